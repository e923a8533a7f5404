"""Memory of the server's processes, and of their memory cgroup: what an out-of-memory kill leaves
nothing else behind of."""

import contextlib
import os
from pathlib import Path
from typing import Any

from llmobs.agent.cgroup import levels

PAGE = os.sysconf("SC_PAGE_SIZE")
NO_LIMIT = 1 << 60
"""Version 1 says `no limit` by a number beyond this."""


class Vitals:
    """`proc` is the agent's /proc, `root` what stands before the mount points in its mountinfo."""

    def __init__(self, proc: Path = Path("/proc"), root: Path = Path("/")) -> None:
        self._proc, self._root = proc, root
        self._folders: dict[int, tuple[str, list[Path]]] = {}
        """By pid: its membership, its memory cgroup and those above it, also after its end."""

    def memory(self, pids: dict[int, int | None]) -> dict[str, Any]:
        """Of processes by the pid that they know themselves by, with their pid here: resident bytes
        by pid (of the dead none), and the memory cgroups that they are or were in."""
        resident: dict[str, int] = {}
        cgroups: dict[str, dict[str, int]] = {}
        for pid, here in pids.items():
            if here is None:
                continue
            with contextlib.suppress(OSError, ValueError, IndexError):
                statm = (self._proc / str(here) / "statm").read_text().split()
                if int(statm[1]):  # a zombie has none, and has left its cgroup
                    resident[str(pid)] = int(statm[1]) * PAGE
                    self._place(here)
            for place, folder in enumerate(self._folders.get(here, ("", []))[1]):
                if str(folder) not in cgroups:
                    figures = cgroup_memory(folder)
                    if figures and (not place or "limit" in figures):
                        cgroups[str(folder)] = figures
        return {"resident": resident, "cgroups": cgroups}

    def _place(self, pid: int) -> None:
        """Look where a process is now: it may be moved."""
        membership = (self._proc / str(pid) / "cgroup").read_text()
        if self._folders.get(pid, ("", []))[0] != membership:
            folders = levels(self._proc, self._root, pid, membership, "memory")
            self._folders[pid] = membership, folders


def cgroup_memory(folder: Path) -> dict[str, int]:
    """Bytes in use, the limit if there is one, and how many processes were killed for memory."""
    found: dict[str, int] = {}
    files = {
        "used": ("memory.current", "memory.usage_in_bytes"),
        "limit": ("memory.max", "memory.limit_in_bytes"),
    }
    for key, names in files.items():
        for name in names:
            with contextlib.suppress(OSError, ValueError):  # `max`: none
                amount = int((folder / name).read_text())
                if amount < NO_LIMIT:
                    found[key] = amount
                break
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            lines = (folder / name).read_text().splitlines()
            for key, value in (line.split() for line in lines):
                if key == "oom_kill":
                    found["oom_kills"] = int(value)
            break
    return found
