"""The server's cgroup: how often and how long its CPU quota kept it from running.

A quota may stand at the server's own cgroup or at any above it (a pod's, a slice's). All levels
that can be seen are read, and of each interval the one counts that throttled longest: a sum would
count a second twice in which two levels throttle, and the own level alone would miss a pod's quota.
"""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Throttled:
    """`nanoseconds` are added up over the CPUs, so in a second there may be several seconds."""

    nanoseconds: int = 0
    throttled: int = 0
    periods: int = 0

    def since(self, before: "Throttled") -> "Throttled":
        """What was added. A cgroup that was removed and made anew counts from 0."""
        if self.periods < before.periods or self.nanoseconds < before.nanoseconds:
            return self
        return Throttled(
            self.nanoseconds - before.nanoseconds,
            self.throttled - before.throttled,
            self.periods - before.periods,
        )

    def __add__(self, more: "Throttled") -> "Throttled":
        return Throttled(
            self.nanoseconds + more.nanoseconds,
            self.throttled + more.throttled,
            self.periods + more.periods,
        )


class Cgroup:
    """What the CPU quotas did to one server, added up; it never falls, wherever the server goes.

    `proc` is the agent's /proc, `root` what stands before the mount points in its mountinfo.
    """

    def __init__(self, proc: Path, root: Path) -> None:
        self._proc, self._root = proc, root
        self.total = Throttled()
        self.readable = False
        """Whether it was read; who reads it takes that back when it fails."""
        self.quota: float | None = None
        """CPUs that the tightest quota leaves to the server; None without one."""
        self._membership = ""
        self._levels: list[Path] = []
        self._seen: dict[Path, Throttled] = {}

    def read(self, pid: int) -> None:
        """Look at the cgroup that the process is in now. Raises OSError where none can be seen that
        has the CPU controller."""
        membership = (self._proc / str(pid) / "cgroup").read_text()
        stands = membership == self._membership and self._levels and self._levels[0].is_dir()
        if not stands:
            self._levels = levels(self._proc, self._root, pid, membership)
            self._membership = membership
        quotas = [quota for level in self._levels if (quota := _quota(level)) is not None]
        self.quota = min(quotas, default=None)
        grown = [
            self._grown(level, counted, own=level == self._levels[0])
            for level in self._levels
            if (counted := _throttled(level)) is not None
        ]
        if not grown:
            raise FileNotFoundError(f"{self._levels[0]}: no CPU controller here or above")
        self.total += max(grown, key=lambda g: (g.nanoseconds, g.throttled, g.periods))
        self.readable = True

    def _grown(self, level: Path, counted: Throttled, own: bool) -> Throttled:
        # What the own one has counted before we came is the server's; what one above has, is not.
        before = self._seen.get(level, Throttled() if own else counted)
        self._seen[level] = counted
        return counted.since(before)


def levels(
    proc: Path, root: Path, pid: int, membership: str, controller: str = "cpu"
) -> list[Path]:
    """The folders of a process's cgroup and of those above it that can be seen, its own first: in
    the hierarchy that has the controller.

    The paths in /proc/PID/cgroup and in mountinfo both begin at the reader's own cgroup namespace,
    with `..` for what is above it. What no mount of ours shows (the agent is in another container),
    one of the process's own may, through /proc/PID/root.
    """
    kind, path = _path(membership, controller)
    process = proc / str(pid)
    denied: PermissionError | None = None
    for mounts, prefix in ((proc / "self", root), (process, process / "root")):
        try:
            found = _levels((mounts / "mountinfo").read_text(), prefix, kind, path, controller)
        except PermissionError as error:
            denied = error
            continue
        if found:
            return found
    raise denied or FileNotFoundError(f"no mount shows the cgroup of process {pid}")


def _path(membership: str, controller: str) -> tuple[str, list[str]]:
    """The version of the hierarchy that has a controller, by the name of its file system, and
    the path in it. In a hybrid of both, version 1 has it if it is mentioned there."""
    unified = None
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part]
        if controller in controllers.split(","):
            return "cgroup", parts
        if number == "0" and not controllers:
            unified = parts
    if unified is None:
        raise FileNotFoundError(f"in no cgroup with the controller {controller}")
    return "cgroup2", unified


def _levels(
    mountinfo: str, prefix: Path, kind: str, path: list[str], controller: str
) -> list[Path]:
    for line in mountinfo.splitlines():
        mount, _, system = line.partition(" - ")
        source, point = (_unescaped(field) for field in mount.split(" ")[3:5])
        name, _, options = system.partition(" ")
        if name != kind:
            continue
        if kind == "cgroup" and controller not in options.split(" ")[-1].split(","):
            continue
        top = [part for part in source.split("/") if part]
        below = path[len(top) :]
        if path[: len(top)] != top or ".." in below:
            continue  # a part of the hierarchy in which the process is not
        folders = [prefix / point.lstrip("/")]
        for part in below:
            folders.append(folders[-1] / part)
        if folders[-1].is_dir():
            return folders[::-1]
    return []


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _throttled(level: Path) -> Throttled | None:
    """None where the CPU controller is off: the root, or one that got no share of it."""
    try:
        text = (level / "cpu.stat").read_text()
    except FileNotFoundError:
        return None
    counted = dict(line.split(" ", 1) for line in text.splitlines())
    if "nr_periods" not in counted:
        return None
    if "throttled_usec" in counted:
        nanoseconds = int(counted["throttled_usec"]) * 1000
    else:
        nanoseconds = int(counted["throttled_time"])
    return Throttled(nanoseconds, int(counted["nr_throttled"]), int(counted["nr_periods"]))


def _quota(level: Path) -> float | None:
    try:
        quota, period = (level / "cpu.max").read_text().split()  # version 2
    except FileNotFoundError:
        try:
            quota = (level / "cpu.cfs_quota_us").read_text().strip()
            period = (level / "cpu.cfs_period_us").read_text()
        except FileNotFoundError:
            return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
