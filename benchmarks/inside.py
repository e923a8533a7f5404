"""Times llmobs' own code inside a server's processes; put in by a sitecustomize of steps.py's.

Each probed function is timed twice, around llmobs' wrapper and within it: the difference is ours.
What the timing itself costs is measured on a function that does nothing, and taken off.
"""

import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wrapt

OUT = "LLMOBS_BENCH_OUT"
clock = time.thread_time_ns
"""Of CPU, not of the wall's: what else runs on the machine meanwhile is not ours."""


class Timer:
    """Own time of one probe: calls and nanoseconds."""

    def __init__(self) -> None:
        self.calls = 0
        self.own = 0
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
                self.own += clock() - began - self.host
                self.calls += 1

        return functools.wraps(original)(outer) if hasattr(original, "__name__") else outer


TIMERS: dict[str, Timer] = {}


def overhead() -> float:
    """Nanoseconds that a call seems to take of ours where nothing is ours."""
    timer = Timer()

    def nothing(argument: Any) -> None:
        pass

    inner = timer.within(nothing)
    outer = timer.around(inner, nothing)
    for _ in range(20_000):
        outer(1)
    return timer.own / timer.calls


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
    while True:
        time.sleep(0.5)
        if TIMERS:
            told = {name: (timer.calls, timer.own) for name, timer in TIMERS.items()}
            partial = folder / f"{os.getpid()}.new"
            partial.write_text(json.dumps({"overhead": overhead(), "timers": told}))
            partial.rename(folder / f"{os.getpid()}.json")


def install() -> None:
    wrapt.register_post_import_hook(_time_probes, "llmobs.probes")
    wrapt.register_post_import_hook(_time_chunks, "llmobs.frontend")
    threading.Thread(target=_tell, args=(Path(os.environ[OUT]),), daemon=True).start()
