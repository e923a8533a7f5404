"""Rules as plain data, before they are written as YAML."""

from dataclasses import dataclass, field

from llmobs.generate.promql import duration
from llmobs.slo import Links

VARIABLES = ("model_name", "instance", "engine")
"""The dashboards' variables that are also labels of alerts."""


@dataclass(frozen=True)
class Recording:
    record: str
    expr: str

    def content(self, links: Links) -> dict[str, object]:
        return {"record": self.record, "expr": self.expr}


@dataclass(frozen=True)
class Alert:
    """`by` are the labels that its series have; `panel` is the dashboard it leads to. Values in
    seconds, as those of the SLO. `summary` is a title, `description` has the values."""

    name: str
    severity: str
    expr: str
    hold: float
    by: tuple[str, ...]
    dashboard: str
    summary: str
    description: str
    labels: dict[str, str] = field(default_factory=dict)

    def content(self, links: Links) -> dict[str, object]:
        """As Prometheus has it."""
        runbook = links.runbook or "{{ externalURL }}/consoles/runbook.html"
        variables = "&".join(
            f"var-{label}={{{{ $labels.{label} | urlquery }}}}"
            for label in VARIABLES
            if label in self.by
        )
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": duration(self.hold),
            "labels": {"severity": self.severity, **self.labels},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{runbook}#{self.name.lower()}",
                "dashboard_url": f"{links.grafana}/d/{self.dashboard}"
                + (f"?{variables}" if variables else ""),
            },
        }


@dataclass(frozen=True)
class Group:
    """Rules that are evaluated together, in order."""

    name: str
    every: float
    rules: tuple[Recording | Alert, ...]

    def content(self, links: Links) -> dict[str, object]:
        return {
            "name": self.name,
            "interval": duration(self.every),
            "rules": [rule.content(links) for rule in self.rules],
        }
