"""Per context bucket: the P99, the phases it went to, and where to look next."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmobs.metrics import PHASES
from llmobs.slo import SLO, ContextBucket

SLOWEST_SHARE = 0.01
SLOWEST_AT_LEAST = 5
"""The mean of one or two requests says little, so this many at least are the slowest."""

Sample = tuple[dict[str, str], float]


@dataclass(frozen=True)
class Split:
    """Where the time of the slowest requests went, on average. Seconds; `phases` sum to `total`."""

    slowest: int
    total: float
    phases: dict[str, float]

    @property
    def dominant(self) -> str:
        """The phase that most of it went to."""
        return max(self.phases, key=lambda phase: self.phases[phase])


@dataclass(frozen=True)
class Breakdown:
    """One context bucket. Seconds; None where nothing was measured."""

    bucket: str
    requests: int
    first_token_p50: float | None
    first_token_p99: float | None
    first_token_target: float
    gap_p99: float | None
    gap_target: float
    seconds_p99: float
    first_token: Split | None
    """Of the requests with the longest time to the first token, until then."""
    whole: Split
    """Of the requests with the longest end-to-end time."""
    cold_starts: int
    slow_for_length: float | None
    """The median of prefill time over what the fit said of its length."""
    kv_mean: float | None
    kv_p99: float | None
    """Bytes of the KV cache that a request held, in one worker."""

    @property
    def missed(self) -> tuple[str, ...]:
        """The objectives whose P99 misses its target."""
        objectives = {
            "first token": (self.first_token_p99, self.first_token_target),
            "token gap": (self.gap_p99, self.gap_target),
        }
        return tuple(
            name for name, (p99, target) in objectives.items() if p99 is not None and p99 > target
        )


def breakdowns(requests: list[dict[str, Any]]) -> list[Breakdown]:
    """One per bucket that has admitted requests, in the order of the SLO."""
    found = []
    for bucket in SLO.buckets:
        here = [r for r in requests if r["context_bucket"] == bucket.name and len(r["phases"]) > 1]
        if here:
            found.append(_breakdown(bucket, here))
    return found


def _breakdown(bucket: ContextBucket, requests: list[dict[str, Any]]) -> Breakdown:
    first = [r["first_token"] for r in requests]
    kv = [r["kv_bytes"] for r in requests if r["kv_bytes"] is not None]
    answered = [r for r in requests if r["first_token_phases"]]
    return Breakdown(
        bucket=bucket.name,
        requests=len(requests),
        first_token_p50=_quantile(first, 0.5),
        first_token_p99=_quantile(first, 0.99),
        first_token_target=bucket.first_token,
        gap_p99=_quantile([r["longest_gap"] for r in requests], 0.99),
        gap_target=bucket.token_gap,
        seconds_p99=float(np.quantile([r["seconds"] for r in requests], 0.99)),
        first_token=_split(answered, "first_token", "first_token_phases") if answered else None,
        whole=_split(requests, "seconds", "phases"),
        cold_starts=sum(r["cold_start"] for r in requests),
        slow_for_length=_quantile(
            [
                r["phases"]["prefill"] / r["predicted_prefill"] if r["predicted_prefill"] else None
                for r in answered
            ],
            0.5,
        ),
        kv_mean=float(np.mean(kv)) if kv else None,
        kv_p99=_quantile(kv, 0.99),
    )


def _split(requests: list[dict[str, Any]], key: str, phases: str) -> Split:
    count = min(len(requests), max(SLOWEST_AT_LEAST, round(SLOWEST_SHARE * len(requests))))
    slowest = sorted(requests, key=lambda r: float(r[key]))[-count:]
    return Split(
        slowest=count,
        total=float(np.mean([r[key] for r in slowest])),
        phases={phase: float(np.mean([r[phases][phase] for r in slowest])) for phase in PHASES},
    )


def _quantile(values: list[float | None], q: float) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.quantile(known, q)) if known else None


QUEUE_ADVICE = {
    "hand_over": "the engine was inside long steps when they came: long prompts prefill in one "
    "piece; a lower --max-num-batched-tokens makes the steps shorter",
    "engine_busy": "the engine was inside long steps: long prompts prefill in one piece; a lower "
    "--max-num-batched-tokens makes the steps shorter",
    "max_num_seqs": "all --max-num-seqs slots were taken: raise it while memory allows, else add "
    "replicas",
    "token_budget": "each step's token budget went to prompts before them: keep long prompts from "
    "taking all of it (a low --long-prefill-token-threshold), or add replicas",
    "kv_cache": "no KV-cache blocks were free: raise --gpu-memory-utilization, lower "
    "--max-model-len, or add replicas",
    "grammar": "structured-output grammars were being compiled",
    "remote_kv": "KV blocks were on their way from another instance",
    "input": "their input was still being streamed in",
    "adapter": "all --max-loras adapters of the batch were others",
    "paused": "the engine was paused",
}
"""By the reason of llmobs_queue_reason_seconds_total. The flags are vLLM's."""

ADVICE = {
    "preprocess": "parsing, templating or tokenising: the API server is the bottleneck "
    "(--api-server-count, less middleware)",
    "prefill": "computing the prompt: shared prefixes (--enable-prefix-caching), tensor "
    "parallelism; beside other prompts it is their tokens too",
    "preempted": "KV-cache blocks ran out and work was thrown away: raise "
    "--gpu-memory-utilization, lower --max-num-seqs or --max-model-len",
    "decode": "tokens came slowly: compare llmobs_step_seconds by batch_kind; `mixed` far above "
    "`decode` means that prefills hold up the others' tokens (a lower --max-num-batched-tokens)",
    "deliver": "the first bytes were slow to leave: a busy event loop in the API server",
}
"""By the phase that dominates, where that is not the queue."""


def advice(breakdown: Breakdown, samples: dict[str, list[Sample]]) -> tuple[str, ...]:
    """Where to look next, a line for each objective that was missed."""
    lines = []
    if "first token" in breakdown.missed and breakdown.first_token is not None:
        phase = breakdown.first_token.dominant
        text = _queue_advice(samples) if phase == "queue" else ADVICE[phase]
        lines.append(f"first token: {text}")
    if "token gap" in breakdown.missed:
        lines.append(f"token gap: {ADVICE['decode']}")
    return tuple(lines)


def _queue_advice(samples: dict[str, list[Sample]]) -> str:
    """By what the server's requests have waited for longest, whatever their length."""
    waits: dict[str, float] = {}
    for labels, value in samples.get("llmobs_queue_reason_seconds_total", ()):
        waits[labels["reason"]] = waits.get(labels["reason"], 0.0) + value
    reason = max(waits, key=lambda name: waits[name], default="engine_busy")
    share = waits.get(reason, 0.0) / (sum(waits.values()) or 1.0)
    return f"`{reason}` is {share:.0%} of all waiting so far: {QUEUE_ADVICE.get(reason, reason)}"
