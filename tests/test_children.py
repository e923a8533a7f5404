"""How children end, seen by their parent without reaping any; real processes."""

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest

from llmobs.children import Children

pytestmark = pytest.mark.timeout(60)
CONTEXT = multiprocessing.get_context("fork")


def leave(code: int) -> None:
    time.sleep(0.5)
    os._exit(code)


def child(function: Any, *args: Any) -> Any:
    process = CONTEXT.Process(target=function, args=args)
    process.start()
    return process


def all_ended(children: Children, count: int) -> dict[int, int]:
    ended: dict[int, int] = {}
    end = time.monotonic() + 20
    while len(ended) < count and time.monotonic() < end:
        ended |= children.wait(1.0)
    return ended


def test_exit_codes_and_signals() -> None:
    made = {
        child(leave, 0): 0,
        child(leave, 3): 3,
        child(time.sleep, 60): -signal.SIGKILL,
        child(time.sleep, 61): -signal.SIGTERM,
    }
    children = Children()
    assert children.wait(0.0) == {}
    for process, code in made.items():
        if code < 0:
            os.kill(process.pid, -code)
    assert all_ended(children, 4) == {process.pid: code for process, code in made.items()}
    for process, code in made.items():
        process.join()
        assert process.exitcode == code  # nothing was taken from who made them


def test_one_that_was_reaped_before_we_looked() -> None:
    """vLLM's own threads look, too."""
    children = Children()
    process = child(time.sleep, 0.5)
    assert children.wait(0.01) == {}
    process.kill()
    process.join()
    assert children.wait(1.0) == {process.pid: -9}


def test_an_end_is_told_once_and_cuts_the_waiting_short() -> None:
    children = Children()
    other = child(time.sleep, 60)
    process = child(time.sleep, 0.3)
    began = time.monotonic()
    assert children.wait(30.0) == {process.pid: 0}
    assert time.monotonic() - began < 20
    assert children.wait(0.3) == {}
    other.kill()
    assert children.wait(30.0) == {other.pid: -9}
    assert children.wait(0.05) == {}
    process.join()
    other.join()


def test_one_that_takes_long_to_die_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are closed, and it is not there to be waited for yet."""
    process = child(time.sleep, 60)
    children = Children()
    assert children.wait(0.0) == {}
    process.kill()
    real, calls = os.waitid, 0

    def waitid(*arguments: int) -> Any:
        nonlocal calls
        calls += 1
        return None if calls < 120 else real(*arguments)

    monkeypatch.setattr(os, "waitid", waitid)
    monkeypatch.setattr("llmobs.children.LOOK_SECONDS", 0.001)
    assert [children.wait(5.0) for _ in range(3)] == [{}, {}, {process.pid: -9}]
    process.join()


def test_one_that_nobody_can_wait_for_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    process = child(time.sleep, 60)
    children = Children()
    assert children.wait(0.0) == {}
    process.kill()
    monkeypatch.setattr(os, "waitid", lambda *_: None)
    monkeypatch.setattr("llmobs.children.LOOK_SECONDS", 0.0)
    assert [children.wait(5.0) for _ in range(20)] == [{}] * 20
    assert children._known == children._turns == {}
    assert children.wait(0.0) == {}
    process.join()


def test_one_that_its_maker_closed_is_let_go() -> None:
    children = Children()
    process = child(time.sleep, 0.1)
    assert children.wait(0.0) == {}
    process.join()
    process.close()
    assert children.wait(0.05) == {}


def test_a_forked_process_does_not_take_its_parents_children_for_its_own() -> None:
    sibling = child(time.sleep, 0.2)
    pid = os.fork()
    if not pid:
        children = Children()
        children.wait(0.5)
        os._exit(1 if children._known or children._told else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    sibling.join()


def test_without_children_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(multiprocessing.process, "_children", set())
    assert Children().wait(1.0) == {}
    assert waited == [1.0]
