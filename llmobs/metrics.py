"""The table of metrics: name, type, labels, meaning. Code, documentation and tests read it."""

from dataclasses import dataclass
from enum import StrEnum

from llmobs import schema
from llmobs.features import FEATURES
from llmobs.slo import BUCKET_NAMES, SLO, UNKNOWN


class Type(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Exactness(StrEnum):
    """Where the figure is kept, and so what survives a gap in the records."""

    TOTAL = "total"
    """In the server's processes, as cumulative totals: exact whatever happens to the agent."""
    RECORDS = "records"
    """In the agent, from complete requests and steps: those that span a gap are left out."""
    AGENT = "agent"
    """The agent about itself."""
    READ = "read"
    """By the kernel or a driver; the agent reads it."""


BUCKETS = BUCKET_NAMES
BUCKETS_OR_UNKNOWN = (*BUCKET_NAMES, UNKNOWN)
PHASES = ("preprocess", "queue", "prefill", "preempted", "decode", "deliver")
TOKENS = ("first", "next")
OBJECTIVES = ("first_token", "token_gap")
RESULTS = ("good", "bad", "excluded")
TERMS = ("constant", "linear", "quadratic")
STAGES = ("schedule", "forward", "sampling", "update")
DROP_REASONS = ("queue_full", "export_failed", "shutdown")
CLOCKS = ("host", "gpu")
STALL_CAUSES = ("frozen", "gc", "preemption", "prefill", "worker", "unknown")
"""Of two that explain a stall the first one is told."""
HAND_OVER = "hand_over"
"""The reason of a wait between front end and engine core. It alone is kept by the agent, so it is
a series of its own: one sum of a total and an agent's figure would fall back when the agent is
started again."""
PROCESSES = ("api_server", "engine_core", "worker", "agent")
CPU_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""As in /proc/stat; what guests ran is in `user` and `nice` already."""
PRESSURES = {"cpu": ("some",), "io": ("some", "full"), "memory": ("some", "full")}
"""Of the machine's CPUs the kernel says `full` too, always 0: it means nothing there."""
OPEN: tuple[str, ...] = ()
"""A label whose values are known only at run time."""


@dataclass(frozen=True)
class Metric:
    """One family. `labels` maps each label to its values, OPEN where they are not known before;
    `boundaries` names the list in the SLO definition (histograms only)."""

    name: str
    type: Type
    help: str
    labels: dict[str, tuple[str, ...]]
    exactness: Exactness
    unit: str = ""
    boundaries: str = ""
    absent: tuple[str, ...] = ()
    """Label values without a series until there is something to tell: not all servers have it."""

    @property
    def bounds(self) -> tuple[float, ...]:
        """The histogram's upper bounds, without +Inf."""
        return tuple(getattr(SLO, self.boundaries))


MODEL = {"model_name": OPEN}
ENGINE = {"model_name": OPEN, "engine": OPEN}
_C, _G, _H = Type.COUNTER, Type.GAUGE, Type.HISTOGRAM
_T, _R, _A = Exactness.TOTAL, Exactness.RECORDS, Exactness.AGENT
_K = Exactness.READ
GPU = {"model_name": OPEN, "gpu": OPEN}
DIRECTIONS = ("tx", "rx")
THROTTLE_REASONS = (
    *("applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost"),
    *("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"),
    "display_clock_setting",
)
"""NVML's own, but for `gpu_idle`: an idle GPU is not throttled."""

METRICS = (
    Metric(
        "decode_token_latency_seconds",
        _H,
        "Latency of output tokens: `first` is the time from arrival to the first token (TTFT), "
        "`next` the gap between two output tokens of a sequence.",
        {**ENGINE, "context_bucket": BUCKETS, "token": TOKENS},
        _R,
        "seconds",
        "fine_seconds",
    ),
    Metric(
        "batch_size_distribution",
        _H,
        "Sequences per engine step.",
        {**ENGINE, "batch_kind": schema.names(schema.BatchKind)},
        _R,
        "",
        "batch_sizes",
    ),
    Metric(
        "context_len_histogram",
        _H,
        "Prompt tokens per request, each distinct prompt of a request once.",
        {**MODEL},
        _R,
        "",
        "context_tokens",
    ),
    Metric(
        "llmobs_batch_size_squares_total",
        _C,
        "Sum of the squares of the sequences per engine step: with the sum and the count of "
        "batch_size_distribution it gives the exact coefficient of variation, also over replicas.",
        {**ENGINE, "batch_kind": schema.names(schema.BatchKind)},
        _T,
    ),
    Metric(
        "llmobs_request_phase_seconds",
        _H,
        "Where the time of an admitted request went; the phases of a request sum to its end-to-end "
        "time. Rejected requests have `preprocess` only.",
        {**MODEL, "phase": PHASES, "context_bucket": BUCKETS},
        _R,
        "seconds",
        "fine_seconds",
    ),
    Metric(
        "llmobs_queue_reason_seconds_total",
        _C,
        "Seconds that admitted requests waited, by what kept them from running: `hand_over` on the "
        "way to the engine core, `engine_busy` until it scheduled next.",
        {**ENGINE, "reason": (*schema.names(schema.Wait), HAND_OVER)},
        _T,
        "seconds",
    ),
    Metric(
        "llmobs_request_seconds",
        _H,
        "End-to-end time of a request, whatever its outcome.",
        {**MODEL, "context_bucket": BUCKETS_OR_UNKNOWN},
        _R,
        "seconds",
        "fine_seconds",
    ),
    Metric(
        "llmobs_requests_received_total",
        _C,
        "Requests received, counted when their length is known or when they are rejected.",
        {**MODEL, "context_bucket": BUCKETS_OR_UNKNOWN},
        _T,
    ),
    Metric(
        "llmobs_requests_total",
        _C,
        "Requests ended, by outcome. `abort`: the client left; `rejected`: any other answer than "
        "2xx before the engine accepted.",
        {
            **MODEL,
            "context_bucket": BUCKETS_OR_UNKNOWN,
            "outcome": schema.names(schema.Outcome),
        },
        _T,
    ),
    Metric(
        "llmobs_request_outcome_seconds_total",
        _C,
        "Sum of the end-to-end times of the requests ended, by outcome.",
        {
            **MODEL,
            "context_bucket": BUCKETS_OR_UNKNOWN,
            "outcome": schema.names(schema.Outcome),
        },
        _T,
        "seconds",
    ),
    Metric(
        "llmobs_rejections_total",
        _C,
        "Rejected requests by HTTP status.",
        {**MODEL, "code": schema.REJECTION_CODES},
        _T,
    ),
    Metric(
        "llmobs_slo_requests_total",
        _C,
        "The verdict on each ended request of known length. A request without a first token within "
        "its target is bad, whatever its outcome. Excluded: answers 4xx, requests to which the "
        "objective does not apply, those that span a gap in the records, and cold starts if the "
        "SLO says so (it does not by default).",
        {
            **MODEL,
            "context_bucket": BUCKETS,
            "objective": OBJECTIVES,
            "result": RESULTS,
        },
        _R,
    ),
    Metric(
        "llmobs_prompt_tokens_total",
        _C,
        "Prompt tokens of sequences whose prefill was done, counted at their end, each distinct "
        "prompt of a request once; `cached` came from the prefix cache.",
        {**MODEL, "context_bucket": BUCKETS, "source": schema.SOURCES},
        _T,
    ),
    Metric(
        "llmobs_generated_tokens_total",
        _C,
        "Output tokens. Where the front end decides the end (stop strings, beam search) they are "
        "counted at the end, else when they come out of the engine.",
        {**MODEL, "context_bucket": BUCKETS},
        _T,
    ),
    Metric(
        "llmobs_requests",
        _G,
        "Sequences in the engine, waiting (preempted ones too) or running.",
        {**ENGINE, "state": ("waiting", "running"), "context_bucket": BUCKETS},
        _T,
    ),
    Metric(
        "llmobs_waiting_tokens",
        _G,
        "Prompt tokens of the sequences that wait.",
        {**ENGINE},
        _T,
    ),
    Metric(
        "llmobs_step_seconds",
        _H,
        "Engine steps by stage. Forward and sampling are host time in the first worker.",
        {**ENGINE, "stage": STAGES, "batch_kind": schema.names(schema.BatchKind)},
        _R,
        "seconds",
        "step_seconds",
    ),
    Metric(
        "llmobs_forward_seconds",
        _H,
        "The forward pass of the engine's steps in the first worker: `host` is the time that the "
        "call took there (with a GPU mostly that of launching its work), `gpu` the GPU's own time "
        "for it, of all batches with a part of a prompt and of one in eight others (no series "
        "where there is no GPU).",
        {**ENGINE, "clock": CLOCKS, "batch_kind": schema.names(schema.BatchKind)},
        _R,
        "seconds",
        "step_seconds",
        absent=("gpu",),
    ),
    Metric(
        "llmobs_stall_seconds_total",
        _C,
        "Seconds by which engine steps stood still, or took more than 0.2 s and ten times the "
        "usual while sequences ran, by cause: `frozen` (the process was stopped or got no CPU), "
        "`gc` (Python's garbage collector), `preemption` (a recompute in the batch), `prefill` (a "
        "prompt in the batch), `worker` (it computed for so long), `unknown`.",
        {**ENGINE, "cause": STALL_CAUSES},
        _R,
        "seconds",
    ),
    Metric(
        "llmobs_gc_pause_seconds",
        _H,
        "Pauses by Python's garbage collector, of all threads of a process.",
        {**MODEL, "process": OPEN},
        _T,
        "seconds",
        "step_seconds",
    ),
    Metric(
        "llmobs_event_loop_lag_seconds",
        _H,
        "How late the event loop of a process came to a timer, asked ten times a second (no series "
        "of a process without one).",
        {**MODEL, "process": OPEN},
        _T,
        "seconds",
        "step_seconds",
    ),
    Metric(
        "llmobs_step_log_moment_total",
        _C,
        "Sums of ln(max(step, 1 us) in us)^power over the engine steps, for the bimodality "
        "coefficient.",
        {**ENGINE, "power": ("0", "1", "2", "3", "4")},
        _T,
    ),
    Metric(
        "llmobs_engine_last_step_timestamp_seconds",
        _G,
        "When the engine last ended a step, Unix time; 0 before the first.",
        {**ENGINE},
        _T,
        "seconds",
    ),
    Metric(
        "llmobs_preemptions_total",
        _C,
        "Sequences preempted for want of KV-cache blocks.",
        {**ENGINE, "context_bucket": BUCKETS},
        _T,
    ),
    Metric(
        "llmobs_spec_tokens_total",
        _C,
        "Speculative decoding: tokens drafted, and drafts accepted.",
        {**ENGINE, "kind": ("draft", "accepted")},
        _T,
    ),
    Metric(
        "llmobs_cpu_seconds_total",
        _C,
        "The machine's CPU time by mode, over all CPUs. `steal`: the hypervisor gave it to others.",
        {**MODEL, "mode": CPU_MODES},
        _K,
        "seconds",
    ),
    Metric(
        "llmobs_cpus",
        _G,
        "CPUs that the server may use: those of its affinity and cpuset, no more than its tightest "
        "quota.",
        {**MODEL},
        _K,
    ),
    Metric(
        "llmobs_load_average",
        _G,
        "The machine's load: threads that run, are ready to run, or wait for a disk.",
        {**MODEL, "window": ("1m",)},
        _K,
    ),
    Metric(
        "llmobs_cgroup_cpu_periods_total",
        _C,
        "Periods of the server's CPU quota that passed while anything in its cgroup ran.",
        {**MODEL},
        _K,
    ),
    Metric(
        "llmobs_cgroup_cpu_throttled_periods_total",
        _C,
        "Those of them in which the quota was used up.",
        {**MODEL},
        _K,
    ),
    Metric(
        "llmobs_cgroup_cpu_throttled_seconds_total",
        _C,
        "How long the quota then kept the server from running, added up over the CPUs.",
        {**MODEL},
        _K,
        "seconds",
    ),
    Metric(
        "llmobs_process_cpu_seconds_total",
        _C,
        "CPU time of the server's processes and of the agent.",
        {**MODEL, "process": PROCESSES},
        _K,
        "seconds",
    ),
    Metric(
        "llmobs_process_run_queue_seconds_total",
        _C,
        "How long their threads were ready to run and had no CPU, whatever the reason.",
        {**MODEL, "process": PROCESSES},
        _K,
        "seconds",
    ),
    Metric(
        "llmobs_pressure_seconds_total",
        _C,
        "How long some, or all, of the machine's tasks waited for a resource (PSI).",
        {**MODEL, "resource": tuple(PRESSURES), "kind": ("some", "full")},
        _K,
        "seconds",
    ),
    Metric(
        "llmobs_cold_start_seconds",
        _H,
        "Time of the first prefill of a bucket since the engine's start, or since it made no step "
        "for 10 minutes: from first scheduled to the first token, without `preempted`. Of "
        "sequences that generate.",
        {**ENGINE, "context_bucket": BUCKETS},
        _R,
        "seconds",
        "cold_start_seconds",
    ),
    Metric(
        "llmobs_latency_model_coefficient",
        _G,
        "Fitted prefill time = constant + linear * n + quadratic * n^2, in seconds, over the n "
        "computed tokens (a cached prefix is not long). Absent while too few prefills, or too few "
        "lengths, were seen.",
        {**ENGINE, "term": TERMS},
        _R,
    ),
    Metric(
        "llmobs_latency_residual_ratio",
        _H,
        "Prefill time over what the fit from before it says for its computed tokens: above 1 it "
        "was slow for its length. Without those for which nothing could be predicted.",
        {**ENGINE, "context_bucket": BUCKETS},
        _R,
        "ratio",
        "residual_ratios",
    ),
    Metric(
        "llmobs_slo_target_seconds",
        _G,
        "The targets: the time to the first token, the longest gap between tokens.",
        {**MODEL, "context_bucket": BUCKETS, "objective": OBJECTIVES},
        _A,
        "seconds",
    ),
    Metric(
        "llmobs_gpu_memory_bytes",
        _G,
        "Memory of a GPU or MIG instance that the server uses: `reserved` is the driver's own, "
        "`used` is what all processes have allocated.",
        {**GPU, "kind": ("total", "used", "reserved", "free")},
        _K,
        "bytes",
    ),
    Metric(
        "llmobs_gpu_memory_pressure_ratio",
        _G,
        "`device`: used of total memory. `effective`: without the KV-cache blocks that are free. "
        "vLLM takes 0.92 of a GPU by itself, so a high `device` alone is no trouble.",
        {**GPU, "kind": ("device", "effective")},
        _K,
    ),
    Metric(
        "llmobs_torch_memory_bytes",
        _G,
        "Memory of PyTorch's allocator in a worker, after its last step: `allocated` to tensors; "
        "`reserved` from the driver, that included; `peak` of `allocated` since the worker began "
        "or vLLM set it back.",
        {**ENGINE, "rank": OPEN, "kind": ("allocated", "reserved", "peak")},
        _T,
        "bytes",
    ),
    Metric(
        "llmobs_torch_memory_events_total",
        _C,
        "`alloc_retry`: PyTorch's allocator gave its cached memory back to get more; `oom`: it got "
        "none.",
        {**ENGINE, "rank": OPEN, "event": ("alloc_retry", "oom")},
        _T,
    ),
    Metric(
        "llmobs_gpu_utilization_ratio",
        _G,
        "The share of the last moment (up to a second) in which anything ran on the GPU.",
        {**GPU},
        _K,
    ),
    Metric("llmobs_gpu_power_watts", _G, "The board's power.", {**GPU}, _K),
    Metric(
        "llmobs_gpu_throttled",
        _G,
        "1 where this is why the GPU's clocks are lower than they could be.",
        {**GPU, "reason": THROTTLE_REASONS},
        _K,
    ),
    Metric(
        "llmobs_gpu_pcie_bytes_total",
        _C,
        "Bytes over PCIe, as the GPU sees them, since the agent began. Exact up to 4 GiB a look "
        "where the driver counts them, else an estimate (see architecture.md).",
        {**GPU, "direction": DIRECTIONS},
        _K,
        "bytes",
    ),
    Metric(
        "llmobs_gpu_nvlink_bytes_total",
        _C,
        "Bytes carried by all NVLinks of the GPU, as the driver counts them.",
        {**GPU, "direction": DIRECTIONS},
        _K,
        "bytes",
    ),
    Metric(
        "llmobs_gpu_nvlinks",
        _G,
        "NVLinks of the GPU.",
        {**GPU, "state": ("active", "inactive")},
        _K,
    ),
    Metric(
        "llmobs_gpu_ecc_errors_total",
        _C,
        "Memory errors over the GPU's life.",
        {**GPU, "kind": ("corrected", "uncorrected")},
        _K,
    ),
    Metric(
        "llmobs_gpu_xid_errors_total",
        _C,
        "Errors that the driver reported of the GPU (XID) since the agent began.",
        {**GPU},
        _K,
    ),
    Metric("llmobs_gpu_last_xid", _G, "The number of the last of them.", {**GPU}, _K),
    Metric(
        "llmobs_gpu_info",
        _G,
        "Always 1: which GPU a `gpu` is (NVML's index, as in nvidia-smi; a MIG instance is "
        "`GPU:INSTANCE`), and which worker uses it.",
        {**GPU, "uuid": OPEN, "name": OPEN, "engine": OPEN, "rank": OPEN},
        _K,
    ),
    Metric(
        "llmobs_kv_blocks",
        _G,
        "KV-cache blocks of the engine's pool. Cached prefixes that nobody uses are free.",
        {**ENGINE, "state": ("used", "free")},
        _T,
    ),
    Metric(
        "llmobs_kv_block_events_total",
        _C,
        "Life of KV-cache blocks. `allocate`: a block leaves the free queue, new or found in the "
        "prefix cache; `free`: it returns; `evict`: what the prefix cache had in it is forgotten. "
        "`allocate` less `free` are in use.",
        {**ENGINE, "event": schema.LABELS["event"]},
        _T,
    ),
    Metric(
        "llmobs_kv_allocation_failures_total",
        _C,
        "Attempts to schedule a request that failed since the pool had too few free blocks: one a "
        "step for the one that is first in line, and one for each preemption.",
        {**ENGINE},
        _T,
    ),
    Metric(
        "llmobs_kv_cache_bytes",
        _G,
        "The size of the KV cache in one worker; with tensor parallelism each has as much.",
        {**ENGINE},
        _T,
        "bytes",
    ),
    Metric(
        "llmobs_request_kv_bytes",
        _H,
        "The most that a request's sequences held of the KV cache in one worker, shared prefixes "
        "included.",
        {**MODEL, "context_bucket": BUCKETS},
        _R,
        "bytes",
        "kv_bytes",
    ),
    Metric(
        "llmobs_incomplete_requests_total",
        _C,
        "Requests that span a gap in the records: counted by the counters, left out of histograms.",
        {**MODEL},
        _A,
    ),
    Metric(
        "llmobs_records_lost_total",
        _C,
        "Records that were overwritten or torn before the agent could read them.",
        {**MODEL, "process": OPEN},
        _A,
    ),
    Metric(
        "llmobs_spans_dropped_total",
        _C,
        "Spans of kept requests that did not arrive, by reason: `queue_full` (more than 50 a "
        "second, or a collector in trouble; the fastest give way), `export_failed`, `shutdown`.",
        {**MODEL, "reason": DROP_REASONS},
        _A,
    ),
    Metric(
        "llmobs_guard_errors_total",
        _C,
        "Failures of llmobs' own code inside the server, swallowed.",
        {**MODEL, "process": OPEN, "probe": OPEN},
        _T,
    ),
    Metric(
        "llmobs_probe_attached",
        _G,
        "1 where a probe is attached in every process of its kind, else 0.",
        {**MODEL, "process": OPEN, "probe": OPEN},
        _T,
    ),
    Metric(
        "llmobs_feature_available",
        _G,
        "1, or 0 where something cannot be told of this server, with the reason (see below).",
        {**MODEL, "feature": tuple(feature.name for feature in FEATURES), "reason": OPEN},
        _A,
    ),
    Metric(
        "llmobs_agent_restarts_total",
        _C,
        "How often the agent of this server was started again.",
        {**MODEL},
        _A,
    ),
    Metric(
        "llmobs_build_info",
        _G,
        "Always 1; the versions.",
        {**MODEL, "version": OPEN, "vllm_version": OPEN},
        _A,
    ),
)
OUTPUT_TOKENS = Metric(
    "output_tokens", _H, "Output tokens per request.", {**MODEL}, _R, "", "context_tokens"
)
"""Kept for OTLP alone, where gen_ai.client.token.usage wants it."""
BY_NAME = {metric.name: metric for metric in (*METRICS, OUTPUT_TOKENS)}
