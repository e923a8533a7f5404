"""llmobs itself: can these figures be trusted, and what do they cost?"""

from typing import Any

from llmobs.generate.dashboards.board import Row, board
from llmobs.generate.dashboards.panel import MODEL, RATE, Query, lines, stat, steps
from llmobs.slo import Slo

ZERO_IS_GOOD = steps(("green", None), ("red", 1))
ONE_IS_GOOD = steps(("red", None), ("green", 1))


def dashboard(slo: Slo) -> dict[str, Any]:
    return board(
        "itself",
        "Can these figures be trusted, and what do they cost?",
        (_state(), _losses()),
    )


def _state() -> Row:
    return Row(
        "State",
        (
            stat(
                "Servers told of",
                "Agents whose page Prometheus reads. Fewer than vLLM servers is a blind spot.",
                "none",
                Query('count(up{job="llmobs",instance=~"$instance"} == 1)', "agents"),
                colors=ONE_IS_GOOD,
            ),
            stat(
                "Probes without a place",
                "Of this vLLM: what they tell is missing.",
                "none",
                Query(f"count(llmobs_probe_attached{{{MODEL}}} == 0) or vector(0)", "missing"),
                colors=ZERO_IS_GOOD,
            ),
            stat(
                "What cannot be told here",
                "Features that something stands in the way of, with the reason.",
                "none",
                Query(
                    "count by (feature, reason) "
                    f"(llmobs_feature_available{{{MODEL}}} == 0) or vector(0)",
                    "{{feature}} {{reason}}",
                ),
                colors=steps(("green", None), ("orange", 1)),
            ),
            stat(
                "Versions",
                "Of llmobs and vLLM, as the servers say; two of one kind mean a half-done upgrade.",
                "none",
                Query(
                    f"count by (version, vllm_version) (llmobs_build_info{{{MODEL}}})",
                    "llmobs {{version}}, vLLM {{vllm_version}}",
                ),
            ),
        ),
        height=5,
    )


def _losses() -> Row:
    return Row(
        "Losses and failures",
        (
            lines(
                "Records lost",
                "Per second: the agent did not read fast enough. Counters stay exact, some "
                "requests are missing in histograms.",
                "ops",
                Query(
                    f"sum by (process) (rate(llmobs_records_lost_total{{{MODEL}}}[{RATE}]))",
                    "{{process}}",
                ),
            ),
            lines(
                "Requests left out of histograms",
                "Per second: those that span lost records.",
                "reqps",
                Query(
                    f"sum(rate(llmobs_incomplete_requests_total{{{MODEL}}}[{RATE}]))",
                    "incomplete",
                ),
            ),
            lines(
                "Failures of our own code",
                "Per second, by probe; swallowed, vLLM does not notice. Anything but 0 is a bug.",
                "ops",
                Query(
                    f"sum by (probe) (rate(llmobs_guard_errors_total{{{MODEL}}}[{RATE}]))",
                    "{{probe}}",
                ),
            ),
            lines(
                "Spans that did not arrive",
                "Per second, by reason. `queue_full` under heavy trouble is by design.",
                "ops",
                Query(
                    f"sum by (reason) (rate(llmobs_spans_dropped_total{{{MODEL}}}[{RATE}]))",
                    "{{reason}}",
                ),
            ),
            lines(
                "CPU of the agent",
                "CPUs in use, beside the server's. It is of the lowest class and gives way.",
                "none",
                Query(
                    "sum by (instance) (rate(llmobs_process_cpu_seconds_total"
                    f'{{process="agent",{MODEL}}}[{RATE}]))',
                    "{{instance}}",
                ),
            ),
            lines(
                "Restarts of the agent",
                "Each one may cost a few seconds of histograms.",
                "none",
                Query(
                    f"sum by (instance) (llmobs_agent_restarts_total{{{MODEL}}})", "{{instance}}"
                ),
            ),
        ),
        widths=(8, 8, 8, 8, 8, 8),
    )
