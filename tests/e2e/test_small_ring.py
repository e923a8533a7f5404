"""Rings far too small, and an agent that is frozen meanwhile: counters stay exact, what cannot be
told whole is not told at all."""

import asyncio
import os
import signal
import time
from collections import Counter

import aiohttp
import pytest

from demo.client import completion
from demo.model import prompt_ids
from tests.e2e.conftest import Served, Start
from tests.e2e.page import Figures
from tests.e2e.traffic import Call, play, send_all

pytestmark = pytest.mark.e2e

BUCKETS = ("0-1k", "1k-4k", "4k-32k", "32k+")
FROZEN_S = 3.0


@pytest.fixture(scope="module")
def served(start: Start) -> Served:
    return start("--max-num-batched-tokens=2048", env={"LLMOBS_RING_BYTES": "8192"})


def ask(served: Served, length: int, seed: int, **options: object) -> Call:
    bucket = "0-1k" if length <= 1024 else "1k-4k"
    ids = prompt_ids(length, seed)
    return Call(bucket, length, lambda session: completion(session, served.url, ids, **options))


@pytest.fixture(scope="module")
def calls(served: Served) -> list[Call]:
    made = []
    for seed in range(0, 120, 3):
        made.append(ask(served, 50 + seed, seed, max_tokens=80, stream=True))
        made.append(ask(served, 2000, seed + 1, max_tokens=30, stream=False))
        made.append(
            ask(
                *(served, 40, seed + 2),
                max_tokens=60,
                stream=True,
                n=2,
                temperature=0.9,
            )
        )
        made[-1].sequences = 2
    made += [ask(served, 30, 900 + i, max_tokens=5, stream=True, model="nobody") for i in range(5)]
    return made


@pytest.fixture(scope="module")
def change(served: Served, calls: list[Call]) -> Figures:
    before = served.page.figures()
    agent = served.page.state["pid"]

    async def traffic(session: aiohttp.ClientSession) -> None:
        load = asyncio.create_task(send_all(session, calls, at_once=6))
        await asyncio.sleep(0.5)
        os.kill(agent, signal.SIGSTOP)
        try:
            await asyncio.sleep(FROZEN_S)
        finally:
            os.kill(agent, signal.SIGCONT)
        await load

    play(traffic)
    return served.page.settled(before, len(calls))


def test_the_clients_notice_nothing(calls: list[Call], change: Figures) -> None:
    assert Counter(call.answer.status for call in calls) == {200: len(calls) - 5, 404: 5}
    assert all(call.answer.ok for call in calls[:-5])


def test_records_were_lost_and_that_is_told(change: Figures) -> None:
    assert change.total("llmobs_records_lost_total") > 0
    assert change.total("llmobs_records_lost_total", process="engine_core") > 0
    assert change.total("llmobs_incomplete_requests_total") > 0


def test_counters_are_exact_all_the_same(calls: list[Call], change: Figures) -> None:
    good = calls[:-5]
    sent = Counter(call.bucket for call in good)
    for bucket in BUCKETS:
        here = {"context_bucket": bucket}
        mine = [call for call in good if call.bucket == bucket]
        assert change.total("llmobs_requests_received_total", **here) == sent[bucket]
        assert change.total("llmobs_requests_total", **here) == sent[bucket]
        assert change.total("llmobs_requests_total", **here, outcome="length") == sent[bucket]
        prompts = sum(call.prompt for call in mine)
        assert change.total("llmobs_prompt_tokens_total", **here) == prompts
        tokens = sum(call.tokens for call in mine)
        assert change.total("llmobs_generated_tokens_total", **here) == tokens
    assert change.total("llmobs_rejections_total", code="404") == 5
    assert change.total("llmobs_requests_total", context_bucket="unknown") == 5


def test_every_ended_request_is_in_the_histograms_or_told_as_incomplete(
    calls: list[Call], change: Figures
) -> None:
    whole = change.total("llmobs_request_seconds_count")
    incomplete = change.total("llmobs_incomplete_requests_total")
    assert whole + incomplete == len(calls)


def test_every_ended_request_of_known_length_has_a_verdict(
    calls: list[Call], change: Figures
) -> None:
    for bucket in BUCKETS:
        ended = sum(call.bucket == bucket for call in calls[:-5])
        for objective in ("first_token", "token_gap"):
            verdicts = change.total(
                "llmobs_slo_requests_total", context_bucket=bucket, objective=objective
            )
            assert verdicts == ended, (bucket, objective)


def test_the_sum_of_phases_is_still_the_whole(served: Served, change: Figures) -> None:
    phases = change.total("llmobs_request_phase_seconds_sum")
    known = change.total("llmobs_request_seconds_sum") - change.total(
        "llmobs_request_seconds_sum", context_bucket="unknown"
    )
    assert phases == pytest.approx(known, abs=0.2)
    for told in served.page.requests():
        assert sum(told["phases"].values()) == pytest.approx(told["seconds"], abs=0.001)


def test_after_the_gap_requests_are_told_whole_again(served: Served, change: Figures) -> None:
    """After the next snapshot, at the latest a second later. Few tokens, and a pause after each
    request: more than this ring holds is not written between two looks of the agent."""
    before = served.page.figures()
    calls = [ask(served, 20, 2000 + i, max_tokens=4, stream=True) for i in range(5)]

    async def slowly(session: aiohttp.ClientSession) -> None:
        for call in calls:
            await call.send(session)
            await asyncio.sleep(1.1)

    play(slowly)
    after = served.page.settled(before, len(calls))
    assert after.total("llmobs_request_seconds_count", context_bucket="0-1k") >= 3
    assert after.total("decode_token_latency_seconds_count", token="next") >= 3 * 3


def test_gauges_return_to_zero_and_nothing_failed(served: Served, change: Figures) -> None:
    time.sleep(0.2)
    figures = served.page.figures()
    assert figures.total("llmobs_requests") == 0
    assert figures.total("llmobs_waiting_tokens") == 0
    assert figures.total("llmobs_guard_errors_total") == 0
    assert figures.total("llmobs_agent_restarts_total") == 0
