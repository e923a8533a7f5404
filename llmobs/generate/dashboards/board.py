"""What all dashboards have in common: variables, links, a grid of panels."""

import json
from dataclasses import dataclass
from typing import Any

from grafanalib import _gen, core

from llmobs.generate.dashboards.panel import PROMETHEUS, mended

TITLES = {
    "overview": "Overview / SLO",
    "latency": "Where the P99 went",
    "batching": "Batching and queue",
    "memory": "KV cache and memory",
    "host": "CPU and kernel",
    "itself": "llmobs itself",
}
WIDTH = 24


@dataclass(frozen=True)
class Row:
    """Panels side by side, all of one height; `widths` in 24ths (empty: alike)."""

    title: str
    panels: tuple[Any, ...]
    height: int = 8
    widths: tuple[int, ...] = ()


def _datasource(name: str, label: str, kind: str) -> core.Template:
    return core.Template(name=name, label=label, type="datasource", query=kind, sort=None)


def _values(name: str, label: str, of: str) -> core.Template:
    return core.Template(
        name=name,
        label=label,
        query=f"label_values({of}, {name})",
        dataSource=PROMETHEUS,
        includeAll=True,
        multi=True,
        allValue=".*",
        default="All",
        refresh=core.REFRESH_ON_TIME_RANGE_CHANGE,
    )


def variables() -> core.Templating:
    there = 'model_name=~"$model_name"'
    step = "llmobs_engine_last_step_timestamp_seconds"
    return core.Templating(
        list=[
            _datasource("datasource", "Prometheus", "prometheus"),
            _datasource("tempo", "Tempo", "tempo"),
            _datasource("pyroscope", "Pyroscope", "grafana-pyroscope-datasource"),
            _values("model_name", "Model", "llmobs_build_info"),
            _values("instance", "Server", f"llmobs_build_info{{{there}}}"),
            _values("engine", "Engine", f'{step}{{{there},instance=~"$instance"}}'),
        ]
    )


def board(name: str, description: str, rows: tuple[Row, ...]) -> dict[str, Any]:
    """A dashboard, as Grafana stores it."""
    panels: list[Any] = []
    y = 0
    for row in rows:
        panels.append(core.RowPanel(title=row.title, gridPos=core.GridPos(1, WIDTH, 0, y)))
        y += 1
        widths = row.widths or (WIDTH // len(row.panels),) * len(row.panels)
        x = 0
        for panel, width in zip(row.panels, widths, strict=True):
            if x + width > WIDTH:
                x, y = 0, y + row.height
            panel.gridPos = core.GridPos(row.height, width, x, y)
            panels.append(panel)
            x += width
        y += row.height
    dashboard = core.Dashboard(
        title=f"llmobs / {TITLES[name]}",
        uid=f"llmobs-{name}",
        description=description,
        tags=["llmobs"],
        timezone="browser",
        refresh="30s",
        schemaVersion=41,
        graphTooltip=core.GRAPH_TOOLTIP_MODE_SHARED_CROSSHAIR,
        time=core.Time("now-1h", "now"),
        templating=variables(),
        panels=panels,
        links=[
            core.DashboardLink(
                title="llmobs", type="dashboards", tags=["llmobs"], includeVars=True, keepTime=True
            )
        ],
    ).auto_panel_ids()
    found: dict[str, Any] = mended(json.loads(json.dumps(dashboard, cls=_gen.DashboardEncoder)))
    return _current(found)


def _current(found: dict[str, Any]) -> dict[str, Any]:
    """The few keys whose form has changed since grafanalib was written."""
    for variable in found["templating"]["list"]:
        query = variable.pop("query")
        if variable["type"] == "query":
            variable["definition"] = query
            variable["query"] = {"query": query, "refId": f"Values{variable['name']}"}
        else:
            variable["query"] = query
            variable.pop("sort", None)
        for old in ("tagsQuery", "tagValuesQuery", "auto", "auto_min", "auto_count"):
            variable.pop(old, None)
        if variable["type"] == "query":
            variable["current"] = {"selected": True, "text": ["All"], "value": ["$__all"]}
        else:
            variable["current"] = {}
        variable["options"] = []
    for panel in found["panels"]:
        if panel["type"] == "row":
            for key in set(panel) - {"type", "title", "gridPos", "id", "collapsed", "panels"}:
                panel.pop(key)
    return found


def text(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"
