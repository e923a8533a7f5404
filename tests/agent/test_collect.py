"""The page's content: read by Prometheus' own tools, complete from the start, not too much."""

import os
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from llmobs import schema
from llmobs.agent.collect import RunCollector
from llmobs.agent.host import Host
from llmobs.agent.run import Run
from llmobs.metrics import METRICS
from llmobs.ring import Writer, start_ticks
from tests.agent.machine import busy
from tests.rings import ENGINE, FRONT, WORKER, new_ring

BUCKETS = ("0-1k", "1k-4k", "4k-32k", "32k+")
OUTCOMES = ("stop", "length", "abort", "error", "rejected")
KINDS = ("prefill", "decode", "mixed")
MS = 1_000_000
# promtool finds fault with names that are the user's own, or OpenTelemetry's habit.
USERS_OWN = {
    'context_len_histogram metric name should not include type "histogram"',
    "context_len_histogram metric name should not include type 'histogram'",
}


class OneGpu:
    """What the agent's own eyes see. A GPU has these series."""

    def poll(self) -> None:
        pass

    def close(self) -> None:
        pass

    def lacking(self) -> dict[str, str]:
        return {}

    def samples(self) -> dict[str, dict[tuple[str, ...], float]]:
        throttles = (
            *("applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost"),
            *("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"),
        )
        kinds = {
            "llmobs_gpu_memory_bytes": ("total", "used", "reserved", "free"),
            "llmobs_gpu_memory_pressure_ratio": ("device", "effective"),
            "llmobs_gpu_throttled": throttles,
            "llmobs_gpu_pcie_bytes_total": ("tx", "rx"),
            "llmobs_gpu_nvlink_bytes_total": ("tx", "rx"),
            "llmobs_gpu_nvlinks": ("active", "inactive"),
            "llmobs_gpu_ecc_errors_total": ("corrected", "uncorrected"),
        }
        plain = ("utilization_ratio", "power_watts", "xid_errors_total", "last_xid")
        return {
            **{name: {("0", kind): 7.0 for kind in values} for name, values in kinds.items()},
            **{f"llmobs_gpu_{name}": {("0",): 7.0} for name in plain},
            "llmobs_gpu_info": {("0", "GPU-1", "NVIDIA H100", "0", "0"): 1.0},
        }


def served(folder: Path) -> Run:
    """One server that has had one request, and one step with two sequences."""
    probes = {"process_inputs": 1, "admit": 1, "finish": 0}
    front = new_ring(folder, {**FRONT, "probes": probes}, 256)
    engine = new_ring(folder, {**ENGINE, "probes": {"schedule": 1}}, 256)
    engine.put(16, 1020 * MS, 7, 0, 0, 55, 10)
    engine.put(17, 1021 * MS, 7, 1, 0, 10, 0, 1, 55)
    engine.put_list(19, 1100 * MS, [7, 1])
    engine.put(21, 1100 * MS, 1, 2, 0, 1021 * MS, 1022 * MS, 1099 * MS, 2, 11, 2)
    engine.put(32, 1090 * MS, 0, 0, 0, 1023 * MS, 2, 11)
    engine.put(33, 1095 * MS, 0, 0, 0, 1091 * MS)
    engine.put(22, 1100 * MS, 7, 0, 0, 1, 55)
    front.put(1, 1000 * MS, 1, 1)
    front.put(2, 1010 * MS, 1, 8, 0, 55, 10, 100)
    front.put(3, 1105 * MS, 1)
    front.put(5, 1110 * MS, 1, 1, 200, 0, 1, 1000 * MS, 1, 0)
    front.cells[schema.model_cell("received", 0)] = 1
    front.cells[schema.model_cell("ended", 0) + 1] = 1
    front.cells[schema.model_cell("ended_ns", 0) + 1] = 110 * MS
    engine.cells[schema.model_cell("generated_tokens", 0) + 2] = 5
    front.cells[schema.model_cell("generated_tokens", 0) + 2] = 6
    engine.floats[schema.PROCESS_CELL["log_moment"] + 1] = 2.5
    engine.cells[schema.PROCESS_CELL["last_step_wall_ns"]] = 1_700_000_000_500_000_000
    engine.cells[schema.PROCESS_CELL["kv_pool_blocks"]] = 23
    engine.cells[schema.PROCESS_CELL["kv_cache_bytes"]] = 24 << 20
    for place, number in enumerate((100, 90, 40)):
        engine.cells[schema.PROCESS_CELL["kv_block_events"] + place] = number
    engine.cells[schema.PROCESS_CELL["kv_allocation_failures"]] = 6
    engine.cells[schema.GUARD_CELL + 12] = 3  # schedule
    worker = new_ring(folder, WORKER, 256)
    worker.cells[schema.PROCESS_CELL["torch_memory"] + 1] = 800
    worker.cells[schema.PROCESS_CELL["torch_reads"]] = 1
    engine.cells[schema.PROCESS_CELL["gc_pause"]] = 40  # up to 0.5 ms
    engine.cells[schema.PROCESS_CELL["gc_pause"] + 6] = 2  # 50 to 100 ms
    engine.cells[schema.PROCESS_CELL["gc_pause_ns"]] = 160 * MS
    front.cells[schema.PROCESS_CELL["loop_lag"] + 10] = 1  # above 5 s
    front.cells[schema.PROCESS_CELL["loop_lag_ns"]] = 6000 * MS
    run = Run(folder)
    own = os.getpid()
    machine = busy(folder / "machine", own, own, start_ticks(own) or 0)
    run.signals.append(Host(run, machine.proc, machine.root))
    run.signals.append(OneGpu())
    return run


def registry(run: Run) -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(RunCollector(run))
    return made


def test_promtool_finds_no_fault(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: apt-get install prometheus"
    text = generate_latest(registry(served(tmp_path)))
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    faults = set(done.stderr.decode().splitlines()) - USERS_OWN
    assert faults == set()


def test_the_text(tmp_path: Path) -> None:
    """The figures of `served`, as lines of the page."""
    lines = set(generate_latest(registry(served(tmp_path))).decode().splitlines())
    model = 'model_name="deepseek-v4"'
    latency = f'context_bucket="0-1k",engine="0",{model},token="first"'
    step = f'batch_kind="mixed",engine="0",{model}'
    phase = f'context_bucket="0-1k",{model},phase='
    expected = {
        f'decode_token_latency_seconds_bucket{{context_bucket="0-1k",engine="0",le="0.1",{model},'
        'token="first"} 0.0',
        f'decode_token_latency_seconds_bucket{{context_bucket="0-1k",engine="0",le="0.15",{model},'
        'token="first"} 1.0',
        f'decode_token_latency_seconds_bucket{{context_bucket="0-1k",engine="0",le="+Inf",{model},'
        'token="first"} 1.0',
        f"decode_token_latency_seconds_count{{{latency}}} 1.0",
        f"decode_token_latency_seconds_sum{{{latency}}} 0.105",
        f"batch_size_distribution_sum{{{step}}} 2.0",
        f"context_len_histogram_sum{{{model}}} 10.0",
        f'context_len_histogram_bucket{{le="1024.0",{model}}} 1.0',
        f'llmobs_request_phase_seconds_sum{{{phase}"preprocess"}} 0.01',
        f'llmobs_request_phase_seconds_sum{{{phase}"queue"}} 0.011',
        f'llmobs_request_phase_seconds_sum{{{phase}"prefill"}} 0.079',
        f'llmobs_request_phase_seconds_sum{{{phase}"deliver"}} 0.01',
        f'llmobs_requests_received_total{{context_bucket="0-1k",{model}}} 1.0',
        f'llmobs_requests_total{{context_bucket="0-1k",{model},outcome="length"}} 1.0',
        f'llmobs_requests_total{{context_bucket="0-1k",{model},outcome="stop"}} 0.0',
        f'llmobs_request_outcome_seconds_total{{context_bucket="0-1k",{model},outcome="length"}} '
        "0.11",
        f'llmobs_generated_tokens_total{{context_bucket="4k-32k",{model}}} 11.0',
        f'llmobs_step_log_moment_total{{engine="0",{model},power="1"}} 2.5',
        f'llmobs_engine_last_step_timestamp_seconds{{engine="0",{model}}} 1.7000000005e+09',
        f'llmobs_gc_pause_seconds_bucket{{le="0.05",{model},process="engine_core"}} 40.0',
        f'llmobs_gc_pause_seconds_bucket{{le="0.1",{model},process="engine_core"}} 42.0',
        f'llmobs_gc_pause_seconds_count{{{model},process="engine_core"}} 42.0',
        f'llmobs_gc_pause_seconds_sum{{{model},process="engine_core"}} 0.16',
        f'llmobs_gc_pause_seconds_count{{{model},process="api_server"}} 0.0',
        f'llmobs_event_loop_lag_seconds_bucket{{le="5.0",{model},process="api_server"}} 0.0',
        f'llmobs_event_loop_lag_seconds_count{{{model},process="api_server"}} 1.0',
        f'llmobs_event_loop_lag_seconds_sum{{{model},process="api_server"}} 6.0',
        f'llmobs_forward_seconds_sum{{batch_kind="mixed",clock="host",engine="0",{model}}} 0.067',
        f'llmobs_step_seconds_sum{{{step},stage="schedule"}} 0.001',
        f'llmobs_step_seconds_sum{{{step},stage="forward"}} 0.067',
        f'llmobs_step_seconds_sum{{{step},stage="sampling"}} 0.004',
        f'llmobs_step_seconds_sum{{{step},stage="update"}} 0.001',
        f'llmobs_slo_requests_total{{context_bucket="0-1k",{model},objective="first_token",'
        'result="good"} 1.0',
        f'llmobs_cold_start_seconds_sum{{context_bucket="0-1k",engine="0",{model}}} 0.079',
        f'llmobs_slo_target_seconds{{context_bucket="4k-32k",{model},objective="first_token"}} 0.8',
        f'llmobs_probe_attached{{{model},probe="admit",process="api_server"}} 1.0',
        f'llmobs_probe_attached{{{model},probe="finish",process="api_server"}} 0.0',
        f'llmobs_guard_errors_total{{{model},probe="schedule",process="engine_core"}} 3.0',
        f'llmobs_guard_errors_total{{{model},probe="admit",process="api_server"}} 0.0',
        f'llmobs_records_lost_total{{{model},process="engine_core"}} 0.0',
        f"llmobs_incomplete_requests_total{{{model}}} 0.0",
        f"llmobs_agent_restarts_total{{{model}}} 0.0",
        f'llmobs_build_info{{{model},version="0.1.0",vllm_version="0.32.0"}} 1.0',
        f'llmobs_cpu_seconds_total{{mode="steal",{model}}} 3.0',
        f"llmobs_cgroup_cpu_throttled_seconds_total{{{model}}} 4.5",
        f'llmobs_torch_memory_bytes{{engine="0",kind="reserved",{model},rank="0"}} 800.0',
        f'llmobs_gpu_power_watts{{gpu="0",{model}}} 7.0',
        f'llmobs_gpu_nvlinks{{gpu="0",{model},state="active"}} 7.0',
        "# TYPE llmobs_requests gauge",
        "# TYPE decode_token_latency_seconds histogram",
        "# TYPE llmobs_preemptions_total counter",
    }
    assert expected - lines == set()
    assert not [line for line in lines if "_created" in line]


NOT_KNOWN_YET = {"llmobs_latency_model_coefficient"}
"""Absent on the page of `served`."""


class One:
    """A single family as a collector."""

    def __init__(self, family: Metric) -> None:
        self.family = family

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        return [self.family]


@pytest.mark.parametrize("name", [metric.name for metric in METRICS])
def test_both_formats_are_read_back_alike(tmp_path: Path, name: str) -> None:
    """Family by family: OpenMetrics calls both llmobs_requests_total and the gauge llmobs_requests
    a family `llmobs_requests`, which Prometheus takes and the stricter Python parser does not."""
    everything = registry(served(tmp_path)).collect()
    families = {f.name + "_total" * (f.type == "counter"): f for f in everything}
    made = CollectorRegistry()
    made.register(One(families[name]))
    (text,) = parse_text(generate_latest(made).decode())
    (openmetrics,) = parse_openmetrics(generate_openmetrics(made).decode())
    samples = [
        {(s.name, *s.labels.items()): s.value for s in parsed.samples}
        for parsed in (text, openmetrics)
    ]
    assert samples[0] == samples[1]
    assert bool(samples[0]) == (name not in NOT_KNOWN_YET)
    assert openmetrics.name == name.removesuffix("_total")
    assert openmetrics.type == text.type


def test_not_too_many_series(tmp_path: Path) -> None:
    lines = generate_latest(registry(served(tmp_path))).decode().splitlines()
    series = [line for line in lines if not line.startswith("#")]
    assert len(series) == len({line.rpartition(" ")[0] for line in series})
    assert 1000 < len(series) < 2500


def test_every_known_label_value_is_there_from_the_start(tmp_path: Path) -> None:
    new_ring(tmp_path, FRONT)
    new_ring(tmp_path, ENGINE)
    found = {
        (s.name, *sorted((k, v) for k, v in s.labels.items() if k not in ("model_name", "le")))
        for family in registry(Run(tmp_path)).collect()
        for s in family.samples
        if s.value == 0 or s.name in ("llmobs_build_info",)
    }
    engine = ("engine", "0")
    unknown = (*BUCKETS, "unknown")

    def there(name: str, *labels: tuple[str, str]) -> None:
        assert (name, *sorted(labels)) in found, (name, labels)

    for bucket in BUCKETS:
        label = ("context_bucket", bucket)
        for token in ("first", "next"):
            there("decode_token_latency_seconds_count", engine, label, ("token", token))
        for phase in ("preprocess", "queue", "prefill", "preempted", "decode", "deliver"):
            there("llmobs_request_phase_seconds_count", label, ("phase", phase))
        for objective, result in product(("first_token", "token_gap"), ("good", "bad", "excluded")):
            labels = (("objective", objective), ("result", result))
            there("llmobs_slo_requests_total", label, *labels)
        for source in ("computed", "cached"):
            there("llmobs_prompt_tokens_total", label, ("source", source))
        for state in ("waiting", "running"):
            there("llmobs_requests", engine, label, ("state", state))
        there("llmobs_generated_tokens_total", label)
        there("llmobs_preemptions_total", engine, label)
        there("llmobs_cold_start_seconds_count", engine, label)
        there("llmobs_latency_residual_ratio_count", engine, label)
    for bucket in unknown:
        label = ("context_bucket", bucket)
        there("llmobs_request_seconds_count", label)
        there("llmobs_requests_received_total", label)
        for outcome in OUTCOMES:
            there("llmobs_requests_total", label, ("outcome", outcome))
            there("llmobs_request_outcome_seconds_total", label, ("outcome", outcome))
    for kind in KINDS:
        label = ("batch_kind", kind)
        there("batch_size_distribution_count", engine, label)
        there("llmobs_batch_size_squares_total", engine, label)
        for stage in ("schedule", "forward", "sampling", "update"):
            there("llmobs_step_seconds_count", engine, label, ("stage", stage))
    for reason in (
        *("engine_busy", "max_num_seqs", "token_budget", "kv_cache", "grammar", "remote_kv"),
        *("input", "adapter", "paused", "hand_over"),
    ):
        there("llmobs_queue_reason_seconds_total", engine, ("reason", reason))
    for code in ("400", "401", "404", "413", "422", "429", "500", "503", "other"):
        there("llmobs_rejections_total", ("code", code))
    for kind in ("draft", "accepted"):
        there("llmobs_spec_tokens_total", engine, ("kind", kind))
    for power in "01234":
        there("llmobs_step_log_moment_total", engine, ("power", power))
    for role in ("api_server", "engine_core"):
        there("llmobs_records_lost_total", ("process", role))
    there("context_len_histogram_count")
    there("llmobs_waiting_tokens", engine)
    there("llmobs_engine_last_step_timestamp_seconds", engine)


def test_two_engines_and_two_front_ends_add_up(tmp_path: Path) -> None:
    for number, count in enumerate([3, 4]):
        front = Writer(tmp_path / f"api_server-{number}.ring", 64, FRONT)
        front.cells[schema.model_cell("received", 0)] = count
        engine = Writer(tmp_path / f"engine_core-{number}.ring", 64, {**ENGINE, "engine": number})
        engine.cells[schema.model_cell("preemptions", 0)] = count
    lines = generate_latest(registry(Run(tmp_path))).decode().splitlines()
    model = 'model_name="deepseek-v4"'
    for line in (
        f'llmobs_requests_received_total{{context_bucket="0-1k",{model}}} 7.0',
        f'llmobs_preemptions_total{{context_bucket="0-1k",engine="0",{model}}} 3.0',
        f'llmobs_preemptions_total{{context_bucket="0-1k",engine="1",{model}}} 4.0',
    ):
        assert line in lines


def test_adapters_appear_with_their_first_use(tmp_path: Path) -> None:
    ring = new_ring(tmp_path, FRONT)
    run = Run(tmp_path)
    assert b"adapter" not in generate_latest(registry(run))
    ring.write_info({**FRONT, "models": ["deepseek-v4", "adapter"]})
    ring.cells[schema.model_cell("received", 1) + 3] = 2
    text = generate_latest(registry(run)).decode()
    line = 'llmobs_requests_received_total{context_bucket="32k+",model_name="adapter"} 2.0'
    assert line in text.splitlines()
    many = ["deepseek-v4", *[f"adapter-{n}" for n in range(20)]]
    ring.write_info({**FRONT, "models": many})
    ring.cells[schema.model_cell("received", 21)] = 9
    text = generate_latest(registry(run)).decode()
    line = 'llmobs_requests_received_total{context_bucket="0-1k",model_name="other"} 9.0'
    assert line in text.splitlines()


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "new\nline", "ünïcode", "", "a" * 500])
def test_any_model_name(tmp_path: Path, name: str) -> None:
    new_ring(tmp_path, {**FRONT, "models": [name]})
    new_ring(tmp_path, {**ENGINE, "models": [name]})
    text = generate_latest(registry(Run(tmp_path))).decode()
    names = {s.labels["model_name"] for family in parse_text(text) for s in family.samples}
    assert names == {name}


def test_without_any_ring_there_is_a_page_all_the_same(tmp_path: Path) -> None:
    text = generate_latest(registry(Run(tmp_path))).decode()
    assert "llmobs_build_info" in text


def samples(run: Run, name: str) -> dict[str, float]:
    """By the one label that tells them apart."""
    (label,) = {"llmobs_probe_attached": ["probe"], "llmobs_build_info": ["vllm_version"]}[name]
    return {
        sample.labels[label]: sample.value
        for family in registry(run).collect()
        for sample in family.samples
        if sample.name == name
    }


def test_a_probe_that_vllm_has_no_place_for_shows_though_its_process_has_no_role(
    tmp_path: Path,
) -> None:
    """Without the probe `scheduler` no process becomes an engine core: the others must tell."""
    probes = {"admit": 1, "scheduler": 0, "join": 0, "forward": 1}
    new_ring(tmp_path, {**FRONT, "probes": probes, "server": "12-345"}, 256)
    for server in ("12-345", "12-346"):  # the latter is another one, with the same agent
        (tmp_path / f"missing-{server}-{'scheduler' if server == '12-345' else 'admit'}").touch()
    (tmp_path / "missing-12-345-unheard_of").touch()
    run = Run(tmp_path)
    run.poll()
    assert samples(run, "llmobs_probe_attached") == {"admit": 1, "scheduler": 0}
    (process,) = {
        sample.labels["process"]
        for family in registry(run).collect()
        for sample in family.samples
        if sample.name == "llmobs_probe_attached" and sample.labels["probe"] == "scheduler"
    }
    assert process == "engine_core"


@pytest.mark.parametrize(
    "version", ["0.21.0rc1.dev12+gabc.d20260401.cu129", "dev", 'a "b" \\ c', "", None, 7]
)
def test_any_version_of_vllm_is_shown(tmp_path: Path, version: Any) -> None:
    new_ring(tmp_path, {**FRONT, "vllm": version}, 256)
    run = Run(tmp_path)
    run.poll()
    assert samples(run, "llmobs_build_info") == {str(version): 1}
    assert "llmobs_build_info" in generate_latest(registry(run)).decode()


def kv(run: Run) -> dict[tuple[str, ...], float]:
    return {
        (s.name, *(v for k, v in sorted(s.labels.items()) if k not in ("model_name", "engine"))): (
            s.value
        )
        for family in RunCollector(run).collect()
        for s in family.samples
        if s.name.startswith("llmobs_kv")
    }


def test_the_kv_cache(tmp_path: Path) -> None:
    assert kv(served(tmp_path)) == {
        ("llmobs_kv_blocks", "used"): 10,
        ("llmobs_kv_blocks", "free"): 13,
        ("llmobs_kv_block_events_total", "allocate"): 100,
        ("llmobs_kv_block_events_total", "free"): 90,
        ("llmobs_kv_block_events_total", "evict"): 40,
        ("llmobs_kv_allocation_failures_total",): 6,
        ("llmobs_kv_cache_bytes",): 24 << 20,
    }


def test_an_engine_without_a_pool_has_no_such_series(tmp_path: Path) -> None:
    new_ring(tmp_path, ENGINE)
    assert kv(Run(tmp_path)) == {}
