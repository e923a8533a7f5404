"""The CPU side of a server: where its CPU time went, and what kept it from a CPU.

Three things do, and each has figures of its own: the hypervisor (steal), a quota (throttling), and
whoever else wants the same CPUs (run-queue delay). docs/cpu.md tells how to read them.
"""

import contextlib
import os
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

from llmobs.agent.cgroup import Cgroup, Throttled
from llmobs.agent.processes import ROLES, Processes, main_role
from llmobs.agent.run import Run, Source
from llmobs.agent.signals import Samples
from llmobs.metrics import CPU_MODES, PRESSURES

FRESH_SECONDS = 1.0
"""No figure of the page is older than that, where the page is asked for at all."""
SLOW_SECONDS = 5.0
"""So often they are read anyway: what threads and processes did that end is lost if unread."""
LEAST_REST = 100
"""After a look there is a rest of so many times the CPU time that it took: thousands of threads may
cost a per cent of a core, not more."""
TICKS = os.sysconf("SC_CLK_TCK")


class Host:
    """Reads /proc and the cgroup file systems. Parameters for the tests are `proc`, `root` (which
    stands before the mount points that /proc/self/mountinfo names) and the clocks: of time, and of
    the CPU time spent."""

    def __init__(
        self,
        run: Run,
        proc: Path = Path("/proc"),
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._run, self._proc, self._root = run, proc, root
        self._clock, self._spent = clock, spent
        self._processes = Processes(run, proc)
        self._cgroups: dict[str, Cgroup] = {}
        """By server."""
        self._highest: dict[str, float] = {}
        self._fresh_until = self._slow_until = 0.0
        self._samples: dict[str, Samples] = {}
        self._lacking: dict[str, str] = {}

    def poll(self) -> None:
        if self._clock() >= self._slow_until:
            self._read()

    def samples(self) -> dict[str, Samples]:
        if self._clock() >= self._fresh_until:
            self._read()
        return self._samples

    def lacking(self) -> dict[str, str]:
        return self._lacking

    def close(self) -> None:
        pass

    def _read(self) -> None:
        before = self._spent()
        self._samples, self._lacking = {}, {}
        models = list(dict.fromkeys(s.models[0] for s in self._run.sources.values() if s.models))
        for feature, reason, read in (
            ("host_cpu", "no_proc", self._machine),
            ("pressure", "no_psi", self._pressure),
        ):
            try:
                for name, values in read().items():
                    # The machine is that of every server; its figures do not add up over models.
                    self._samples[name] = {(m, *v): x for m in models for v, x in values.items()}
            except (OSError, ValueError, LookupError) as error:
                self._lacks(feature, reason, error)
        self._read_processes(models)
        self._read_cgroups()
        now, rest = self._clock(), LEAST_REST * (self._spent() - before)
        self._fresh_until = now + max(FRESH_SECONDS, rest)
        self._slow_until = now + max(SLOW_SECONDS, rest)

    def _lacks(self, feature: str, reason: str, error: Exception) -> None:
        denied = isinstance(error, PermissionError)
        self._lacking[feature] = "no_permission" if denied else reason

    def _machine(self) -> dict[str, Samples]:
        with open(self._proc / "stat", "rb") as file:
            _, *ticks = file.readline().split()  # all CPUs together
        if len(ticks) < len(CPU_MODES):
            raise ValueError("a kernel that does not know steal")
        seconds: Samples = {}
        for mode, value in zip(CPU_MODES, ticks, strict=False):
            # The kernel's idle and iowait may go back a little.
            highest = max(self._highest.get(mode, 0.0), int(value) / TICKS)
            seconds[(mode,)] = self._highest[mode] = highest
        load = float((self._proc / "loadavg").read_bytes().split()[0])
        return {"llmobs_cpu_seconds_total": seconds, "llmobs_load_average": {("1m",): load}}

    def _pressure(self) -> dict[str, Samples]:
        seconds: Samples = {}
        for resource, kinds in PRESSURES.items():
            for line in (self._proc / "pressure" / resource).read_text().splitlines():
                kind, *fields = line.split()
                if kind in kinds:
                    total = dict(field.split("=") for field in fields)["total"]
                    seconds[resource, kind] = int(total) / 1e6
        return {"llmobs_pressure_seconds_total": seconds}

    def _read_processes(self, models: list[str]) -> None:
        self._processes.read()
        cpu: Samples = {}
        delays: Samples = {}
        accounts = self._processes.by_role() | {
            (model, "agent"): [self._processes.agent] for model in models
        }
        for key, some in accounts.items():
            cpu[key] = sum(account.cpu for account in some) / TICKS
            known = [account.delay for account in some if account.delay is not None]
            if known:
                delays[key] = sum(known) / 1e9
        self._samples["llmobs_process_cpu_seconds_total"] = cpu
        self._samples["llmobs_process_run_queue_seconds_total"] = delays
        if reason := self._processes.unreadable():
            self._lacking["run_queue"] = reason

    def _read_cgroups(self) -> None:
        totals: dict[str, list[Cgroup]] = {}
        allowed: dict[str, set[int]] = {}
        for server, sources in self._servers().items():
            cgroup = self._cgroups.setdefault(server, Cgroup(self._proc, self._root))
            totals.setdefault(sources[0].models[0], []).append(cgroup)
            running = [pid for s in sources if s.alive and (pid := s.reader.process) is not None]
            if not running:
                continue
            try:
                cgroup.read(running[0])
            except (OSError, ValueError, LookupError) as error:
                if (self._proc / str(running[0])).is_dir():  # else it has just ended
                    cgroup.readable, cgroup.quota = False, None
                    self._lacks("cgroup_cpu", "no_cgroup", error)
            for pid in running:
                with contextlib.suppress(OSError, ValueError, LookupError):
                    cpus = self._allowed(pid)
                    allowed.setdefault(sources[0].models[0], set()).update(cpus)
        known = {m: [c.total for c in some if c.readable] for m, some in totals.items()}
        sums = {model: sum(some, Throttled()) for model, some in known.items() if some}
        self._samples |= {
            "llmobs_cgroup_cpu_periods_total": {(m,): s.periods for m, s in sums.items()},
            "llmobs_cgroup_cpu_throttled_periods_total": {
                (m,): s.throttled for m, s in sums.items()
            },
            "llmobs_cgroup_cpu_throttled_seconds_total": {
                (m,): s.nanoseconds / 1e9 for m, s in sums.items()
            },
            "llmobs_cpus": {
                (m,): min(len(cpus), sum(c.quota or inf for c in totals[m]))
                for m, cpus in allowed.items()
            },
        }

    def _servers(self) -> dict[str, list[Source]]:
        """The processes of each server, that first whose cgroup counts as the server's."""
        servers: dict[str, list[Source]] = {}
        for role in ROLES:
            for source in self._run.sources.values():
                if source.models and main_role(source.roles) == role:
                    servers.setdefault(str(source.info.get("server")), []).append(source)
        return servers

    def _allowed(self, pid: int) -> set[int]:
        """The CPUs that its affinity and its cpuset leave to a process: the kernel keeps the former
        within the latter."""
        lines = (self._proc / str(pid) / "status").read_text().splitlines()
        (text,) = (line for line in lines if line.startswith("Cpus_allowed_list:"))
        cpus: set[int] = set()
        for part in text.split()[1].split(","):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
        return cpus
