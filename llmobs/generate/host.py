"""Alerts about the host's CPUs."""

from llmobs.generate.promql import SERVER, duration, number, total
from llmobs.generate.rule import Alert, Group
from llmobs.slo import Slo

CPU = "llmobs_cpu_seconds_total"
ON = f"on ({', '.join(SERVER)})"
HERE = "{{ $labels.instance }}"


def groups(slo: Slo) -> list[Group]:
    return [
        Group(
            "llmobs-cpu",
            30,
            (
                _mode(slo, "LLMCPUSteal", "steal", "Other guests of the same host had the CPUs"),
                _mode(slo, "LLMCPUWait", "iowait", "The CPUs stood idle waiting for a disk"),
                *(_throttled(slo), _run_queue(slo), _cpi(slo), _load(slo)),
            ),
        )
    ]


def share(mode: str, window: str) -> str:
    """Of the host's CPU time, all CPUs together."""
    part = total(SERVER, f'{CPU}{{mode="{mode}"}}', window)
    return f"{part}\n/ ({total(SERVER, CPU, window)} > 0)"


def _mode(slo: Slo, name: str, mode: str, what: str) -> Alert:
    figures = slo.alerts.cpu_steal if mode == "steal" else slo.alerts.cpu_wait
    window = duration(figures.window)
    return Alert(
        name,
        figures.severity,
        f"{share(mode, window)} > {number(figures.above)}",
        figures.for_,
        SERVER,
        "llmobs-host",
        f"{{{{ $value | humanizePercentage }}}} CPU {mode} on {HERE}",
        f"{what}: {{{{ $value | humanizePercentage }}}} of the CPU time of {HERE} in the last "
        f"{window} was {mode}; {number(figures.above * 100)}% is the limit. Sampling and launching "
        "kernels wait for it.",
    )


def _throttled(slo: Slo) -> Alert:
    figures = slo.alerts.cpu_throttled
    window = duration(figures.window)
    seconds = "llmobs_cgroup_cpu_throttled_seconds_total"
    now = total(SERVER, seconds, window)
    before = f"sum by ({', '.join(SERVER)}) (rate({seconds}[{window}] offset {window}))"
    cut = total(SERVER, "llmobs_cgroup_cpu_throttled_periods_total", window)
    periods = total(SERVER, "llmobs_cgroup_cpu_periods_total", window)
    return Alert(
        "LLMCPUThrottled",
        figures.severity,
        f"(\n  {now} > {number(figures.above)}\n  and {now} > {number(figures.growth)} * {before}\n"
        f")\nor (\n  {now} > 0\n"
        f"  and {cut}\n  / ({periods} > 0) > {number(figures.periods)}\n)",
        figures.for_,
        SERVER,
        "llmobs-host",
        f"The CPU quota halts the server on {HERE}",
        'The cgroup of the server was halted {{ $value | printf "%.2f" }} s per second in the last '
        f"{window}, and it grows, or {number(figures.periods * 100)}% of its periods are cut.",
    )


def _run_queue(slo: Slo) -> Alert:
    figures = slo.alerts.run_queue_delay
    by = (*SERVER, "process")
    which = 'llmobs_process_run_queue_seconds_total{process!="agent"}'
    window = duration(figures.window)
    return Alert(
        "LLMRunQueueDelay",
        figures.severity,
        f"{total(by, which, window)} > {number(figures.above)}",
        figures.for_,
        by,
        "llmobs-host",
        "{{ $labels.process }} waits for a CPU",
        f"{{{{ $labels.process }}}} on {HERE} was ready to run and did not for "
        f"{{{{ $value | humanizePercentage }}}} of the last {window}; "
        f"{number(figures.above * 100)}% is the limit.",
    )


def _cpi(slo: Slo) -> Alert:
    figures = slo.alerts.cpi_high
    window, by = duration(figures.window), (*SERVER, "process")
    cycles = total(by, "llmobs_cpu_cycles_total", window)
    instructions = total(by, "llmobs_cpu_instructions_total", window)
    # The counters are of the eBPF exporter's page, the idle time of the agent's: joined by the host
    # where both are on it, by whatever the scrape calls the two otherwise.
    host = 'label_replace({}, "host", "$1", "instance", "([^:]*).*")'
    idle = (
        f'{total(SERVER, CPU + """{mode="idle"}""", window)} / ({total(SERVER, CPU, window)} > 0)'
    )
    cpi = f"{cycles}\n  / ({instructions} > 0)"
    return Alert(
        "LLMCPIHigh",
        figures.severity,
        f"{host.format(cpi)} > {number(figures.above)}\n"
        f"and on (host) {host.format(idle)} < {number(figures.idle_below)}",
        figures.for_,
        by,
        "llmobs-host",
        '{{ $labels.process }} needs {{ $value | printf "%.1f" }} cycles per instruction',
        f"{{{{ $labels.process }}}} on {HERE} spent "
        '{{ $value | printf "%.2f" }} cycles per instruction '
        f"in the last {window} ({number(figures.above)} is the limit): its cores wait for memory, "
        "shared caches or another NUMA node.",
    )


def _load(slo: Slo) -> Alert:
    figures = slo.alerts.node_load_high
    load = f'max by ({", ".join(SERVER)}) (llmobs_load_average{{window="1m"}})'
    return Alert(
        "LLMNodeLoadHigh",
        figures.severity,
        f"{load}\n/ {ON} (max by ({', '.join(SERVER)}) (llmobs_cpus) > 0) > "
        f"{number(figures.above)}",
        figures.for_,
        SERVER,
        "llmobs-host",
        f"The load of {HERE} is {{{{ $value | humanizePercentage }}}} of its CPUs",
        f"{{{{ $value | humanizePercentage }}}} of the CPUs of {HERE} would be busy if all that is "
        f"ready to run ran; {number(figures.above * 100)}% is the limit.",
    )
