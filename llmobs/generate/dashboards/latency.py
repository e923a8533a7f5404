"""Where the P99 went: phases by context length, what lies behind them, traces."""

from typing import Any

from llmobs.generate.dashboards.board import Row, board
from llmobs.generate.dashboards.panel import (
    ENGINE,
    MODEL,
    RATE,
    Query,
    flame_graph,
    heatmap,
    lines,
    traces,
)
from llmobs.generate.promql import number
from llmobs.slo import Slo

PHASE = "llmobs_request_phase_seconds"


def dashboard(slo: Slo) -> dict[str, Any]:
    return board(
        "latency",
        "Which phase got slower, for which context length, and for which requests?",
        (_means(slo), _tails(), _heatmaps(), _length(slo), _requests(slo)),
    )


def _means(slo: Slo) -> Row:
    return Row(
        "Where the time goes, by context length",
        tuple(
            lines(
                f"{bucket.name}: mean time by phase",
                f"A request of {bucket.name} tokens spends its time so, from the first byte in to "
                "the last byte out; the stack is its whole time. The phase that grew is where to "
                "look: `queue` waits, `prefill` computes the prompt, `preempted` is work done "
                "twice, `decode` yields tokens.",
                "s",
                Query(
                    f'sum by (phase) (rate({PHASE}_sum{{context_bucket="{bucket.name}",{MODEL}}}'
                    f"[{RATE}]))\n/ ignoring (phase) group_left () (sum(rate({PHASE}_count"
                    f'{{phase="queue",context_bucket="{bucket.name}",{MODEL}}}[{RATE}])) > 0)',
                    "{{phase}}",
                ),
                stacked=True,
            )
            for bucket in slo.buckets
        ),
        widths=(24 // min(len(slo.buckets), 4),) * len(slo.buckets),
    )


def _tails() -> Row:
    return Row(
        "The slow ones",
        (
            lines(
                "P99 by phase",
                "One request in a hundred spent longer in this phase. Phases are not slow for the "
                "same requests, so these do not add up.",
                "s",
                Query(
                    f"histogram_quantile(0.99, sum by (phase, le) "
                    f"(rate({PHASE}_bucket{{{MODEL}}}[{RATE}])))",
                    "{{phase}}",
                    exemplar=True,
                ),
            ),
            lines(
                "Why requests wait",
                "Seconds of waiting per second, by what kept them from running: `token_budget` "
                "(long prompts before them), `max_num_seqs`, `kv_cache`, `engine_busy` (long "
                "steps). The widest band is the one to mend.",
                "none",
                Query(
                    "sum by (reason) "
                    f"(rate(llmobs_queue_reason_seconds_total{{{ENGINE}}}[{RATE}]))",
                    "{{reason}}",
                ),
                stacked=True,
            ),
            lines(
                "P99 between two tokens",
                "One gap between output tokens in a hundred was longer; dashed: the target. "
                "Streams freeze above it.",
                "s",
                Query(
                    "histogram_quantile(0.99, sum by (context_bucket, le) (rate("
                    f'decode_token_latency_seconds_bucket{{token="next",{ENGINE}}}[{RATE}])))',
                    "{{context_bucket}}",
                    exemplar=True,
                ),
                Query(
                    "max by (context_bucket) "
                    f'(llmobs_slo_target_seconds{{objective="token_gap",{MODEL}}})',
                    "{{context_bucket}} target",
                ),
                targets_dashed=True,
            ),
        ),
    )


def _heatmaps() -> Row:
    token = "decode_token_latency_seconds_bucket"
    return Row(
        "Distributions: the dots are traces",
        (
            heatmap(
                "First tokens",
                "How many requests got their first token after how long. A second band, or a tail "
                "that climbs, is what the P99 is made of. A dot is a request: click it for its "
                "trace.",
                "s",
                Query(
                    f'sum by (le) (increase({token}{{token="first",{ENGINE}}}[{RATE}]))',
                    "{{le}}",
                    exemplar=True,
                ),
            ),
            heatmap(
                "Gaps between tokens",
                "How many pauses between two tokens were how long. A band far above the main one "
                "is usually prefills of others in the same step.",
                "s",
                Query(
                    f'sum by (le) (increase({token}{{token="next",{ENGINE}}}[{RATE}]))',
                    "{{le}}",
                    exemplar=True,
                ),
            ),
        ),
        height=9,
    )


def _length(slo: Slo) -> Row:
    ratio, cold = "llmobs_latency_residual_ratio", "llmobs_cold_start_seconds"
    return Row(
        "Slow for its length, or slow because long?",
        (
            lines(
                "Prefill time over what its length explains, median",
                "1 is as this server always was for prompts of that length. Above "
                f"{number(slo.alerts.slow_for_length.above)} something else than length makes them "
                "slow: a neighbour, a throttled GPU, a new version.",
                "none",
                Query(
                    "histogram_quantile(0.5, sum by (context_bucket, le) "
                    f"(rate({ratio}_bucket{{{ENGINE}}}[{RATE}])))",
                    "{{context_bucket}}",
                ),
                limit=slo.alerts.slow_for_length.above,
            ),
            lines(
                "Fitted prefill time per 1,000 tokens",
                "From this server's own fit of prefill time over computed tokens (linear part). "
                "A step up means that all prompts became slower.",
                "s",
                Query(
                    "1000 * avg by (instance, engine) "
                    f'(llmobs_latency_model_coefficient{{term="linear",{ENGINE}}})',
                    "{{instance}} engine {{engine}}",
                ),
            ),
            lines(
                "Cold starts: mean time",
                "First prefills of a length after the start or a long pause. Far above the rest "
                "means compilation or captured graphs in the way of users: warm up first.",
                "s",
                Query(
                    f"sum by (context_bucket) (increase({cold}_sum{{{ENGINE}}}[10m]))\n"
                    f"/ (sum by (context_bucket) (increase({cold}_count{{{ENGINE}}}[10m])) > 0)",
                    "{{context_bucket}}",
                ),
            ),
        ),
    )


def _requests(slo: Slo) -> Row:
    return Row(
        "The requests themselves",
        (
            traces(
                "Slowest traces",
                "Requests that missed a target, failed or were preempted: each is kept. Open one "
                "to see its phases, what it waited for and its slowest step.",
                '{ name = "llm.request" && span.llm.missed =~ ".+" }',
            ),
            flame_graph(
                "Where the CPU time goes",
                "CPU profile of the server's processes (needs Pyroscope). Wide frames that are not "
                "the model's are time taken from it.",
                '{service_name=~".*llmobs.*|.*vllm.*"}',
            ),
        ),
        height=10,
    )
