"""Alerts about traffic, batches and the queue."""

from llmobs.generate.latency import by_target
from llmobs.generate.promql import ENGINE, SERVER, SERVICE, duration, number, one_of, ratio, total
from llmobs.generate.rule import Alert, Group, Recording
from llmobs.slo import Slo

RECEIVED = "llmobs_requests_received_total"
SHARE = "llmobs:long_context:share"
CV = "llmobs:batch_size:cv"
MEAN = "llmobs:batch_size:mean"
BIMODALITY = "llmobs:step_log:bimodality"
VARIANCE = "llmobs:step_log:variance"


def groups(slo: Slo) -> list[Group]:
    alerts = slo.alerts
    return [
        Group(
            "llmobs-batches",
            alerts.batch_size_unstable.every,
            (*batch_records(slo), *_batches(slo)),
        ),
        Group(
            "llmobs-lengths", alerts.long_context_surge.every, (*share_records(slo), _surge(slo))
        ),
        Group("llmobs-load", 30, (_queue(slo), _burst(slo), _capacity(slo), *_throughput(slo))),
    ]


def batch_records(slo: Slo) -> list[Recording]:
    """Coefficient of variation and bimodality, exact from sums that add over replicas."""
    window = duration(slo.alerts.batch_size_unstable.window)
    size = "batch_size_distribution"
    count = f"({total(ENGINE, f'{size}_count', window)} > 0)"
    mean = f"{total(ENGINE, f'{size}_sum', window)} / {count}"
    squares = f"{total(ENGINE, 'llmobs_batch_size_squares_total', window)} / {count}"
    records = [
        Recording(MEAN, mean),
        Recording(CV, f"sqrt(clamp_min({squares} - {MEAN} ^ 2, 0))\n/ ({MEAN} > 0)"),
    ]
    window = duration(slo.alerts.batch_latency_bimodal.window)

    def moment(power: int) -> str:
        selector = f'llmobs_step_log_moment_total{{power="{power}"}}'
        return total(ENGINE, selector, window)

    m1, m2, m3, m4 = (f"llmobs:step_log:m{power}" for power in range(1, 5))
    records += [
        Recording(name, f"{moment(power)} / ({moment(0)} > 0)")
        for power, name in enumerate((m1, m2, m3, m4), 1)
    ]
    return [
        *records,
        Recording(VARIANCE, f"{m2} - {m1} ^ 2"),
        # Sarle: (skewness² + 1) / kurtosis.
        Recording(
            BIMODALITY,
            f"(({m3} - 3 * {m1} * {m2} + 2 * {m1} ^ 3) ^ 2 / ({VARIANCE} > 1e-4) ^ 3 + 1)\n/ (\n"
            f"  ({m4} - 4 * {m1} * {m3} + 6 * {m1} ^ 2 * {m2} - 3 * {m1} ^ 4)\n"
            f"  / ({VARIANCE} > 1e-4) ^ 2\n)",
        ),
    ]


def _batches(slo: Slo) -> list[Alert]:
    batch, bimodal = slo.alerts.batch_size_unstable, slo.alerts.batch_latency_bimodal
    window, on = duration(batch.window), f"on ({', '.join(ENGINE)})"
    steps = total(ENGINE, "batch_size_distribution_count", window, "increase")
    wide = duration(bimodal.window)
    timed = total(ENGINE, 'llmobs_step_log_moment_total{power="0"}', wide, "increase")
    # The squares are exact totals, sum and count are not where records were lost.
    lost = f"max by (job, instance) (increase(llmobs_records_lost_total[{window}])) > 0"
    return [
        Alert(
            "LLMBatchSizeUnstable",
            batch.severity,
            f"{CV} > {number(batch.above)}\nand {on} {steps} >= {batch.steps}\n"
            f"and {on} {MEAN} >= {number(batch.mean)}\nunless on (job, instance) {lost}",
            batch.for_,
            ENGINE,
            "llmobs-batching",
            'The batch size swings: coefficient of variation {{ $value | printf "%.2f" }}',
            f"Over {window} the number of sequences per step of {{{{ $labels.model_name }}}} on "
            "{{ $labels.instance }}, engine {{ $labels.engine }}, varies by "
            '{{ $value | printf "%.2f" }} of its mean; '
            f"{number(batch.above)} is the limit. Requests wait while others are processed in "
            "bursts.",
        ),
        Alert(
            "LLMBatchLatencyBimodal",
            bimodal.severity,
            f"{BIMODALITY} > {number(bimodal.above)}\nand {on} {timed} >= {bimodal.steps}\n"
            f"and {on} {VARIANCE} > {number(bimodal.variance)}",
            bimodal.for_,
            ENGINE,
            "llmobs-batching",
            "Engine steps are of two kinds: fast ones and slow ones",
            f"Over {wide} the step times of {{{{ $labels.model_name }}}} on "
            "{{ $labels.instance }}, engine {{ $labels.engine }}, have two humps (Sarle's "
            'coefficient {{ $value | printf "%.2f" }}, '
            f"limit {number(bimodal.above)}): usually long prefills between the decode steps of "
            "chats.",
        ),
    ]


def share_records(slo: Slo) -> list[Recording]:
    surge = slo.alerts.long_context_surge
    first = slo.bucket_index(surge.longer_than + 1)
    names = one_of(bucket.name for bucket in slo.buckets[first:])
    return [
        Recording(
            f"{SHARE}{window}",
            ratio(
                total(SERVICE, f'{RECEIVED}{{context_bucket=~"{names}"}}', window),
                total(SERVICE, f'{RECEIVED}{{context_bucket!="unknown"}}', window),
            ),
        )
        for window in (duration(surge.window), duration(surge.baseline))
    ]


def _surge(slo: Slo) -> Alert:
    surge = slo.alerts.long_context_surge
    window = duration(surge.window)
    now = f"{SHARE}{window}"
    before = f"{SHARE}{duration(surge.baseline)} offset {duration(surge.baseline_ago)}"
    known = f'{RECEIVED}{{context_bucket!="unknown"}}'
    count = total(SERVICE, known, window, "increase")
    on = f"on ({', '.join(SERVICE)})"
    deviation = f"sqrt(clamp_min({before} * (1 - {before}), 0.0001)\n    / {on} {count})"
    return Alert(
        "LLMLongContextSurge",
        surge.severity,
        f"{now} > {number(surge.times)} * ({before})\nand {now} > {number(surge.at_least_share)}\n"
        f"and on ({', '.join(SERVICE)}) {count} >= {surge.at_least}\n"
        f"and {now} - ({before})\n  > {number(surge.sigmas)} * {deviation}",
        surge.for_,
        SERVICE,
        "llmobs-overview",
        "Long contexts are now {{ $value | humanizePercentage }} of the traffic",
        f"Prompts of more than {surge.longer_than} tokens are "
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.model_name }}, over "
        f"{number(surge.times)} times the share of the {duration(surge.baseline)} before. Their "
        "prefills hold up everyone's tokens.",
    )


def _queue(slo: Slo) -> Alert:
    queue, on = slo.alerts.queue_deep, f"on ({', '.join(SERVER)})"
    waiting = f'sum by ({", ".join(SERVER)}) (llmobs_requests{{state="waiting"}})'
    cores = f"max by ({', '.join(SERVER)}) (llmobs_cpus)"
    return Alert(
        "LLMQueueDeep",
        queue.severity,
        f"{waiting} >= {on} {number(queue.above)} * {cores}",
        queue.for_,
        SERVER,
        "llmobs-batching",
        "{{ $value }} requests wait on {{ $labels.instance }}",
        "{{ $value }} requests wait in the engines of {{ $labels.instance }}: at least "
        f"{number(queue.above)} for each of its CPUs.",
    )


def _burst(slo: Slo) -> Alert:
    burst = slo.alerts.traffic_burst
    now = total(SERVICE, RECEIVED, duration(burst.window))
    ago = f"{duration(burst.baseline)}] offset {duration(burst.baseline_ago)}"
    before = f"sum by ({', '.join(SERVICE)}) (rate({RECEIVED}[{ago}))"
    return Alert(
        "LLMTrafficBurst",
        burst.severity,
        f"{now}\n  > {number(burst.times)} * {before}\n"
        f"and {now} > {number(burst.at_least_per_second)}",
        burst.for_,
        SERVICE,
        "llmobs-overview",
        'Traffic to {{ $labels.model_name }} rose to {{ $value | printf "%.1f" }} requests/s',
        '{{ $labels.model_name }} receives {{ $value | printf "%.1f" }} requests/s, over '
        f"{number(burst.times)} times the mean of {duration(burst.baseline)} before.",
    )


def _capacity(slo: Slo) -> Alert:
    capacity = slo.alerts.capacity_low
    window, rate = duration(capacity.window), number(capacity.per_second)
    bucket = slo.buckets[slo.bucket_index(capacity.prompt_tokens)].name
    which = f'context_bucket="{bucket}"'
    done = f'llmobs_requests_total{{{which},outcome=~"stop|length"}}'
    return Alert(
        "LLMCapacityLow",
        capacity.severity,
        f"{total(SERVICE, done, window)} < {rate}\n"
        f"and {total(SERVICE, f'{RECEIVED}{{{which}}}', window)} >= {rate}",
        capacity.for_,
        SERVICE,
        "llmobs-overview",
        'Only {{ $value | printf "%.1f" }} requests/s are done',
        f"{rate} requests/s or more of {bucket} tokens come to {{{{ $labels.model_name }}}}, "
        '{{ $value | printf "%.1f" }} are done. The promise is '
        f"{rate}.",
    )


def _throughput(slo: Slo) -> list[Alert]:
    figures = slo.alerts.stream_throughput_low
    window, by = duration(figures.window), (*SERVICE, "context_bucket")
    promised = by_target(
        slo, lambda b: round(tokens(slo, b.name) / 1000 * figures.per_1000_tokens, 2)
    )
    alerts = []
    for target, buckets in promised:
        which = f'context_bucket=~"{one_of(buckets)}"'
        running = f'llmobs_requests{{state="running",{which}}}'
        alerts.append(
            Alert(
                "LLMStreamThroughputLow",
                figures.severity,
                f"{total(by, f'llmobs_generated_tokens_total{{{which}}}', window)}"
                f" < {number(target)}\nand on ({', '.join(by)}) "
                f"sum by ({', '.join(by)}) (avg_over_time({running}[{window}]))"
                f" >= {figures.streams}",
                figures.for_,
                by,
                "llmobs-overview",
                "Streams of {{ $labels.context_bucket }} tokens are slow: "
                '{{ $value | printf "%.0f" }} tokens/s in all',
                "All streams of {{ $labels.context_bucket }} tokens to "
                '{{ $labels.model_name }} together yield {{ $value | printf "%.1f" }} tokens/s; '
                f"{number(target)} are promised (context/1000 × "
                f"{number(figures.per_1000_tokens)}), while {figures.streams} or more run.",
                {"target": number(target)},
            )
        )
    return alerts


def tokens(slo: Slo, name: str) -> int:
    """The context that a bucket is named by: its limit, that of the one before for the last."""
    bucket = next(bucket for bucket in slo.buckets if bucket.name == name)
    return bucket.limit or (slo.limits[-1] if slo.limits else 1000)
