"""What the page must say, by the clients' own count."""

from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from tests.e2e.page import Figures, Page, eventually
from tests.e2e.traffic import Call

BUCKETS = ("0-1k", "1k-4k", "4k-32k", "32k+")
KNOWN_OR_NOT = (*BUCKETS, "unknown")
PHASES = ("preprocess", "queue", "prefill", "preempted", "decode", "deliver")
OUTCOMES = ("stop", "length", "abort", "error", "rejected")
VERY_LONG = 4000
FOREIGN = "foreign_frontend"

# What nothing can do without, by its own name.
PROBES = {
    "api_server": {"process_inputs", "admit", "finish", "abort"},
    "engine_core": {"scheduler", "join", "schedule", "update", "preempt", "leave"},
    "worker": {"worker", "forward", "sample"},
}


def by_bucket(calls: Iterable[Call], value: Callable[[Call], int]) -> dict[str, int]:
    sums = dict.fromkeys(BUCKETS, 0)
    for call in calls:
        sums[call.bucket] += value(call)
    return sums


def check_counts(change: Figures, calls: list[Call], model: str, pooling: bool = False) -> None:
    """All that is counted of the requests of one model. Exact, but for the tokens of those who
    left: the engine may be some ahead of what reached them."""
    here = {"model_name": model}
    taken = [call for call in calls if call.outcome != "rejected"]
    left = [call for call in calls if call.outcome == "abort"]
    told = [call for call in taken if call.outcome != "abort"]
    assert not [call.answer for call in told if not call.answer.ok]

    # The ground that the rest stands on: what the server told is what was sent.
    assert [call.answer.prompt_tokens for call in told] == [call.prompt for call in told]

    received = Counter(call.bucket for call in calls)
    counted = change.by("context_bucket", "llmobs_requests_received_total", **here)
    assert counted == {bucket: received[bucket] for bucket in KNOWN_OR_NOT}
    ends = Counter((call.bucket, call.outcome) for call in calls)
    for bucket in KNOWN_OR_NOT:
        ended = change.by("outcome", "llmobs_requests_total", **here, context_bucket=bucket)
        assert ended == {outcome: ends[bucket, outcome] for outcome in OUTCOMES}, bucket
    ended = change.by("context_bucket", "llmobs_request_seconds_count", **here)
    assert ended == {bucket: received[bucket] for bucket in KNOWN_OR_NOT}
    codes = Counter(call.rejection for call in calls if call.outcome == "rejected")
    counted = change.by("code", "llmobs_rejections_total", **here)
    assert {code: count for code, count in counted.items() if count} == codes

    prompts = change.by("context_bucket", "llmobs_prompt_tokens_total", **here, source="computed")
    assert prompts == by_bucket(taken, lambda call: call.prompt)
    assert change.total("llmobs_prompt_tokens_total", **here, source="cached") == 0
    assert change.total("context_len_histogram_count", **here) == len(taken)
    assert change.total("context_len_histogram_sum", **here) == sum(c.prompt for c in taken)

    tokens = change.by("context_bucket", "llmobs_generated_tokens_total", **here)
    known = by_bucket(told, lambda call: 0 if pooling else call.tokens)
    for bucket in BUCKETS:
        leavers = [call for call in left if call.bucket == bucket]
        seen = sum(call.answer.chunks for call in leavers)
        assert known[bucket] + seen <= tokens[bucket] <= known[bucket] + VERY_LONG * len(leavers)
    latency = "decode_token_latency_seconds_count"
    first = change.by("context_bucket", latency, **here, token="first")
    assert first == by_bucket(taken, lambda _: 0 if pooling else 1)
    following = change.by("context_bucket", latency, **here, token="next")
    begun = by_bucket(taken, lambda call: 0 if pooling else call.sequences)
    assert following == {bucket: tokens[bucket] - begun[bucket] for bucket in BUCKETS}

    for phase in PHASES:
        counts = change.by(
            *("context_bucket", "llmobs_request_phase_seconds_count"), **here, phase=phase
        )
        if phase == "preprocess":  # which the rejected of known length have as well
            counts = {bucket: counts[bucket] - ends[bucket, "rejected"] for bucket in BUCKETS}
        assert counts == by_bucket(taken, lambda _: 1), phase
    for bucket in BUCKETS:
        where = {**here, "context_bucket": bucket}
        phases = change.total("llmobs_request_phase_seconds_sum", **where)
        seconds = change.total("llmobs_request_seconds_sum", **where)
        assert phases == pytest.approx(seconds, abs=0.001 * (received[bucket] + 1))
    seconds = change.total("llmobs_request_seconds_sum", **here)
    by_outcome = change.total("llmobs_request_outcome_seconds_total", **here)
    assert by_outcome == pytest.approx(seconds, abs=0.001)


def check_steps(change: Figures) -> None:
    """Each engine step is in each of its series once."""
    steps = change.total("batch_size_distribution_count")
    assert steps > 0
    assert change.total("llmobs_step_log_moment_total", power="0") == steps
    stages = change.by("stage", "llmobs_step_seconds_count")
    assert stages["schedule"] == stages["update"] == steps


def check_end(figures: Figures, roles: Iterable[str]) -> None:
    """Nothing is left in the engines, and nothing of llmobs' own failed or is missing."""
    assert figures.total("llmobs_requests") == 0
    assert figures.total("llmobs_waiting_tokens") == 0
    for name in ("guard_errors", "records_lost", "incomplete_requests", "agent_restarts"):
        assert figures.total(f"llmobs_{name}_total") == 0, name
    attached = figures.by("process", "llmobs_probe_attached")
    assert set(attached) == set(roles)
    for role in roles:
        probes = figures.by("probe", "llmobs_probe_attached", process=role)
        assert PROBES[role] <= set(probes)
        assert set(probes.values()) == {1}, (role, probes)


def check_rings(page: Page, processes: dict[str, int]) -> None:
    """Each observed process has a ring, and no other has."""
    rings = Counter(path.name.partition("-")[0] for path in page.folder.glob("*.ring"))
    assert rings == processes


def check_foreign(page: Page, calls: list[Call], roles: Iterable[str]) -> None:
    """The engine's figures are right, the front end's are not there, and it is said why."""

    def empty() -> Figures | None:
        figures = page.figures()
        return figures if figures.total("llmobs_requests") == 0 else None

    assert not [c.answer for c in calls if not c.answer.ok and not c.answer.aborted]
    figures = eventually("an empty engine", empty)
    tokens = figures.by("context_bucket", "llmobs_generated_tokens_total")
    for bucket in BUCKETS:
        here = [call for call in calls if call.bucket == bucket]
        told = sum(call.answer.completion_tokens or call.answer.chunks for call in here)
        # Of these the engine makes some more before it hears that they are over.
        over = [call for call in here if call.outcome in ("abort", "stop")]
        assert told <= tokens[bucket] <= told + VERY_LONG * len(over), bucket
    latency = "decode_token_latency_seconds_count"
    begun = sum(call.sequences for call in calls)
    assert figures.total(latency, token="next") == sum(tokens.values()) - begun
    check_steps(figures)
    check_end(figures, roles)
    for name in ("request_seconds_count", "request_phase_seconds_count"):
        assert figures.total(f"llmobs_{name}") == 0
    assert figures.total(latency, token="first") == 0
    for name in ("llmobs_requests_total", "llmobs_requests_received_total"):
        with pytest.raises(KeyError):
            figures.total(name)
    for feature, reason in (("front_end", FOREIGN), ("http_edge", FOREIGN), ("worker", "")):
        said = figures.by("reason", "llmobs_feature_available", feature=feature)
        assert said == {reason: float(not reason)}, feature
