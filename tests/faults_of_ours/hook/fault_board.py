"""A page of memory by which a test tells a running server's probes to fail, and learns how often
they did."""

import mmap
import os
import struct
from pathlib import Path

VARIABLE = "FAULT_BOARD"
ENTRY = struct.Struct("<BxxxIQ")
"""How a point fails, how many times it still does, how often it did."""
POINTS = 64
FOR_EVER = 0xFFFFFFFF

HOWS = ("", "error", "recursion", "memory", "afterwards")
"""`afterwards`: what is ours has done its work and raises then; the others fail before it."""


class Board:
    """The page, by the number of a point; each point is reached in one process only."""

    def __init__(self, path: Path, create: bool = False) -> None:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
        try:
            if create:
                os.truncate(path, ENTRY.size * POINTS)
                os.chmod(path, 0o666)  # a server of another user
            self._map = mmap.mmap(descriptor, ENTRY.size * POINTS)
        finally:
            os.close(descriptor)

    def set(self, point: int, how: str, times: int = FOR_EVER) -> None:
        raised = self.raised(point)
        ENTRY.pack_into(self._map, point * ENTRY.size, HOWS.index(how), times, raised)

    def raised(self, point: int) -> int:
        """How often the point has failed."""
        return int(ENTRY.unpack_from(self._map, point * ENTRY.size)[2])

    def failing(self, point: int) -> str:
        """How the point is to fail, if it is."""
        how, times, _ = ENTRY.unpack_from(self._map, point * ENTRY.size)
        return HOWS[how] if times else ""

    def fail(self, point: int, how: str) -> None:
        """Count a failure, and fail."""
        number, times, raised = ENTRY.unpack_from(self._map, point * ENTRY.size)
        times -= times != FOR_EVER
        ENTRY.pack_into(self._map, point * ENTRY.size, number, times, raised + 1)
        if how == "recursion":
            _recurse()
        if how == "memory":
            raise MemoryError("by the fault board")
        raise RuntimeError("by the fault board")


def _recurse() -> None:
    _recurse()
