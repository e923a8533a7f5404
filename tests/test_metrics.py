"""The table of metrics against the contract."""

import re

import pytest

from llmobs.metrics import BY_NAME, METRICS, Metric

USERS_OWN = {"decode_token_latency_seconds", "batch_size_distribution", "context_len_histogram"}
BUCKETS = ("0-1k", "1k-4k", "4k-32k", "32k+")
FINE = {"decode_token_latency_seconds", "llmobs_request_phase_seconds", "llmobs_request_seconds"}


def test_no_name_twice() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert set(BY_NAME) >= USERS_OWN


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_and_labels(metric: Metric) -> None:
    assert metric.name in USERS_OWN or metric.name.startswith("llmobs_")
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert (metric.type == "counter") == metric.name.endswith("_total")
    assert not metric.name.startswith("vllm")
    assert next(iter(metric.labels)) == "model_name"
    for label, values in metric.labels.items():
        assert re.fullmatch(r"[a-z][a-z_]*", label)
        assert label not in ("le", "quantile", "job", "instance")
        assert len(set(values)) == len(values)
    assert metric.help.endswith(".")
    if metric.unit:
        assert metric.name.removesuffix("_total").endswith(metric.unit)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_boundaries(metric: Metric) -> None:
    if metric.type != "histogram":
        assert not metric.boundaries
        return
    bounds = metric.bounds
    assert list(bounds) == sorted(set(bounds))
    if metric.name in FINE:
        assert {0.05, 0.2, 0.3, 0.5, 0.8} <= set(bounds)
        assert (bounds[0], bounds[-1]) == (0.001, 60.0)
    else:
        assert len(bounds) <= 10
    if metric.name == "context_len_histogram":
        assert {1024, 4096, 32768} <= set(bounds)


CONTRACT = {
    "decode_token_latency_seconds": {"context_bucket": BUCKETS, "token": ("first", "next")},
    "batch_size_distribution": {"batch_kind": ("prefill", "decode", "mixed")},
    "context_len_histogram": {},
    "llmobs_batch_size_squares_total": {"batch_kind": ("prefill", "decode", "mixed")},
    "llmobs_request_phase_seconds": {
        "phase": ("preprocess", "queue", "prefill", "preempted", "decode", "deliver"),
        "context_bucket": BUCKETS,
    },
    "llmobs_requests_received_total": {"context_bucket": (*BUCKETS, "unknown")},
    "llmobs_requests_total": {
        "context_bucket": (*BUCKETS, "unknown"),
        "outcome": ("stop", "length", "abort", "error", "rejected"),
    },
    "llmobs_slo_requests_total": {
        "objective": ("first_token", "token_gap"),
        "result": ("good", "bad", "excluded"),
    },
    "llmobs_prompt_tokens_total": {"source": ("computed", "cached")},
    "llmobs_generated_tokens_total": {"context_bucket": BUCKETS},
    "llmobs_requests": {"state": ("waiting", "running"), "context_bucket": BUCKETS},
    "llmobs_waiting_tokens": {},
    "llmobs_step_seconds": {
        "stage": ("schedule", "forward", "sampling", "update"),
        "batch_kind": ("prefill", "decode", "mixed"),
    },
    "llmobs_step_log_moment_total": {"power": ("0", "1", "2", "3", "4")},
    "llmobs_engine_last_step_timestamp_seconds": {},
    "llmobs_preemptions_total": {"context_bucket": BUCKETS},
    "llmobs_spec_tokens_total": {"kind": ("draft", "accepted")},
    "llmobs_rejections_total": {},
    "llmobs_cpu_seconds_total": {
        "mode": ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    },
    "llmobs_cpus": {},
    "llmobs_load_average": {"window": ("1m",)},
    "llmobs_cgroup_cpu_periods_total": {},
    "llmobs_cgroup_cpu_throttled_periods_total": {},
    "llmobs_cgroup_cpu_throttled_seconds_total": {},
    "llmobs_process_cpu_seconds_total": {
        "process": ("api_server", "engine_core", "worker", "agent")
    },
    "llmobs_process_run_queue_seconds_total": {
        "process": ("api_server", "engine_core", "worker", "agent")
    },
    "llmobs_pressure_seconds_total": {
        "resource": ("cpu", "io", "memory"),
        "kind": ("some", "full"),
    },
    "llmobs_cold_start_seconds": {"context_bucket": BUCKETS},
    "llmobs_latency_model_coefficient": {"term": ("constant", "linear", "quadratic")},
    "llmobs_latency_residual_ratio": {"context_bucket": BUCKETS},
    "llmobs_slo_target_seconds": {
        "context_bucket": BUCKETS,
        "objective": ("first_token", "token_gap"),
    },
    "llmobs_kv_blocks": {"state": ("used", "free")},
    "llmobs_kv_block_events_total": {"event": ("allocate", "free", "evict")},
    "llmobs_kv_allocation_failures_total": {},
    "llmobs_kv_cache_bytes": {},
}


@pytest.mark.parametrize("name", CONTRACT)
def test_labels_of_the_contract(name: str) -> None:
    labels = BY_NAME[name].labels
    for label, values in CONTRACT[name].items():
        assert labels[label] == values
