"""An embedding model: no decode, no token latency, and all the rest as ever."""

from collections import Counter

import pytest

from demo.client import embeddings
from demo.model import prompt_ids
from tests.e2e.conftest import Served, Start
from tests.e2e.page import Figures
from tests.e2e.traffic import Call, play, send_all

pytestmark = pytest.mark.e2e

BUCKETS = ("0-1k", "1k-4k", "4k-32k", "32k+")
PHASES = ("preprocess", "queue", "prefill", "preempted", "decode", "deliver")


@pytest.fixture(scope="module")
def served(start: Start) -> Served:
    return start("--runner=pooling", "--max-num-batched-tokens=2048", kind="embedding")


@pytest.fixture(scope="module")
def calls(served: Served) -> list[Call]:
    def ask(bucket: str, *lengths: int) -> Call:
        prompts = [prompt_ids(n, len(made) * 10 + i) for i, n in enumerate(lengths)]
        content = prompts if len(prompts) > 1 else prompts[0]
        call = Call(bucket, sum(lengths), lambda session: embeddings(session, served.url, content))
        made.append(call)
        return call

    made: list[Call] = []
    for length in (1, 128, 900):
        ask("0-1k", length)
    ask("0-1k", 100, 150, 200)
    ask("1k-4k", 1500)
    return made


@pytest.fixture(scope="module")
def change(served: Served, calls: list[Call]) -> Figures:
    before = served.page.figures()
    play(lambda session: send_all(session, calls, at_once=2))
    return served.page.settled(before, len(calls))


def test_embeddings_are_answered(calls: list[Call], change: Figures) -> None:
    assert all(call.answer.ok for call in calls), [call.answer for call in calls]
    assert [call.answer.prompt_tokens for call in calls] == [1, 128, 900, 450, 1500]


def test_they_are_counted_as_requests_that_stopped(calls: list[Call], change: Figures) -> None:
    sent = Counter(call.bucket for call in calls)
    for bucket in BUCKETS:
        here = {"context_bucket": bucket}
        assert change.total("llmobs_requests_received_total", **here) == sent[bucket]
        assert change.total("llmobs_requests_total", **here, outcome="stop") == sent[bucket]
        assert change.total("llmobs_requests_total", **here) == sent[bucket]
        assert change.total("llmobs_request_seconds_count", **here) == sent[bucket]


def test_their_tokens_are_all_of_the_prompt(calls: list[Call], change: Figures) -> None:
    prompts = change.by("context_bucket", "llmobs_prompt_tokens_total")
    assert prompts == {"0-1k": 1 + 128 + 900 + 450, "1k-4k": 1500, "4k-32k": 0, "32k+": 0}
    assert change.total("llmobs_generated_tokens_total") == 0
    assert change.total("context_len_histogram_count") == len(calls)
    assert change.total("context_len_histogram_sum") == 1 + 128 + 900 + 450 + 1500


def test_they_have_phases_but_no_decode(served: Served, calls: list[Call], change: Figures) -> None:
    counts = change.by("phase", "llmobs_request_phase_seconds_count")
    assert counts == dict.fromkeys(PHASES, len(calls))
    sums = change.by("phase", "llmobs_request_phase_seconds_sum")
    assert sums["decode"] == sums["preempted"] == 0
    assert sums["prefill"] > 0
    assert sum(sums.values()) == pytest.approx(
        change.total("llmobs_request_seconds_sum"), abs=0.001 * len(calls)
    )
    for told in served.page.requests():
        assert sum(told["phases"].values()) == pytest.approx(told["seconds"], abs=0.001)
        assert told["first_token"] is None
        assert told["output_tokens"] == 0


def test_they_have_no_token_latency(change: Figures) -> None:
    assert change.total("decode_token_latency_seconds_count") == 0


def test_the_objectives_do_not_apply_to_them(calls: list[Call], change: Figures) -> None:
    for objective in ("first_token", "token_gap"):
        verdicts = change.by("result", "llmobs_slo_requests_total", objective=objective)
        assert verdicts == {"good": 0, "bad": 0, "excluded": len(calls)}


def test_a_server_on_the_cpu_has_no_gpu_and_says_so(served: Served, change: Figures) -> None:
    figures = served.page.figures()
    for feature in ("gpu_memory", "gpu_memory_effective", "gpu_power", "torch_memory"):
        told = figures.by("reason", "llmobs_feature_available", feature=feature)
        assert told == {"no_gpu": 0}
    for metric in ("llmobs_gpu_memory_bytes", "llmobs_torch_memory_bytes"):
        with pytest.raises(KeyError, match="no series"):
            figures.total(metric)


def test_nothing_of_llmobs_own_failed(served: Served, change: Figures) -> None:
    figures = served.page.figures()
    assert figures.total("llmobs_guard_errors_total") == 0
    assert figures.total("llmobs_incomplete_requests_total") == 0
    assert figures.total("llmobs_requests") == 0
    assert figures.total("llmobs_waiting_tokens") == 0
    assert "llmobs: probe" not in served.server.log_text()
