"""A real CPU quota for a running server; needs root."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from demo.vllm_server import VllmServer


def _hierarchy() -> tuple[Path, Path, bool]:
    """Where groups with a CPU quota can be made, the group of this process, whether version 2."""
    memberships = [
        line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()
    ]
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, system, options, *_ = line.split()
        if system == "cgroup" and "cpu" in options.split(","):
            (path,) = (p for _, names, p in memberships if "cpu" in names.split(","))
            own = Path(point) / path.lstrip("/")
            return own, own, False
        controllers = Path(point) / "cgroup.controllers"
        if system == "cgroup2" and "cpu" in controllers.read_text().split():
            (path,) = (p for number, _, p in memberships if number == "0")
            return Path(point), Path(point) / path.lstrip("/"), True
    raise AssertionError("no cgroup hierarchy with the CPU controller is mounted")


@contextlib.contextmanager
def quota(server: VllmServer, cpus: float) -> Iterator[Path]:
    """All of the server's processes in a group of their own with that many CPUs; its folder."""
    parent, own, unified = _hierarchy()
    folder = parent / f"llmobs-test-{os.getpid()}"
    if unified:
        (parent / "cgroup.subtree_control").write_text("+cpu")
    folder.mkdir()
    try:
        if unified:
            (folder / "cpu.max").write_text(f"{cpus * 100_000:.0f} 100000")
        else:
            (folder / "cpu.cfs_period_us").write_text("100000")
            (folder / "cpu.cfs_quota_us").write_text(f"{cpus * 100_000:.0f}")
        _move(server, folder)
        yield folder
    finally:
        _move(server, own)
        folder.rmdir()


def _move(server: VllmServer, folder: Path) -> None:
    for process in server.processes():
        (folder / "cgroup.procs").write_text(str(process.pid))


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
