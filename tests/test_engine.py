"""What the engine's follower does once one of its probes has failed."""

import itertools
import tempfile
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmobs import engine, process, schema
from llmobs.guard import GUARD
from llmobs.ring import Writer
from tests.fake_scheduler import Scheduler, request
from tests.rings import ENGINE, new_ring


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Writer:
    monkeypatch.setenv("LLMOBS_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(process, "_watch", lambda *_: None)
    made = new_ring(tmp_path, ENGINE)
    monkeypatch.setattr(engine, "ENGINE", engine.Engine(made, several_tokens=False))
    return made


def waiting(ring: Writer) -> int:
    return ring.cells[schema.model_cell("requests", 0)]


def join(scheduler: Any, name: str) -> None:
    scheduler.requests[name] = new = request(name, 10, 5)
    engine.joined(None, None, scheduler, new)


def test_what_a_failed_probe_left_behind_is_forgotten_with_the_next_request(ring: Writer) -> None:
    """Else it would be counted as waiting or running for ever."""
    scheduler = SimpleNamespace(requests={})
    for name in ("a", "b", "c"):
        join(scheduler, name)
    del scheduler.requests["a"], scheduler.requests["b"]  # the probe `leave` failed
    join(scheduler, "d")
    assert waiting(ring) == 4
    try:
        raise RuntimeError
    except RuntimeError:
        GUARD.failed("leave")
    join(scheduler, "e")
    assert waiting(ring) == 3
    assert ring.cells[schema.PROCESS_CELL["waiting_tokens"]] == 30
    for name in ("c", "d", "e"):
        engine.left(engine.NOTHING, None, scheduler, scheduler.requests.pop(name))
    assert waiting(ring) == 0


def test_steps_that_never_come_back_are_few(ring: Writer) -> None:
    """The probe `update` fails at every step."""
    scheduler = SimpleNamespace(requests={}, running=[], max_num_running_reqs=1)
    for _ in range(2000):
        output = SimpleNamespace(total_num_scheduled_tokens=0, num_scheduled_tokens={})
        engine.scheduled(1, output, scheduler)
    assert engine.ENGINE is not None
    assert len(engine.ENGINE.steps) == 256


class Failing:
    """The engine's probes as the guard runs them, of which some fail."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.share = 0.0
        self.scheduler: Any = None
        self.before = True

    def _observe(self, observer: Any, *arguments: Any) -> Any:
        try:
            if self.random.random() < self.share:
                raise RuntimeError
            return observer(*arguments)
        except Exception:
            GUARD.total += 1
            return None

    def join(self, new: Any) -> None:
        self._observe(engine.joined, None, None, self.scheduler, new)

    def leave(self, gone: Any) -> None:
        self._observe(engine.left, engine.NOTHING, None, self.scheduler, gone)

    def preempt(self, victim: Any, before: int, usage: int) -> None:
        token = before, usage, engine.NOTHING
        self._observe(engine.preempted, token, None, self.scheduler, victim)

    def scheduled(self, scheduler: Any, output: Any, started: int) -> None:
        if token := self._observe(engine.schedule_starts, scheduler):
            self._observe(engine.scheduled, token, output, scheduler)

    @property
    def updating(self) -> bool:
        return False

    @updating.setter
    def updating(self, _: bool) -> None:
        self.before = self._observe(engine.update_starts, self.scheduler, None, None) is not None

    def updated(self, output: Any, runner: Any, result: Any, started: int) -> None:
        if self.before:
            self._observe(engine.updated, 1, result, self.scheduler, output, runner)


def drive(scheduler: Scheduler, random: Random, victims: int) -> int:
    """One step; the tokens that came out."""
    cached = iter(lambda: random.choice([0, 0, 3]), None)
    output = scheduler.schedule(1, victims, 10_000, 7, cached, lambda: None)
    sampled = random.choice([lambda r, most: 1, lambda r, most: random.randint(1, most)])
    pairs = scheduler.update(output, sampled, lambda r: False, lambda: None)
    return sum(tokens for _, tokens in pairs)


@given(
    st.randoms(use_true_random=False),
    st.booleans(),
    st.sampled_from([0, 3]),
    st.sampled_from([0.05, 0.3, 0.9]),
)
@settings(deadline=None, max_examples=100)
def test_whichever_probes_fail_what_comes_after_is_exact(
    random: Random, ahead: bool, drafts: int, share: float
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_watch", lambda *_: None)
        patch.setattr(GUARD, "total", 0)
        ring = Writer(Path(folder) / "a.ring", 512, ENGINE)
        patch.setattr(engine, "ENGINE", engine.Engine(ring, several_tokens=drafts > 0))
        probes = Failing(random)
        scheduler = Scheduler(probes, lambda: 1, ahead, drafts)  # type: ignore[arg-type]
        probes.scheduler = scheduler
        names = map(str, itertools.count())
        probes.share = share
        for _ in range(random.randint(1, 40)):
            if random.random() < 0.5:
                kind = random.choice(["plain", "plain", "cut", "pooling"])
                scheduler.add(request(next(names), random.randint(1, 30), 6, kind))
            if scheduler.requests and random.random() < 0.1:
                scheduler.abort(random.choice(list(scheduler.requests)))
            drive(scheduler, random, random.choice([0, 0, 0, 1]))
        probes.share = 0.0
        while scheduler.requests:
            drive(scheduler, random, 0)

        failures = GUARD.total
        cell = schema.model_cell("generated_tokens", 0)
        scheduler.add(request(next(names), 5, 6))
        told, tokens = ring.cells[cell], 0
        for _ in range(30):
            if random.random() < 0.3:
                scheduler.add(request(next(names), random.randint(1, 30), 6))
            tokens += drive(scheduler, random, random.choice([0, 0, 1]))
        while scheduler.requests:
            tokens += drive(scheduler, random, 0)
        assert ring.cells[cell] - told == tokens
        assert waiting(ring) == ring.cells[schema.model_cell("requests", 0) + 4] == 0
        assert ring.cells[schema.PROCESS_CELL["waiting_tokens"]] == 0
        assert engine.ENGINE is not None
        assert not engine.ENGINE.sequences
        assert GUARD.total == failures


def speculating(ring: Writer, names: str, resumable: str) -> tuple[Any, dict[str, Any]]:
    """An engine all of whose requests have yielded their first token, and what vLLM has of them."""
    follower = engine.Engine(ring, several_tokens=True)
    requests = {name: request(name, 10, 100) for name in names}
    for name, known in requests.items():
        known.resumable = name in resumable  # type: ignore[attr-defined]
        follower.join(known)
    new = [SimpleNamespace(req_id=name) for name in names]
    step(follower, requests, dict.fromkeys(names, 1), new)
    return follower, requests


def step(follower: Any, requests: dict[str, Any], yielded: dict[str, int], new: Any = ()) -> None:
    """A step in which these yield so many tokens."""
    output = SimpleNamespace(
        total_num_scheduled_tokens=1,
        num_scheduled_tokens=yielded,
        scheduled_new_reqs=new,
        scheduled_spec_decode_tokens={},
    )
    scheduler = SimpleNamespace(requests=requests, running=requests, max_num_running_reqs=1)
    follower.scheduled(scheduler, output, 1)
    outputs = []
    for name, tokens in yielded.items():
        requests[name]._output_token_ids += [7] * tokens
        outputs.append(SimpleNamespace(request_id=name, new_token_ids=[7] * tokens))
    follower.updated(output, None, {0: SimpleNamespace(outputs=outputs, scheduler_stats=None)}, 1)


def generated(ring: Writer) -> int:
    return ring.cells[schema.model_cell("generated_tokens", 0)]


@pytest.mark.parametrize("emptied_by", ["between steps", "before it leaves"])
def test_a_streamed_input_empties_the_list_of_what_a_request_has_yielded(
    ring: Writer, emptied_by: str
) -> None:
    """vLLM makes the output part of the prompt then. What is counted must not fall with it."""
    follower, requests = speculating(ring, "abc", resumable="ab")
    step(follower, requests, {"a": 3, "b": 2, "c": 4})
    assert generated(ring) == 3 + 9
    requests["a"]._output_token_ids.clear()
    if emptied_by == "between steps":
        step(follower, requests, {"a": 1, "b": 2, "c": 3})
    else:
        step(follower, requests, {"b": 2, "c": 4})
    assert generated(ring) == 3 + 9 + 6
    for name in "ab":
        requests[name]._output_token_ids.clear()
        follower.leave(requests.pop(name))
    step(follower, requests, {"c": 2})
    follower.leave(requests.pop("c"))
    assert generated(ring) == 3 + 9 + 6 + 2
    requests["d"] = request("d", 10, 100)
    follower.join(requests["d"])
    step(follower, requests, {"d": 1}, [SimpleNamespace(req_id="d")])
    step(follower, requests, {"d": 3})
    assert generated(ring) == 3 + 9 + 6 + 2 + 4


def test_a_vllm_that_keeps_its_tokens_elsewhere_is_counted_as_well(ring: Writer) -> None:
    """Then the list is asked for by its public name."""
    follower = engine.Engine(ring, several_tokens=True)
    new = request("a", 10, 100)
    tokens = new._output_token_ids
    other = SimpleNamespace(**{n: v for n, v in vars(new).items() if n != "_output_token_ids"})
    other.output_token_ids = tokens
    follower.join(other)
    step(follower, {"a": new}, {"a": 1}, [SimpleNamespace(req_id="a")])
    step(follower, {"a": new}, {"a": 4})
    assert generated(ring) == 5
