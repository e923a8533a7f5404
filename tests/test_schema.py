"""The layout of a ring file, byte by byte, and of the cumulative totals."""

import math
import struct
from itertools import product
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from llmobs import schema
from llmobs.ring import Writer


def test_a_file_by_hand(tmp_path: Path) -> None:
    """Where everything stands, read with nothing but struct."""
    ring = Writer(tmp_path / "a.ring", 4, {"roles": []})
    ring.put(21, 1234, 9, 1, 2, 10, -11, 12, 13, 14, 15, 16, 17, -(2**63))
    ring.cells[0], ring.cells[100] = 5, -6
    content = (tmp_path / "a.ring").read_bytes()
    magic, version, slot, capacity = struct.unpack_from("<8sIIQ", content)
    assert (magic, version, slot, capacity) == (b"LLMOBSR1", 2, 104, 4)
    (length,) = struct.unpack_from("<I", content, 28)
    assert content[64 : 64 + length] == b'{"roles": []}'
    assert struct.unpack_from("<q", content, 16384) == (5,)
    assert struct.unpack_from("<q", content, 16384 + 800) == (-6,)
    record = struct.unpack_from("<QBBHI9qqQ", content, 65536 + 104)
    columns = (10, -11, 12, 13, 14, 15, 16, 17, -(2**63))
    assert record == (1, 21, 1, 2, 9, *columns, 1234, 1)
    assert len(content) == 65536 + 4 * 104


def test_vocabularies() -> None:
    """Their numbers are written into files that outlive a release: they never move."""
    numbers = {kind.name: kind.value for kind in schema.Kind}
    assert numbers == {
        "ARRIVE": 1,
        "ADMIT": 2,
        "FIRST": 3,
        "SEQUENCE_END": 4,
        "END": 5,
        "BEAMS": 6,
        "CONTEXT": 7,
        "TRACE_STATE": 8,
        "JOIN": 16,
        "CHUNK": 17,
        "PREEMPT": 18,
        "TOKENS": 19,
        "SKIP": 20,
        "STEP": 21,
        "LEAVE": 22,
        "SNAPSHOT": 23,
        "SNAPSHOT_ENTRY": 24,
        "MORE": 25,
        "KV_STARVED": 26,
        "FORWARD": 32,
        "SAMPLE": 33,
        "GPU": 34,
        "COLLECTION": 40,
        "LAG": 41,
        "FROZEN": 42,
        "EXIT": 43,
        "RAISED": 44,
        "BROKEN": 45,
    }
    assert schema.names(schema.Outcome) == ("stop", "length", "abort", "error", "rejected")
    assert schema.names(schema.BatchKind) == ("prefill", "decode", "mixed")
    assert schema.names(schema.SequenceState) == ("waiting", "prefill", "decode", "preempted")
    assert schema.names(schema.Wait) == (
        *("engine_busy", "max_num_seqs", "token_budget", "kv_cache", "grammar", "remote_kv"),
        *("input", "adapter", "paused"),
    )
    assert [flag.value for flag in schema.Flag] == [1, 2, 4, 8]


def test_no_two_totals_share_a_cell() -> None:
    cells: list[int] = []
    for name, dimensions in schema.PER_MODEL.items():
        sizes = math.prod(len(schema.LABELS[d]) for d in dimensions)
        for model in range(22):
            first = schema.model_cell(name, model)
            cells += range(first, first + sizes)
    for name, dimensions in schema.PER_PROCESS.items():
        first = schema.PROCESS_CELL[name]
        cells += range(first, first + math.prod(len(schema.LABELS[d]) for d in dimensions))
    cells += range(schema.GUARD_CELL, schema.GUARD_CELL + 64)
    assert sorted(cells) == list(range(len(cells)))
    assert len(cells) == schema.CELLS
    assert 16384 + 8 * len(cells) <= 65536


@given(st.integers(0, 4), st.integers(0, 4))
def test_the_order_of_cells_is_that_of_the_labels(bucket: int, outcome: int) -> None:
    pairs = list(product(schema.LABELS["context_bucket_or_unknown"], schema.LABELS["outcome"]))
    assert pairs[bucket * 5 + outcome] == (
        ("0-1k", "1k-4k", "4k-32k", "32k+", "unknown")[bucket],
        ("stop", "length", "abort", "error", "rejected")[outcome],
    )
