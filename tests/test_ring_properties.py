"""Whatever is written comes back, whatever is damaged is counted: for any values, sizes, orders."""

import contextlib
import itertools
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmobs.ring import Reader, RingError, Writer
from llmobs.schema import Kind
from tests.rings import ENGINE, SLOT, SLOTS_AT, read_all

pytestmark = pytest.mark.timeout(300)
ANY = settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))

U8, U16, U32 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32))
I64 = st.integers(-(2**63), 2**63 - 1)
RECORD = st.tuples(st.sampled_from([int(kind) for kind in Kind]), I64, U32, U8, U16, *[I64] * 9)
NUMBERS = st.lists(U32, max_size=80)
TEXT = st.binary(max_size=300)
WRITE = (
    st.tuples(st.just("put"), RECORD)
    | st.tuples(st.just("put_list"), st.tuples(I64, NUMBERS, U32))
    | st.tuples(st.just("put_text"), st.tuples(I64, TEXT, U32))
)


@contextlib.contextmanager
def ring(capacity: int) -> Iterator[tuple[Writer, Path]]:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.ring"
        yield Writer(path, capacity, ENGINE), path


def columns(numbers: list[int]) -> list[int]:
    """Eighteen unsigned 32-bit numbers as nine signed 64-bit columns."""
    return list(struct.unpack("<9q", struct.pack("<18I", *numbers, *[0] * (18 - len(numbers)))))


def write(writer: Writer, what: str, arguments: Any) -> list[tuple[Any, ...]]:
    """Write, and tell what must come back, without the records' numbers."""
    if what == "put":
        writer.put(*arguments)
        kind, time, z, x, y, *rest = arguments
        return [(kind, x, y, z, rest, time)]
    time, content, z = arguments
    if what == "put_list":
        writer.put_list(19, time, list(content), z)
        parts = [content[start : start + 18] for start in range(0, len(content), 18)]
        return [(19, len(part), 0, z, columns(part), time) for part in parts]
    writer.put_text(8, time, content, z)
    texts = [content[start : start + 72] for start in range(0, len(content), 72)]
    return [
        (8, len(text), part, z, list(struct.unpack("<9q", text.ljust(72, b"\0"))), time)
        for part, text in enumerate(texts)
    ]


def content(record: tuple[Any, ...]) -> tuple[Any, ...]:
    number, kind, x, y, z, values, time, again = record
    assert number == again
    return kind, x, y, z, values, time


@given(st.lists(WRITE, max_size=12))
@ANY
def test_what_is_written_is_what_is_read(writes: list[tuple[str, Any]]) -> None:
    """Each kind of record, each value its fields can hold; lists and texts of any length."""
    with ring(200) as (writer, path):
        reader = Reader(path)
        expected = [record for what, how in writes for record in write(writer, what, how)]
        records, lost = read_all(reader)
        reader.close()
        assert [content(record) for record in records] == expected
        assert [record[0] for record in records] == list(range(1, len(expected) + 1))
        assert lost == 0


@given(
    st.integers(1, 40),
    st.lists(st.lists(WRITE, max_size=8) | st.integers(1, 100), max_size=20),
)
@ANY
def test_any_order_of_writing_and_reading(capacity: int, turns: list[Any]) -> None:
    """A number stands for one read of at most so many. However often the ring goes round, what is
    read is what was written by that number, and the rest is counted."""
    with ring(capacity) as (writer, path):
        reader = Reader(path)
        written: list[tuple[Any, ...]] = []
        seen = 0
        for turn in [*turns, *[100] * (len(turns) * 40 // capacity + 3)]:
            if isinstance(turn, int):
                batch = reader.read(turn)
                seen += batch.lost
                for record in batch.rows():
                    seen += 1
                    assert record[0] == seen
                    assert content(record) == written[seen - 1]
            else:
                written += [record for what, how in turn for record in write(writer, what, how)]
        records, lost = read_all(reader)
        reader.close()
        assert seen + lost + len(records) == len(written)


SPLASHES = st.lists(
    st.tuples(st.integers(0, 2**32), st.binary(min_size=1, max_size=400)), min_size=1, max_size=6
)


def splash(path: Path, capacity: int, splashes: list[tuple[int, bytes]]) -> set[int]:
    """Overwrite bytes among the slots; the slots that were touched."""
    touched: set[int] = set()
    with path.open("r+b") as file:
        for at, noise in splashes:
            at %= capacity * SLOT
            noise = noise[: capacity * SLOT - at]
            file.seek(SLOTS_AT + at)
            file.write(noise)
            touched.update(range(at // SLOT, (at + len(noise) - 1) // SLOT + 1))
    return touched


@given(st.integers(1, 60), st.integers(1, 150), SPLASHES, st.integers(0, 60))
@example(2, 17, [(0, b"\x00")], 0)  # overrun, and damaged just where the reader stands
@ANY
def test_damage_costs_what_it_damaged_and_is_over_after_one_round(
    capacity: int, count: int, splashes: list[tuple[int, bytes]], read_before: int
) -> None:
    """No record comes that was not written; what nobody touched comes as it was written; once the
    writer has gone round, all comes again."""
    with ring(capacity) as (writer, path):
        reader = Reader(path)

        def put(number: int) -> None:
            writer.put(21, number * 7, number, number % 256, 1, number, -number, number * 3)

        put(1)
        reader.read(read_before or 1)
        for number in range(2, count + 1):
            put(number)
        touched = splash(path, capacity, splashes)
        seen = reader.position - 1
        numbers = []
        for _ in range(2 * capacity + 4):
            batch = reader.read()
            seen += batch.lost
            for record in batch.rows():
                seen += 1
                assert record[0] == seen <= count
                numbers.append(seen)
                if seen % capacity not in touched:
                    values = [seen, -seen, seen * 3, *[0] * 6]
                    assert content(record) == (21, seen % 256, 1, seen, values, seen * 7)
        still = range(max(count - capacity + capacity // 8 + 2, 2), count + 1)
        assert {n for n in still if n % capacity not in touched} <= {*numbers, 1}
        for number in range(count + 1, count + 1 + 2 * capacity):
            put(number)
            batch = reader.read()
            seen += batch.lost + len(batch.records)
        for number in range(count + 1 + 2 * capacity, count + 11 + 2 * capacity):
            put(number)
            records, lost = read_all(reader)
            seen += lost + len(records)
            assert [record[0] for record in records] == [number]
        assert seen == count + 10 + 2 * capacity
        reader.close()


@given(st.integers(3, 60), st.integers(1, 100), st.data())
@ANY
def test_a_number_that_is_not_true_is_not_believed(
    capacity: int, count: int, data: st.DataObject
) -> None:
    """Right at both ends, and in its slot, but laps ahead: it costs its own record."""
    count += 2
    with ring(capacity) as (writer, path):
        for number in range(1, count + 1):
            writer.put(21, 5, number)
        slot = data.draw(st.integers(0, capacity - 1))
        lap = data.draw(st.integers(count // capacity + 3, 2**50))
        with path.open("r+b") as file:
            for at in (0, 96):
                file.seek(SLOTS_AT + slot * SLOT + at)
                file.write(struct.pack("<Q", slot + lap * capacity))
        reader = Reader(path)
        numbers: list[int] = []
        for number in range(count + 1, count + 1 + capacity + 20):
            for _ in range(3):
                records, _ = read_all(reader)
                numbers += [record[0] for record in records]
            writer.put(21, 5, number)
        records, _ = read_all(reader)
        numbers += [record[0] for record in records]
        reader.close()
        assert numbers == sorted(set(numbers))
        assert numbers[-1] == count + capacity + 20
        assert max(b - a for a, b in itertools.pairwise(numbers)) <= 2
        first = max(count - capacity + capacity // 8 + 3, 1)
        assert set(range(first, count + 1)) - set(numbers) <= {
            number for number in range(first, count + 1) if number % capacity == slot
        } | {first}


@given(st.binary(max_size=400), st.integers(0, 3), st.integers(0, 200))
@ANY
def test_a_file_of_any_bytes(noise: bytes, slots: int, cut: int) -> None:
    """Its header right or not, its length right or not: a ring, or RingError."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.ring"
        header = struct.pack("<8sIIQIIQ", b"LLMOBSR1", 2, 104, slots, os.getpid(), 0, 1)
        whole = (header.ljust(SLOTS_AT, b"\0") + noise.ljust(slots * SLOT, b"\0"))[: -cut or None]
        path.write_bytes(whole)
        try:
            reader = Reader(path)
        except RingError:
            assert len(whole) != SLOTS_AT + slots * SLOT or not slots
            return
        assert reader.info() == {}
        for _ in range(8):
            read_all(reader)
        reader.close()


@pytest.mark.parametrize("capacity", [10_324_441, 10**10])
def test_a_file_that_says_it_is_larger_than_any_ring(tmp_path: Path, capacity: int) -> None:
    """Without having a block of it: to look through it would take the reader's memory."""
    path = tmp_path / "a.ring"
    with path.open("wb") as file:
        file.write(struct.pack("<8sIIQIIQ", b"LLMOBSR1", 2, 104, capacity, 1, 0, 1))
        file.truncate(SLOTS_AT + capacity * SLOT)
    with pytest.raises(RingError, match="its length is not what its header says"):
        Reader(path)
