"""Speculative decoding, where a step yields several tokens, and a queue that is full."""

import asyncio

import aiohttp
import pytest

from demo.client import completion
from demo.model import prompt_ids
from tests.e2e.conftest import Served, Start
from tests.e2e.page import Figures, eventually, scrape
from tests.e2e.traffic import Call, play, send_all

pytestmark = pytest.mark.e2e

QUEUE = 4  # requests that the server takes at a time
ARGS = (
    "--speculative-config",
    '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4,"prompt_lookup_min":2}',
    f"--max-num-queued-reqs={QUEUE}",
)
BURSTS = 8


@pytest.fixture(scope="module")
def served(start: Start) -> Served:
    return start(*ARGS)


def ask(served: Served, ids: list[int], **options: object) -> Call:
    return Call(
        *("0-1k", len(ids)), lambda session: completion(session, served.url, ids, **options)
    )


@pytest.fixture(scope="module")
def calls(served: Served) -> list[Call]:
    """Prompts that repeat themselves, so that there is something to look up."""
    made = []
    for seed in range(10):
        ids = prompt_ids(8, seed) * 20
        made.append(ask(served, ids, max_tokens=100, stream=seed % 2 == 0))
    # Here the front end cuts: the engine may be several tokens ahead.
    random = {"temperature": 1.0, "extra": {"seed": 3}}
    for seed in range(10, 14):
        ids = prompt_ids(8, seed) * 20
        made.append(ask(served, ids, max_tokens=200, stream=True, stop=["ba", "ko"], **random))
    made.append(ask(served, prompt_ids(8, 20) * 20, max_tokens=1, stream=True))
    return made


@pytest.fixture(scope="module")
def change(served: Served, calls: list[Call]) -> Figures:
    before = served.page.figures()
    play(lambda session: send_all(session, calls, at_once=QUEUE - 1))
    return served.page.settled(before, len(calls))


def test_token_counts_are_those_of_the_usage(calls: list[Call], change: Figures) -> None:
    assert all(call.answer.ok for call in calls), [call.answer for call in calls]
    assert change.total("llmobs_generated_tokens_total") == sum(call.tokens for call in calls)
    assert change.total("llmobs_prompt_tokens_total") == sum(call.prompt for call in calls)


def test_each_token_but_the_first_has_a_gap_also_where_several_come_at_once(
    calls: list[Call], change: Figures
) -> None:
    gaps = change.total("decode_token_latency_seconds_count", token="next")
    assert gaps == sum(call.tokens - 1 for call in calls)
    assert change.total("decode_token_latency_seconds_count", token="first") == len(calls)


def test_drafts_and_accepted_ones_are_those_that_vllm_counts(
    served: Served, change: Figures
) -> None:
    counted = served.page.figures().by("kind", "llmobs_spec_tokens_total")
    vllm = scrape(f"{served.url}/metrics")
    assert counted == {
        "draft": vllm.total("vllm:spec_decode_num_draft_tokens_total"),
        "accepted": vllm.total("vllm:spec_decode_num_accepted_tokens_total"),
    }
    assert counted["draft"] >= counted["accepted"] > 0


def test_the_phases_sum(served: Served, calls: list[Call], change: Figures) -> None:
    phases = change.total("llmobs_request_phase_seconds_sum")
    whole = change.total("llmobs_request_seconds_sum")
    assert phases == pytest.approx(whole, abs=0.001 * len(calls))
    for told in served.page.requests():
        assert sum(told["phases"].values()) == pytest.approx(told["seconds"], abs=0.001)


# The full queue


@pytest.fixture(scope="module")
def refused(served: Served, change: Figures) -> tuple[list[Call], Figures]:
    """More requests than the server takes: some are refused by an answer 503, some when their
    stream has begun already."""
    before = served.page.figures()
    sent: list[Call] = []

    async def traffic(session: aiohttp.ClientSession) -> None:
        # What arrives in one moment finds the queue empty, and is refused once it stands in it.
        for burst in range(BURSTS):
            calls = [
                ask(served, prompt_ids(20, burst * 100 + i), max_tokens=5, stream=True)
                for i in range(20)
            ]
            sent.extend(calls)
            await send_all(session, calls)
            if any(late(call) for call in calls):
                break
        # What finds it full is refused before.
        full = [
            ask(served, prompt_ids(20, 2000 + i), max_tokens=3000, stream=False)
            for i in range(QUEUE)
        ]
        sent.extend(full)
        busy = asyncio.gather(*(call.send(session) for call in full))
        await asyncio.to_thread(eventually, "a full queue", lambda: _in_engine(served) == QUEUE)
        more = [
            ask(served, prompt_ids(20, 3000 + i), max_tokens=5, stream=i % 2 == 0) for i in range(6)
        ]
        sent.extend(more)
        await send_all(session, more)
        await busy

    play(traffic)
    return sent, served.page.settled(before, len(sent))


def _in_engine(served: Served) -> float:
    return served.page.figures().total("llmobs_requests")


def late(call: Call) -> bool:
    return call.answer.status == 200 and call.answer.error_code == 503


def test_refusals_are_counted_before_and_within_a_stream(
    refused: tuple[list[Call], Figures],
) -> None:
    sent, change = refused
    clean = sum(call.answer.status == 503 for call in sent)
    within = sum(late(call) for call in sent)
    assert clean >= 6
    assert within > 0
    assert change.total("llmobs_rejections_total", code="503") == clean + within
    assert change.total("llmobs_rejections_total") == clean + within
    assert change.total("llmobs_requests_total", outcome="rejected") == clean + within
    assert change.total("llmobs_requests_received_total") == len(sent)
    taken = sum(call.answer.ok for call in sent)
    assert taken == len(sent) - clean - within
    assert change.total("llmobs_requests_total", outcome="length") == taken


def test_refusals_are_those_that_vllm_counts(
    served: Served, refused: tuple[list[Call], Figures]
) -> None:
    vllm = scrape(f"{served.url}/metrics").total("vllm:admission_rejections_total")
    assert served.page.figures().total("llmobs_rejections_total", code="503") == vllm


def test_a_refusal_for_want_of_room_is_a_bad_verdict(
    refused: tuple[list[Call], Figures],
) -> None:
    """Not the client's fault, as 4xx is. Those whose length was not known yet have none."""
    _, change = refused
    known = change.total("llmobs_requests_total", outcome="rejected") - change.total(
        "llmobs_requests_total", outcome="rejected", context_bucket="unknown"
    )
    bad = change.total("llmobs_slo_requests_total", objective="first_token", result="bad")
    assert bad >= known > 0
    assert (
        change.total("llmobs_slo_requests_total", objective="first_token", result="excluded") == 0
    )


def test_gauges_return_to_zero_and_nothing_failed(
    served: Served, refused: tuple[list[Call], Figures]
) -> None:
    figures = served.page.figures()
    assert figures.total("llmobs_requests") == 0
    assert figures.total("llmobs_waiting_tokens") == 0
    assert figures.total("llmobs_guard_errors_total") == 0
    assert figures.total("llmobs_incomplete_requests_total") == 0
