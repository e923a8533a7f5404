"""Requests put together from what front ends and engines recorded."""

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from llmobs import frontend, process
from llmobs.agent.requests import RequestView
from llmobs.agent.run import Run
from llmobs.agent.steps import EngineView
from llmobs.agent.store import Store
from llmobs.ring import Reader, Writer
from tests.agent.test_steps import EVENTS, QUIET, STARTS, everything_agrees, play
from tests.agent.world import World
from tests.rings import ENGINE, FRONT, read_all

MS = 1_000_000
ARRIVE, ADMIT, FIRST, SEQUENCE_END, END, BEAMS = 1, 2, 3, 4, 5, 6
JOIN, CHUNK, PREEMPT, TOKENS, SKIP, STEP, LEAVE = 16, 17, 18, 19, 20, 21, 22
CUT, POOLING, BEAM, HTTP = 1, 2, 4, 8
STOP, LENGTH, ABORT, ERROR, REJECTED = 0, 1, 2, 3, 4


@given(STARTS, EVENTS, st.lists(st.booleans(), max_size=400))
@hypothesis_settings(QUIET, max_examples=150)
def test_rings_may_be_read_in_any_order(
    starts: list[Any], events: list[Any], engine_first: list[bool]
) -> None:
    """Record by record, and still the same comes out of it."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as monkeypatch:
        world = World(Path(name), monkeypatch, ahead=True)
        monkeypatch.setattr(world, "read", lambda _: None)
        play(world, starts + events)
        engine, front = read_all(world.engine_reader)[0], read_all(world.front_reader)[0]
        for turn in [*engine_first, *[True] * len(engine), *[False] * len(front)]:
            records = engine if turn else front
            if not records:
                continue
            if turn:
                world.view.feed(records.pop(0))
            else:
                world.requests.feed(1, records.pop(0))
        everything_agrees(world)


class Rings:
    """Records by hand: `front` and `engine` take kind, time in ms, whom, x, y and columns."""

    def __init__(self) -> None:
        self.store = Store()
        self.requests = RequestView(self.store)
        self.requests.models[1] = ["m"]
        self.view = EngineView("0", self.store, self.requests.sequence_changed)
        self.view.models = ["m"]

    def front(self, kind: int, ms: float, z: int, x: int = 0, y: int = 0, *columns: int) -> None:
        self.requests.feed(1, self._record(kind, ms, z, x, y, columns))

    def engine(self, kind: int, ms: float, z: int, x: int = 0, y: int = 0, *columns: int) -> None:
        self.view.feed(self._record(kind, ms, z, x, y, columns))

    @staticmethod
    def _record(kind: int, ms: float, z: int, x: int, y: int, columns: tuple) -> tuple[Any, ...]:
        return (1, kind, x, y, z, [*columns, *[0] * (9 - len(columns))], round(ms * MS), 1)

    def step(self, ms: float, started: float, number: int, kind: int = 1) -> None:
        start = round(started * MS)
        self.engine(STEP, ms, number, kind, 0, start, start, start, 1, 1, 1)

    def tokens(self, ms: float, *pairs: int) -> None:
        columns = [a | b << 32 for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
        self.engine(TOKENS, ms, 0, len(pairs), 0, *columns)

    def sequence(self, z: int, key: int, joined: float, first: float, steps: list[float]) -> None:
        """One that runs alone, from its start right after it joined."""
        self.engine(JOIN, joined, z, 0, 0, key, 10)
        self.engine(CHUNK, joined + 1, z, 1, 0, 10, 0, z * 100, key)
        self.tokens(first, z, 1)
        self.step(first, joined + 1, z * 100, 0)
        for place, ms in enumerate(steps):
            self.step(ms, ms - 1, z * 100 + place + 1)
        self.engine(LEAVE, [first, *steps][-1], z, 0, 0, 1 + len(steps), key)

    def histogram(self, name: str, *labels: str) -> tuple[int, float]:
        child = self.store.histograms.get(name, {}).get(labels)
        return (sum(child.counts), round(child.sum, 9)) if child is not None else (0, 0.0)

    def verdicts(self) -> dict[tuple[str, str], str]:
        counters = self.store.counters.get("llmobs_slo_requests_total", {})
        return {
            (bucket, objective): result
            for (_, bucket, objective, result), count in counters.items()
            if count
        }


@pytest.fixture
def rings() -> Rings:
    return Rings()


def test_a_request_is_dated_by_the_wall_clock(
    rings: Rings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = process.Process(SimpleNamespace())  # type: ignore[arg-type]
    state.ring = Writer(tmp_path / "a.ring", 16, FRONT)
    monkeypatch.setattr(process, "_current", state)
    before = time.time_ns()
    frontend.arrive({"path": "/v1/chat/completions", "headers": []})
    (record,), _ = read_all(Reader(tmp_path / "a.ring"))
    rings.requests.feed(1, record)
    (request,) = rings.requests.requests.values()
    assert before - MS <= request.wall <= time.time_ns() + MS
    assert request.wall_at == request.arrival


def test_a_streamed_chat(rings: Rings) -> None:
    rings.front(ARRIVE, 1000, 1, 1)
    rings.front(ADMIT, 1010, 1, HTTP, 0, 55, 10, 100)
    rings.sequence(7, 55, 1020, 1100, [1130, 1150])
    rings.front(FIRST, 1105, 1)
    rings.front(SEQUENCE_END, 1152, 1, STOP, 0, 55, 3, 0)
    rings.front(END, 1153, 1, STOP, 200, 0, 3, 1000 * MS, 1, 0)
    (request,) = rings.requests.finished
    assert request.model == "m"
    assert (request.context_bucket, request.outcome, request.status) == ("0-1k", "stop", 200)
    assert (request.prompt_tokens, request.output_tokens) == (10, 3)
    assert (request.seconds, request.first_token, request.longest_gap) == (0.153, 0.105, 0.03)
    assert request.phases == (0.01, 0.011, 0.079, 0.0, 0.05, 0.003)
    latency = ("decode_token_latency_seconds", "m", "0", "0-1k")
    assert rings.histogram(*latency, "first") == (1, 0.105)
    assert rings.histogram(*latency, "next") == (2, 0.05)
    assert rings.histogram("llmobs_request_seconds", "m", "0-1k") == (1, 0.153)
    assert rings.histogram("context_len_histogram", "m") == (1, 10)
    assert rings.verdicts() == {("0-1k", "first_token"): "good", ("0-1k", "token_gap"): "good"}


def test_several_sequences_of_one_prompt(rings: Rings) -> None:
    """First token: the earliest. Phases: of the one that ends last. Prompt: once."""
    rings.front(ARRIVE, 1000, 1, 1)
    rings.front(ADMIT, 1010, 1, HTTP, 0, 55, 2000, 100, 0)
    rings.front(ADMIT, 1011, 1, HTTP, 0, 56, 0, 100, 1)
    rings.sequence(7, 55, 1020, 1400, [1410])
    rings.sequence(8, 56, 1420, 1440, [1500])
    rings.front(END, 1505, 1, LENGTH, 200, 1, 4, 1000 * MS, 0, 0)
    (request,) = rings.requests.finished
    assert request.first_token == 0.4
    assert request.phases == (0.011, 0.41, 0.019, 0.0, 0.06, 0.005)
    assert request.prompt_tokens == 2000
    assert rings.verdicts() == {("1k-4k", "first_token"): "bad", ("1k-4k", "token_gap"): "good"}
    assert rings.histogram("context_len_histogram", "m") == (1, 2000)


def test_a_stop_string_cuts_what_the_engine_went_on_with(rings: Rings) -> None:
    rings.front(ARRIVE, 1000, 1, 1)
    rings.front(ADMIT, 1010, 1, HTTP | CUT, 0, 55, 10, 100)
    rings.engine(JOIN, 1020, 7, CUT, 0, 55, 10)
    rings.engine(CHUNK, 1021, 7, 1, 0, 10, 0, 100, 55)
    rings.tokens(1100, 7, 1)
    rings.step(1100, 1021, 100)
    for place, ms in enumerate([1130, 1190, 1900]):
        rings.step(ms, ms - 1, 101 + place)
    rings.front(SEQUENCE_END, 1195, 1, STOP, 0, 55, 3, 0)
    rings.front(END, 1196, 1, STOP, 200, 0, 3, 1000 * MS, 0, 0)
    assert not rings.requests.finished  # the engine has not let it go yet
    rings.engine(LEAVE, 1901, 7, 0, 0, 4, 55)
    (request,) = rings.requests.finished
    assert request.longest_gap == 0.06
    assert request.phases == (0.01, 0.011, 0.079, 0.0, 0.09, 0.006)
    assert rings.histogram("decode_token_latency_seconds", "m", "0", "0-1k", "next") == (2, 0.09)


def test_a_beam_search(rings: Rings) -> None:
    """Three rounds of two beams; three beams of different lengths are returned."""
    rings.front(ARRIVE, 1000, 1, 1)
    number = 0
    for turn, first in enumerate([1100, 1120, 1150]):
        for beam in range(1 if not turn else 2):
            number += 1
            key = 50 + number
            prompt = 10 if number == 1 else 0
            rings.front(ADMIT, first - 15, 1, HTTP | BEAM, 0, key, prompt, 1)
            rings.engine(JOIN, first - 14, number, CUT, 0, key, 10 + turn)
            rings.engine(CHUNK, first - 13, number, 1, 0, 10 + turn, 0, number, key)
            if beam or not turn:
                pairs = [n for s in range(number - beam, number + 1) for n in (s, 1)]
                rings.tokens(first, *pairs)
                rings.step(first, first - 13, number, 0)
                for done in range(number - beam, number + 1):
                    rings.engine(LEAVE, first, done, 0, 0, 1, 50 + done)
    columns = [3 | 2 << 32, 4]
    rings.front(BEAMS, 1160, 1, 3, 0, *columns)
    rings.front(END, 1161, 1, LENGTH, 200, 0, 9, 1000 * MS, 0, 0)
    (request,) = rings.requests.finished
    # Rounds at 1100, 1120, 1150: gaps of 20 and 30 ms; the fourth token of the longest came with
    # the third.
    next_ = rings.histogram("decode_token_latency_seconds", "m", "0", "0-1k", "next")
    assert next_ == (2 + 1 + 3, 0.12)
    assert request.longest_gap == 0.03
    assert request.first_token == 0.1
    assert request.phases == (0.085, 0.002, 0.013, 0.0, 0.05, 0.011)
    assert request.prompt_tokens == 10


def test_a_call_from_python(rings: Rings) -> None:
    """No arrival is recorded: the end has it."""
    rings.front(ADMIT, 1010, 1, 0, 4, 55, 10, 100, 0, 1_700_000_000)
    rings.requests.models[1] = ["m", "adapter"]
    rings.view.models = ["m", "adapter"]
    rings.sequence(7, 55, 1020, 1100, [])
    rings.front(END, 1101, 1, LENGTH, 0, 0, 1, 1004 * MS, 0, 1)
    (request,) = rings.requests.finished
    assert (request.model, request.seconds, request.first_token) == ("adapter", 0.097, 0.096)
    latency = ("decode_token_latency_seconds", "adapter", "0", "0-1k", "first")
    assert rings.histogram(*latency) == (1, 0.096)


@pytest.mark.parametrize(
    ("status", "bucket", "first"),
    [(400, 0, "excluded"), (404, 0, "excluded"), (503, 3, "bad"), (500, 2, "bad")],
)
def test_a_rejection(rings: Rings, status: int, bucket: int, first: str) -> None:
    rings.front(ARRIVE, 1000, 1, 1)
    rings.front(END, 1003, 1, REJECTED, status, bucket, 0, 1000 * MS, 0, 0)
    (request,) = rings.requests.finished
    assert (request.outcome, request.status, request.phases) == ("rejected", status, (0.003,))
    assert (request.first_token, request.longest_gap) == (None, None)
    name = ("0-1k", "1k-4k", "4k-32k", "32k+")[bucket]
    assert rings.verdicts() == {(name, "first_token"): first, (name, "token_gap"): "excluded"}
    phase = ("llmobs_request_phase_seconds", "m", "preprocess", name)
    assert rings.histogram(*phase) == (1, 0.003)
    assert rings.histogram("llmobs_request_phase_seconds", "m", "queue", name) == (0, 0.0)
    assert rings.histogram("context_len_histogram", "m") == (0, 0.0)


def test_a_rejection_of_unknown_length(rings: Rings) -> None:
    rings.front(ARRIVE, 1000, 1, 1)
    rings.front(END, 1003, 1, REJECTED, 400, 4, 0, 1000 * MS, 0, 0)
    assert next(iter(rings.requests.finished)).context_bucket == "unknown"
    assert rings.histogram("llmobs_request_seconds", "m", "unknown") == (1, 0.003)
    assert rings.verdicts() == {}


def test_a_pooling_request_has_no_token(rings: Rings) -> None:
    rings.front(ARRIVE, 1000, 1, 5)
    rings.front(ADMIT, 1010, 1, HTTP | POOLING, 0, 55, 10)
    rings.engine(JOIN, 1020, 7, POOLING, 0, 55, 10)
    rings.engine(CHUNK, 1021, 7, 1, 0, 10, 0, 100, 55)
    rings.step(1050, 1021, 100)
    rings.engine(LEAVE, 1050, 7, 0, 0, 0, 55)
    rings.front(END, 1060, 1, STOP, 200, 0, 0, 1000 * MS, 0, 0)
    (request,) = rings.requests.finished
    assert request.phases == (0.01, 0.011, 0.029, 0.0, 0.0, 0.01)
    both = {("0-1k", "first_token"): "excluded", ("0-1k", "token_gap"): "excluded"}
    assert rings.verdicts() == both
    assert rings.histogram("decode_token_latency_seconds", "m", "0", "0-1k", "first") == (0, 0.0)


def test_the_engines_last_word_is_waited_for_so_long(rings: Rings) -> None:
    rings.front(ARRIVE, 1000, 1, 1)
    rings.front(ADMIT, 1010, 1, HTTP, 0, 55, 10, 100)
    rings.front(END, 1100, 1, ABORT, 0, 0, 0, 1000 * MS, 0, 0)
    rings.requests.tidy(6000 * MS, engines_alive=True)
    assert not rings.requests.finished
    rings.requests.tidy(6101 * MS, engines_alive=True)
    (request,) = rings.requests.finished
    assert request.phases == (0.01, 0.09, 0.0, 0.0, 0.0, 0.0)
    rings.engine(JOIN, 1020, 7, 0, 0, 55, 10)
    rings.engine(LEAVE, 6200, 7, 0, 0, 0, 55)
    assert len(rings.requests.finished) == 1


def test_a_dead_engine_has_no_last_word(rings: Rings) -> None:
    rings.front(ARRIVE, 1000, 1, 1)
    rings.front(ADMIT, 1010, 1, HTTP, 0, 55, 10, 100)
    rings.front(END, 1100, 1, ERROR, 500, 0, 0, 1000 * MS, 0, 0)
    rings.requests.tidy(1101 * MS, engines_alive=False)
    assert next(iter(rings.requests.finished)).outcome == "error"


def test_a_sequence_that_no_front_end_knows_is_forgotten(rings: Rings) -> None:
    rings.sequence(7, 55, 1020, 1100, [1130])
    assert rings.requests.orphans
    rings.requests.tidy((1130 + 60_000) * MS, engines_alive=True)
    assert rings.requests.orphans
    rings.requests.tidy((1131 + 60_000) * MS, engines_alive=True)
    assert not rings.requests.orphans


# Gaps in the records

EXCLUDED = {("0-1k", "first_token"): "excluded", ("0-1k", "token_gap"): "excluded"}


def nothing_was_told(rings: Rings) -> None:
    assert not rings.requests.finished
    assert rings.requests.incomplete == 1
    assert rings.verdicts() == EXCLUDED
    assert rings.histogram("llmobs_request_seconds", "m", "0-1k") == (0, 0.0)
    assert not rings.requests.requests


def test_a_gap_in_the_front_ends_ring(rings: Rings) -> None:
    rings.front(ARRIVE, 1000, 1, 1)
    rings.front(ADMIT, 1010, 1, HTTP, 0, 55, 10, 100)
    rings.requests.gap(1)
    rings.sequence(7, 55, 1020, 1100, [1130])
    rings.front(FIRST, 1105, 1)
    rings.front(END, 1153, 1, LENGTH, 200, 0, 2, 1000 * MS, 1, 0)
    nothing_was_told(rings)


def test_a_gap_in_another_front_ends_ring(rings: Rings) -> None:
    rings.front(ARRIVE, 1000, 1, 1)
    rings.requests.gap(2)
    rings.front(END, 1003, 1, REJECTED, 400, 0, 0, 1000 * MS, 0, 0)
    assert len(rings.requests.finished) == 1


def test_a_request_whose_arrival_was_lost(rings: Rings) -> None:
    rings.front(ADMIT, 1010, 1, HTTP, 0, 55, 10, 100)
    rings.sequence(7, 55, 1020, 1100, [1130])
    rings.front(END, 1153, 1, LENGTH, 200, 0, 2, 1000 * MS, 1, 0)
    nothing_was_told(rings)


def test_a_request_of_which_only_the_end_is_left(rings: Rings) -> None:
    rings.front(END, 1153, 1, LENGTH, 200, 0, 2, 1000 * MS, 1, 0)
    assert rings.requests.incomplete == 1
    assert not rings.requests.finished


def test_ends_that_were_lost_are_counted(rings: Rings) -> None:
    """The front end's own count of ends tells how many are missing."""
    for number in (1, 2, 3):
        rings.front(ARRIVE, 1000, number, 1)
    rings.front(END, 1003, 1, REJECTED, 400, 0, 0, 1000 * MS, 0, 0)
    rings.requests.gap(1)
    rings.requests.missed_ends(1, 3)
    assert rings.requests.incomplete == 2
    assert not rings.requests.requests
    rings.requests.missed_ends(1, 3)
    assert rings.requests.incomplete == 2


def test_a_gap_in_the_engines_ring(rings: Rings) -> None:
    rings.front(ARRIVE, 1000, 1, 1)
    rings.front(ADMIT, 1010, 1, HTTP, 0, 55, 10, 100)
    rings.engine(JOIN, 1020, 7, 0, 0, 55, 10)
    rings.view.gap()
    rings.engine(LEAVE, 1130, 7, 0, 0, 1, 55)
    rings.front(END, 1153, 1, LENGTH, 200, 0, 2, 1000 * MS, 1, 0)
    nothing_was_told(rings)


def test_a_sequence_that_was_in_the_gap_as_a_whole(rings: Rings) -> None:
    rings.front(ARRIVE, 1000, 1, 1)
    rings.front(ADMIT, 1010, 1, HTTP, 0, 55, 10, 100)
    rings.view.gap()
    rings.requests.engine_gap(1200 * MS)
    rings.front(END, 1153, 1, LENGTH, 200, 0, 2, 1000 * MS, 1, 0)
    rings.requests.tidy(9000 * MS, engines_alive=True)
    nothing_was_told(rings)


# Several engines


@pytest.mark.parametrize("names", [("0-api", "1-engine"), ("1-api", "0-engine")])
@pytest.mark.parametrize("engine", [0, 1])
def test_a_first_token_is_booked_to_its_engine(
    tmp_path: Path, names: tuple[str, str], engine: int
) -> None:
    """In whichever order the rings are read."""
    front = Writer(tmp_path / f"{names[0]}.ring", 64, FRONT)
    engines = [
        Writer(tmp_path / f"{names[1]}-{n}.ring", 64, {**ENGINE, "engine": n}) for n in (0, 1)
    ]
    run = Run(tmp_path)
    run.poll()
    front.put(ARRIVE, 1000 * MS, 1, 1)
    front.put(ADMIT, 1010 * MS, 1, HTTP, 0, 55, 10, 100)
    front.put(FIRST, 1100 * MS, 1)
    engines[engine].put(JOIN, 1020 * MS, 7, 0, 0, 55, 10)
    run.poll()
    children = run.store.histograms["decode_token_latency_seconds"]
    for number in (0, 1):
        child = children["deepseek-v4", str(number), "0-1k", "first"]
        assert sum(child.counts) == int(number == engine)


def test_what_spans_a_gap_is_given_up_at_once(rings: Rings) -> None:
    """Also the engine's part of it: of those that wait no snapshot speaks."""
    rings.front(ARRIVE, 1000, 1, 1)
    rings.front(ADMIT, 1010, 1, HTTP, 0, 55, 10, 100)
    rings.engine(JOIN, 1020, 7, 0, 0, 55, 10)
    rings.view.gap()
    rings.front(END, 1100, 1, ABORT, 200, 0, 0, 1000 * MS, 1, 0)
    rings.requests.tidy(1101 * MS, True)
    assert rings.requests.incomplete == 1
    assert not rings.requests.finished
    assert not rings.requests.requests
    assert not rings.requests.ending
    assert not rings.view.sequences


def test_sequences_without_a_front_end_are_not_kept_without_limit(rings: Rings) -> None:
    for number in range(6000):
        rings.engine(JOIN, 1000, number, 0, 0, number, 10)
    rings.view.gap()
    rings.requests.tidy(1001 * MS, True)
    assert list(rings.requests.orphans) == list(range(1000, 6000))
    assert list(rings.view.sequences) == list(range(1000, 6000))
    # A request whose engine's part was let go is not told as if it had never got there.
    rings.front(ARRIVE, 990, 1, 1)
    rings.front(ADMIT, 995, 1, HTTP, 0, 55, 10, 100)
    rings.front(END, 1100, 1, STOP, 200, 0, 5, 990 * MS, 1, 0)
    rings.requests.tidy(1101 * MS, True)
    assert (rings.requests.incomplete, len(rings.requests.finished)) == (1, 0)
