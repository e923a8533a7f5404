"""Real cgroups with a CPU quota, for running processes; needs root."""

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from demo.vllm_server import VllmServer

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Hierarchy:
    """The one with the CPU controller: where it is mounted and how, the cgroup of this process, and
    where new ones can be made."""

    point: Path
    mount: tuple[str, ...]
    own: Path
    parent: Path

    @property
    def unified(self) -> bool:
        return "cgroup2" in self.mount


def hierarchy() -> Hierarchy:
    memberships = [
        line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()
    ]
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, system, options, *_ = line.split()
        point = Path(place)
        if system == "cgroup" and "cpu" in options.split(","):
            ((names, path),) = ((n, p) for _, n, p in memberships if "cpu" in n.split(","))
            own = point / path.lstrip("/")
            return Hierarchy(point, ("-t", "cgroup", "-o", names), own, own)
        if system == "cgroup2" and "cpu" in (point / "cgroup.controllers").read_text().split():
            (path,) = (p for number, _, p in memberships if number == "0")
            # Only the topmost may hold processes and hand out controllers both.
            return Hierarchy(point, ("-t", "cgroup2"), point / path.lstrip("/"), point)
    raise AssertionError("no cgroup hierarchy with the CPU controller is mounted")


@contextlib.contextmanager
def group(cpus: float) -> Iterator[Path]:
    """A new cgroup with that many CPUs, which must be empty again at the end; its folder."""
    where = hierarchy()
    folder = where.parent / f"llmobs-test-{os.getpid()}-{next(_numbers)}"
    if where.unified:
        (where.parent / "cgroup.subtree_control").write_text("+cpu")
    folder.mkdir()
    try:
        if where.unified:
            (folder / "cpu.max").write_text(f"{cpus * 100_000:.0f} 100000")
        else:
            (folder / "cpu.cfs_period_us").write_text("100000")
            (folder / "cpu.cfs_quota_us").write_text(f"{cpus * 100_000:.0f}")
        yield folder
    finally:
        folder.rmdir()


@contextlib.contextmanager
def quota(server: VllmServer, cpus: float) -> Iterator[Path]:
    """All of the server's processes in a cgroup of their own with that many CPUs; its folder."""
    with group(cpus) as folder:
        try:
            _move(server, folder)
            yield folder
        finally:
            _move(server, hierarchy().own)


def _move(server: VllmServer, folder: Path) -> None:
    for process in server.processes():
        (folder / "cgroup.procs").write_text(str(process.pid))


def container(folder: Path, command: Sequence[str]) -> "subprocess.Popen[str]":
    """A process in that cgroup that sees no other: a namespace and a mount of its own, as a
    container has."""
    where = hierarchy()
    mount = " ".join(where.mount)
    inside = f'umount -l {where.point} && mount {mount} none {where.point} && exec "$@"'
    enter = f"echo $$ > {folder}/cgroup.procs && exec unshare -Cm sh -c '{inside}' sh \"$@\""
    return subprocess.Popen(["sh", "-c", enter, "sh", *command], stdout=subprocess.PIPE, text=True)


def throttled(folder: Path) -> tuple[int, int, float]:
    """Periods, throttled periods and throttled seconds, by the kernel's own account."""
    lines = (folder / "cpu.stat").read_text().splitlines()
    counted = {name: int(value) for name, value in (line.split() for line in lines)}
    seconds = (
        counted["throttled_usec"] / 1e6
        if "throttled_usec" in counted
        else counted["throttled_time"] / 1e9
    )
    return counted["nr_periods"], counted["nr_throttled"], seconds
