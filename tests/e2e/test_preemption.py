"""A KV cache that is far too small: whose stream freezes, and where that time is booked."""

import threading

import aiohttp
import pytest

from demo.client import completion
from demo.model import prompt_ids
from tests.e2e.conftest import Served, Start
from tests.e2e.page import Figures, scrape
from tests.e2e.traffic import Call, play, send_all

pytestmark = pytest.mark.e2e

REQUESTS = 16
SHORTEST = 60  # each prompt is one token longer than the one before: that tells them apart
TOKENS = 600
ARGS = ("--num-gpu-blocks-override=24", "--no-enable-prefix-caching", "--max-model-len=2048")


@pytest.fixture(scope="module")
def served(start: Start) -> Served:
    return start(*ARGS)


@pytest.fixture(scope="module")
def calls(served: Served) -> list[Call]:
    def ask(session: aiohttp.ClientSession, ids: list[int]):
        return completion(session, served.url, ids, max_tokens=TOKENS, stream=True)

    prompts = [prompt_ids(SHORTEST + i, seed=i) for i in range(REQUESTS)]
    return [Call("0-1k", len(ids), lambda s, ids=ids: ask(s, ids)) for ids in prompts]


@pytest.fixture(scope="module")
def change(served: Served, calls: list[Call]) -> Figures:
    before = served.page.figures()
    play(lambda session: send_all(session, calls))
    return served.page.settled(before, REQUESTS)


@pytest.fixture(scope="module")
def told(served: Served, change: Figures) -> dict[int, dict]:
    """What llmobs tells of each request, by the length of its prompt."""
    return {request["prompt_tokens"]: request for request in served.page.requests()}


def test_all_streams_come_to_their_end(calls: list[Call], change: Figures) -> None:
    assert [call.tokens for call in calls] == [TOKENS] * REQUESTS
    assert change.total("llmobs_requests_total", outcome="length") == REQUESTS


def test_preemptions_are_those_that_vllm_counts(served: Served, change: Figures) -> None:
    counted = change.total("llmobs_preemptions_total")
    assert counted == change.total("llmobs_preemptions_total", context_bucket="0-1k")
    assert counted == scrape(f"{served.url}/metrics").total("vllm:num_preemptions_total")
    assert counted > 0


def test_each_request_knows_its_preemptions(change: Figures, told: dict[int, dict]) -> None:
    preemptions = sum(request["preemptions"] for request in told.values())
    # One that is preempted again before it has recomputed what it lost is one longer preemption.
    assert 0 < preemptions <= change.total("llmobs_preemptions_total")
    for request in told.values():
        assert (request["preemptions"] > 0) == (request["phases"]["preempted"] > 0), request


def test_the_longest_freeze_that_a_client_saw_is_preempted_time_and_not_decode(
    calls: list[Call], told: dict[int, dict]
) -> None:
    frozen = max(calls, key=lambda call: call.answer.longest_gap)
    freeze = frozen.answer.longest_gap
    request = told[frozen.prompt]
    assert freeze > 10 * request["phases"]["decode"] / TOKENS, "no freeze at all"
    assert request["preemptions"] >= 1
    assert request["phases"]["preempted"] >= 0.9 * freeze
    # What remains for the decode is the rest of the stream, without the freeze.
    stream = frozen.answer.last_chunk - frozen.answer.first_chunk
    assert request["phases"]["decode"] <= 1.05 * (stream - 0.9 * freeze)
    assert request["longest_gap"] == pytest.approx(freeze, rel=0.1)


def test_streams_that_were_not_preempted_have_no_such_time(
    served: Served, told: dict[int, dict], change: Figures
) -> None:
    spared = [request for request in told.values() if not request["preemptions"]]
    assert all(request["phases"]["preempted"] == 0 for request in spared)
    assert change.total("llmobs_request_phase_seconds_sum", phase="preempted") == pytest.approx(
        sum(r["phases"]["preempted"] for r in told.values()), abs=0.001
    )


def test_the_phases_still_sum(told: dict[int, dict], change: Figures) -> None:
    assert len(told) == REQUESTS
    for request in told.values():
        assert min(request["phases"].values()) >= 0, request
        total = sum(request["phases"].values())
        assert total == pytest.approx(request["seconds"], abs=0.001), request
    total = change.total("llmobs_request_phase_seconds_sum")
    whole = change.total("llmobs_request_seconds_sum")
    assert total == pytest.approx(whole, abs=0.001 * REQUESTS)


def test_tokens_are_counted_once_though_they_were_computed_twice(
    calls: list[Call], change: Figures
) -> None:
    assert change.total("llmobs_generated_tokens_total") == REQUESTS * TOKENS
    prompts = change.total("llmobs_prompt_tokens_total", source="computed")
    assert prompts == sum(call.prompt for call in calls)
    assert change.total("llmobs_prompt_tokens_total", source="cached") == 0
    gaps = change.total("decode_token_latency_seconds_count", token="next")
    assert gaps == REQUESTS * (TOKENS - 1)
    assert change.total("decode_token_latency_seconds_count", token="first") == REQUESTS


def test_gaps_take_as_long_as_the_clients_waited(calls: list[Call], change: Figures) -> None:
    counted = change.total("decode_token_latency_seconds_sum", token="next")
    assert counted == pytest.approx(sum(sum(c.answer.gaps) for c in calls), rel=0.05)


def test_gauges_return_to_zero_and_nothing_failed(served: Served, change: Figures) -> None:
    figures = served.page.figures()
    assert figures.total("llmobs_requests") == 0
    assert figures.total("llmobs_waiting_tokens") == 0
    assert figures.total("llmobs_guard_errors_total") == 0
    assert figures.total("llmobs_incomplete_requests_total") == 0


# The KV cache's blocks

BLOCKS = 23  # 24, less vLLM's null block


def test_blocks_balance_and_none_is_in_use_at_the_end(served: Served, change: Figures) -> None:
    events = change.by("event", "llmobs_kv_block_events_total")
    # Nothing is shared, so a block of 128 tokens is taken for each that any of them filled.
    least = sum(-(-(SHORTEST + i + TOKENS - 1) // 128) for i in range(REQUESTS))
    assert events["allocate"] == events["free"] >= least
    assert events["evict"] == 0
    figures = served.page.figures()
    assert figures.by("state", "llmobs_kv_blocks") == {"used": 0, "free": BLOCKS}
    own = scrape(f"{served.url}/metrics")
    assert own.total("vllm:kv_cache_usage_perc") == 0


def test_every_reading_balances_while_it_storms(
    served: Served, calls: list[Call], told: dict[int, dict]
) -> None:
    """Used blocks are what was handed out and has not come back, whenever one looks."""
    readings: list[Figures] = []
    over = threading.Event()

    def read() -> None:
        while not over.wait(0.1):
            readings.append(served.page.figures())

    reader = threading.Thread(target=read)
    reader.start()
    before = served.page.figures()
    play(lambda session: send_all(session, calls[:8]))
    served.page.settled(before, 8)
    over.set()
    reader.join()
    most = 0.0
    for figures in readings:
        events = figures.by("event", "llmobs_kv_block_events_total")
        blocks = figures.by("state", "llmobs_kv_blocks")
        assert blocks["used"] == events["allocate"] - events["free"]
        assert blocks["used"] + blocks["free"] == BLOCKS
        assert 0 <= blocks["used"] <= BLOCKS
        most = max(most, blocks["used"])
    assert most > BLOCKS / 2, "it was never looked at under load"


def test_starved_attempts(served: Served, change: Figures) -> None:
    """Each preemption is for one; those that wait fail once a step."""
    failures = change.total("llmobs_kv_allocation_failures_total")
    preemptions = change.total("llmobs_preemptions_total")
    assert failures > preemptions
    steps = change.total("batch_size_distribution_count")
    assert failures <= preemptions + steps


def test_what_a_request_held(served: Served, told: dict[int, dict]) -> None:
    # Two layers, keys and values, 128 tokens, two heads of 32 floats of 4 bytes.
    block = 2 * 2 * 128 * 2 * 32 * 4
    assert served.page.figures().total("llmobs_kv_cache_bytes") == (BLOCKS + 1) * block
    for prompt, request in told.items():
        held = -(-(prompt + TOKENS - 1) // 128)
        assert request["kv_bytes"] in (held * block, (held + 1) * block), request
