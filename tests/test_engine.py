"""What the engine's follower does once one of its probes has failed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmobs import engine, process, schema
from llmobs.guard import GUARD
from llmobs.ring import Writer
from tests.fake_scheduler import request
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
