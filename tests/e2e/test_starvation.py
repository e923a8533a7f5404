"""A burst of long prompts before short ones: the short wait, and it is told where and why."""

import asyncio

import aiohttp
import pytest

from demo.client import completion
from demo.model import prompt_ids
from tests.e2e.conftest import Served, Start
from tests.e2e.page import Figures
from tests.e2e.traffic import Call, play, send_all

pytestmark = pytest.mark.e2e

LONG, LONGS = 3900, 8
SHORT, SHORTS = 30, 10
MAX_SEQS = 4
ARGS = ("--max-num-batched-tokens=2048", f"--max-num-seqs={MAX_SEQS}")


@pytest.fixture(scope="module")
def served(start: Start) -> Served:
    return start(*ARGS)


def short(served: Served, seed: int) -> Call:
    ids = prompt_ids(SHORT, seed)
    return Call(
        *("0-1k", SHORT),
        lambda session: completion(session, served.url, ids, max_tokens=8, stream=True),
    )


@pytest.fixture(scope="module")
def calm(served: Served) -> Figures:
    """Short requests one after another, with the server to themselves."""
    before = served.page.figures()
    calls = [short(served, seed) for seed in range(SHORTS)]
    play(lambda session: send_all(session, calls, at_once=1))
    return served.page.settled(before, SHORTS)


class Storm:
    """The burst: the calls, what changed, and the page while it lasted."""

    def __init__(self, served: Served) -> None:
        self.shorts = [short(served, seed) for seed in range(100, 100 + SHORTS)]
        self.longs = []
        for seed in range(200, 200 + LONGS):
            ids = prompt_ids(LONG, seed)
            ask = lambda session, ids=ids: completion(  # noqa: E731
                session, served.url, ids, max_tokens=150, stream=False
            )
            self.longs.append(Call("1k-4k", LONG, ask))
        self.during: list[Figures] = []
        before = served.page.figures()
        self._served = served
        play(self._traffic)
        self.change = served.page.settled(before, LONGS + SHORTS)

    async def _traffic(self, session: aiohttp.ClientSession) -> None:
        burst = asyncio.create_task(send_all(session, self.longs))
        await asyncio.sleep(0.1)
        chats = asyncio.create_task(send_all(session, self.shorts))
        while not (burst.done() and chats.done()):
            self.during.append(await asyncio.to_thread(self._served.page.figures))
            await asyncio.sleep(0.05)
        await burst
        await chats


@pytest.fixture(scope="module")
def storm(served: Served, calm: Figures) -> Storm:
    return Storm(served)


def mean_first_token(change: Figures, bucket: str) -> float:
    labels = {"token": "first", "context_bucket": bucket}
    name = "decode_token_latency_seconds"
    return change.total(f"{name}_sum", **labels) / change.total(f"{name}_count", **labels)


def test_short_requests_wait_for_their_first_token(calm: Figures, storm: Storm) -> None:
    assert all(call.answer.ok for call in storm.shorts + storm.longs)
    assert mean_first_token(storm.change, "0-1k") > 3 * mean_first_token(calm, "0-1k")
    client = sum(call.answer.ttft for call in storm.shorts) / SHORTS
    assert mean_first_token(storm.change, "0-1k") == pytest.approx(client, rel=0.1)


def test_they_wait_in_the_queue(storm: Storm) -> None:
    here = {"context_bucket": "0-1k"}
    queue = storm.change.total("llmobs_request_phase_seconds_sum", **here, phase="queue")
    first = storm.change.total("decode_token_latency_seconds_sum", **here, token="first")
    assert queue / first > 0.5


def test_the_reasons_are_sequences_and_tokens(storm: Storm) -> None:
    """Neither the KV cache nor anything else kept them."""
    reasons = storm.change.by("reason", "llmobs_queue_reason_seconds_total")
    explained = reasons["max_num_seqs"] + reasons["token_budget"]
    assert explained > 0.5 * sum(reasons.values())
    assert reasons["kv_cache"] < 0.1 * sum(reasons.values())


def test_the_counts_of_the_long_ones_stay_their_own(storm: Storm) -> None:
    change = storm.change
    for name in (
        "llmobs_requests_received_total",
        "llmobs_requests_total",
        "llmobs_request_seconds_count",
    ):
        counts = change.by("context_bucket", name)
        assert counts == {"0-1k": SHORTS, "1k-4k": LONGS, "4k-32k": 0, "32k+": 0, "unknown": 0}
    prompts = change.by("context_bucket", "llmobs_prompt_tokens_total")
    assert prompts == {"0-1k": SHORTS * SHORT, "1k-4k": LONGS * LONG, "4k-32k": 0, "32k+": 0}
    generated = change.by("context_bucket", "llmobs_generated_tokens_total")
    assert generated == {"0-1k": SHORTS * 8, "1k-4k": LONGS * 150, "4k-32k": 0, "32k+": 0}


def test_the_backlog_shows_while_it_lasts(served: Served, storm: Storm) -> None:
    tokens = [figures.total("llmobs_waiting_tokens") for figures in storm.during]
    # Half of the long prompts find no place among the sequences that run.
    assert max(tokens) >= (LONGS - MAX_SEQS) * LONG
    assert max(tokens) <= LONGS * LONG + SHORTS * SHORT
    for figures in storm.during:
        waiting = figures.by("context_bucket", "llmobs_requests", state="waiting")
        running = figures.total("llmobs_requests", state="running")
        assert running <= MAX_SEQS
        assert waiting["1k-4k"] <= LONGS
        assert waiting["0-1k"] <= SHORTS
        assert waiting["4k-32k"] == waiting["32k+"] == 0
    after = served.page.figures()
    assert after.total("llmobs_waiting_tokens") == 0
    assert after.total("llmobs_requests") == 0
