"""Memory of the server's processes, and of their memory cgroup: what an out-of-memory kill leaves
nothing else behind of."""

import contextlib
import os
from pathlib import Path
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")
NO_LIMIT = 1 << 60
"""Version 1 says `no limit` by a number beyond this."""


class Vitals:
    """`proc` is the agent's /proc, `root` what stands before the mount points in its mountinfo."""

    def __init__(self, proc: Path = Path("/proc"), root: Path = Path("/")) -> None:
        self._proc, self._root = proc, root
        self._folders: dict[int, tuple[str, Path | None]] = {}
        """By pid: its membership and its memory cgroup, also after its end."""

    def memory(self, pids: dict[int, int | None]) -> dict[str, Any]:
        """Of processes by the pid that they know themselves by, with their pid here: resident bytes
        by pid (of the dead none), and the memory cgroups that they are or were in."""
        resident = {}
        folders = []
        for pid, here in pids.items():
            if here is not None:
                with contextlib.suppress(OSError, ValueError, IndexError):
                    statm = (self._proc / str(here) / "statm").read_text().split()
                    if int(statm[1]):  # a zombie has none, and has left its cgroup
                        resident[str(pid)] = int(statm[1]) * PAGE
                        self._place(here)
                _, folder = self._folders.get(here, ("", None))
                if folder is not None and folder not in folders:
                    folders.append(folder)
        return {
            "resident": resident,
            "cgroups": {str(f): found for f in folders if (found := cgroup_memory(f))},
        }

    def _place(self, pid: int) -> None:
        """Look where a process is now: it may be moved."""
        try:
            membership = (self._proc / str(pid) / "cgroup").read_text()
        except OSError:
            return
        if self._folders.get(pid, ("", None))[0] != membership:
            try:
                mounts = (self._proc / "self" / "mountinfo").read_text()
            except OSError:
                return
            folder = memory_cgroup(membership, mounts, self._root)
            self._folders[pid] = membership, folder


def memory_cgroup(membership: str, mountinfo: str, root: Path) -> Path | None:
    """The folder of the cgroup that counts a process's memory, by its /proc/PID/cgroup; None if it
    cannot be seen. In a hybrid of both versions, the first has it if it is mentioned there."""
    kind, path = "cgroup2", None
    for line in membership.splitlines():
        number, controllers, where = line.split(":", 2)
        if "memory" in controllers.split(","):
            kind, path = "cgroup", where
            break
        if number == "0" and not controllers:
            path = where
    for line in mountinfo.splitlines():
        mount, _, system = line.partition(" - ")
        top, point = mount.split(" ")[3:5]
        name, _, options = system.partition(" ")
        if path is None or name != kind:
            continue
        if kind == "cgroup" and "memory" not in options.split(" ")[-1].split(","):
            continue
        if path == top or path.startswith(top.rstrip("/") + "/"):
            folder = root / point.lstrip("/") / path[len(top.rstrip("/")) :].lstrip("/")
            if folder.is_dir():
                return folder
    return None


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
