"""Alerts about time: first tokens, slow for its length, cold starts, what holds processes up."""

from collections.abc import Callable

from llmobs.generate.promql import ENGINE, SERVER, duration, le, number, one_of, quantile, total
from llmobs.generate.rule import Alert, Group
from llmobs.slo import ContextBucket, Slo

TOKEN = "decode_token_latency_seconds"


def by_target(
    slo: Slo, target: Callable[[ContextBucket], float]
) -> list[tuple[float, tuple[str, ...]]]:
    """The buckets that have a target in common."""
    found: dict[float, tuple[str, ...]] = {}
    for bucket in slo.buckets:
        found[target(bucket)] = (*found.get(target(bucket), ()), bucket.name)
    return sorted(found.items())


def groups(slo: Slo) -> list[Group]:
    first = slo.alerts.first_token_p99_high
    return [
        Group("llmobs-first-token", first.every, tuple(_first_token(slo))),
        Group("llmobs-latency", 30, (*_slow(slo), *_cold(slo), *_held_up(slo))),
    ]


def _first_token(slo: Slo) -> list[Alert]:
    figures = slo.alerts.first_token_p99_high
    window, by = duration(figures.window), (*ENGINE, "context_bucket")
    alerts = []
    for target, buckets in by_target(slo, lambda bucket: bucket.first_token):
        which = f'token="first",context_bucket=~"{one_of(buckets)}"'
        count = total(by, f"{TOKEN}_count{{{which}}}", window, "increase")
        alerts.append(
            Alert(
                "LLMFirstTokenP99High",
                figures.severity,
                f"{quantile(0.99, by, f'{TOKEN}_bucket{{{which}}}', window)} > {number(target)}\n"
                f"and on ({', '.join(by)}) {count} >= {figures.at_least}",
                figures.for_,
                by,
                "llmobs-latency",
                "First tokens of {{ $labels.model_name }} are late: P99 "
                "{{ $value | humanizeDuration }} for {{ $labels.context_bucket }} tokens",
                f"In the last {window} one request in a hundred of {{{{ $labels.context_bucket }}}}"
                " tokens waited {{ $value | humanizeDuration }} or longer for its first token on "
                "{{ $labels.instance }}, engine {{ $labels.engine }}; the target is "
                f"{duration(target)}.",
                {"target": duration(target)},
            )
        )
    return alerts


def _slow(slo: Slo) -> list[Alert]:
    figures, by = slo.alerts.slow_for_length, (*ENGINE, "context_bucket")
    window, metric = duration(figures.window), "llmobs_latency_residual_ratio"
    return [
        Alert(
            "LLMSlowForLength",
            figures.severity,
            f"{quantile(0.5, by, f'{metric}_bucket', window)} > {number(figures.above)}\n"
            f"and on ({', '.join(by)}) {total(by, f'{metric}_count', window, 'increase')}"
            f" >= {figures.at_least}",
            figures.for_,
            by,
            "llmobs-latency",
            "Prefills of {{ $labels.context_bucket }} tokens take "
            '{{ $value | printf "%.1f" }} times as long as their length explains',
            f"In the last {window} half of the prefills of {{{{ $labels.context_bucket }}}} tokens "
            'on {{ $labels.instance }} took at least {{ $value | printf "%.2f" }} times what this '
            "server's own fit says of prompts so long. They are slow for their length, not because "
            "they are long: look at what runs beside them, at the GPU's clock and at the CPU.",
        )
    ]


def _cold(slo: Slo) -> list[Alert]:
    figures, by = slo.alerts.cold_start_slow, (*ENGINE, "context_bucket")
    window, metric = duration(figures.window), "llmobs_cold_start_seconds"
    alerts = []
    for target, buckets in by_target(slo, lambda bucket: bucket.cold_start):
        which = f'{{context_bucket=~"{one_of(buckets)}"}}'
        seconds = total(by, f"{metric}_sum{which}", window, "increase")
        count = total(by, f"{metric}_count{which}", window, "increase")
        alerts.append(
            Alert(
                "LLMColdStartSlow",
                figures.severity,
                f"{seconds}\n/ ({count} > 0) > {number(target)}",
                figures.for_,
                by,
                "llmobs-latency",
                "A cold start for {{ $labels.context_bucket }} tokens took "
                "{{ $value | humanizeDuration }}",
                f"The first prefill of {{{{ $labels.context_bucket }}}} tokens after a start or "
                "a pause took {{ $value | humanizeDuration }} on {{ $labels.instance }}; "
                f"{duration(target)} are expected.",
                {"target": duration(target)},
            )
        )
    return alerts


def _held_up(slo: Slo) -> list[Alert]:
    lag, pauses, by = slo.alerts.event_loop_lag, slo.alerts.gc_pause, (*SERVER, "process")
    window = duration(lag.window)
    metric = "llmobs_event_loop_lag_seconds"
    longer = le(pauses.longer_than)
    gc, gc_window = "llmobs_gc_pause_seconds", duration(pauses.window)
    return [
        Alert(
            "LLMEventLoopLag",
            lag.severity,
            f"{quantile(0.99, by, f'{metric}_bucket', window)} > {number(lag.above)}\n"
            f"and on ({', '.join(by)}) {total(by, f'{metric}_count', window, 'increase')}"
            f" >= {lag.at_least}",
            lag.for_,
            by,
            "llmobs-host",
            "The event loop of {{ $labels.process }} is late: P99 {{ $value | humanizeDuration }}",
            "On {{ $labels.instance }} every request and every streamed token passes the event "
            f"loop of {{{{ $labels.process }}}}; in the last {window} one turn in a hundred came "
            "{{ $value | humanizeDuration }} late or more "
            f"({duration(lag.above)} are allowed).",
        ),
        Alert(
            "LLMGCPause",
            pauses.severity,
            f"{total(by, f'{gc}_count', gc_window, 'increase')}\n"
            f'- {total(by, f"""{gc}_bucket{{le="{longer}"}}""", gc_window, "increase")}\n'
            f">= {pauses.at_least}",
            pauses.for_,
            by,
            "llmobs-host",
            "Garbage collection halts {{ $labels.process }}",
            'About {{ $value | printf "%.0f" }} times in the last '
            f"{gc_window} Python's garbage collection halted {{{{ $labels.process }}}} on "
            f"{{{{ $labels.instance }}}} for longer than {duration(pauses.longer_than)}.",
        ),
    ]
