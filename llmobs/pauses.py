"""What holds up a whole process: Python's garbage collector, a blocked event loop, a stop."""

import asyncio
import contextlib
import gc
import os
import resource
import time
import weakref
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from llmobs import schema
from llmobs.guard import GUARD
from llmobs.ring import Writer
from llmobs.schema import Kind
from llmobs.slo import SLO

now = time.monotonic_ns

BOUNDS_NS = tuple(int(bound * 1e9) for bound in SLO.step_seconds)
COLLECTIONS = schema.PROCESS_CELL["gc_pause"]
COLLECTIONS_NS = schema.PROCESS_CELL["gc_pause_ns"]
LAGS = schema.PROCESS_CELL["loop_lag"]
LAGS_NS = schema.PROCESS_CELL["loop_lag_ns"]

LOOP_SECONDS = 0.1
"""How often the event loop is asked to come back. One that is blocked is seen to be, for up to so
much less than it was."""
LONG_COLLECTION_NS = 5_000_000
LONG_LAG_NS = 50_000_000
LONG_FREEZE_NS = 100_000_000
"""From here on there is a record of each, so that what it held up can be explained by it."""
ASKED_AT_LEAST = 4
ASKS_AGAIN_NS = 200_000_000
"""How often a thread that waits for Python's lock asks for it, on however busy a machine."""

_ring: Writer | None = None
"""Where this process tells of its pauses: None in a forked child until it has its own."""
_loops: "weakref.WeakSet[Any]" = weakref.WeakSet()


def watch(ring: Writer) -> None:
    """Time the garbage collector of this process from now on, which has this ring."""
    global _ring
    _ring = ring
    if _collected not in gc.callbacks:
        gc.callbacks.append(_collected)


def stop() -> None:
    """Time nothing any more."""
    global _ring
    _ring = None
    _loops.clear()
    if _collected in gc.callbacks:
        gc.callbacks.remove(_collected)


def _forked() -> None:
    global _ring
    _ring = None
    _loops.clear()


os.register_at_fork(after_in_child=_forked)

_began = 0


def _collected(
    phase: str,
    info: dict[str, int],
    now: Any = now,
    first: int = BOUNDS_NS[0],
    failed: Any = GUARD.failed,
) -> None:
    """Called at each start and end of a collection, for which all threads of the process wait.

    There may be some at each step, and almost all end in the first bucket. The collector does not
    run within itself, so nothing else writes these cells at the same time.
    """
    global _began
    if phase == "start":
        _began = now()
        return
    try:
        if _ring is None or not _began:
            return
        pause = now() - _began
        cells = _ring.cells
        cells[COLLECTIONS_NS] += pause
        if pause <= first:
            cells[COLLECTIONS] += 1
            return
        cells[COLLECTIONS + bisect_left(BOUNDS_NS, pause)] += 1
        if pause >= LONG_COLLECTION_NS:
            generation = info["generation"]
            _ring.put(Kind.COLLECTION, _began + pause, 0, generation, 0, _began)
    except Exception:
        failed("pauses")


def watch_loop() -> None:
    """Time the event loop that runs here, to its end. Safe to call twice, and without a loop."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if loop not in _loops:
        _loops.add(loop)
        _again(loop)


def _again(loop: asyncio.AbstractEventLoop) -> None:
    # By a clock of our own: uvloop's stands still while callbacks run, and its timers go by it.
    loop.call_later(LOOP_SECONDS, _tick, loop, now() + int(LOOP_SECONDS * 1e9))


def _tick(loop: asyncio.AbstractEventLoop, due: int) -> None:
    try:
        time_now = now()
        if loop not in _loops:
            return
        _again(loop)
        if _ring is not None:
            lag = max(time_now - due, 0)
            _ring.cells[LAGS_NS] += lag
            _ring.cells[LAGS + bisect_left(BOUNDS_NS, lag)] += 1
            if lag >= LONG_LAG_NS:
                _ring.put(Kind.LAG, time_now, 0, 0, 0, due)
    except Exception:
        GUARD.failed("pauses")


@contextlib.contextmanager
def waiting(ring: Writer, seconds: float) -> Iterator[None]:
    """Around a wait of so long: tell if the whole process was kept from running when it should have
    gone on.

    A thread that wakes up while another one holds Python's lock (a collection, a long call) asks
    for it every 5 ms, on a busy machine less often; each time it gives up the CPU. In a process
    that is stopped, or gets no CPU, it does nothing at all.
    """
    asked = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    due = now() + int(seconds * 1e9)
    yield
    late = now() - due
    if late >= LONG_FREEZE_NS:
        asked = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - asked
        if asked < max(ASKED_AT_LEAST, late // ASKS_AGAIN_NS):
            ring.put(Kind.FROZEN, due + late, 0, 0, 0, due)
