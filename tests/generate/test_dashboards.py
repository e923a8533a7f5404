"""The dashboards against Grafana's own schema, Prometheus' parser and the table of metrics."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as models

from llmobs.generate.rules import alerts, groups
from llmobs.metrics import BY_NAME, OPEN
from llmobs.slo import SLO
from tests.generate.test_rules import FOREIGN, NOT_YET, TARGET_LABELS, family, selectors

FOLDER = Path(__file__).parents[2] / "dashboards/json"
NAMES = ("overview", "latency", "batching", "memory", "host", "itself")
LATER = {
    *("llmobs_kv_blocks", "llmobs_kv_block_events_total", "llmobs_kv_cache_bytes"),
    *("llmobs_cuda_kernel_launches_total", "llmobs_run_queue_seconds"),
    *("llmobs_gpu_memory_bytes", "llmobs_torch_memory_bytes", "llmobs_gpu_utilization_ratio"),
}
CURRENT = {
    *("timeseries", "stat", "heatmap", "table", "flamegraph", "alertlist", "row"),
}

register_default_plugins()


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def queries(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(panel, target) of what Prometheus is asked."""
    for panel in read(name)["panels"]:
        for target in panel.get("targets", ()):
            if target["datasource"]["type"] == "prometheus":
                yield panel, target


def substituted(expr: str) -> str:
    """As Grafana would send it with all chosen."""
    expr = re.sub(r"\$(model_name|instance|engine)", ".*", expr)
    return expr.replace("$__rate_interval", "1m")


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """What of `before` is not in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key not in after:
                yield f"{path}.{key}"
            else:
                yield from lost(value, after[key], f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for n, (x, y) in enumerate(zip(before, after, strict=True)):
            yield from lost(x, y, f"{path}[{n}]")
    elif before != after:
        yield f"{path}: {before!r} is {after!r}"


@pytest.mark.parametrize("name", NAMES)
def test_grafanas_schema_loses_nothing(name: str) -> None:
    found = read(name)
    again = json.loads(JSONEncoder().encode(models.Dashboard.from_json(found)))
    assert list(lost(found, again)) == []


@pytest.mark.parametrize("name", NAMES)
def test_panels(name: str) -> None:
    found = read(name)
    assert found["uid"] == f"llmobs-{name}"
    assert found["schemaVersion"] == 41
    variables = [v["name"] for v in found["templating"]["list"]]
    assert variables == ["datasource", "tempo", "pyroscope", "model_name", "instance", "engine"]
    ids = [panel["id"] for panel in found["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        assert panel["type"] in CURRENT
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert len(panel["description"]) > 20, panel["title"]
        assert set(panel["datasource"]) == {"type", "uid"}
        assert re.fullmatch(r"\$\{(datasource|tempo|pyroscope)\}", panel["datasource"]["uid"])
        for target in panel.get("targets", ()):
            assert target["datasource"] == panel["datasource"]


@pytest.mark.parametrize("name", NAMES)
def test_every_query_is_promql(name: str, tmp_path: Path) -> None:
    exprs = [substituted(target["expr"]) for _, target in queries(name)]
    rules = [{"record": f"panel:{n}", "expr": expr} for n, expr in enumerate(exprs)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "$" not in "".join(exprs)


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_and_label_exists(name: str) -> None:
    recorded = {rule.record for g in groups(SLO) for rule in g.rules if hasattr(rule, "record")}
    unknown = (NOT_YET | LATER) - set(BY_NAME)
    for panel, target in queries(name):
        for metric_name, matchers in selectors(substituted(target["expr"])):
            if metric_name in recorded or metric_name in FOREIGN:
                continue
            if family(metric_name) in unknown or metric_name.removesuffix("_bucket") in unknown:
                continue
            assert family(metric_name) in BY_NAME, (panel["title"], metric_name)
            metric = BY_NAME[family(metric_name)]
            for label, (how, value) in matchers.items():
                assert label in {*metric.labels, *TARGET_LABELS}, (panel["title"], label)
                known = metric.labels.get(label, OPEN)
                if known is not OPEN and how.startswith("="):
                    assert [v for v in known if re.fullmatch(value, v) or v == value], (
                        label,
                        value,
                    )


def test_ratios_are_not_summed_and_rates_come_first() -> None:
    for name in NAMES:
        for panel, target in queries(name):
            expr = target["expr"]
            assert not re.search(r"sum[^(]*\([^()]*_ratio\b", expr), panel["title"]
            assert "rate(sum" not in expr, panel["title"]
            for window in re.findall(r"(?:rate|increase)\([^\[]*\[([^\]]+)\]", expr):
                assert window in ("$__rate_interval", "30d", "10m"), panel["title"]


def test_alerts_lead_to_dashboards_that_are_there() -> None:
    uids = {read(name)["uid"] for name in NAMES}
    variables = {"model_name", "instance", "engine"}
    for alert in alerts(SLO):
        url = str(alert.content(SLO.links)["annotations"]["dashboard_url"])
        assert re.search(r"/d/([\w-]+)", url)[1] in uids
        assert set(re.findall(r"var-(\w+)=", url)) <= variables
