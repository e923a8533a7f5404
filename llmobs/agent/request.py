"""One request: what is known of it, and the partition of its time."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from llmobs import schema
from llmobs.agent.steps import EngineView, Preemption, Sequence
from llmobs.schema import Flag, Outcome


@dataclass(slots=True)
class Admission:
    """A sequence as the front end saw it. `tokens` is -1 until it ended there."""

    key: int
    time: int
    flags: int
    prompt: int
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


class Finished(NamedTuple):
    """What is kept of a request that ended; no text. Times in seconds."""

    ended: float
    """Unix time."""
    model: str
    context_bucket: str
    outcome: str
    status: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    first_token: float | None
    longest_gap: float | None
    preemptions: int
    phases: tuple[float, ...]
    """In the order of PHASES, they sum to `seconds`; the first only if it was never admitted."""
    first_token_phases: tuple[float, ...]
    """The same until the first token, they sum to `first_token`; empty if there was none."""


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


def phases_of(request: Request) -> tuple[int, ...]:
    """Nanoseconds in each of PHASES; they sum to the request's whole time, by construction.

    They follow the sequence that ended last. A request that never got to the engine has the first
    phase only. All sequences of a beam search are one: what began with the first ended with the
    last.
    """
    arrival, end = request.arrival, request.end
    if not request.admissions:
        return (end - arrival,)
    known = _known(request)
    if not known:
        added = min(max(min(a.time for a in request.admissions.values()), arrival), end)
        return (added - arrival, end - added, 0, 0, 0, 0)
    opening, sequence = max(known, key=lambda pair: pair[1].last or pair[1].left)
    start = sequence
    if opening.flags & Flag.BEAM:
        opening, start = min(known, key=lambda pair: pair[0].time)
    whole = request.outcome in (Outcome.STOP, Outcome.LENGTH)
    last = (sequence.last or sequence.left) if whole else end
    marks = (arrival, opening.time, start.started or end, start.first or last, last, end)
    return _partition(marks, sequence.preemptions)


def first_token_phases_of(request: Request, first: int) -> tuple[int, ...]:
    """The same until the first token, by the sequence that had it; empty if there was none."""
    known = [(a, s) for a, s in _known(request) if s.first]
    if not known or not first:
        return ()
    opening, sequence = min(known, key=lambda pair: pair[1].first)
    marks = (request.arrival, opening.time, sequence.started, sequence.first, sequence.first, first)
    return _partition(marks, sequence.preemptions)


def _known(request: Request) -> list[tuple[Admission, Sequence]]:
    return [(a, a.sequence) for a in request.admissions.values() if a.sequence is not None]


def _partition(marks: tuple[int, ...], preemptions: list[Preemption]) -> tuple[int, ...]:
    """From the six moments between which the phases lie. Moments out of order, as an abort leaves
    them, are clamped; what was lost to preemption is taken out of prefill and decode."""
    *ordered, end = marks
    moments = [ordered[0]]
    for moment in (*ordered[1:], end):
        moments.append(min(max(moment, moments[-1]), max(end, ordered[0])))
    preprocess, queue, prefill, decode, deliver = (b - a for a, b in pairwise(moments))
    preempted = 0
    for loss in preemptions:
        stop = loss.end or end
        in_prefill = max(min(stop, moments[3]) - max(loss.start, moments[2]), 0)
        in_decode = max(min(stop, moments[4]) - max(loss.start, moments[3]), 0)
        prefill, decode = prefill - in_prefill, decode - in_decode
        preempted += in_prefill + in_decode
    return preprocess, queue, prefill, preempted, decode, deliver
