"""Each record is read once, whole and in order, or it is counted as lost."""

import contextlib
import errno
import itertools
import os
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmobs.ring import Reader, RingError, Writer, start_ticks
from tests.rings import ENGINE, SLOT, SLOTS_AT, new_ring, python, read_all


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Hypothesis runs a test many times, pytest's tmp_path is made once."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def payload(n: int) -> tuple[int, ...]:
    """Columns that belong to record n and to no other."""
    return tuple((n * 1_000_003 + place) * (-1) ** place for place in range(9))


def put(ring: Writer, n: int) -> None:
    ring.put(n % 200, n * 7, n % 2**32, n % 256, n % 65536, *payload(n))


def check(record: tuple, n: int) -> None:
    assert record == (n, n % 200, n % 256, n % 65536, n % 2**32, list(payload(n)), n * 7, n)


CAPACITIES = st.integers(1, 40) | st.sampled_from([63, 64, 65, 127, 200])


@given(CAPACITIES, st.lists(st.tuples(st.integers(0, 90), st.integers(1, 100)), max_size=12))
@settings(max_examples=150, deadline=None)
def test_each_record_once_in_order_or_lost(capacity: int, turns: list[tuple[int, int]]) -> None:
    """`turns`: so many puts, then one read of at most so many records."""
    with folder() as path:
        ring = Writer(path / "a.ring", capacity, {})
        reader = Reader(path / "a.ring")
        written = seen = 0
        turns = [*turns, *[(0, 100)] * (2 + sum(puts for puts, _ in turns) // max(capacity, 1))]
        for puts, most in turns:
            for _ in range(puts):
                written += 1
                put(ring, written)
            behind = written - seen
            batch = reader.read(most)
            assert len(batch.records) <= most
            if behind <= capacity:
                assert batch.lost == 0, "nothing was overwritten"
            seen += batch.lost
            for record in batch.rows():
                seen += 1
                check(record, seen)
            assert seen <= written
        rest, lost = read_all(reader)
        for record, n in zip(rest, itertools.count(seen + lost + 1), strict=False):
            check(record, n)
        assert seen + lost + len(rest) == written
        reader.close()


def test_overrun_is_counted_to_the_record(tmp_path: Path) -> None:
    ring = Writer(tmp_path / "a.ring", 16, {})
    reader = Reader(tmp_path / "a.ring")
    for n in range(1, 101):
        put(ring, n)
    records, lost = read_all(reader)
    # 85 to 100 are still there; two of them are given up, to keep ahead of the writer.
    assert [record[0] for record in records] == list(range(87, 101))
    assert lost == 86
    put(ring, 101)
    records, lost = read_all(reader)
    assert [record[0] for record in records] == [101]
    assert lost == 0


DAMAGE = st.tuples(st.integers(0, 29), st.sampled_from([0, 96]), st.binary(min_size=8, max_size=8))


@given(st.lists(DAMAGE, min_size=1, max_size=8, unique_by=lambda d: d[0]), st.integers(1, 29))
@settings(max_examples=150, deadline=None)
def test_torn_slots_are_stepped_over_and_counted(
    damages: list[tuple[int, int, bytes]], count: int
) -> None:
    """Records whose number was damaged at either end are lost, and only those."""
    with folder() as path:
        ring = Writer(path / "a.ring", 30, {})
        for n in range(1, count + 1):
            put(ring, n)
        torn = set()
        with open(path / "a.ring", "r+b") as file:
            for slot, at, number in damages:
                file.seek(SLOTS_AT + slot * SLOT + at)
                file.write(number)
                torn.add(slot)
        reader = Reader(path / "a.ring")
        numbers: list[int] = []
        lost = 0
        for _ in range(3 * len(damages) + 3):  # a torn one is looked at twice
            records, more = read_all(reader)
            for record in records:
                check(record, record[0])
            numbers += [record[0] for record in records]
            lost += more
        whole = [n for n in range(1, count + 1) if n % 30 not in torn]
        assert numbers == whole
        # What is torn at the very end may still be on its way.
        assert lost == max(whole, default=0) - len(whole)
        # The writer goes on, and so does the reader.
        for n in range(count + 1, count + 31):
            put(ring, n)
        records, more = read_all(reader)
        again, rest = read_all(reader)
        numbers += [record[0] for record in records + again]
        assert numbers == sorted(set(numbers))
        assert len(numbers) + lost + more + rest == count + 30


def test_two_threads_write(tmp_path: Path) -> None:
    ring = Writer(tmp_path / "a.ring", 50_000, {})

    def write(thread: int) -> None:
        for n in range(10_000):
            ring.put(1, n, thread, 0, 0, n, thread)

    threads = [threading.Thread(target=write, args=(t,)) for t in (1, 2)]
    for thread in threads:
        thread.start()
    reader = Reader(tmp_path / "a.ring")
    records: list[tuple] = []
    while any(thread.is_alive() for thread in threads):
        records += read_all(reader)[0]
    for thread in threads:
        thread.join()
    records += read_all(reader)[0]
    assert [record[0] for record in records] == list(range(1, 20_001))
    for thread_number in (1, 2):
        own = [record[5][0] for record in records if record[4] == thread_number]
        assert own == list(range(10_000))


WRITER = """
import sys, time
from pathlib import Path
from llmobs.ring import Writer
ring = Writer(Path(sys.argv[1]), int(sys.argv[2]), {})
end = time.monotonic() + float(sys.argv[3])
n = 0
while n % 512 or time.monotonic() < end:
    n += 1
    ring.put(3, n, n & 0xFFFFFFFF, 1, 2, n, -n, n * 3, n ^ 0x5555, n, n, n, n, n)
print(n)
"""


@pytest.mark.parametrize(("capacity", "pause"), [(64, 0.0), (1024, 0.0), (4096, 0.02)])
def test_reader_beside_a_writer_at_full_speed(tmp_path: Path, capacity: int, pause: float) -> None:
    path = tmp_path / "a.ring"
    process = python(WRITER, path, capacity, 1.0)
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.001)
    reader = Reader(path)
    seen = lost = last = 0
    while True:
        running = process.poll() is None
        batch = reader.read()
        lost += batch.lost
        if len(batch.records):
            numbers = batch.records["head"]
            columns = batch.records["columns"]
            assert (columns[:, 0] == numbers).all()
            assert (columns[:, 1] == -numbers.astype("i8")).all()
            assert (columns[:, 2] == numbers * 3).all()
            assert (columns[:, 3] == numbers ^ 0x5555).all()
            assert (columns[:, 8] == numbers).all()
            assert (batch.records["time"] == numbers).all()
            assert (batch.records["tail"] == numbers).all()
            assert int(numbers[0]) > last
            assert (numbers[1:] == numbers[:-1] + 1).all()
            last = int(numbers[-1])
            seen += len(numbers)
        elif not running:
            break
        time.sleep(pause)
    written = int(process.communicate()[0])
    assert written > 50_000
    assert seen + lost == written
    assert seen > 0


def test_a_list_takes_as_many_records_as_it_needs(tmp_path: Path) -> None:
    ring = Writer(tmp_path / "a.ring", 16, {})
    ring.put_list(19, 5, list(range(4_294_967_276, 4_294_967_296)), 9)
    first, second = read_all(Reader(tmp_path / "a.ring"))[0]
    assert (first[1], first[2], first[4], first[6]) == (19, 18, 9, 5)
    assert (second[1], second[2], second[4], second[6]) == (19, 2, 9, 5)
    packed = struct.pack("<18q", *first[5], *second[5])
    numbers = struct.unpack("<36I", packed)
    assert numbers == (*range(4_294_967_276, 4_294_967_296), *[0] * 16)


def test_the_header_tells_the_process(tmp_path: Path) -> None:
    ring = Writer(tmp_path / "a.ring", 16, {"roles": ["engine_core"]})
    reader = Reader(tmp_path / "a.ring")
    assert reader.info() == {"roles": ["engine_core"]}
    assert (reader.pid, reader.capacity) == (os.getpid(), 16)
    assert reader.alive()
    ring.write_info({"models": ["ünïcode"] * 100})
    assert reader.info() == {"models": ["ünïcode"] * 100}
    with pytest.raises(ValueError, match="does not fit"):
        ring.write_info({"models": ["x" * 20_000]})
    assert reader.info() == {"models": ["ünïcode"] * 100}
    ring.cells[3] = -5
    ring.floats[4] = 0.25
    before = reader.totals()
    ring.cells[3] = 6
    assert before[3] == -5
    assert before.cast("B").cast("d")[4] == 0.25
    assert reader.totals()[3] == 6


def test_a_dead_writer_is_dead_and_its_ring_still_read(tmp_path: Path) -> None:
    process = python(WRITER, tmp_path / "a.ring", 4096, 0.0)
    written = int(process.communicate()[0])
    reader = Reader(tmp_path / "a.ring")
    assert not reader.alive()
    assert written == 0
    assert start_ticks(process.pid) is None
    # The same pid again is another process.
    Writer(tmp_path / "b.ring", 16, {})
    with open(tmp_path / "b.ring", "r+b") as file:
        file.seek(32)
        file.write(struct.pack("<Q", 12345))
    assert not Reader(tmp_path / "b.ring").alive()


def test_the_file_is_private_and_its_blocks_reserved(tmp_path: Path) -> None:
    Writer(tmp_path / "a.ring", 1000, {})
    status = os.stat(tmp_path / "a.ring")
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == 65536 + 1000 * 104
    assert status.st_blocks * 512 >= status.st_size
    assert list(tmp_path.iterdir()) == [tmp_path / "a.ring"]


def test_a_file_that_is_there_already_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.new").write_text("somebody's")
    with pytest.raises(FileExistsError):
        Writer(tmp_path / "a.ring", 16, {})
    assert not (tmp_path / "a.ring").exists()
    assert (tmp_path / "a.new").read_text() == "somebody's"


# Damaged and foreign files


def damaged(path: Path, kind: str) -> None:
    ring = Writer(path, 16, ENGINE)
    put(ring, 1)
    content = bytearray(path.read_bytes())
    if kind == "foreign":
        path.write_bytes(b"#!/bin/sh\n" * 20_000)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "header only":
        path.write_bytes(content[:64])
    elif kind == "truncated":
        path.write_bytes(content[:-1])
    elif kind == "too long":
        path.write_bytes(content + b"\0")
    elif kind == "no slots":
        content[16:24] = struct.pack("<Q", 0)
        path.write_bytes(content[:SLOTS_AT])
    elif kind == "wrong version":
        content[8:12] = struct.pack("<I", 99)
        path.write_bytes(content)
    elif kind == "wrong slot size":
        content[12:16] = struct.pack("<I", 112)
        path.write_bytes(content)
    elif kind == "huge capacity":
        content[16:24] = b"\xff" * 8
        path.write_bytes(content)
    elif kind == "symlink":
        path.rename(path.with_suffix(".real"))
        path.symlink_to(path.with_suffix(".real"))
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "fifo":
        path.unlink()
        os.mkfifo(path)
    elif kind == "missing":
        path.unlink()


KINDS = (
    *("foreign", "empty", "header only", "truncated", "too long", "no slots", "wrong version"),
    *("wrong slot size", "huge capacity", "symlink", "folder", "fifo", "missing"),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(10)
def test_what_is_no_ring_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.ring"
    damaged(path, kind)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RingError, match=r"a\.ring: ."):
        Reader(path)
    assert len(os.listdir("/proc/self/fd")) <= open_files


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_users_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ring"
    Writer(path, 16, ENGINE)
    os.chmod(tmp_path, 0o755)
    os.chmod(path, 0o644)
    code = (
        "import os, sys; from pathlib import Path; from llmobs.ring import Reader, RingError\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: Reader(Path(sys.argv[1]))\n"
        "except RingError as error: print(error)"
    )
    # pytest's own folders are closed to others: hand the descriptor's folder over instead.
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        moved = Path(name) / "a.ring"
        moved.write_bytes(path.read_bytes())
        output = python(code, moved).communicate()[0]
    assert "not a regular file of this user" in output


def test_a_reader_that_cannot_look_at_the_processes_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Writer(tmp_path / "a.ring", 16, ENGINE)

    def no_file_left(pid: int, ticks: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("llmobs.ring.process_id", no_file_left)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RingError, match="Too many open files") as caught:
        Reader(tmp_path / "a.ring")
    assert caught.value.passing
    del caught
    assert len(os.listdir("/proc/self/fd")) <= open_files


def test_a_file_cut_short_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.ring"
    ring = Writer(path, 4096, ENGINE)
    for n in range(1, 4000):
        put(ring, n)
    reader = Reader(path)
    assert len(reader.read(10).records) == 10
    os.truncate(path, SLOTS_AT)
    with pytest.raises(RingError, match="cut short"):
        reader.read()
    reader.close()
    reader.close()


@given(
    st.integers(1, 40),
    st.integers(0, 100),
    st.lists(st.tuples(st.integers(0, 39 * 104), st.binary(min_size=1, max_size=300)), max_size=6),
)
@settings(max_examples=200, deadline=None)
def test_random_bytes_among_the_slots(
    capacity: int, count: int, splashes: list[tuple[int, bytes]]
) -> None:
    with folder() as path:
        ring = Writer(path / "a.ring", capacity, ENGINE)
        for n in range(1, count + 1):
            put(ring, n)
        reader = Reader(path / "a.ring")
        with open(path / "a.ring", "r+b") as file:
            for at, content in splashes:
                file.seek(SLOTS_AT + at % (capacity * SLOT))
                file.write(content[: capacity * SLOT - at % (capacity * SLOT)])
        for _ in range(4):
            for _ in range(200):
                try:
                    batch = reader.read()
                except RingError:
                    return
                assert batch.lost >= 0
                if not len(batch.records):
                    break
            else:
                pytest.fail("reads on and on")


@given(st.lists(st.tuples(st.integers(0, 16_500), st.binary(min_size=1, max_size=64)), max_size=5))
@settings(max_examples=200, deadline=None)
def test_random_bytes_in_the_header(splashes: list[tuple[int, bytes]]) -> None:
    with folder() as path:
        ring = Writer(path / "a.ring", 16, ENGINE)
        put(ring, 1)
        with open(path / "a.ring", "r+b") as file:
            for at, content in splashes:
                file.seek(at)
                file.write(content)
        try:
            reader = Reader(path / "a.ring")
        except RingError:
            return
        assert isinstance(reader.info(), dict)
        assert reader.alive() in (True, False)
        read_all(reader)
        reader.close()


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_numbers_that_agree_with_each_other_but_are_not_true(numbers: list[int]) -> None:
    """Both ends of a slot hold the same wrong number."""
    with folder() as path:
        ring = Writer(path / "a.ring", 8, ENGINE)
        for n in range(1, 6):
            put(ring, n)
        reader = Reader(path / "a.ring")
        with open(path / "a.ring", "r+b") as file:
            for slot, number in enumerate(numbers):
                for at in (0, 96):
                    file.seek(SLOTS_AT + slot * SLOT + at)
                    file.write(struct.pack("<Q", number))
        for _ in range(50):
            try:
                batch = reader.read()
            except RingError:
                return
            assert batch.lost >= 0


def test_no_space_raises_here_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from llmobs.ring import Writer\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: Writer(Path(sys.argv[1]) / 'a.ring', 10_000, {})\n"
        "except OSError as error: print('OSError', error.strerror)"
    )
    output = python(code, tmp_path).communicate()[0]
    assert output.startswith("OSError")
    assert list(tmp_path.iterdir()) == []


def test_the_helper_names_rings_as_the_server_does(tmp_path: Path) -> None:
    new_ring(tmp_path, ENGINE)
    (ring,) = tmp_path.iterdir()
    assert ring.name.startswith(f"engine_core-{os.getpid()}-")


def test_a_file_cut_short_under_its_writer_ends_the_writer(tmp_path: Path) -> None:
    """The one thing that the server does not survive (docs/architecture.md says so): only its own
    user can do it, who could kill it as well."""
    code = (
        "import os, sys; from pathlib import Path; from llmobs.ring import Writer\n"
        "ring = Writer(Path(sys.argv[1]) / 'a.ring', 1000, {})\n"
        "ring.put(1, 2)\n"
        "os.truncate(ring.path, 4096)\n"
        "ring.put(1, 2)"
    )
    process = python(code, tmp_path)
    process.communicate()
    assert process.returncode == -signal.SIGBUS
    ring = Writer(tmp_path / "b.ring", 16, {})
    assert ring.path.stat().st_mode & 0o777 == 0o600


def test_a_process_that_nobody_reaps_is_dead(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from llmobs.ring import Writer; "
        "Writer(Path(sys.argv[1]), 16, {}); print(flush=True); sys.stdin.read()"
    )
    process = python(code, tmp_path / "a.ring", stdin=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    reader = Reader(tmp_path / "a.ring")
    assert reader.alive()
    process.kill()
    stat = Path(f"/proc/{process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert not reader.alive()
    process.wait()
    assert not reader.alive()
