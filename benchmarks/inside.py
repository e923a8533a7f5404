"""Times llmobs' own code inside a server's processes; put in by a sitecustomize of steps.py's.

Each probed function is timed twice, around llmobs' wrapper and within it: the difference is ours.
What the timing itself costs is measured on a function that does nothing, and taken off.
Medians, so that what else runs on the machine does not count.
"""

import functools
import json
import os
import statistics
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wrapt

OUT = "LLMOBS_BENCH_OUT"
clock = time.perf_counter_ns


class Timer:
    """Own time of one probe: nanoseconds of each call."""

    def __init__(self) -> None:
        self.own = array("q")
        self.host = 0

    def within(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def inner(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            try:
                return original(*args, **kwargs)
            finally:
                self.host = clock() - began

        return inner

    def around(self, wrapper: Callable[..., Any], original: Any) -> Callable[..., Any]:
        def outer(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            try:
                return wrapper(*args, **kwargs)
            finally:
                self.own.append(clock() - began - self.host)

        return functools.wraps(original)(outer) if hasattr(original, "__name__") else outer


TIMERS: dict[str, Timer] = {}


def overhead() -> float:
    """Nanoseconds that a call seems to take of ours where nothing is ours."""
    timer = Timer()

    def nothing(argument: Any) -> None:
        pass

    outer = timer.around(timer.within(nothing), nothing)
    for _ in range(20_000):
        outer(1)
    return statistics.median(timer.own)


def _time_probes(probes: Any) -> None:
    wrap = probes.wrap

    def timed_wrap(name: str, original: Callable[..., Any], *rest: Any, **more: Any) -> Any:
        timer = TIMERS.setdefault(name, Timer())
        return timer.around(wrap(name, timer.within(original), *rest, **more), original)

    probes.wrap = timed_wrap


def _time_chunks(frontend: Any) -> None:
    sender = frontend.Edge.sender

    def timed_sender(edge: Any, send: Callable[..., Any]) -> Callable[..., Any]:
        timer = TIMERS.setdefault("chunk", Timer())
        return timer.around(sender(edge, timer.within(send)), None)

    frontend.Edge.sender = timed_sender


def _tell(folder: Path) -> None:
    """Write how often each probe was called since the last window began, and the median of its own
    time; a window begins when `window` says another name."""
    taken_off = overhead()
    window = ""
    while True:
        time.sleep(0.5)
        told = {
            name: (len(timer.own), statistics.median(timer.own) - taken_off)
            for name, timer in TIMERS.items()
            if timer.own
        }
        if told:
            partial = folder / f"{os.getpid()}.new"
            partial.write_text(json.dumps(told))
            partial.rename(folder / f"{os.getpid()}.json")
        if (folder / "window").read_text() != window:
            window = (folder / "window").read_text()
            for timer in TIMERS.values():
                del timer.own[:]


def install() -> None:
    wrapt.register_post_import_hook(_time_probes, "llmobs.probes")
    wrapt.register_post_import_hook(_time_chunks, "llmobs.frontend")
    threading.Thread(target=_tell, args=(Path(os.environ[OUT]),), daemon=True).start()
