"""Panels of the kinds that our dashboards have. grafanalib's own output needs some mending:
`mended` does it, and tests/generate checks the result against Grafana's schema."""

from dataclasses import dataclass
from typing import Any

import attr
from grafanalib import core

PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}
TEMPO = {"type": "tempo", "uid": "${tempo}"}
PYROSCOPE = {"type": "grafana-pyroscope-datasource", "uid": "${pyroscope}"}
MODEL = 'model_name=~"$model_name",instance=~"$instance"'
ENGINE = f'{MODEL},engine=~"$engine"'
RATE = "$__rate_interval"
NOT_IN_GRAFANA = (
    *("rows", "style", "hideControls", "sharedCrosshair", "useTags", "__inputs", "error"),
    *("height", "span", "minSpan", "editable", "time_options"),
)
"""What grafanalib writes and no current Grafana knows."""


@attr.s
class _Target(core.Target):  # type: ignore[misc]
    """A query; with `exemplar` Grafana shows the traces behind it."""

    exemplar: bool = attr.ib(default=False)

    def to_json_data(self) -> dict[str, Any]:
        found: dict[str, Any] = super().to_json_data()
        wanted = ("expr", "format", "legendFormat", "refId", "instant", "datasource", "hide")
        kept = {key: found[key] for key in wanted}
        return {**kept, "range": not self.instant, "exemplar": self.exemplar}


@attr.s
class _RawPanel(core.Panel):  # type: ignore[misc]
    """A kind of panel that grafanalib does not know, or knows as it once was."""

    kind: str = attr.ib(default="")
    options: Any = attr.ib(factory=dict)
    defaults: Any = attr.ib(factory=dict)

    def to_json_data(self) -> dict[str, Any]:
        found: dict[str, Any] = self.panel_json(
            {"type": self.kind, "options": self.options, "fieldConfig": {"overrides": []}}
        )
        found["fieldConfig"]["defaults"] |= self.defaults
        if not self.thresholds:
            found["fieldConfig"]["defaults"].pop("thresholds", None)
        return found


# mypy does not see the fields of the classes that these come from.
Target: Any = _Target
RawPanel: Any = _RawPanel


@dataclass(frozen=True)
class Query:
    """An expression and what its lines are called."""

    expr: str
    legend: str = ""
    exemplar: bool = False


def targets(queries: tuple[Query, ...], instant: bool = False, heatmap: bool = False) -> list[Any]:
    return [
        Target(
            expr=query.expr,
            legendFormat=query.legend or "__auto",
            refId=chr(ord("A") + n),
            datasource=PROMETHEUS,
            instant=instant,
            exemplar=query.exemplar,
            format="heatmap" if heatmap else "time_series",
        )
        for n, query in enumerate(queries)
    ]


def steps(*limits: tuple[str, float | None]) -> list[dict[str, Any]]:
    """Colours from a value on, the first from anywhere."""
    return [{"color": color, "value": value} for color, value in limits]


GOOD = steps(("green", None))


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    stacked: bool = False,
    limit: float | None = None,
    top: float | None = None,
    targets_dashed: bool = False,
) -> Any:
    """Lines over time; `limit` is drawn as a red line, `top` is the axis' end."""
    overrides = []
    if targets_dashed:
        dashed = {"fill": "dash", "dash": [8, 8]}
        overrides = [
            {
                "matcher": {"id": "byRegexp", "options": "/target/"},
                "properties": [
                    {"id": "custom.lineStyle", "value": dashed},
                    {"id": "custom.fillOpacity", "value": 0},
                ],
            }
        ]
    custom: dict[str, Any] = {}
    if limit is not None:
        custom["thresholdsStyle"] = {"mode": "line"}
    defaults: dict[str, Any] = {"unit": unit, "min": 0, "custom": custom}
    if top is not None:
        defaults["max"] = top
    return core.TimeSeries(
        title=title,
        description=description,
        dataSource=PROMETHEUS,
        targets=targets(queries),
        fillOpacity=40 if stacked else 5,
        stacking={"mode": "normal" if stacked else "none", "group": "A"},
        legendDisplayMode="table",
        legendCalcs=["lastNotNull", "max"],
        tooltipMode="multi",
        tooltipSort="desc",
        spanNulls=False,
        overrides=overrides,
        maxDataPoints=500,
        thresholds=GOOD if limit is None else steps(("green", None), ("red", limit)),
        extraJson={"fieldConfig": {"defaults": defaults}},
    )


def stat(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    colors: list[dict[str, Any]] | None = None,
    decimals: int | None = None,
) -> Any:
    """The latest value, large, in the colour that says how it stands."""
    return core.Stat(
        title=title,
        description=description,
        dataSource=PROMETHEUS,
        targets=targets(queries, instant=True),
        format=unit,
        reduceCalc="lastNotNull",
        graphMode="none",
        colorMode="value",
        textMode="auto",
        decimals=decimals,
        noValue="–",
        thresholds=colors or GOOD,
    )


def heatmap(title: str, description: str, unit: str, query: Query) -> Any:
    """How many fell into each bucket over time; the dots are traces."""
    return RawPanel(
        title=title,
        description=description,
        dataSource=PROMETHEUS,
        targets=targets((query,), heatmap=True),
        kind="heatmap",
        maxDataPoints=200,
        options={
            "calculate": False,
            "cellGap": 1,
            "color": {
                "mode": "scheme",
                "scheme": "Turbo",
                "scale": "exponential",
                "exponent": 0.5,
                "steps": 64,
                "fill": "dark-orange",
                "reverse": False,
            },
            "exemplars": {"color": "rgba(255,0,255,0.7)"},
            "filterValues": {"le": 1e-9},
            "legend": {"show": True},
            "rowsFrame": {"layout": "auto"},
            "tooltip": {"mode": "single", "yHistogram": True},
            "yAxis": {"axisPlacement": "left", "reverse": False, "unit": unit},
        },
        defaults={"custom": {"hideFrom": {"legend": False, "tooltip": False, "viz": False}}},
    )


def traces(title: str, description: str, query: str) -> Any:
    """Traces that a TraceQL query finds, to open with a click."""
    found = {
        "refId": "A",
        "datasource": TEMPO,
        "queryType": "traceql",
        "query": query,
        "limit": 20,
        "spss": 3,
        "tableType": "traces",
        "filters": [],
    }
    return RawPanel(
        title=title,
        description=description,
        dataSource=TEMPO,
        targets=[found],
        kind="table",
        options={"showHeader": True, "cellHeight": "sm"},
    )


def flame_graph(title: str, description: str, labels: str) -> Any:
    """Where the CPU time of the processes went."""
    found = {
        "refId": "A",
        "datasource": PYROSCOPE,
        "queryType": "profile",
        "profileTypeId": "process_cpu:cpu:nanoseconds:cpu:nanoseconds",
        "labelSelector": labels,
        "spanSelector": [],
        "groupBy": [],
    }
    return RawPanel(
        title=title,
        description=description,
        dataSource=PYROSCOPE,
        targets=[found],
        kind="flamegraph",
    )


def alert_list(title: str, description: str) -> Any:
    """What Prometheus' rules say now."""
    return RawPanel(
        title=title,
        description=description,
        dataSource=PROMETHEUS,
        kind="alertlist",
        options={
            "viewMode": "list",
            "groupMode": "default",
            "groupBy": [],
            "maxItems": 20,
            "sortOrder": 3,
            "dashboardAlerts": False,
            "alertName": "",
            "alertInstanceLabelFilter": "",
            "datasource": "${datasource}",
            "stateFilter": {
                "firing": True,
                "pending": True,
                "noData": False,
                "normal": False,
                "error": True,
                "recovering": True,
            },
            "folder": None,
        },
    )


def mended(value: Any) -> Any:
    """Without nulls and without what Grafana no longer knows."""
    if isinstance(value, dict):
        kept = {k: mended(v) for k, v in value.items() if v is not None and k not in NOT_IN_GRAFANA}
        if kept.get("color") and set(value) == {"color", "value"} and value["value"] is None:
            kept["value"] = None  # a threshold from anywhere on: there null has a meaning
        return kept
    if isinstance(value, list):
        return [mended(item) for item in value]
    return value
