"""Alerts about the KV cache and the GPU's memory, and the engine that stands still."""

from llmobs.generate.promql import ENGINE, SERVER, duration, number, total
from llmobs.generate.rule import Alert, Group, Recording
from llmobs.slo import Slo

STARVED = "llmobs_kv_allocation_failures_total"
PREEMPTIONS = "llmobs_preemptions_total"
IN_FLIGHT = "llmobs:in_flight:requests"
PRESSURE = "llmobs_gpu_memory_pressure_ratio"


def groups(slo: Slo) -> list[Group]:
    stalled = slo.alerts.engine_stalled
    return [
        Group("llmobs-stalled", stalled.every, _stalled(slo)),
        Group("llmobs-memory", 30, (*_cache(slo), *_pressure(slo))),
    ]


def _stalled(slo: Slo) -> tuple[Recording, Alert]:
    figures = slo.alerts.engine_stalled
    here, engine = ", ".join(SERVER), "job, instance, engine"
    last = f"time() - max by ({', '.join(ENGINE)}) (llmobs_engine_last_step_timestamp_seconds)"
    arrived = duration(figures.arrived)
    return (
        Recording(
            IN_FLIGHT,
            f"sum by ({here}) (llmobs_requests_received_total)\n"
            f"- sum by ({here}) (llmobs_requests_total)",
        ),
        Alert(
            "LLMEngineStalled",
            figures.severity,
            f"{last} > {number(figures.no_step)}\nand (\n"
            # The heartbeat has the served name, requests of adapters have theirs.
            f"  {last}\n    and on ({engine}) sum by ({engine}) (llmobs_requests) > 0\n"
            # An engine that stood still before they came knows of none: then the front end's count,
            # as far as it rose, for what a dead front end left open never ends.
            f"  or {last}\n"
            f"    and on ({here}) {IN_FLIGHT} > min_over_time({IN_FLIGHT}[{arrived}])\n"
            f"    unless on ({here}) sum by ({here}) (llmobs_requests) > 0\n)",
            figures.for_,
            ENGINE,
            "llmobs-batching",
            "Engine {{ $labels.engine }} of {{ $labels.model_name }} stands still",
            "Requests are there, and engine {{ $labels.engine }} on {{ $labels.instance }} has "
            "made no step for {{ $value | humanizeDuration }}, whatever /health answers. "
            f"{duration(figures.no_step)} is the limit.",
        ),
    )


def _cache(slo: Slo) -> list[Alert]:
    starved, storm = slo.alerts.kv_starved, slo.alerts.preemption_storm
    return [
        Alert(
            "LLMKVStarved",
            starved.severity,
            f"{total(ENGINE, STARVED, duration(starved.window))} > {number(starved.above)}",
            starved.for_,
            ENGINE,
            "llmobs-memory",
            "The KV cache of {{ $labels.model_name }} is used up",
            "Engine {{ $labels.engine }} on {{ $labels.instance }} found no free KV blocks "
            '{{ $value | printf "%.1f" }} times a second: requests wait for memory.',
        ),
        Alert(
            "LLMPreemptionStorm",
            storm.severity,
            f"{total(ENGINE, PREEMPTIONS, duration(storm.window))} > {number(storm.above)}",
            storm.for_,
            ENGINE,
            "llmobs-memory",
            'Engine {{ $labels.engine }} preempts {{ $value | printf "%.1f" }} requests a second',
            "For want of KV blocks engine {{ $labels.engine }} on {{ $labels.instance }} throws "
            'away the work of {{ $value | printf "%.1f" }} requests a second and does it again; '
            f"{number(storm.above)} is the limit.",
        ),
    ]


def _pressure(slo: Slo) -> list[Alert]:
    alerts, by = slo.alerts, (*SERVER, "gpu")
    ticket, page, rising = (
        alerts.memory_pressure,
        alerts.memory_pressure_critical,
        alerts.device_memory_rising,
    )
    effective = f'max by ({", ".join(by)}) ({PRESSURE}{{kind="effective"}})'
    device = f'{PRESSURE}{{kind="device"}}'
    now = f"max by ({', '.join(by)}) ({device})"
    before = f"max by ({', '.join(by)}) ({device} offset {duration(rising.ago)})"
    window, on = duration(page.window), f"on ({', '.join(SERVER)})"
    harm = (
        f"{total(SERVER, PREEMPTIONS, window, 'increase')} > 0\n"
        f"  or {total(SERVER, STARVED, window, 'increase')} > 0"
    )
    what = (
        "of the memory of GPU {{ $labels.gpu }} on {{ $labels.instance }} is taken (KV blocks that "
        "are free not counted)"
    )
    return [
        Alert(
            "LLMMemoryPressure",
            ticket.severity,
            f"{effective} > {number(ticket.above)}",
            ticket.for_,
            by,
            "llmobs-memory",
            "GPU {{ $labels.gpu }}: {{ $value | humanizePercentage }} of its memory in use",
            f"{{{{ $value | humanizePercentage }}}} {what}; {number(ticket.above * 100)}% is the "
            "limit.",
            {"kind": "effective"},
        ),
        Alert(
            "LLMMemoryPressure",
            rising.severity,
            f"{now} > {number(rising.above)}\nand {now} - {before} > {number(rising.rise)}",
            rising.for_,
            by,
            "llmobs-memory",
            "GPU {{ $labels.gpu }} is nearly full, and filling",
            f"{{{{ $value | humanizePercentage }}}} of the memory of GPU {{{{ $labels.gpu }}}} on "
            f"{{{{ $labels.instance }}}} is taken, and more than {duration(rising.ago)} ago: a "
            "leak, or a neighbour on the same card.",
            {"kind": "device"},
        ),
        Alert(
            "LLMMemoryPressureCritical",
            page.severity,
            f"{effective} > {number(page.above)}\nand {on} (\n  {harm}\n)",
            page.for_,
            by,
            "llmobs-memory",
            "GPU {{ $labels.gpu }} is out of memory for its requests",
            f"{{{{ $value | humanizePercentage }}}} {what}, and in the last {window} requests were "
            "preempted or found no free KV blocks.",
        ),
    ]
