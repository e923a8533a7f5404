"""The partition of a request's time, whatever the order of events."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmobs.agent.request import (
    Admission,
    Request,
    first_token,
    first_token_phases_of,
    phases_of,
)
from llmobs.agent.steps import Preemption, Sequence
from llmobs.schema import Outcome

TIME = st.integers(1, 60)
MAYBE = st.just(0) | TIME


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    sequence = Sequence(1, 1, 0, 10, 0, True)
    sequence.joined, sequence.started = draw(MAYBE), draw(MAYBE)
    sequence.first, sequence.last, sequence.left = draw(MAYBE), draw(MAYBE), draw(MAYBE)
    # Intervals of one sequence never overlap, and only the last may be open.
    edges = sorted(draw(st.lists(TIME, max_size=6, unique=True)))
    sequence.preemptions = [Preemption(a, b) for a, b in pairwise([*edges, 0])][::2]
    return sequence


@st.composite
def requests(draw: st.DrawFn) -> Request:
    request = Request(draw(TIME))
    request.end = draw(st.integers(request.arrival, 61))
    request.outcome = draw(st.sampled_from(list(Outcome)))
    request.streamed = draw(st.booleans())
    request.first_chunk = draw(MAYBE)
    for key in range(draw(st.integers(0, 3))):
        flags = draw(st.sampled_from([0, 1, 4, 8]))
        admission = Admission(key, draw(TIME), flags, 10)
        admission.sequence = draw(st.none() | sequences())
        request.admissions[key] = admission
    return request


@given(requests())
@settings(max_examples=500)
def test_phases_sum_exactly_and_none_is_negative(request: Request) -> None:
    phases = phases_of(request)
    assert sum(phases) == request.end - request.arrival
    assert min(phases) >= 0
    assert len(phases) == (6 if request.admissions else 1)


@given(requests())
@settings(max_examples=500)
def test_phases_until_the_first_token_sum_to_it(request: Request) -> None:
    first = first_token(request)
    phases = first_token_phases_of(request, first)
    assert min(phases, default=0) >= 0
    if phases:
        assert len(phases) == 6
        assert sum(phases) == max(first - request.arrival, 0)
    elif first and not request.first_chunk:
        pytest.fail("an engine's first token has its phases")


def built(outcome: Outcome = Outcome.STOP, **times: int) -> Request:
    """Arrival 100, handed over 110; everything else by keyword."""
    request = Request(100)
    request.end, request.outcome = times.pop("end", 200), outcome
    admission = Admission(1, 110, 8, 10)
    sequence = admission.sequence = Sequence(1, 1, 0, 10, 0, True, joined=112)
    losses = times.pop("losses", ())
    sequence.preemptions = [Preemption(*loss) for loss in losses]  # type: ignore[attr-defined]
    for name, time in times.items():
        setattr(sequence, name, time)
    request.admissions[1] = admission
    return request


USUAL = {"started": 120, "first": 150, "last": 190, "left": 190}


@pytest.mark.parametrize(
    ("request_", "phases"),
    [
        (built(**USUAL), (10, 10, 30, 0, 40, 10)),
        # Preempted while decoding, and while prefilling.
        (built(**USUAL, losses=((160, 175),)), (10, 10, 30, 15, 25, 10)),
        (built(**USUAL, losses=((130, 140),)), (10, 10, 20, 10, 40, 10)),
        (built(**USUAL, losses=((130, 140), (160, 175))), (10, 10, 20, 25, 25, 10)),
        # Preempted just before a first token that was on its way.
        (built(**USUAL, losses=((140, 160),)), (10, 10, 20, 20, 30, 10)),
        # One that never came back, and one whose client left meanwhile.
        (built(Outcome.ABORT, **USUAL, losses=((160, 0),)), (10, 10, 30, 40, 10, 0)),
        # The client left: decode lasts until then, nothing is delivered.
        (built(Outcome.ABORT, **USUAL), (10, 10, 30, 0, 50, 0)),
        # ... before the first token, before it was started, and a token after all.
        (built(Outcome.ABORT, started=120, left=205), (10, 10, 80, 0, 0, 0)),
        (built(Outcome.ABORT, left=205), (10, 90, 0, 0, 0, 0)),
        (built(Outcome.ABORT, started=120, first=203, last=203, left=203), (10, 10, 80, 0, 0, 0)),
        # Pooling: no token, but an answer.
        (built(started=120, left=180), (10, 10, 60, 0, 0, 20)),
        # Failed in decode.
        (built(Outcome.ERROR, **USUAL), (10, 10, 30, 0, 50, 0)),
    ],
)
def test_phases_of_single_cases(request_: Request, phases: tuple[int, ...]) -> None:
    assert phases_of(request_) == phases


def test_phases_follow_the_sequence_that_ends_last() -> None:
    request = built(**USUAL)
    longer = Admission(2, 115, 8, 0)
    longer.sequence = Sequence(2, 2, 0, 10, 0, True, 116, 140, 160, 195, 195)
    request.admissions[2] = longer
    assert phases_of(request) == (15, 25, 20, 0, 35, 5)


def test_all_rounds_of_a_beam_search_are_one() -> None:
    request = built(**USUAL)
    request.admissions[1].flags = 4
    last = Admission(2, 170, 4, 0)
    last.sequence = Sequence(2, 2, 0, 10, 0, True, 171, 172, 195, 195, 195)
    request.admissions[2] = last
    assert phases_of(request) == (10, 10, 30, 0, 45, 5)


def test_one_that_never_got_to_the_engine() -> None:
    request = Request(100)
    request.end, request.outcome = 130, Outcome.REJECTED
    assert phases_of(request) == (30,)
    request.admissions[1] = Admission(1, 110, 8, 10)
    request.outcome = Outcome.ERROR
    assert phases_of(request) == (10, 20, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("outcome", "streamed", "chunk", "engine", "expected"),
    [
        (Outcome.STOP, True, 155, 150, 155),
        (Outcome.STOP, True, 0, 150, 150),
        (Outcome.STOP, False, 0, 150, 150),
        (Outcome.STOP, False, 0, 0, 0),
        # A stream that broke before its first chunk had none, whatever the engine did.
        (Outcome.ABORT, True, 0, 150, 0),
        (Outcome.ERROR, True, 0, 150, 0),
        (Outcome.ABORT, True, 155, 150, 155),
        (Outcome.ABORT, False, 0, 150, 150),
        # The engine's token came after the client had left.
        (Outcome.ABORT, False, 0, 203, 0),
    ],
)
def test_the_first_token(
    *, outcome: Outcome, streamed: bool, chunk: int, engine: int, expected: int
) -> None:
    request = built(outcome, first=engine)
    request.streamed, request.first_chunk = streamed, chunk
    assert first_token(request) == expected
