"""The rules as a whole: the contract's names, what they read, where they lead."""

import re
import subprocess
from pathlib import Path

import pytest

from llmobs.generate.rules import alerts, content, dump, groups
from llmobs.metrics import BY_NAME, OPEN, Type
from llmobs.slo import SLO

CONTRACT = {
    *("LLMFirstTokenP99High", "LLMFirstTokenBurn", "LLMAvailabilityBurn", "LLMHealthBurn"),
    *("LLMStreamThroughputLow", "LLMCapacityLow", "LLMTrafficBurst", "LLMLongContextSurge"),
    *("LLMBatchSizeUnstable", "LLMBatchLatencyBimodal", "LLMQueueDeep", "LLMKVStarved"),
    *("LLMPreemptionStorm", "LLMMemoryPressure", "LLMMemoryPressureCritical", "LLMEngineStalled"),
    *("LLMEventLoopLag", "LLMGCPause", "LLMSlowForLength", "LLMColdStartSlow", "LLMCPUSteal"),
    *("LLMCPUWait", "LLMCPUThrottled", "LLMRunQueueDelay", "LLMCPIHigh", "LLMNodeLoadHigh"),
    *("LlmobsAbsent", "LlmobsProbeMissing", "LlmobsRecordsDropped", "LlmobsGuardErrors"),
    *("LlmobsBoundaryMissing", "LlmobsEbpfLost"),
}
PAGES = {
    *("LLMFirstTokenP99High", "LLMFirstTokenBurn", "LLMAvailabilityBurn", "LLMHealthBurn"),
    *("LLMPreemptionStorm", "LLMMemoryPressureCritical", "LLMEngineStalled"),
}
NOT_YET = {
    *("llmobs_cpus", "llmobs_cpu_seconds_total", "llmobs_load_average"),
    *("llmobs_cgroup_cpu_periods_total", "llmobs_cgroup_cpu_throttled_periods_total"),
    *("llmobs_cgroup_cpu_throttled_seconds_total", "llmobs_process_run_queue_seconds_total"),
    *("llmobs_kv_allocation_failures_total", "llmobs_gpu_memory_pressure_ratio"),
    *("llmobs_event_loop_lag_seconds", "llmobs_gc_pause_seconds", "llmobs_cold_start_seconds"),
    *("llmobs_latency_residual_ratio", "llmobs_cpu_cycles_total", "llmobs_cpu_instructions_total"),
}
"""Of the contract: checked as soon as they are in the table."""
FOREIGN = {"up": {}, "probe_success": {}}
"""Prometheus' own, and the blackbox exporter's."""
TARGET_LABELS = {"job", "instance"}


def test_the_alerts_of_the_contract() -> None:
    assert {alert.name for alert in alerts(SLO)} == CONTRACT
    assert {alert.name for alert in alerts(SLO) if alert.severity == "page"} == PAGES
    assert {alert.severity for alert in alerts(SLO)} == {"page", "ticket"}


def test_promtool_finds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rules.yml"
    path.write_text(dump(content(SLO)))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_how_often_they_are_evaluated() -> None:
    every = {rule.name: g.every for g in groups(SLO) for rule in g.rules if hasattr(rule, "name")}
    assert every["LLMFirstTokenP99High"] == 10
    assert every["LLMBatchSizeUnstable"] == 30
    assert every["LLMLongContextSurge"] == 60


@pytest.mark.parametrize("alert", alerts(SLO), ids=lambda alert: alert.name)
def test_what_a_person_reads(alert) -> None:
    found = alert.content(SLO.links)
    notes = found["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url", "dashboard_url"}
    assert notes["runbook_url"].endswith(f"/consoles/runbook.html#{alert.name.lower()}")
    assert notes["dashboard_url"].startswith("http://localhost:3000/d/llmobs-")
    if alert.name != "LlmobsProbeMissing" and 'kind="page"' not in str(alert.labels):
        told = notes["summary"] + notes["description"]
        assert "$value" in told or alert.labels.get("kind") == "page" or not_a_number(alert.name)
    used = set(re.findall(r"\$labels\.(\w+)", str(notes)))
    assert used <= {*alert.by, *alert.labels}


def not_a_number(name: str) -> bool:
    return name in ("LlmobsBoundaryMissing",)


SELECTOR = re.compile(r"\b([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})?(?=[\s\[)]|$)")
MATCHER = re.compile(r'(\w+)(=~|!=|!~|=)"([^"]*)"')
WORDS = {
    *("sum", "by", "rate", "increase", "and", "or", "on", "unless", "offset", "histogram_quantile"),
    *("max", "min", "count", "clamp_min", "sqrt", "avg", "avg_over_time", "min_over_time", "time"),
    *("vector", "label_replace", "host", "scalar"),
}


def selectors(expr: str) -> list[tuple[str, dict[str, tuple[str, str]]]]:
    expr = re.sub(r"\b(by|on|ignoring|group_left) \([^)]*\)", " ", expr)
    expr = re.sub(r'"[^"{}]*"(?=[,)])', " ", expr)  # of label_replace
    found = []
    for name, braces in SELECTOR.findall(expr):
        if name in WORDS or re.fullmatch(r"[0-9a-z]*\d[a-z0-9]*", name):
            continue
        matchers = {label: (how, value) for label, how, value in MATCHER.findall(braces or "")}
        found.append((name, matchers))
    return found


def family(name: str) -> str:
    for suffix in ("_bucket", "_count", "_sum"):
        base = name.removesuffix(suffix)
        if (base in BY_NAME and BY_NAME[base].type is Type.HISTOGRAM) or base in NOT_YET:
            return base
    return name


def test_every_metric_and_label_exists() -> None:
    recorded = {r.record for g in groups(SLO) for r in g.rules if hasattr(r, "record")}
    seen = set()
    for group in groups(SLO):
        for rule in group.rules:
            for name, matchers in selectors(rule.expr):
                seen.add(name)
                if name in recorded or name in FOREIGN or family(name) in NOT_YET - set(BY_NAME):
                    continue
                assert family(name) in BY_NAME, (name, rule.expr)
                metric = BY_NAME[family(name)]
                for label, (how, value) in matchers.items():
                    if label == "le":
                        assert float(value) in metric.bounds, (name, value)
                        continue
                    assert label in {*metric.labels, *TARGET_LABELS}, (name, label)
                    known = metric.labels.get(label, OPEN)
                    if known is not OPEN and how.startswith("="):
                        matching = [v for v in known if re.fullmatch(value, v) or v == value]
                        assert matching, (name, label, value)
    assert len(seen) > 40
