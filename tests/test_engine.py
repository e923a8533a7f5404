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
        engine.left(None, None, scheduler, scheduler.requests.pop(name))
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
        self._observe(engine.left, None, None, self.scheduler, gone)

    def preempt(self, victim: Any, before: int, usage: int) -> None:
        self._observe(engine.preempted, (before, usage), None, self.scheduler, victim)

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
    pairs = scheduler.update(output, lambda r, most: 1, lambda r: False, lambda: None)
    return sum(tokens for _, tokens in pairs)


@given(st.randoms(use_true_random=False), st.booleans(), st.sampled_from([0.05, 0.3, 0.9]))
@settings(deadline=None, max_examples=100)
def test_whichever_probes_fail_what_comes_after_is_exact(
    random: Random, ahead: bool, share: float
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_watch", lambda *_: None)
        patch.setattr(GUARD, "total", 0)
        ring = Writer(Path(folder) / "a.ring", 512, ENGINE)
        patch.setattr(engine, "ENGINE", engine.Engine(ring, several_tokens=False))
        probes = Failing(random)
        probes.scheduler = scheduler = Scheduler(probes, lambda: 1, ahead)  # type: ignore[arg-type]
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
