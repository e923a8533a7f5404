"""A machine as the agent sees it: /proc and the cgroup file systems as a tree of files."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MODEL = "deepseek-v4"
HERTZ = os.sysconf("SC_CLK_TCK")
ENGINE_PID, FRONT_PID = 10, 20
V1 = "33 23 0:30 {root} {point} rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"
V2 = "29 23 0:26 {root} {point} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot"
OTHER = (
    "24 1 0:22 / /proc rw,nosuid - proc proc rw\n32 31 0:29 / /cpuset rw - cgroup cgroup rw,cpuset"
)


class Machine:
    """`root` is what stands before every path; the files are written by the tests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = root / "proc"
        self.sources: dict[str, Any] = {}
        self.run: Any = SimpleNamespace(sources=self.sources, restarts=0)

    def write(self, path: str, text: str) -> Path:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def mounts(self, *lines: str, process: object = "self") -> None:
        self.write(f"/proc/{process}/mountinfo", "\n".join((OTHER, *filter(None, lines))) + "\n")

    def process(
        self,
        pid: int,
        *,
        cpu: tuple[int, int] = (0, 0),
        waited: dict[int, int] | None = None,
        started: int = 77,
        state: str = "S",
        cpus: str = "0-3",
        cgroup: str = "0::/\n",
    ) -> None:
        """A process; `cpu` in ticks, what its threads waited in nanoseconds."""
        before = " ".join(["0"] * 10)
        stat = f"{pid} (VLLM (a) b) {state} {before} {cpu[0]} {cpu[1]} 9 9 20 0 3 0 {started} 0\n"
        self.write(f"/proc/{pid}/stat", stat)
        self.write(
            f"/proc/{pid}/status", f"Name:\tx\nCpus_allowed:\tf\nCpus_allowed_list:\t{cpus}\n"
        )
        self.write(f"/proc/{pid}/cgroup", cgroup)
        for thread, nanoseconds in ({pid: 0} if waited is None else waited).items():
            self.write(f"/proc/{pid}/task/{thread}/schedstat", f"123456789 {nanoseconds} 5\n")

    def ring(self, name: str, pid: int | None, *roles: str, **more: Any) -> Any:
        """A ring of that process; `more`: model, server, ticks."""
        self.sources[name] = SimpleNamespace(
            reader=SimpleNamespace(process=pid, ticks=more.get("ticks", 77)),
            roles=list(roles),
            models=[more.get("model", MODEL)],
            info={"server": more.get("server", "12-345")},
            alive=True,
        )
        return self.sources[name]


def busy(root: Path, engine: int = ENGINE_PID, front: int = FRONT_PID, ticks: int = 77) -> Machine:
    """Two processes of one server in a container with a quota, seen from the host."""
    machine = Machine(root)
    machine.write(
        "/proc/stat",
        f"cpu  {10 * HERTZ} {HERTZ} {5 * HERTZ} {70 * HERTZ} {2 * HERTZ} 0 {HERTZ} {3 * HERTZ} "
        f"{4 * HERTZ} 0\ncpu0 1 2 3 4 5 6 7 8 9 0\nintr 5\n",
    )
    machine.write("/proc/loadavg", "3.25 1.00 0.50 5/900 12345\n")
    averages = "avg10=1.00 avg60=2.00 avg300=0.50"
    for number, resource in enumerate(("cpu", "io", "memory"), 1):
        machine.write(
            f"/proc/pressure/{resource}",
            f"some {averages} total={number}500000\nfull {averages} total={number}000\n",
        )
    group = "0::/pod\n"
    machine.process(os.getpid(), started=ticks, cpu=(HERTZ, 0), waited={1: 10**9}, cpus="0-63")
    machine.process(
        engine, started=ticks, cpu=(6 * HERTZ, 0), waited={1: 10**9, 2: 10**9}, cgroup=group
    )
    machine.process(
        front, started=ticks, cpu=(0, 2 * HERTZ), waited={1: 10**8}, cpus="2-4,7", cgroup=group
    )
    machine.ring("front", front, "api_server")
    machine.ring("engine", engine, "engine_core")
    machine.mounts(V2.format(root="/", point="/cg"))
    machine.write("/cg/pod/cpu.max", "350000 100000\n")
    machine.write("/cg/pod/cpu.stat", "nr_periods 90\nnr_throttled 30\nthrottled_usec 4500000\n")
    return machine
