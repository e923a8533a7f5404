"""One request: what is known of it, and the partition of its time."""

import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from llmobs import schema
from llmobs.agent.steps import EngineView, Preemption, Sequence
from llmobs.metrics import PHASES
from llmobs.schema import Flag, Outcome


@dataclass(slots=True)
class TraceContext:
    """Where the request's span belongs. Ids are 0 where there are none yet; `sampled` is what the
    owner of the parent decided, `remote_sampled` what the caller's traceparent said."""

    trace: int = 0
    parent: int = 0
    span: int = 0
    sampled: bool = False
    remote_sampled: bool = False
    state: bytes = b""
    local: bool = False
    """The parent is a server span of the same process."""

    def identify(self) -> None:
        """Give the trace and the request's own span their ids, if they have none."""
        self.trace = self.trace or random.getrandbits(128) | 1
        self.span = self.span or random.getrandbits(64) | 1


@dataclass(slots=True)
class Admission:
    """A sequence as the front end saw it. `tokens` is -1 until it ended there."""

    key: int
    time: int
    flags: int
    prompt: int
    max_tokens: int = 0
    tokens: int = -1
    ended: int = 0
    sequence: Sequence | None = None
    engine: EngineView | None = None


@dataclass(slots=True)
class Request:
    """One request, as far as it is known. Times in nanoseconds (monotonic), 0: not yet."""

    arrival: int
    route: int = 0
    complete: bool = True
    model: int = 0
    cell: int = -1
    first_chunk: int = 0
    first_observed: bool = False
    length_observed: bool = False
    admissions: dict[int, Admission] = field(default_factory=dict)
    beams: list[int] = field(default_factory=list)
    end: int = 0
    outcome: Outcome = Outcome.STOP
    status: int = 0
    bucket: int = schema.BUCKETS
    tokens: int = 0
    streamed: bool = False
    wall_at: int = 0
    wall: int = 0
    """The wall clock, in nanoseconds since the epoch, when the monotonic one stood at `wall_at`."""
    trace: "TraceContext" = field(default_factory=lambda: TraceContext())
    missed: tuple[str, ...] = ()
    """The objectives that it missed."""
    pinned: bool = False
    """An exemplar leads to its trace, which must be kept then."""


def first_token(request: Request) -> int:
    """When the first token was there: the first chunk handed to the server, engine time where there
    is no stream; 0 if there was none."""
    if request.first_chunk:
        return request.first_chunk
    if request.streamed and request.outcome in (Outcome.ABORT, Outcome.ERROR):
        return 0
    sequences = [a.sequence for a in request.admissions.values() if a.sequence is not None]
    # The engine may yield one more after the client left: nobody was given that.
    return min((s.first for s in sequences if 0 < s.first <= request.end), default=0)


class Segment(NamedTuple):
    """A stretch of a request's time in one phase; nanoseconds, monotonic. `loss` is the preemption
    that the phase `preempted` goes back to."""

    phase: str
    start: int
    end: int
    loss: Preemption | None = None


def segments_of(request: Request) -> list[Segment]:
    """The partition of a request's time: contiguous, from its arrival to its end, by construction.

    It follows the sequence that ended last. A request that never got to the engine has the first
    phase only. All sequences of a beam search are one: what began with the first ended with the
    last. Stretches of no length are left out.
    """
    if not request.admissions:
        return [Segment("preprocess", request.arrival, request.end)]
    return _cut(*_marks_of(request))


def _marks_of(request: Request) -> tuple[list[int], list[Preemption]]:
    """The moments between which the phases of an admitted request lie, and what was lost."""
    arrival, end = request.arrival, request.end
    chosen = chosen_sequence(request)
    if chosen is None:
        added = min(max(min(a.time for a in request.admissions.values()), arrival), end)
        return [arrival, added, end, end, end, end], []
    opening, start, sequence = chosen
    whole = request.outcome in (Outcome.STOP, Outcome.LENGTH)
    last = (sequence.last or sequence.left) if whole else end
    marks = [arrival, opening.time, start.started or end, start.first or last, last, end]
    return marks, sequence.preemptions


def chosen_sequence(request: Request) -> tuple[Admission, Sequence, Sequence] | None:
    """Which sequence stands for the request: its admission, where it starts and where it ends (two
    only in beam search); None if the engine knew none."""
    known = _known(request)
    if not known:
        return None
    opening, sequence = max(known, key=lambda pair: pair[1].last or pair[1].left)
    start = sequence
    if opening.flags & Flag.BEAM:
        opening, start = min(known, key=lambda pair: pair[0].time)
    return opening, start, sequence


def predicted_prefill(request: Request) -> float | None:
    """What the fit of prefill time by length said of the sequence that stands for it, in seconds;
    None: nothing."""
    chosen = chosen_sequence(request)
    return chosen[1].predicted or None if chosen else None


def cold_start(request: Request) -> bool:
    """Whether one of its prefills was a cold start."""
    return any(a.sequence.cold for a in request.admissions.values() if a.sequence is not None)


def phases_of(request: Request) -> tuple[int, ...]:
    """Nanoseconds in each of PHASES; the first alone if it was never admitted."""
    if not request.admissions:
        return (request.end - request.arrival,)
    return _sums(*_marks_of(request))


def first_token_phases_of(request: Request, first: int) -> tuple[int, ...]:
    """The same until the first token, by the sequence that had it; empty if there was none."""
    known = [(a, s) for a, s in _known(request) if s.first]
    if not known or not first:
        return ()
    opening, sequence = min(known, key=lambda pair: pair[1].first)
    marks = [request.arrival, opening.time, sequence.started, sequence.first, sequence.first, first]
    return _sums(marks, sequence.preemptions)


def _sums(marks: list[int], losses: list[Preemption]) -> tuple[int, ...]:
    """The time in each of PHASES."""
    if not losses:  # most requests: no segments need be cut
        arrival, admitted, started, first, last, end = _in_order(marks)
        return admitted - arrival, started - admitted, first - started, 0, last - first, end - last
    segments = _cut(marks, losses)
    return tuple(sum(s.end - s.start for s in segments if s.phase == phase) for phase in PHASES)


def _known(request: Request) -> list[tuple[Admission, Sequence]]:
    return [(a, a.sequence) for a in request.admissions.values() if a.sequence is not None]


def _in_order(marks: list[int]) -> list[int]:
    """Moments out of order, as an abort leaves them, are clamped."""
    if marks == sorted(marks):
        return marks
    end = max(marks[-1], marks[0])
    moments = [marks[0]]
    for moment in marks[1:]:
        moments.append(min(max(moment, moments[-1]), end))
    return moments


def _cut(marks: list[int], losses: list[Preemption]) -> list[Segment]:
    """From the six moments between which the phases lie; what was lost to preemption is cut out of
    prefill and decode."""
    moments = _in_order(marks)
    end = moments[-1]
    segments: list[Segment] = []
    names = ("preprocess", "queue", "prefill", "decode", "deliver")
    for name, (start, stop) in zip(names, pairwise(moments), strict=True):
        at = start
        if name in ("prefill", "decode"):
            for loss in losses:
                lost, found = max(loss.start, at), min(loss.end or end, stop)
                if lost < found:
                    segments += [Segment(name, at, lost), Segment("preempted", lost, found, loss)]
                    at = found
        segments.append(Segment(name, at, stop))
    joined: list[Segment] = []
    for segment in segments:
        if segment.start == segment.end:
            continue
        before = joined[-1] if joined else None
        if before and before.loss is segment.loss and before.phase == segment.phase:
            joined[-1] = before._replace(end=segment.end)
        else:
            joined.append(segment)
    return joined
