"""The buckets, targets and boundaries of the contract."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmobs.slo import BUCKET_NAMES, SLO, ContextBucket, Slo


def test_the_users_buckets_and_targets() -> None:
    assert [(b.name, b.limit, b.first_token, b.token_gap) for b in SLO.buckets] == [
        ("0-1k", 1024, 0.3, 0.2),
        ("1k-4k", 4096, 0.3, 0.2),
        ("4k-32k", 32768, 0.8, 0.2),
        ("32k+", None, 0.8, 0.2),
    ]
    assert BUCKET_NAMES == ("0-1k", "1k-4k", "4k-32k", "32k+")


def oracle(tokens: int) -> str:
    if tokens <= 1024:
        return "0-1k"
    if tokens <= 4096:
        return "1k-4k"
    return "4k-32k" if tokens <= 32768 else "32k+"


@given(
    st.integers(0, 1_000_000)
    | st.sampled_from([0, 1, 1023, 1024, 1025, 4095, 4096, 4097, 32767, 32768, 32769])
)
def test_the_bucket_of_a_prompt(tokens: int) -> None:
    assert BUCKET_NAMES[SLO.bucket_index(tokens)] == oracle(tokens)


def test_the_boundaries_of_the_contract() -> None:
    assert {0.05, 0.2, 0.3, 0.5, 0.8} <= set(SLO.fine_seconds)
    assert (SLO.fine_seconds[0], SLO.fine_seconds[-1]) == (0.001, 60.0)
    assert {1024, 4096, 32768} <= set(SLO.context_tokens)
    for coarse in (SLO.step_seconds, SLO.batch_sizes, SLO.context_tokens):
        assert len(coarse) <= 10


LAST = ContextBucket("all", None, 0.3, 0.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fine_seconds": (0.2, 0.3, 0.3, 0.8)}, "fine_seconds must rise"),
        ({"fine_seconds": (0.3, 0.2, 0.8)}, "fine_seconds must rise"),
        ({"step_seconds": (2.0, 1.0)}, "step_seconds must rise"),
        ({"batch_sizes": (1, 1)}, "batch_sizes must rise"),
        ({"context_tokens": (5, 4)}, "context_tokens must rise"),
        ({"fine_seconds": (0.2, 0.8)}, "target 0.3 of 0-1k is no histogram boundary"),
        ({"buckets": (ContextBucket("a", 10, 0.3, 0.2),)}, "last has none"),
        ({"buckets": (ContextBucket("a", None, 0.3, 0.2), LAST)}, "needs a limit"),
        (
            {"buckets": (*(ContextBucket(n, n, 0.3, 0.2) for n in (9, 8)), LAST)},
            "limits must rise",
        ),
        ({"buckets": (ContextBucket("a", None, 0.31, 0.2),)}, "target 0.31"),
    ],
)
def test_a_wrong_definition_is_loud(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Slo(), **change)
