"""CPU and kernel: does the server get the CPU time that it wants?"""

from typing import Any

from llmobs.generate.dashboards.board import Row, board
from llmobs.generate.dashboards.panel import MODEL, RATE, Query, heatmap, lines
from llmobs.slo import Slo

HOST = 'instance=~"$instance"'


def dashboard(slo: Slo) -> dict[str, Any]:
    return board(
        "host",
        "Does the server get the CPU time that it wants, and what does the kernel do to it?",
        (_cpu(slo), _processes(slo), _python(slo), _ebpf(slo)),
    )


def _cpu(slo: Slo) -> Row:
    alerts, cpu = slo.alerts, "llmobs_cpu_seconds_total"
    return Row(
        "The machine",
        (
            lines(
                "CPU time by mode",
                "Share of all CPUs. `steal` was given to other guests, `iowait` waited for a disk: "
                f"each is bad above {alerts.cpu_steal.above:.0%}.",
                "percentunit",
                Query(
                    f'sum by (mode) (rate({cpu}{{mode!="idle",{MODEL}}}[{RATE}]))\n'
                    f"/ ignoring (mode) group_left () sum(rate({cpu}{{{MODEL}}}[{RATE}]))",
                    "{{mode}}",
                ),
                stacked=True,
            ),
            lines(
                "Load per CPU",
                "Threads that run or want to, over the CPUs that the server may use. Above "
                f"{alerts.node_load_high.above:.0%} they begin to wait.",
                "percentunit",
                Query(
                    f'max by (instance) (llmobs_load_average{{window="1m",{MODEL}}})\n'
                    f"/ max by (instance) (llmobs_cpus{{{MODEL}}})",
                    "{{instance}}",
                ),
                limit=alerts.node_load_high.above,
            ),
            lines(
                "Throttled by the CPU quota",
                "Seconds per second that the cgroup was halted, and the share of its periods that "
                "were cut. Any growth here is latency.",
                "none",
                Query(
                    "sum by (instance) "
                    f"(rate(llmobs_cgroup_cpu_throttled_seconds_total{{{MODEL}}}[{RATE}]))",
                    "{{instance}} seconds",
                ),
                Query(
                    "sum by (instance) "
                    f"(rate(llmobs_cgroup_cpu_throttled_periods_total{{{MODEL}}}[{RATE}]))\n"
                    "/ (sum by (instance) "
                    f"(rate(llmobs_cgroup_cpu_periods_total{{{MODEL}}}[{RATE}])) > 0)",
                    "{{instance}} periods",
                ),
            ),
            lines(
                "Pressure",
                "Share of the time in which some task waited for the resource (PSI).",
                "percentunit",
                Query(
                    "sum by (resource) "
                    f'(rate(llmobs_pressure_seconds_total{{kind="some",{MODEL}}}[{RATE}]))',
                    "{{resource}}",
                ),
            ),
        ),
        widths=(6, 6, 6, 6),
    )


def _processes(slo: Slo) -> Row:
    return Row(
        "The server's processes",
        (
            lines(
                "CPU by process",
                "CPUs in use. An engine core at 1 is at its limit: Python runs on one core.",
                "none",
                Query(
                    f"sum by (process) (rate(llmobs_process_cpu_seconds_total{{{MODEL}}}[{RATE}]))",
                    "{{process}}",
                ),
            ),
            lines(
                "Ready, and not running",
                "Seconds per second that a process' threads had no CPU. Above "
                f"{slo.alerts.run_queue_delay.above:.0%} too much else runs there.",
                "percentunit",
                Query(
                    "sum by (process) "
                    f"(rate(llmobs_process_run_queue_seconds_total{{{MODEL}}}[{RATE}]))",
                    "{{process}}",
                ),
                limit=slo.alerts.run_queue_delay.above,
            ),
        ),
    )


def _python(slo: Slo) -> Row:
    lag, gc = "llmobs_event_loop_lag_seconds", "llmobs_gc_pause_seconds"
    return Row(
        "Python",
        (
            lines(
                "Event loop: P99 of its lag",
                "How late the loop comes to its work; every streamed token passes it. Above "
                f"{slo.alerts.event_loop_lag.above:g} s the API server is the bottleneck.",
                "s",
                Query(
                    "histogram_quantile(0.99, sum by (process, le) "
                    f"(rate({lag}_bucket{{{MODEL}}}[{RATE}])))",
                    "{{process}}",
                ),
                limit=slo.alerts.event_loop_lag.above,
            ),
            lines(
                "Garbage collection",
                "Seconds per second that Python's collector halts a process.",
                "percentunit",
                Query(
                    f"sum by (process) (rate({gc}_sum{{{MODEL}}}[{RATE}]))",
                    "{{process}}",
                ),
            ),
            heatmap(
                "Pauses by garbage collection",
                "How many pauses were how long. Those above "
                f"{slo.alerts.gc_pause.longer_than:g} s freeze every stream.",
                "s",
                Query(f"sum by (le) (increase({gc}_bucket{{{MODEL}}}[{RATE}]))", "{{le}}"),
            ),
        ),
    )


def _ebpf(slo: Slo) -> Row:
    return Row(
        "Kernel (llmobs ebpf)",
        (
            lines(
                "CUDA launches by family",
                "Per second: attention, gemm, sampling and others. A family that grows with the "
                "same traffic is new work. (root and a GPU)",
                "ops",
                Query(
                    f"sum by (family) (rate(llmobs_cuda_kernel_launches_total{{{HOST}}}[{RATE}]))",
                    "{{family}}",
                ),
                stacked=True,
            ),
            lines(
                "Run-queue delay: P99",
                "How long a thread that was woken waited for a CPU. Milliseconds here are late "
                "kernels on the GPU. (root)",
                "s",
                Query(
                    "histogram_quantile(0.99, sum by (process, le) "
                    f"(rate(llmobs_run_queue_seconds_bucket{{{HOST}}}[{RATE}])))",
                    "{{process}}",
                ),
            ),
            lines(
                "Cycles per instruction",
                f"Above {slo.alerts.cpi_high.above:g} the cores wait for memory, a shared cache or "
                "another NUMA node. Of an idle process it means nothing. (root, a PMU)",
                "none",
                Query(
                    f"sum by (process) (rate(llmobs_cpu_cycles_total{{{HOST}}}[{RATE}]))\n"
                    "/ (sum by (process) "
                    f"(rate(llmobs_cpu_instructions_total{{{HOST}}}[{RATE}])) > 0)",
                    "{{process}}",
                ),
                limit=slo.alerts.cpi_high.above,
            ),
        ),
    )
