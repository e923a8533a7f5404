"""What each alert goes by: the fields of the SLO file's `alerts`, one class per shape.

`severity` and `for_` (how long it must hold) are in all; `every` is how often it is evaluated,
where that is not every 30 s.
"""

from dataclasses import dataclass
from typing import Literal

from llmobs.slo_file import Count, Hold, Number, Seconds, Share

Severity = Literal["page", "ticket"]


@dataclass(frozen=True, kw_only=True)
class Alarm:
    severity: Severity
    for_: Hold


@dataclass(frozen=True, kw_only=True)
class Within(Alarm):
    """Any at all within `window`."""

    window: Seconds


@dataclass(frozen=True, kw_only=True)
class FirstTokenP99(Within):
    """P99 above the bucket's target, of at least so many requests in the window."""

    at_least: Count
    every: Seconds


@dataclass(frozen=True, kw_only=True)
class Throughput(Within):
    """Tokens per second below `per_1000_tokens` × context/1000, while so many streams run."""

    per_1000_tokens: Number
    streams: Count


@dataclass(frozen=True, kw_only=True)
class Capacity(Within):
    """Requests per second of the bucket of `prompt_tokens`: asked for, and not done."""

    prompt_tokens: Count
    per_second: Number


@dataclass(frozen=True, kw_only=True)
class Burst(Within):
    """Requests received per second, against the mean of `baseline` that ended `baseline_ago`."""

    times: Number
    baseline: Seconds
    baseline_ago: Seconds
    at_least_per_second: Number


@dataclass(frozen=True, kw_only=True)
class Surge(Within):
    """The share of prompts `longer_than` so many tokens, against the share of `baseline`."""

    longer_than: Count
    times: Number
    baseline: Seconds
    baseline_ago: Seconds
    at_least_share: Share
    at_least: Count
    sigmas: Number
    every: Seconds


@dataclass(frozen=True, kw_only=True)
class BatchSize(Within):
    """The coefficient of variation, of so many steps with at least so many sequences each."""

    above: Number
    steps: Count
    mean: Number
    every: Seconds


@dataclass(frozen=True, kw_only=True)
class Bimodal(Within):
    """Sarle's coefficient of ln(step time), of so many steps that vary so much."""

    above: Number
    steps: Count
    variance: Number


@dataclass(frozen=True, kw_only=True)
class Above(Alarm):
    """A gauge above a number."""

    above: Number


@dataclass(frozen=True, kw_only=True)
class AboveWithin(Within):
    """A rate or a ratio over the window above a number."""

    above: Number


@dataclass(frozen=True, kw_only=True)
class ShareAbove(Within):
    """A share of the time of the window."""

    above: Share


@dataclass(frozen=True, kw_only=True)
class Pressure(Alarm):
    above: Share


@dataclass(frozen=True, kw_only=True)
class Rising(Pressure):
    """A share above, and higher by `rise` than `ago`."""

    rise: Share
    ago: Seconds


@dataclass(frozen=True, kw_only=True)
class CriticalPressure(Pressure):
    """A share above, and a preemption or a failed allocation within the window."""

    window: Seconds


@dataclass(frozen=True, kw_only=True)
class Stalled(Alarm):
    """Requests there, and no step for so long. A request that came within `arrived` counts too."""

    no_step: Seconds
    arrived: Seconds
    every: Seconds


@dataclass(frozen=True, kw_only=True)
class Lag(Within):
    """P99 above, of at least so many."""

    above: Seconds
    at_least: Count


@dataclass(frozen=True, kw_only=True)
class Pauses(Within):
    """At least so many pauses longer than `longer_than`."""

    longer_than: Seconds
    at_least: Count


@dataclass(frozen=True, kw_only=True)
class SlowForLength(Within):
    """The median of actual over expected prefill time, of so many requests."""

    above: Number
    at_least: Count


@dataclass(frozen=True, kw_only=True)
class Throttled(Within):
    """Throttled seconds per second above, and `growth` × those of a window before; or a share of
    the periods."""

    above: Number
    growth: Number
    periods: Share


@dataclass(frozen=True, kw_only=True)
class Cpi(Within):
    """Cycles per instruction above, while the host is idle for less than `idle_below`."""

    above: Number
    idle_below: Share


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """By alert; `first_token_p99_high` is `LLMFirstTokenP99High`, and so on."""

    first_token_p99_high: FirstTokenP99
    stream_throughput_low: Throughput
    capacity_low: Capacity
    traffic_burst: Burst
    long_context_surge: Surge
    batch_size_unstable: BatchSize
    batch_latency_bimodal: Bimodal
    queue_deep: Above
    kv_starved: AboveWithin
    preemption_storm: AboveWithin
    memory_pressure: Pressure
    device_memory_rising: Rising
    memory_pressure_critical: CriticalPressure
    engine_stalled: Stalled
    event_loop_lag: Lag
    gc_pause: Pauses
    slow_for_length: SlowForLength
    cold_start_slow: Within
    cpu_steal: ShareAbove
    cpu_wait: ShareAbove
    cpu_throttled: Throttled
    run_queue_delay: ShareAbove
    cpi_high: Cpi
    node_load_high: Above
    absent: Alarm
    probe_missing: Alarm
    records_dropped: Within
    guard_errors: Within
    boundary_missing: Alarm
    ebpf_lost: Within
