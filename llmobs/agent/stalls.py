"""Stalls: steps of an engine that took far too long while sequences ran, and why."""

from collections import deque
from typing import NamedTuple

from llmobs.metrics import STALL_CAUSES
from llmobs.schema import Kind
from llmobs.slo import SLO

LEAST_NS = int(min(bucket.token_gap for bucket in SLO.buckets) * 1e9)
"""A shorter pause between two tokens misses nobody's target."""
TIMES_USUAL = 10
"""So many times the median of the last STEPS_COMPARED steps is far too long."""
STEPS_COMPARED = 256
SILENT_NS = 3_000_000_000
"""A process that runs shows it every second."""
PAUSES_KEPT = 512
KEPT = 1024

FROZEN, GC, PREEMPTION, PREFILL, WORKER, UNKNOWN = STALL_CAUSES
PAUSES = {Kind.FROZEN: FROZEN, Kind.COLLECTION: GC}


class Pause(NamedTuple):
    """A whole process stood still. Times in nanoseconds, monotonic."""

    start: int
    end: int
    cause: str
    process: str


class Suspect(NamedTuple):
    """A step that took long: from the end of the one before, or where nothing ran then from its own
    beginning. `prompt` and `recomputed` are the tokens of prompts, and of what was lost to
    preemption, that it computed for some of `sequences`; `waited`: one was owed its next token."""

    start: int
    end: int
    sequences: int
    prompt: int
    recomputed: int
    waited: bool


class Stall(NamedTuple):
    """`process` is that which stood still, where one did."""

    start: int
    end: int
    cause: str
    process: str = ""


class Pauses:
    """When some processes stood still."""

    def __init__(self) -> None:
        self._known: deque[Pause] = deque(maxlen=PAUSES_KEPT)

    def add(self, process: str, kind: int, start: int, end: int) -> None:
        if kind in PAUSES:
            self._known.append(Pause(start, end, PAUSES[Kind(kind)], process))

    def most_of(self, start: int, end: int) -> tuple[str, str] | None:
        """What stood still for at least half of this time: why, and which process."""
        sums: dict[tuple[str, str], int] = {}
        for pause in self._known:
            overlap = min(pause.end, end) - max(pause.start, start)
            if overlap > 0:
                key = pause.cause, pause.process
                sums[key] = sums.get(key, 0) + overlap
        # A process may be stopped within a collection: that it was stopped says more.
        likely = [key for key, overlap in sums.items() if 2 * overlap >= end - start]
        return min(likely, default=None, key=lambda key: STALL_CAUSES.index(key[0]))


def cause_of(step: Suspect, computing: int, pauses: Pauses) -> Stall | None:
    """Why a step took long, of which `computing` was the model's time. None if it did no more than
    its work, and nobody waited for it."""
    length = step.end - step.start
    still = pauses.most_of(step.start, step.end)
    if still is not None:
        return Stall(step.start, step.end, *still)
    if 2 * computing < length:
        cause = UNKNOWN
    elif not step.waited:
        return None  # a long prompt alone takes long
    elif 2 * step.recomputed > step.sequences + step.prompt:
        cause = PREEMPTION
    elif step.prompt > step.sequences:
        cause = PREFILL
    else:
        cause = WORKER
    return Stall(step.start, step.end, cause)


def between(stalls: "deque[Stall]", start: int, end: int) -> list[Stall]:
    """The parts of stalls within this time, in order."""
    return [
        stall._replace(start=max(stall.start, start), end=min(stall.end, end))
        for stall in stalls
        if stall.start < end and stall.end > start
    ]
