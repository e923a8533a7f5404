"""Alerts about llmobs itself: a blind spot must not look like health."""

from llmobs.generate.burn import HEALTH_JOB
from llmobs.generate.latency import TOKEN, by_target
from llmobs.generate.promql import SERVER, duration, le, one_of
from llmobs.generate.rule import Alert, Group
from llmobs.slo import Slo

JOB = "llmobs"
LOST = "llmobs_records_lost_total"
HERE = "{{ $labels.instance }}"


def groups(slo: Slo) -> list[Group]:
    return [Group("llmobs-itself", 30, (*_absent(slo), *_broken(slo), *_boundaries(slo)))]


def _absent(slo: Slo) -> list[Alert]:
    figures = slo.alerts.absent
    up = f'count(up{{job="{JOB}"}} == 1)'
    return [
        Alert(
            "LlmobsAbsent",
            figures.severity,
            f'count(probe_success{{job="{HEALTH_JOB}"}} == 1)\n> ({up} or vector(0))',
            figures.for_,
            (),
            "llmobs-itself",
            "A vLLM server is up that llmobs does not tell of",
            "{{ $value }} vLLM servers answer their health check, and fewer llmobs agents answer "
            "Prometheus.",
            {"kind": "server"},
        ),
        Alert(
            "LlmobsAbsent",
            figures.severity,
            f'up{{job="{JOB}"}} == 1\nunless on (job, instance) llmobs_build_info',
            figures.for_,
            SERVER,
            "llmobs-itself",
            f"{HERE} answers, but tells nothing of llmobs",
            f"Prometheus scrapes {HERE}, and there is no llmobs_build_info on that page: another "
            "exporter has the port, or the server was started without llmobs.",
            {"kind": "page"},
        ),
    ]


def _broken(slo: Slo) -> list[Alert]:
    alerts = slo.alerts
    missing, dropped, guard, lost = (
        alerts.probe_missing,
        alerts.records_dropped,
        alerts.guard_errors,
        alerts.ebpf_lost,
    )
    probe = (*SERVER, "process", "probe")
    process = (*SERVER, "process")
    return [
        Alert(
            "LlmobsProbeMissing",
            missing.severity,
            f"min by ({', '.join(probe)}) (llmobs_probe_attached) == 0",
            missing.for_,
            probe,
            "llmobs-itself",
            f"The probe {{{{ $labels.probe }}}} is not attached on {HERE}",
            f"This vLLM has no place for the probe {{{{ $labels.probe }}}} in "
            f"{{{{ $labels.process }}}} on {HERE}: what it tells is missing.",
        ),
        Alert(
            "LlmobsRecordsDropped",
            dropped.severity,
            f"sum by ({', '.join(process)}) "
            f'(increase({LOST}{{process!="ebpf"}}[{duration(dropped.window)}])) > 0',
            dropped.for_,
            process,
            "llmobs-itself",
            f"Records of {{{{ $labels.process }}}} were lost on {HERE}",
            'About {{ $value | printf "%.0f" }} records were overwritten before the agent read '
            f"them in the last {duration(dropped.window)}. Counters stay exact; the requests in "
            "question are left out of histograms and verdicts.",
        ),
        Alert(
            "LlmobsGuardErrors",
            guard.severity,
            f"sum by ({', '.join(probe)}) "
            f"(increase(llmobs_guard_errors_total[{duration(guard.window)}])) > 0",
            guard.for_,
            probe,
            "llmobs-itself",
            f"The probe {{{{ $labels.probe }}}} fails on {HERE}",
            'llmobs\' own code failed about {{ $value | printf "%.0f" }} times in '
            f"{{{{ $labels.process }}}} in the last {duration(guard.window)}. vLLM did not notice; "
            "the figures may be wrong.",
        ),
        Alert(
            "LlmobsEbpfLost",
            lost.severity,
            f"sum by ({', '.join(SERVER)}) "
            f'(increase({LOST}{{process="ebpf"}}[{duration(lost.window)}])) > 0',
            lost.for_,
            SERVER,
            "llmobs-itself",
            f"Events of the kernel were lost on {HERE}",
            'About {{ $value | printf "%.0f" }} eBPF events were lost in the last '
            f"{duration(lost.window)}: launches and run-queue delays are undercounted.",
        ),
    ]


def _boundaries(slo: Slo) -> list[Alert]:
    """A bound that is judged, and that a page lacks: every rule on it would be silent for ever."""
    figures = slo.alerts.boundary_missing
    by = ", ".join((*SERVER, "context_bucket"))
    judged = [
        ("first", target, buckets)
        for target, buckets in by_target(slo, lambda bucket: bucket.first_token)
    ] + [
        ("next", target, buckets)
        for target, buckets in by_target(slo, lambda bucket: bucket.token_gap)
    ]
    missing = []
    for token, target, buckets in judged:
        which = f'token="{token}",context_bucket=~"{one_of(buckets)}"'
        missing.append(
            f"count by ({by}) ({TOKEN}_count{{{which}}})\n"
            f'  unless count by ({by}) ({TOKEN}_bucket{{{which},le="{le(target)}"}})'
        )
    gc = le(slo.alerts.gc_pause.longer_than)
    missing.append(
        f"count by ({by}) (llmobs_gc_pause_seconds_count)\n"
        f'  unless count by ({by}) (llmobs_gc_pause_seconds_bucket{{le="{gc}"}})'
    )
    return [
        Alert(
            "LlmobsBoundaryMissing",
            figures.severity,
            "\nor ".join(missing),
            figures.for_,
            (*SERVER, "context_bucket"),
            "llmobs-itself",
            f"{HERE} goes by another SLO file than these rules",
            f"A histogram of {HERE} has no boundary at a target of these rules "
            "({{ $labels.context_bucket }}), so alerts on it cannot fire. Start the server with "
            "the LLMOBS_SLO_FILE that the rules were made from.",
        )
    ]
