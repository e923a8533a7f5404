"""How processes ended that are not our children: a kernel from 6.15 on tells whoever holds a pidfd.

So the end of a server's first process is known too, which has no parent of ours; and of all of
them, if they were killed together and the agent was not.
"""

import fcntl
import os
import struct
import time

from llmobs.agent.run import Run, Source

# include/uapi/linux/pidfd.h: struct pidfd_info as of its first version, 64 bytes.
INFO_SIZE = 64
GET_INFO = 3 << 30 | INFO_SIZE << 16 | 0xFF << 8 | 11
EXIT = 1 << 3
EXIT_CODE_AT = 60


class Endings:
    """`told` has, by the pid that a process calls itself: its exit code, or minus the signal, and
    when it was first seen to be dead (Unix seconds): the kernel tells only once it was reaped."""

    def __init__(self) -> None:
        self.told: dict[int, tuple[int, float]] = {}
        self._held: dict[int, int] = {}
        self._dead: dict[int, float] = {}
        self._known: set[str] = set()

    def look(self, run: Run) -> None:
        """Take hold of processes that are new, and see which have ended."""
        for name, source in run.sources.items():
            if name not in self._known:
                self._known.add(name)
                self._hold(source)
            if not source.alive:
                self._dead.setdefault(source.reader.pid, time.time())
        for pid, descriptor in list(self._held.items()):
            try:
                code = exit_code(descriptor)
            except OSError:  # a kernel that does not tell
                self._let_go(pid)
                continue
            if code is not None:
                self.told[pid] = code, self._dead.get(pid, time.time())
                self._let_go(pid)

    def _hold(self, source: Source) -> None:
        reader = source.reader
        if reader.process is None or reader.pid in self._held:
            return
        try:
            descriptor = os.pidfd_open(reader.process)
        except OSError:
            return
        if reader.alive():  # else its pid may be another's by now
            self._held[reader.pid] = descriptor
        else:
            os.close(descriptor)

    def _let_go(self, pid: int) -> None:
        os.close(self._held.pop(pid))

    def close(self) -> None:
        for pid in list(self._held):
            self._let_go(pid)


def exit_code(descriptor: int) -> int | None:
    """Of the process of a pidfd; None until somebody has reaped it. Raises OSError where the kernel
    does not tell."""
    buffer = bytearray(INFO_SIZE)
    struct.pack_into("<Q", buffer, 0, EXIT)
    fcntl.ioctl(descriptor, GET_INFO, buffer)
    (mask,) = struct.unpack_from("<Q", buffer, 0)
    if not mask & EXIT:
        return None
    (status,) = struct.unpack_from("<i", buffer, EXIT_CODE_AT)
    return os.waitstatus_to_exitcode(status)
