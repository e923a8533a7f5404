"""Batching and queue: who is in a step, and who waits for one."""

from typing import Any

from llmobs.generate.dashboards.board import Row, board
from llmobs.generate.dashboards.panel import ENGINE, MODEL, RATE, Query, heatmap, lines
from llmobs.generate.load import BIMODALITY, CV
from llmobs.slo import Slo

SIZE = "batch_size_distribution"
STEP = "llmobs_step_seconds"
WHO = "{{instance}} engine {{engine}}"


def dashboard(slo: Slo) -> dict[str, Any]:
    return board(
        "batching",
        "Who is in a step, what does it cost the others, and who waits?",
        (_batches(slo), _steps(), _queue(slo)),
    )


def _batches(slo: Slo) -> Row:
    alerts = slo.alerts
    return Row(
        "Batches",
        (
            lines(
                "Mean batch size",
                "Sequences per engine step, by kind of step. Small batches with a queue mean that "
                "something else than --max-num-seqs is full.",
                "none",
                Query(
                    f"sum by (batch_kind) (rate({SIZE}_sum{{{ENGINE}}}[{RATE}]))\n"
                    f"/ (sum by (batch_kind) (rate({SIZE}_count{{{ENGINE}}}[{RATE}])) > 0)",
                    "{{batch_kind}}",
                ),
            ),
            lines(
                "Coefficient of variation of the batch size",
                f"Over 5 minutes, by engine. Above {alerts.batch_size_unstable.above} requests "
                "come in waves, or are let in in waves.",
                "none",
                Query(f"{CV}{{{ENGINE}}}", WHO),
                limit=alerts.batch_size_unstable.above,
            ),
            lines(
                "Bimodality of step times",
                f"Sarle's coefficient over 10 minutes. Above {alerts.batch_latency_bimodal.above} "
                "steps are of two kinds, fast and slow: long prefills between the decode steps of "
                "chats.",
                "none",
                Query(f"{BIMODALITY}{{{ENGINE}}}", WHO),
                limit=alerts.batch_latency_bimodal.above,
            ),
        ),
    )


def _steps() -> Row:
    kinds = f"sum by (batch_kind) (rate({SIZE}_count{{{ENGINE}}}[{RATE}]))"
    steps = f'sum by (batch_kind) (rate({STEP}_count{{stage="forward",{ENGINE}}}[{RATE}]))'
    total = f"sum by (batch_kind) (rate({STEP}_sum{{{ENGINE}}}[{RATE}]))"
    return Row(
        "Steps",
        (
            lines(
                "Steps by kind",
                "Per second. `mixed` steps carry prefills beside decodes: each makes everyone's "
                "next token wait for someone's prompt.",
                "ops",
                Query(kinds, "{{batch_kind}}"),
                stacked=True,
            ),
            lines(
                "Mean step time by kind",
                "`mixed` far above `decode` is what prefills cost the streams: a lower "
                "--max-num-batched-tokens or --long-prefill-token-threshold.",
                "s",
                Query(f"{total}\n/ ({steps} > 0)", "{{batch_kind}}"),
            ),
            lines(
                "Prefill tokens per step that has some",
                "Computed prompt tokens, over steps with a prefill in them. Near "
                "--max-num-batched-tokens a step is as long as it can be.",
                "none",
                Query(
                    f'sum(rate(llmobs_prompt_tokens_total{{source="computed",{MODEL}}}[{RATE}]))\n'
                    f'/ (sum(rate({SIZE}_count{{batch_kind=~"prefill|mixed",{ENGINE}}}[{RATE}]))'
                    " > 0)",
                    "tokens",
                ),
            ),
            lines(
                "Step time by stage",
                "Seconds per second: what the engine's time goes to. `schedule` and `update` are "
                "Python and should be thin; what is missing to 1 is idle.",
                "percentunit",
                Query(
                    f"sum by (stage) (rate({STEP}_sum{{{ENGINE}}}[{RATE}]))\n"
                    "/ scalar(count(llmobs_engine_last_step_timestamp_seconds"
                    f"{{{ENGINE}}}))",
                    "{{stage}}",
                ),
                stacked=True,
            ),
            heatmap(
                "Forward time",
                "How many steps' forward pass took how long. Two bands are two kinds of steps.",
                "s",
                Query(
                    f'sum by (le) (increase({STEP}_bucket{{stage="forward",{ENGINE}}}[{RATE}]))',
                    "{{le}}",
                ),
            ),
            lines(
                "Time that steps stood still, by cause",
                "Seconds per second by which steps took far longer than usual: stopped, garbage "
                "collection, preemption, a prompt in the batch.",
                "none",
                Query(
                    f"sum by (cause) (rate(llmobs_stall_seconds_total{{{ENGINE}}}[{RATE}]))",
                    "{{cause}}",
                ),
                stacked=True,
            ),
        ),
        widths=(8, 8, 8, 8, 8, 8),
    )


def _queue(slo: Slo) -> Row:
    return Row(
        "Queue",
        (
            lines(
                "Requests waiting",
                "By context length. At "
                f"{slo.alerts.queue_deep.above:g} for each CPU someone is told.",
                "none",
                Query(
                    f'sum by (context_bucket) (llmobs_requests{{state="waiting",{ENGINE}}})',
                    "{{context_bucket}}",
                ),
                stacked=True,
            ),
            lines(
                "Requests running",
                "By context length; flat at --max-num-seqs means full.",
                "none",
                Query(
                    f'sum by (context_bucket) (llmobs_requests{{state="running",{ENGINE}}})',
                    "{{context_bucket}}",
                ),
                stacked=True,
            ),
            lines(
                "Prompt tokens waiting",
                "A queue of ten can be ten chats or ten books: this is how much work it is.",
                "none",
                Query(f"sum by (instance, engine) (llmobs_waiting_tokens{{{ENGINE}}})", WHO),
            ),
            lines(
                "Time since the last step",
                "Seconds. It may grow while nothing is asked; with requests there, above "
                f"{slo.alerts.engine_stalled.no_step:g} s the engine is taken for stalled.",
                "s",
                Query(
                    f"time() - max by (instance, engine) "
                    f"(llmobs_engine_last_step_timestamp_seconds{{{ENGINE}}} > 0)",
                    WHO,
                ),
            ),
        ),
        widths=(6, 6, 6, 6),
    )
