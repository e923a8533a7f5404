"""For each alert: series that must make it fire, at which minute, and a twin that must not.

All figures are written out: nothing here is taken from the SLO file. A minute per sample; what
changes does so at minute 30, so the first sample that tells of it is that of minute 31.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from tests.generate.promtool import Series, counter, gauge

LONG = 60
"""Minutes that a series lasts at least."""


@dataclass(frozen=True)
class Case:
    """It fires at minute `at`, not one before. `by` is the label that tells the twin from it."""

    alert: str
    at: int
    loud: Callable[[str], list[Series]]
    quiet: Callable[[str], list[Series]]
    by: str = "instance"
    note: str = ""


def labels(who: str, **more: str) -> str:
    """`who` is instance and model alike."""
    pairs = {"job": "llmobs", "instance": who, "model_name": who, **more}
    return "{" + ",".join(f'{k}="{v}"' for k, v in pairs.items()) + "}"


def engine(who: str, **more: str) -> str:
    return labels(who, engine="0", **more)


def at_30(before: float, after: float) -> tuple[tuple[float, int], tuple[float, int]]:
    return (before, 30), (after, LONG - 30)


def level(before: float, after: float) -> tuple[tuple[float, int], tuple[float, int]]:
    """The sample of minute 30 is the first of the new level."""
    return (before, 30), (after, LONG - 29)


def latency(who: str, bucket: str, per_minute: float, slow: float, bound: str) -> list[Series]:
    """First tokens, half of the good ones far below the bound; `slow` is the share beyond it from
    minute 30 on."""
    beyond = {"0.3": "0.5", "0.8": "1.2"}[bound]

    def one(le: str, before: float, after: float) -> Series:
        name = engine(who, context_bucket=bucket, token="first", le=le)
        steps = at_30(per_minute * before, per_minute * after)
        return counter("decode_token_latency_seconds_bucket" + name, *steps)

    count = engine(who, context_bucket=bucket, token="first")
    return [
        one("0.2", 0.5, (1 - slow) / 2),
        one(bound, 1, 1 - slow),
        one(beyond, 1, 1),
        one("+Inf", 1, 1),
        counter("decode_token_latency_seconds_count" + count, *at_30(per_minute, per_minute)),
    ]


def histogram(
    name: str, labels_of: Callable[..., str], grid: list[tuple[str, float, float]], **more: str
) -> list[Series]:
    """By boundary: what comes per minute, cumulative, before and after minute 30."""
    series = [
        counter(f"{name}_bucket" + labels_of(le=le, **more), *at_30(before, after))
        for le, before, after in grid
    ]
    _, before, after = grid[-1]
    return [*series, counter(f"{name}_count" + labels_of(**more), *at_30(before, after))]


def traffic(who: str, short: tuple[float, float], long: tuple[float, float]) -> list[Series]:
    """Requests received per minute, before and after minute 90."""
    name = "llmobs_requests_received_total"
    return [
        counter(name + labels(who, context_bucket=bucket), (before, 90), (after, 60))
        for bucket, (before, after) in (("0-1k", short), ("4k-32k", long))
    ]


def batches(who: str, sizes: list[int], per_minute: int = 600, calm: int = 12) -> list[Series]:
    """Steps with these batch sizes in turn, from minute 30 on; before, all of the `calm` size."""
    n = len(sizes)
    each = {"batch_kind": "decode"}
    mean, square = sum(sizes) / n, sum(s * s for s in sizes) / n
    size = "batch_size_distribution"
    return [
        counter(f"{size}_count" + engine(who, **each), *at_30(per_minute, per_minute)),
        counter(f"{size}_sum" + engine(who, **each), *at_30(calm * per_minute, mean * per_minute)),
        counter(
            "llmobs_batch_size_squares_total" + engine(who, **each),
            *at_30(calm**2 * per_minute, square * per_minute),
        ),
        counter("llmobs_records_lost_total" + labels(who, process="engine_core"), (0, LONG)),
    ]


def steps(who: str, milliseconds: list[float], per_minute: int = 600) -> list[Series]:
    """Engine steps that take these times in turn, all the time."""
    logs = [math.log(ms * 1000) for ms in milliseconds]
    return [
        counter(
            "llmobs_step_log_moment_total" + engine(who, power=str(power)),
            (per_minute * sum(x**power for x in logs) / len(logs), LONG),
        )
        for power in range(5)
    ]


def spread(center: float, sigma: float, n: int = 200) -> list[float]:
    """A lognormal, by its quantiles."""
    from scipy.stats import norm

    return [center * math.exp(sigma * norm.ppf((i + 0.5) / n)) for i in range(n)]


def cpu(who: str, steal: float = 0, iowait: float = 0, idle: float = 30) -> list[Series]:
    """Seconds per minute and CPU from minute 30 on, of 60; four CPUs."""
    modes = {"steal": steal, "iowait": iowait, "idle": idle, "user": 60 - steal - iowait - idle}
    return [
        counter("llmobs_cpu_seconds_total" + labels(who, mode=m), *at_30(4 * b, 4 * v))
        for (m, v), b in zip(modes.items(), (0, 0, 30, 30), strict=True)
    ]


def cpus(who: str) -> Series:
    return gauge("llmobs_cpus" + labels(who), (4, LONG + 1))


def pressure(who: str, kind: str, before: float, after: float) -> Series:
    name = "llmobs_gpu_memory_pressure_ratio" + labels(who, gpu="0", kind=kind)
    return gauge(name, *level(before, after))


def preemptions(who: str, per_minute: float) -> Series:
    name = "llmobs_preemptions_total" + engine(who, context_bucket="0-1k")
    return counter(name, *at_30(0, per_minute))


def starved(who: str, per_minute: float) -> Series:
    return counter("llmobs_kv_allocation_failures_total" + engine(who), *at_30(0, per_minute))


def waiting(who: str, after: float) -> list[Series]:
    name = "llmobs_requests" + engine(who, state="waiting", context_bucket="0-1k")
    return [gauge(name, *level(0, after)), cpus(who)]


def throttled(who: str, seconds: list[tuple[float, int]], cut: float) -> list[Series]:
    cgroup = "llmobs_cgroup_cpu_"
    return [
        counter(f"{cgroup}throttled_seconds_total" + labels(who), *seconds),
        counter(f"{cgroup}periods_total" + labels(who), (600, LONG)),
        counter(f"{cgroup}throttled_periods_total" + labels(who), *at_30(0, 600 * cut)),
    ]


def cycles(who: str, cpi: float, idle: float) -> list[Series]:
    """The eBPF exporter has a page of its own on the same host."""
    there = labels(f"{who}:9466", process="engine_core").replace('"llmobs"', '"llmobs-ebpf"')
    return [
        counter("llmobs_cpu_cycles_total" + there, *at_30(1e9, cpi * 1e9)),
        counter("llmobs_cpu_instructions_total" + there, *at_30(1e9, 1e9)),
        *cpu(f"{who}:9464", idle=idle),
    ]


def process(name: str, who: str, before: float, after: float, **more: str) -> Series:
    return counter(name + labels(who, **more), *at_30(before, after))


def streams(
    who: str, tokens_per_second: float, running: float, bucket: str = "1k-4k", before: float = 300
) -> list[Series]:
    """Tokens per second of all streams of a length, before and after minute 30."""
    of = {"context_bucket": bucket}
    return [
        counter(
            "llmobs_generated_tokens_total" + labels(who, **of),
            *at_30(before * 60, tokens_per_second * 60),
        ),
        gauge("llmobs_requests" + engine(who, state="running", **of), (running, LONG + 1)),
    ]


def capacity(who: str, received: float, done: float) -> list[Series]:
    bucket = {"context_bucket": "1k-4k"}
    return [
        counter(
            "llmobs_requests_received_total" + labels(who, **bucket),
            *at_30(55 * 60, received * 60),
        ),
        counter(
            "llmobs_requests_total" + labels(who, outcome="length", **bucket),
            *at_30(55 * 60, done * 60),
        ),
        counter(
            "llmobs_requests_total" + labels(who, outcome="abort", **bucket),
            *at_30(0, (received - done) * 60),
        ),
    ]


def residuals(who: str, half_slow: bool, per_minute: float = 30) -> list[Series]:
    slow = 0.8 if half_slow else 0.3
    grid = [
        ("1.0", per_minute * 0.5, per_minute * 0.1),
        ("1.5", per_minute, per_minute * (1 - slow)),
        ("2.0", per_minute, per_minute),
        ("+Inf", per_minute, per_minute),
    ]
    of = lambda **more: engine(who, context_bucket="0-1k", **more)  # noqa: E731
    return histogram("llmobs_latency_residual_ratio", of, grid)


def cold(who: str, seconds: float, bucket: str = "0-1k") -> list[Series]:
    """One at minute 31."""
    name = "llmobs_cold_start_seconds"
    of = engine(who, context_bucket=bucket)
    once = ((0, 30), (1, 1), (0, 29))
    return [
        counter(f"{name}_count" + of, *once),
        counter(f"{name}_sum" + of, *((step * seconds, n) for step, n in once)),
    ]


def lag(who: str, late: float, per_minute: float = 600) -> list[Series]:
    of = lambda **more: labels(who, process="api_server", **more)  # noqa: E731
    grid = [
        ("0.05", per_minute, per_minute * (1 - late) / 2),
        ("0.1", per_minute, per_minute * (1 - late)),
        ("0.3", per_minute, per_minute),
        ("+Inf", per_minute, per_minute),
    ]
    return histogram("llmobs_event_loop_lag_seconds", of, grid)


def pauses(who: str, long: float) -> list[Series]:
    """So many a minute longer than 0.1 s from minute 30 on, among 60."""
    of = lambda **more: labels(who, process="engine_core", **more)  # noqa: E731
    grid = [("0.05", 60, 60 - long), ("0.1", 60, 60 - long), ("+Inf", 60, 60)]
    return histogram("llmobs_gc_pause_seconds", of, grid)


def loads(who: str, load: float) -> list[Series]:
    name = "llmobs_load_average" + labels(who, window="1m")
    return [gauge(name, *level(0.4, load)), cpus(who)]


def pages(who: str, le: str) -> list[Series]:
    of = lambda **more: engine(  # noqa: E731
        who, context_bucket="1k-4k", token="first", **more
    )
    name = "decode_token_latency_seconds"
    return [
        gauge(f"{name}_bucket" + of(le=le), (7, LONG)),
        gauge(f"{name}_count" + of(), (7, LONG)),
    ]


def surge(who: str, before: float, after: float, per_minute: float = 1000) -> list[Series]:
    """The share of long contexts, before and after minute 90."""
    return traffic(
        who,
        (per_minute * (1 - before), per_minute * (1 - after)),
        (per_minute * before, per_minute * after),
    )


CASES = [
    # A fifth of the first tokens beyond the target: true from minute 31, `for` 2m.
    Case(
        "LLMFirstTokenP99High",
        33,
        lambda who: latency(who, "1k-4k", 600, 0.2, "0.3"),
        lambda who: latency(who, "1k-4k", 600, 0.009, "0.3"),
    ),
    # 2%, evenly from 0.3 to 0.5: P99 is 0.4 in the end, and above 0.3 after the third of 5 minutes.
    Case(
        "LLMFirstTokenP99High",
        35,
        lambda who: latency(who, "1k-4k", 600, 0.02, "0.3"),
        lambda who: latency(who, "1k-4k", 600, 0.009, "0.3"),
        note="a little late",
    ),
    Case(
        "LLMFirstTokenP99High",
        35,
        lambda who: latency(who, "32k+", 600, 0.02, "0.8"),
        lambda who: latency(who, "32k+", 600, 0.009, "0.8"),
        note="a little late at 32k",
    ),
    Case(
        "LLMFirstTokenP99High",
        33,
        lambda who: latency(who, "4k-32k", 21, 0.5, "0.8"),
        lambda who: latency(who, "4k-32k", 19, 0.5, "0.8"),
        note="few at 32k",
    ),
    Case(
        "LLMFirstTokenP99High",
        33,
        lambda who: latency(who, "4k-32k", 600, 0.2, "0.8"),
        lambda who: latency(who, "4k-32k", 600, 0.009, "0.8"),
        note="32k has 800 ms",
    ),
    Case(
        "LLMFirstTokenP99High",
        33,
        lambda who: latency(who, "0-1k", 21, 0.5, "0.3"),
        lambda who: latency(who, "0-1k", 19, 0.5, "0.3"),
        note="under 100 requests a P99 is only their slowest",
    ),
    # 180 tokens/s of 184.32 promised at 4k; 300 before, so the mean of 5 minutes is below after 5.
    Case(
        "LLMStreamThroughputLow",
        40,
        lambda who: streams(who, 180, 8),
        lambda who: streams(who, 186, 8),
        by="model_name",
    ),
    Case(
        "LLMStreamThroughputLow",
        38,
        lambda who: streams(who, 60, 8),
        lambda who: streams(who, 60, 7),
        by="model_name",
        note="idle is not slow",
    ),
    Case(
        "LLMStreamThroughputLow",
        40,
        lambda who: streams(who, 45, 8, "0-1k"),
        lambda who: streams(who, 47, 8, "0-1k"),
        by="model_name",
        note="46.08 at 1k",
    ),
    Case(
        "LLMStreamThroughputLow",
        40,
        lambda who: streams(who, 20, 8, "0-1k"),
        lambda who: streams(who, 20, 7, "0-1k"),
        by="model_name",
        note="idle at 1k",
    ),
    Case(
        "LLMStreamThroughputLow",
        40,
        lambda who: streams(who, 1470, 8, "4k-32k", 2000),
        lambda who: streams(who, 1480, 8, "32k+", 2000),
        by="model_name",
        note="1474.56 at 32k",
    ),
    Case(
        "LLMStreamThroughputLow",
        37,
        lambda who: streams(who, 100, 8, "32k+", 2000),
        lambda who: streams(who, 100, 7, "4k-32k", 2000),
        by="model_name",
        note="idle at 32k",
    ),
    # 40 of 60 asked for: (55·k + 40·(5 − k))/5 < 50 from the second minute on.
    Case(
        "LLMCapacityLow",
        37,
        lambda who: capacity(who, 60, 40),
        lambda who: capacity(who, 60, 50.5),
        by="model_name",
    ),
    Case(
        "LLMCapacityLow",
        37,
        lambda who: capacity(who, 60, 40),
        lambda who: capacity(who, 10, 10),
        by="model_name",
        note="low demand is no breach",
    ),
    Case(
        "LLMCapacityLow",
        37,
        lambda who: capacity(who, 60, 40),
        lambda who: capacity(who, 40, 20),
        by="model_name",
        note="less is asked for than promised",
    ),
    # +150% at minute 90, over 2 minutes: 1.75 × after one, 2.5 × after two.
    Case(
        "LLMTrafficBurst",
        97,
        lambda who: traffic(who, (600, 1500), (0, 0)),
        lambda who: traffic(who, (600, 1180), (0, 0)),
        by="model_name",
    ),
    Case(
        "LLMTrafficBurst",
        96,
        lambda who: traffic(who, (30, 300), (0, 0)),
        lambda who: traffic(who, (2, 55), (0, 0)),
        by="model_name",
        note="a request a second is no burst",
    ),
    Case(
        "LLMTrafficBurst",
        97,
        lambda who: traffic(who, (30, 75), (0, 0)),
        lambda who: traffic(who, (2, 55), (0, 0)),
        by="model_name",
        note="just above one a second",
    ),
    # 10% of long contexts become 20%: the share of 5 minutes is above 15% after the third minute.
    Case(
        "LLMLongContextSurge",
        95,
        lambda who: surge(who, 0.10, 0.20),
        lambda who: surge(who, 0.10, 0.149),
        by="model_name",
    ),
    Case(
        "LLMLongContextSurge",
        93,
        lambda who: surge(who, 0, 0.2, per_minute=24),
        lambda who: surge(who, 0, 0.2, per_minute=19),
        by="model_name",
        note="from nothing; under 100 requests it is noise",
    ),
    Case(
        "LLMLongContextSurge",
        95,
        lambda who: surge(who, 0.005, 0.032, per_minute=4000),
        lambda who: surge(who, 0.005, 0.019, per_minute=4000),
        by="model_name",
        note="2% are the least",
    ),
    Case(
        "LLMLongContextSurge",
        97,
        lambda who: surge(who, 0.1, 0.19, per_minute=30),
        lambda who: surge(who, 0.1, 0.17, per_minute=30),
        by="model_name",
        note="3.7 sigma and 2.9",
    ),
    Case(
        "LLMLongContextSurge",
        94,
        lambda who: surge(who, 0.1, 0.4, per_minute=30),
        lambda who: surge(who, 0.1, 0.16, per_minute=30),
        by="model_name",
        note="within 3 sigma of 150 requests",
    ),
    # 4 and 20 in turn: mean 12, deviation 8, 0.67; mixed with steps of 12, above 0.4 after 2 of 5.
    Case(
        "LLMBatchSizeUnstable",
        37,
        lambda who: batches(who, [4, 20]),
        lambda who: batches(who, [8, 16]),
    ),
    Case(
        "LLMBatchSizeUnstable",
        37,
        lambda who: batches(who, [1, 4]),
        lambda who: batches(who, [1, 1, 1, 3], calm=1),
        note="one and two is no swing",
    ),
    Case(
        "LLMBatchSizeUnstable",
        37,
        lambda who: batches(who, [4, 20], per_minute=11),
        lambda who: batches(who, [4, 20], per_minute=9),
        note="50 steps in 5 minutes at least",
    ),
    Case(
        "LLMBatchSizeUnstable",
        37,
        lambda who: batches(who, [4, 20]),
        lambda who: [
            *batches(who, [4, 20])[:3],
            counter("llmobs_records_lost_total" + labels(who, process="engine_core"), (5, LONG)),
        ],
        note="the sums are not whole where records were lost",
    ),
    # Two humps, 50 and 800 ms, from the beginning: 200 steps are there at once, `for` 5m.
    Case(
        "LLMBatchLatencyBimodal",
        6,
        lambda who: steps(who, [*spread(50, 0.15), *spread(800, 0.15)]),
        lambda who: steps(who, spread(200, 0.4)),
    ),
    Case(
        "LLMBatchLatencyBimodal",
        6,
        lambda who: steps(who, [*spread(50, 0.15), *spread(800, 0.15)]),
        lambda who: steps(who, [*spread(50, 0.01), *spread(85, 0.01)]),
        note="two humps so near are no trouble",
    ),
    # Humps 1.6 apart (as logarithms), 0.4 wide: 0.58. One hump as wide is 0.33.
    Case(
        "LLMBatchLatencyBimodal",
        6,
        lambda who: steps(who, [*spread(50, 0.4), *spread(248, 0.4)]),
        lambda who: steps(who, spread(100, 0.9)),
        note="just two humps",
    ),
    # The one twice the other: a variance of (ln 2 / 2)² and a little.
    Case(
        "LLMBatchLatencyBimodal",
        6,
        lambda who: steps(who, [*spread(50, 0.05), *spread(100, 0.05)]),
        lambda who: steps(who, [*spread(50, 0.05), *spread(80, 0.05)]),
        note="just far enough apart",
    ),
    Case(
        "LLMBatchLatencyBimodal",
        15,
        lambda who: steps(who, [*spread(50, 0.15), *spread(800, 0.15)], per_minute=21),
        lambda who: steps(who, [*spread(50, 0.15), *spread(800, 0.15)], per_minute=19),
        note="of 200 steps at least",
    ),
    # Four CPUs: eight wait.
    Case("LLMQueueDeep", 31, lambda who: waiting(who, 8), lambda who: waiting(who, 7)),
    Case(
        "LLMKVStarved",
        37,
        lambda who: [starved(who, 31)],
        lambda who: [starved(who, 29)],
    ),
    Case(
        "LLMPreemptionStorm",
        33,
        lambda who: [preemptions(who, 31)],
        lambda who: [preemptions(who, 29)],
    ),
    Case(
        "LLMMemoryPressure",
        32,
        lambda who: [pressure(who, "effective", 0.5, 0.86)],
        lambda who: [pressure(who, "effective", 0.5, 0.85), pressure(who, "device", 0.92, 0.92)],
    ),
    Case(
        "LLMMemoryPressure",
        35,
        lambda who: [pressure(who, "device", 0.92, 0.975)],
        lambda who: [pressure(who, "device", 0.972, 0.975)],
        note="the device, nearly full and rising",
    ),
    Case(
        "LLMMemoryPressure",
        35,
        lambda who: [pressure(who, "device", 0.972, 0.9835)],
        lambda who: [pressure(who, "device", 0.972, 0.98)],
        note="a hundredth is a rise",
    ),
    Case(
        "LLMMemoryPressure",
        35,
        lambda who: [pressure(who, "device", 0.92, 0.975)],
        lambda who: [pressure(who, "device", 0.9, 0.96)],
        note="rising, and far from full",
    ),
    Case(
        "LLMMemoryPressureCritical",
        32,
        lambda who: [pressure(who, "effective", 0.5, 0.91), preemptions(who, 1), starved(who, 0)],
        lambda who: [pressure(who, "effective", 0.5, 0.99), preemptions(who, 0), starved(who, 0)],
        note="a full pool that serves is healthy",
    ),
    Case(
        "LLMMemoryPressureCritical",
        32,
        lambda who: [pressure(who, "effective", 0.5, 0.91), preemptions(who, 0), starved(who, 1)],
        lambda who: [pressure(who, "effective", 0.5, 0.89), preemptions(who, 9), starved(who, 9)],
    ),
    Case("LLMEventLoopLag", 33, lambda who: lag(who, 0.2), lambda who: lag(who, 0.009)),
    # 1.1% between 0.1 and 0.3 s: P99 is 0.118 s when the 5 minutes are full of it.
    Case(
        "LLMEventLoopLag",
        37,
        lambda who: lag(who, 0.011),
        lambda who: lag(who, 0.009),
        note="a little late",
    ),
    Case(
        "LLMEventLoopLag",
        33,
        lambda who: lag(who, 0.2, per_minute=21),
        lambda who: lag(who, 0.2, per_minute=19),
        note="of 100 turns at least",
    ),
    # One a minute: three in five minutes after the third, a little less for what is extrapolated.
    Case("LLMGCPause", 33, lambda who: pauses(who, 1), lambda who: pauses(who, 0.5)),
    # The median of 10 minutes moves when most of them are slow: 0.8·k/10 > 0.5 after 7.
    Case(
        "LLMSlowForLength",
        42,
        lambda who: residuals(who, True),
        lambda who: residuals(who, False),
    ),
    Case(
        "LLMSlowForLength",
        42,
        lambda who: residuals(who, True, per_minute=5.2),
        lambda who: residuals(who, True, per_minute=4.8),
        note="of 50 prefills at least",
    ),
    Case("LLMColdStartSlow", 31, lambda who: cold(who, 0.06), lambda who: cold(who, 0.05)),
    Case(
        "LLMColdStartSlow",
        31,
        lambda who: cold(who, 0.13, "1k-4k"),
        lambda who: cold(who, 0.11, "1k-4k"),
        note="120 ms at 4k",
    ),
    Case(
        "LLMColdStartSlow",
        31,
        lambda who: cold(who, 0.85, "4k-32k"),
        lambda who: cold(who, 0.75, "32k+"),
        note="800 ms at 32k",
    ),
    # A third of the time stolen: above 15% of 5 minutes after the third.
    Case("LLMCPUSteal", 38, lambda who: cpu(who, steal=18), lambda who: cpu(who, steal=8.9)),
    Case("LLMCPUSteal", 38, lambda who: cpu(who, steal=18), lambda who: cpu(who, iowait=18)),
    Case("LLMCPUWait", 38, lambda who: cpu(who, iowait=18), lambda who: cpu(who, steal=18)),
    Case("LLMCPUWait", 38, lambda who: cpu(who, iowait=18), lambda who: cpu(who, iowait=8.9)),
    # 0.5, then 2, 3, 4.5, 6.75 s in a minute: above 0.05 s/s over 5 minutes after the fourth.
    Case(
        "LLMCPUThrottled",
        39,
        lambda who: throttled(who, [(0.5, 30), *((2 * 1.5**i, 1) for i in range(30))], 0.1),
        lambda who: throttled(who, [(6, 60)], 0.1),
        note="much but steady is no growth",
    ),
    # 6% more each minute are 34% in five: above 1.2 times from the sixth minute on.
    Case(
        "LLMCPUThrottled",
        41,
        lambda who: throttled(who, [(6, 30), *((6 * 1.06**i, 1) for i in range(1, 31))], 0.1),
        lambda who: throttled(who, [(6, 30), *((6 * 1.02**i, 1) for i in range(1, 31))], 0.1),
        note="a fifth more",
    ),
    Case(
        "LLMCPUThrottled",
        37,
        lambda who: throttled(who, [(0.6, 60)], 0.7),
        lambda who: throttled(who, [(0.6, 60)], 0.24),
        note="a quarter of the periods",
    ),
    Case(
        "LLMRunQueueDelay",
        39,
        lambda who: [process(QUEUE, who, 0, 9, process="engine_core")],
        lambda who: [
            process(QUEUE, who, 0, 5.9, process="engine_core"),
            process(QUEUE, who, 0, 30, process="agent"),
        ],
        note="the agent may wait",
    ),
    # 2 cycles, before 1: above 1.5 when over half of the cycles' window has passed.
    Case(
        "LLMCPIHigh",
        38,
        lambda who: cycles(who, 2, idle=12),
        lambda who: cycles(who, 2, idle=57),
        by="host",
        note="an idle CPU's means nothing",
    ),
    Case(
        "LLMCPIHigh",
        38,
        lambda who: cycles(who, 2, idle=12),
        lambda who: cycles(who, 1.49, idle=12),
        by="host",
    ),
    Case(
        "LLMCPIHigh",
        38,
        lambda who: cycles(who, 2, idle=30),
        lambda who: cycles(who, 2, idle=50),
        by="host",
        note="half idle is busy enough",
    ),
    Case("LLMNodeLoadHigh", 32, lambda who: loads(who, 3.3), lambda who: loads(who, 3.2)),
    Case(
        "LlmobsProbeMissing",
        32,
        lambda who: [gauge(ATTACHED + labels(who, process="worker", probe="p"), *level(1, 0))],
        lambda who: [gauge(ATTACHED + labels(who, process="worker", probe="p"), (1, LONG))],
    ),
    Case(
        "LlmobsRecordsDropped",
        31,
        lambda who: [process(LOST, who, 0, 1, process="engine_core")],
        lambda who: [
            process(LOST, who, 0, 0, process="engine_core"),
            process(LOST, who, 0, 9, process="ebpf"),
        ],
    ),
    Case(
        "LlmobsEbpfLost",
        31,
        lambda who: [process(LOST, who, 0, 1, process="ebpf")],
        lambda who: [process(LOST, who, 0, 9, process="engine_core")],
    ),
    Case(
        "LlmobsGuardErrors",
        31,
        lambda who: [process(GUARD, who, 0, 1, process="worker", probe="p")],
        lambda who: [process(GUARD, who, 0, 0, process="worker", probe="p")],
    ),
    Case("LlmobsBoundaryMissing", 5, lambda who: pages(who, "0.25"), lambda who: pages(who, "0.3")),
]
QUEUE = "llmobs_process_run_queue_seconds_total"
ATTACHED = "llmobs_probe_attached"
LOST = "llmobs_records_lost_total"
GUARD = "llmobs_guard_errors_total"
