"""Pauses of a whole process, real ones: collections, a blocked loop, a process that is stopped."""

import asyncio
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from llmobs import pauses, probes, process, schema
from llmobs.ring import Reader, Writer
from tests.rings import python, read_all

pytestmark = pytest.mark.timeout(60)
COLLECTION, LAG, FROZEN = 40, 41, 42
BOUNDS = (0.0005, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 5.0)
WATCH = pauses.watch  # the tests' own processes are not watched


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Writer]:
    """Of this very process, which is watched."""
    made = Writer(tmp_path / "engine_core.ring", 4096, {})
    WATCH(made)
    yield made
    pauses.stop()


def counts(ring: Writer, name: str) -> list[int]:
    first = schema.PROCESS_CELL[name]
    return list(ring.cells[first : first + 11])


def seconds(ring: Writer, name: str) -> float:
    return ring.cells[schema.PROCESS_CELL[f"{name}_ns"]] / 1e9


def records(ring: Writer, kind: int) -> list[tuple[int, int, int]]:
    """Detail, start and end of each record of this kind."""
    found, lost = read_all(Reader(ring.path))
    assert not lost
    return [(r[2], r[5][0], r[6]) for r in found if r[1] == kind]


def test_a_collection_of_a_big_heap(ring: Writer) -> None:
    gc.disable()
    try:
        heap = [[number] for number in range(1_000_000)]
        before = counts(ring, "gc_pause")
        began = time.monotonic_ns()
        gc.collect()
        ended = time.monotonic_ns()
    finally:
        gc.enable()
    took = (ended - began) / 1e9
    assert len(heap) == 1_000_000
    change = [a - b for a, b in zip(counts(ring, "gc_pause"), before, strict=True)]
    assert sum(change) == 1
    place = change.index(1)
    # What it took is what a caller sees, but for the two clock looks around it.
    lowest = BOUNDS[place - 1] if place else 0.0
    assert lowest < took
    generation, start, end = records(ring, COLLECTION)[-1]
    assert generation == 2
    assert began <= start < end <= ended
    assert end - start > 0.5 * (ended - began)
    assert seconds(ring, "gc_pause") >= (end - start) / 1e9


def test_small_collections_are_counted_and_not_recorded(ring: Writer) -> None:
    gc.collect()
    gc.freeze()
    try:
        before = sum(counts(ring, "gc_pause"))
        recorded = len(records(ring, COLLECTION))
        for _ in range(100):
            gc.collect(0)
        assert sum(counts(ring, "gc_pause")) - before == 100
        assert len(records(ring, COLLECTION)) == recorded
    finally:
        gc.unfreeze()


def test_nothing_is_timed_once_the_probes_are_off(ring: Writer) -> None:
    probes.detach()
    before = sum(counts(ring, "gc_pause"))
    gc.collect()
    assert sum(counts(ring, "gc_pause")) == before
    assert not [c for c in gc.callbacks if getattr(c, "__module__", "") == "llmobs.pauses"]


def test_a_forked_child_writes_into_no_ring_of_its_parent(ring: Writer) -> None:
    gc.collect()
    before = counts(ring, "gc_pause")
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert counts(ring, "gc_pause") == before


def test_each_observed_process_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMOBS_RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.setattr(process, "_watch", lambda *_: None)
    monkeypatch.setattr(pauses, "watch", WATCH)
    process.mark_server()
    state = process.current()
    state.open("engine_core", "m")
    try:
        assert state.ring is not None
        gc.collect()
        assert sum(counts(state.ring, "gc_pause")) > 0
    finally:
        pauses.stop()


# The event loop


def blocked(block_s: float, runner: Callable[..., None]) -> None:
    """A loop that waits a while, is blocked once, and ends."""

    async def main() -> None:
        pauses.watch_loop()
        pauses.watch_loop()  # once a loop, however often it is asked
        await asyncio.sleep(0.55)
        time.sleep(block_s)
        await asyncio.sleep(0.35)

    runner(main())


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_blocked_loop(ring: Writer, kind: str) -> None:
    if kind == "uvloop":
        import uvloop

        run = uvloop.run
    else:
        run = asyncio.run
    blocked(0.5, run)
    found = counts(ring, "loop_lag")
    # Ten times a second when it can: some 9 in 0.9 s, and the one that had to wait.
    assert 3 <= sum(found) <= 11
    longest = max(end - due for _, due, end in records(ring, LAG)) / 1e9
    assert longest >= 0.39
    assert sum(found[8:]) >= 1  # more than 0.3 s
    assert seconds(ring, "loop_lag") >= longest
    time.sleep(0.25)
    assert counts(ring, "loop_lag") == found, "it ended with its loop"


def test_a_loop_that_is_not_blocked_has_no_lag_to_speak_of(ring: Writer) -> None:
    async def main() -> None:
        pauses.watch_loop()
        await asyncio.sleep(1.0)

    asyncio.run(main())
    assert sum(counts(ring, "loop_lag")) >= 3
    assert seconds(ring, "loop_lag") >= 0


def test_without_a_loop_there_is_none_to_watch(ring: Writer) -> None:
    pauses.watch_loop()
    assert sum(counts(ring, "loop_lag")) == 0


def test_a_watched_loop_keeps_no_process_alive() -> None:
    code = (
        "import asyncio\n"
        "from llmobs import pauses\n"
        "async def main():\n"
        "    pauses.watch_loop()\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=30, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# A process that stands still

SLEEPER = (
    "import sys, time; from pathlib import Path\n"
    "from llmobs import pauses; from llmobs.ring import Writer\n"
    "ring = Writer(Path(sys.argv[1]), 64, {})\n"
    "print('ready', flush=True)\n"
    "for _ in range(int(sys.argv[2])):\n"
    "    with pauses.waiting(ring, 0.2): time.sleep(0.2)\n"
)


def test_a_process_that_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "a.ring"
    with python(SLEEPER, path, 10) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        while psutil.Process(child.pid).status() != psutil.STATUS_SLEEPING:
            time.sleep(0.001)
        os.kill(child.pid, signal.SIGSTOP)
        stopped = time.monotonic_ns()
        time.sleep(1.5)
        goes_on = time.monotonic_ns()
        os.kill(child.pid, signal.SIGCONT)
        assert child.wait(30) == 0
    found = [(r[5][0], r[6]) for r in read_all(Reader(path))[0] if r[1] == FROZEN]
    since, until = max(found, key=lambda pair: pair[1] - pair[0])
    assert stopped - 50_000_000 <= since <= stopped + 250_000_000
    assert until >= goes_on
    assert until - since > 1.2e9


@pytest.mark.parametrize("how", ["a long call", "a long call that sleeps", "a collection"])
def test_a_thread_that_holds_pythons_lock_does_not_freeze_the_process(
    ring: Writer, how: str
) -> None:
    """It runs, or waits for something, and only the others stand still."""
    holding = ctypes.PyDLL(None)  # of which a call keeps the lock
    numbers = list(range(3_000_000, 0, -1))
    heap = [[n] for n in range(2_000_000)] if how == "a collection" else []

    def hold() -> None:
        until = time.monotonic() + 0.7
        if how == "a long call that sleeps":
            holding.usleep(800_000)
        elif how == "a collection":
            gc.collect()
            gc.collect()
        else:
            while time.monotonic() < until:
                sorted(numbers, key=None)
                sum(numbers)

    holder = threading.Timer(0.05, hold)
    holder.start()
    with pauses.waiting(ring, 0.1):
        time.sleep(0.1)
    holder.join()
    del heap
    assert records(ring, FROZEN) == []
