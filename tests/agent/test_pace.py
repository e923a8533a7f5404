"""When the agent's threads rest."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from llmobs.agent import pace
from llmobs.agent.pace import Pace, Paced
from llmobs.agent.run import Run
from tests.rings import ENGINE, new_ring


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each rest is. Each look at the clock finds 0.5 ms of work done."""
    taken: list[float] = []
    clock = iter(range(10**9, 10**12, 500_000))
    watch = SimpleNamespace(thread_time_ns=lambda: next(clock), sleep=taken.append)
    monkeypatch.setattr(pace, "time", watch)
    return taken


def test_who_has_worked_for_two_milliseconds_rests(rests: list[float]) -> None:
    own = Pace()
    own.breathe()  # whatever it did before
    del rests[:]
    for _ in range(20):
        own.breathe()
    assert rests == [0.005] * 4


def test_items_come_whole_and_in_order_with_rests_between(rests: list[float]) -> None:
    assert list(Paced(range(2000), Pace())) == list(range(2000))
    assert 5 <= len(rests) <= 20


def test_nobody_rests_while_there_is_much_to_catch_up_on(
    rests: list[float], tmp_path: Path
) -> None:
    ring = new_ring(tmp_path, ENGINE, 8192)
    run = Run(tmp_path)
    for count, hurry in ((100, False), (3000, True), (100, False)):
        for _ in range(count):
            ring.put(20, 1)
        run.poll()
        assert run.pace.hurry is hurry
        del rests[:]
        list(run.pace.over(range(2000)))
        assert (not rests) is hurry
