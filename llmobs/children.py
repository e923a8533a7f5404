"""How the child processes of this one ended, seen without reaping any: that is vLLM's own to do."""

import multiprocessing.connection
import multiprocessing.process
import os
import time
import weakref

LOOKS = 50
LOOK_SECONDS = 0.01
TURNS = 20
"""A child's sentinel goes before it can be waited for: a little, but for one with much memory on a
busy machine. So often so many looks are taken."""


class Children:
    """Those that were made by `multiprocessing`, as vLLM makes all of its own."""

    def __init__(self) -> None:
        self._known: dict[int, multiprocessing.process.BaseProcess] = {}
        self._turns: dict[int, int] = {}
        self._told: weakref.WeakSet[multiprocessing.process.BaseProcess] = weakref.WeakSet()

    def wait(self, seconds: float) -> dict[int, int]:
        """Wait so long, or until some child ends. Of those that did, by pid: the exit code, or
        minus the number of the signal."""
        # Not active_children(): that reaps, and vLLM's own look could come out empty.
        for child in list(getattr(multiprocessing.process, "_children", ())):
            # After a plain fork those of the parent are in the set, too.
            ours = getattr(child, "_parent_pid", None) == os.getpid()
            if ours and child.pid is not None and child not in self._told:
                self._known.setdefault(child.pid, child)
        sentinels: dict[int, int] = {}
        for pid, child in list(self._known.items()):
            try:
                sentinels[child.sentinel] = pid
            except ValueError:  # closed by who made it
                del self._known[pid]
        if not sentinels:
            time.sleep(seconds)
            return {}
        ready = multiprocessing.connection.wait(list(sentinels), seconds)
        ended = {}
        for pid in [sentinels[sentinel] for sentinel in ready if isinstance(sentinel, int)]:
            child = self._known[pid]
            code = _exit_code(child)
            self._turns[pid] = self._turns.get(pid, 0) + 1
            if code is None and self._turns[pid] < TURNS:
                continue
            del self._known[pid], self._turns[pid]
            self._told.add(child)
            if code is not None:
                ended[pid] = code
        return ended


def _exit_code(child: multiprocessing.process.BaseProcess) -> int | None:
    for _ in range(LOOKS):
        try:
            assert child.pid is not None
            result = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # reaped: multiprocessing remembers how it ended
            try:
                code = child.exitcode
            except ValueError:  # and closed
                return None
        else:
            code = None
            if result is not None:
                exited = result.si_code == os.CLD_EXITED
                code = result.si_status if exited else -result.si_status
        if code is not None:
            return code
        time.sleep(LOOK_SECONDS)
    return None
