"""Series for `promtool test rules`, as explicit samples, and the tool itself."""

import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from llmobs.generate.rules import content, dump
from llmobs.slo import SLO


@dataclass(frozen=True)
class Series:
    """One sample per interval; None where the scrape failed."""

    name: str
    values: tuple[float | None, ...]
    counter: bool

    def gap(self, at: int, length: int = 3) -> "Series":
        """Some scrapes that failed."""
        gone = [None if at <= i < at + length else v for i, v in enumerate(self.values)]
        return replace(self, values=tuple(gone))

    def reset(self, at: int) -> "Series":
        """The process that counts was started again."""
        base = self.values[at]
        if not self.counter or base is None:
            return self
        after = [v if v is None else v - base for v in self.values[at:]]
        return replace(self, values=(*self.values[:at], *after))

    def written(self) -> dict[str, str]:
        values = " ".join("_" if v is None else f"{v:.10g}" for v in self.values)
        return {"series": self.name, "values": values}


def counter(name: str, *segments: tuple[float, int]) -> Series:
    """Rises by so much in each of so many intervals; the first sample is 0."""
    values = [0.0]
    for step, length in segments:
        for _ in range(length):
            values.append(values[-1] + step)
    return Series(name, tuple(values), True)


def gauge(name: str, *segments: tuple[float, int]) -> Series:
    """Stands at a value for so many samples."""
    return Series(name, tuple(v for v, n in segments for _ in range(n)), False)


@dataclass
class Scenario:
    """Series, and at which times which alerts fire (label sets as a set of tuples) or do not."""

    name: str
    series: Sequence[Series]
    interval: str = "1m"
    expected: list[dict[str, Any]] = field(default_factory=list)

    def check(
        self, alert: str, at: str, *firing: str, by: str = "instance", where: str = ""
    ) -> None:
        """At that time it fires for exactly these values of the label `by`, of those alerts that
        `where` selects."""
        samples = [{"labels": f'{{{by}="{value}"}}', "value": 1} for value in firing]
        expr = f'group by ({by}) (ALERTS{{alertname="{alert}",alertstate="firing"{where}}})'
        self.expected.append({"expr": expr, "eval_time": at, "exp_samples": samples})

    def written(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "interval": self.interval,
            "input_series": [s.written() for s in self.series],
            "promql_expr_test": self.expected,
        }


CHANGE: Callable[[str], str] = str
"""What `mutate` puts in, to see whether anyone notices."""


def rules(alert: str) -> str:
    """The rules of that alert, and what they read of others: all take ten times as long."""
    groups = content(SLO)["groups"]
    every = [rule for group in groups for rule in group["rules"]]
    wanted = [rule for rule in every if rule.get("alert") == alert]
    for rule in wanted:  # grows meanwhile: what is read may read others
        wanted += [r for r in every if r.get("record", "-") in rule["expr"] and r not in wanted]
    for group in groups:
        group["rules"] = [rule for rule in group["rules"] if rule in wanted]
    return dump({"groups": [group for group in groups if group["rules"]]})


def run(
    folder: Path, rules: str, scenarios: Iterable[Scenario], every: str = "1m"
) -> "subprocess.CompletedProcess[str]":
    """promtool's verdict on the scenarios."""
    (folder / "rules.yml").write_text(CHANGE(rules))
    tests = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": every,
        # Without it the order is chance, and what is recorded may come a turn late.
        "group_eval_order": [group["name"] for group in yaml.safe_load(rules)["groups"]],
        "tests": [scenario.written() for scenario in scenarios],
    }
    (folder / "test.yml").write_text(yaml.safe_dump(tests, sort_keys=False, width=10**6))
    return subprocess.run(
        ["promtool", "test", "rules", str(folder / "test.yml")],
        capture_output=True,
        text=True,
        timeout=300,
    )
