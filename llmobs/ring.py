"""Ring files: appended to by one process without ever waiting, tailed by the agent."""

import errno
import itertools
import json
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmobs import schema

SUFFIX = ".ring"
MOST_RECORDS = 1 << 62
"""No process writes as many: a number beyond it is damage."""
MOST_SLOTS = (1 << 30) // schema.SLOT_SIZE
"""What the largest ring that can be asked for holds. A file may say more without having a block of
it, and to look through that would take the reader's memory."""


class RingError(Exception):
    """A file is no ring, or no longer one. `passing`: the reader had no memory or no descriptor
    left to find out; it may be one yet."""

    passing = False


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process. One that
    is dead and that nobody has reaped yet (in a container, maybe nobody ever will) is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command, field 2, may hold spaces and brackets: count from the last bracket.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def process_id(pid: int, ticks: int) -> int | None:
    """The pid here of a process that may know itself by another, in a pid namespace (a container);
    None if it does not run. Start ticks are the same in all namespaces."""
    if start_ticks(pid) == ticks:
        return pid
    for entry in os.listdir("/proc"):
        if entry.isdigit() and start_ticks(int(entry)) == ticks:
            try:
                status = Path(f"/proc/{entry}/status").read_text()
            except OSError:
                continue
            inner = [line.split() for line in status.splitlines() if line.startswith("NSpid:")]
            if inner and inner[0][-1] == str(pid):
                return int(entry)
    return None


class Writer:
    """Appends records to this process's own ring file.

    `cells` are the cumulative totals (integers), `floats` the same cells as doubles. The file is
    private (mode 0600) and its blocks are reserved beforehand: a full disk raises OSError here, not
    a SIGBUS in the server later.
    """

    def __init__(self, path: Path, capacity: int, info: dict[str, Any]) -> None:
        self.path = path
        self.capacity = capacity
        size = schema.SLOTS_OFFSET + capacity * schema.SLOT_SIZE
        pid = os.getpid()
        partial = path.with_suffix(".new")
        descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
            header = (schema.MAGIC, schema.VERSION, schema.SLOT_SIZE, capacity, pid, 0)
            schema.HEADER.pack_into(self._map, 0, *header, start_ticks(pid) or 0)
            self._buffer = memoryview(self._map)
            cells = self._buffer[schema.TOTALS_OFFSET :][: 8 * schema.CELLS]
            self.cells: memoryview[int] = cells.cast("q")
            self.floats: memoryview[float] = cells.cast("d")
            self.write_info(info)
            os.rename(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._next = itertools.count(1).__next__

    def write_info(self, info: dict[str, Any]) -> None:
        """Replace what the header says about the process. Rare: names of adapters, probes."""
        text = json.dumps(info).encode()
        if len(text) > schema.TOTALS_OFFSET - schema.INFO_OFFSET:
            raise ValueError("the description of the process does not fit into the header")
        schema.INFO_LENGTH.pack_into(self._map, schema.INFO_LENGTH_OFFSET, 0)
        self._map[schema.INFO_OFFSET : schema.INFO_OFFSET + len(text)] = text
        schema.INFO_LENGTH.pack_into(self._map, schema.INFO_LENGTH_OFFSET, len(text))

    def put(
        self,
        kind: int,
        time: int,
        z: int = 0,
        x: int = 0,
        y: int = 0,
        c0: int = 0,
        c1: int = 0,
        c2: int = 0,
        c3: int = 0,
        c4: int = 0,
        c5: int = 0,
        c6: int = 0,
        c7: int = 0,
        c8: int = 0,
        *,
        _pack: Any = schema.RECORD.pack_into,
        _offset: int = schema.SLOTS_OFFSET,
        _size: int = schema.SLOT_SIZE,
    ) -> None:
        """Append one record. One C call writes it, so threads cannot interleave within a slot."""
        n = self._next()
        at = _offset + n % self.capacity * _size
        _pack(self._map, at, n, kind, x, y, z, c0, c1, c2, c3, c4, c5, c6, c7, c8, time, n)

    def put_list(self, kind: int, time: int, numbers: list[int], z: int = 0) -> None:
        """Append a list of unsigned 32-bit numbers, eighteen in a record; x says how many."""
        for start in range(0, len(numbers), 18):
            part = numbers[start : start + 18]
            count = len(part)
            part += [0] * (18 - len(part))
            n = self._next()
            at = schema.SLOTS_OFFSET + n % self.capacity * schema.SLOT_SIZE
            schema.PAIRS.pack_into(self._map, at, n, kind, count, 0, z, *part, time, n)

    def put_text(self, kind: int, time: int, text: bytes, z: int = 0) -> None:
        """Append bytes, 72 in a record; x says how many, y which part."""
        for part, start in enumerate(range(0, len(text), 72)):
            piece = text[start : start + 72]
            n = self._next()
            at = schema.SLOTS_OFFSET + n % self.capacity * schema.SLOT_SIZE
            schema.TEXT.pack_into(self._map, at, n, kind, len(piece), part, z, piece, time, n)


@dataclass
class Batch:
    """Records read in one go; `lost` were overwritten before they could be read, just before."""

    records: npt.NDArray[np.void]
    lost: int

    def rows(self) -> list[tuple[Any, ...]]:
        """The records as plain tuples, the columns as a list, all numbers Python's own."""
        names = self.records.dtype.names or ()
        return list(zip(*(self.records[name].tolist() for name in names), strict=True))


def _refusal(path: Path, error: Exception) -> RingError:
    refusal = RingError(f"{path}: {getattr(error, 'strerror', None) or error}")
    refusal.passing = isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    )
    return refusal


class Reader:
    """Tails a ring file; every record is read whole, or counted as lost."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Not blocking: a named pipe that nobody writes to is no ring either.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._descriptor = os.open(path, flags)
        except OSError as error:
            raise _refusal(path, error) from error
        try:
            self._open()
        except (ValueError, OSError, MemoryError, struct.error) as error:
            os.close(self._descriptor)
            raise _refusal(path, error) from error
        self.position = 1
        self._torn_at = 0
        self._info: dict[str, Any] = {}
        self._info_text = b""

    def _open(self) -> None:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode) or os.geteuid() not in (status.st_uid, 0):
            raise ValueError("not a regular file of this user")
        if status.st_size < schema.SLOTS_OFFSET + schema.SLOT_SIZE:
            raise ValueError("too short for a ring")
        self._map = mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)
        header = schema.HEADER.unpack_from(self._map, 0)
        magic, version, slot_size, capacity, pid, _, ticks = header
        self.capacity, self.pid, self.ticks = int(capacity), int(pid), int(ticks)
        if magic != schema.MAGIC:
            raise ValueError("not a ring of llmobs")
        if version != schema.VERSION or slot_size != schema.SLOT_SIZE:
            raise ValueError(f"a ring of version {version}, this llmobs reads {schema.VERSION}")
        self._size = schema.SLOTS_OFFSET + self.capacity * slot_size
        if not 1 <= self.capacity <= MOST_SLOTS or self._size != status.st_size:
            raise ValueError("its length is not what its header says")
        self._slots = np.ndarray(
            (self.capacity,), schema.SLOT, buffer=self._map, offset=schema.SLOTS_OFFSET
        )
        self._heads, self._tails = self._slots["head"], self._slots["tail"]
        # Here, where a failure is a refusal: it lists /proc, and may lack a descriptor for that.
        self.process = process_id(self.pid, self.ticks)
        """The writer's pid here, None if it had ended already; `pid` is what it calls itself."""

    def alive(self) -> bool:
        """Whether the process that writes here still runs."""
        return self.process is not None and start_ticks(self.process) == self.ticks

    def info(self) -> dict[str, Any]:
        """What the header says about the process; empty while it is being rewritten. Raises
        RingError if the file was cut short."""
        self._check_size()
        (length,) = schema.INFO_LENGTH.unpack_from(self._map, schema.INFO_LENGTH_OFFSET)
        if not 0 < length <= schema.TOTALS_OFFSET - schema.INFO_OFFSET:
            return {}
        text = self._map[schema.INFO_OFFSET : schema.INFO_OFFSET + length]
        if text != self._info_text:  # it is looked at often, and changes seldom
            try:
                info = json.loads(text)
            except ValueError:
                return {}
            self._info = info if isinstance(info, dict) else {}
            self._info_text = text
        return self._info

    def totals(self) -> "memoryview[int]":
        """A copy of the cumulative totals as of now. Raises RingError if the file was cut short."""
        self._check_size()
        end = schema.TOTALS_OFFSET + 8 * schema.CELLS
        return memoryview(self._map[schema.TOTALS_OFFSET : end]).cast("q")

    def _check_size(self) -> None:
        # To look at a page that is not there any more would be the end of the reader.
        if os.fstat(self._descriptor).st_size < self._size:
            raise RingError(f"{self.path}: cut short")

    def newest(self) -> int:
        """The number of the newest whole record, 0 if there is none."""
        whole = np.where(self._heads == self._tails, self._heads, np.uint64(0))
        slot = int(whole.argmax())
        number = int(whole[slot])
        if number % self.capacity == slot and number < self.position + self.capacity:
            return number
        # Damage, or much was written since the last look. A true number stands in its own slot and
        # is at most a lap away from the others.
        laps, places = np.divmod(whole, np.uint64(self.capacity))
        likely = (places == np.arange(self.capacity)) & (whole > 0) & (whole < MOST_RECORDS)
        if not likely.any():
            return 0
        usual = int(np.sort(laps[likely])[likely.sum() // 2])
        likely &= (laps >= max(usual - 1, 0)) & (laps <= usual + 1)
        return int(whole[likely].max())

    def _whole(self, count: int) -> tuple[int, int]:
        """How many records from `position` on are whole, within one contiguous stretch, and the
        stretch's first slot."""
        whole = self._standing(count)
        count = len(whole) if whole.all() else int(whole.argmin())
        return count, self.position % self.capacity

    def _standing(self, count: int) -> npt.NDArray[np.bool_]:
        """Of the records from `position` on, within one contiguous stretch, which are whole."""
        first = self.position % self.capacity
        count = min(count, self.capacity - first)
        expected = np.arange(self.position, self.position + count, dtype=np.uint64)
        stretch = slice(first, first + count)
        whole: npt.NDArray[np.bool_] = self._heads[stretch] == expected
        whole &= self._tails[stretch] == expected
        return whole

    def read(self, most: int = 8192) -> Batch:
        """The next records, at most so many. Raises RingError if the file was cut short."""
        self._check_size()
        lost = 0
        while True:
            # Mostly few are new, and to look at a slot costs a miss of the cache.
            wanted = min(64, most)
            count, first = self._whole(wanted)
            while count == wanted < most:
                wanted = min(8 * wanted, most)
                count, first = self._whole(wanted)
            if count == 0:
                skipped = self._skip(first)
                lost += skipped
                if skipped:
                    continue
                return Batch(self._slots[:0].copy(), lost)
            copy = self._slots[first : first + count].copy()
            # The writer sets a slot's head before anything else of it: a head that still stands
            # after the copy proves the copy whole.
            expected = np.arange(self.position, self.position + count, dtype=np.uint64)
            intact = self._heads[first : first + count] == expected
            if not intact.all():
                # Overwriting goes upwards, so what is still intact is the end of the copy.
                overwritten = count - int(intact[::-1].argmin())
                copy = copy[overwritten:]
                lost += overwritten
            self.position += count
            if len(copy):
                return Batch(copy, lost)

    def _skip(self, slot: int) -> int:
        """Step over what cannot be read any more; 0 if it is only not written yet."""
        head = int(self._heads[slot])
        following = self._heads[slot : slot + 64]
        if len(following) == 64 and int(following.max()) < self.position:
            return 0  # whatever is newer than a torn one stands close behind it
        newest = self.newest()
        if newest <= self.position:
            return 0
        lap = self.position + self.capacity
        if newest >= lap or (head > self.position and newest == lap - 1):
            # Overrun. Leave the writer an eighth of the ring, or it would overrun us again at once.
            target = max(newest - self.capacity + self.capacity // 8 + 1, self.position + 1)
            skipped = target - self.position
            self.position = target
            return skipped
        # Newer ones are there but this one is not whole: a thread between two lines of `put`, or a
        # process killed there. Look once more at the next read before giving it up, and then all
        # the torn ones behind it too: they may be many, where a file was damaged.
        if self._torn_at != self.position:
            self._torn_at = self.position
            return 0
        whole = self._standing(newest - self.position)
        skipped = int(whole.argmax()) if whole.any() else len(whole)  # 0: whole just now
        self.position += skipped
        return skipped

    def close(self) -> None:
        """Unmap. Safe to call twice."""
        if self._descriptor >= 0:
            del self._slots, self._heads, self._tails
            os.close(self._descriptor)
            self._descriptor = -1
