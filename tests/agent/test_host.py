"""The CPU side of the page, from a machine made of files, and from the real one."""

import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from llmobs.agent.collect import RunCollector
from llmobs.agent.host import Host
from llmobs.agent.run import Run
from tests.agent.machine import ENGINE_PID, FRONT_PID, HERTZ, MODEL, V1, Machine, busy
from tests.rings import ENGINE, FRONT, new_ring


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def host(machine: Machine, clock: Any = None) -> Host:
    return Host(machine.run, machine.proc, machine.root, clock or Clock(), lambda: 0)


def test_all_figures(tmp_path: Path) -> None:
    source = host(busy(tmp_path))
    machine = {
        "llmobs_cpu_seconds_total": {
            (MODEL, "user"): 10,
            (MODEL, "nice"): 1,
            (MODEL, "system"): 5,
            (MODEL, "idle"): 70,
            (MODEL, "iowait"): 2,
            (MODEL, "irq"): 0,
            (MODEL, "softirq"): 1,
            (MODEL, "steal"): 3,
        },
        "llmobs_load_average": {(MODEL, "1m"): 3.25},
        "llmobs_pressure_seconds_total": {
            (MODEL, "cpu", "some"): 1.5,
            (MODEL, "io", "some"): 2.5,
            (MODEL, "io", "full"): 0.002,
            (MODEL, "memory", "some"): 3.5,
            (MODEL, "memory", "full"): 0.003,
        },
    }
    server = {
        "llmobs_process_cpu_seconds_total": {
            (MODEL, "engine_core"): 6,
            (MODEL, "api_server"): 2,
            (MODEL, "agent"): 1,
        },
        "llmobs_process_run_queue_seconds_total": {
            (MODEL, "engine_core"): 2,
            (MODEL, "api_server"): 0.1,
            (MODEL, "agent"): 1,
        },
        "llmobs_cgroup_cpu_periods_total": {(MODEL,): 90},
        "llmobs_cgroup_cpu_throttled_periods_total": {(MODEL,): 30},
        "llmobs_cgroup_cpu_throttled_seconds_total": {(MODEL,): 4.5},
        "llmobs_cpus": {(MODEL,): 3.5},  # six by affinity (0-4 and 7), of which the quota leaves
    }
    assert source.samples() == machine | server
    assert source.lacking() == {}


def test_two_models_of_one_agent(tmp_path: Path) -> None:
    """The machine is that of both; processes and cgroups are each one's own, and those of replicas
    add up."""
    machine = busy(tmp_path)
    for pid, waited in ((30, 7 * 10**9), (40, 10**9)):
        machine.process(pid, waited={1: waited}, cpus="0-1", cgroup=f"0::/other{pid}\n")
        machine.ring(str(pid), pid, "engine_core", model="b", server=f"{pid}-1")
        counted = f"nr_periods {pid}\nnr_throttled 2\nthrottled_usec 250000\n"
        machine.write(f"/cg/other{pid}/cpu.stat", counted)
    samples = host(machine).samples()
    assert samples["llmobs_load_average"] == {(MODEL, "1m"): 3.25, ("b", "1m"): 3.25}
    assert samples["llmobs_process_run_queue_seconds_total"] == {
        (MODEL, "engine_core"): 2,
        (MODEL, "api_server"): 0.1,
        (MODEL, "agent"): 1,
        ("b", "engine_core"): 8,
        ("b", "agent"): 1,
    }
    assert samples["llmobs_cgroup_cpu_periods_total"] == {(MODEL,): 90, ("b",): 70}
    assert samples["llmobs_cgroup_cpu_throttled_seconds_total"] == {(MODEL,): 4.5, ("b",): 0.5}
    assert samples["llmobs_cpus"] == {(MODEL,): 3.5, ("b",): 2}


FAMILIES = {
    "host_cpu": ("llmobs_cpu_seconds_total", "llmobs_load_average"),
    "pressure": ("llmobs_pressure_seconds_total",),
    "run_queue": ("llmobs_process_run_queue_seconds_total",),
    "cgroup_cpu": (
        "llmobs_cgroup_cpu_periods_total",
        "llmobs_cgroup_cpu_throttled_periods_total",
        "llmobs_cgroup_cpu_throttled_seconds_total",
    ),
}


def damage(machine: Machine, what: str) -> None:
    if what == "no pressure":
        shutil.rmtree(machine.proc / "pressure")
    elif what == "no schedstat":
        for file in machine.proc.glob("*/task/*/schedstat"):
            file.unlink()
    elif what == "no cgroup":
        shutil.rmtree(machine.root / "cg")
    elif what == "no controller":
        machine.write("/cg/pod/cpu.stat", "usage_usec 1\n")
    elif what == "no stat":
        (machine.proc / "stat").unlink()
    elif what == "nonsense in stat":
        machine.write("/proc/stat", "cpu  a b c d e f g h i j\n")
    elif what == "an old kernel's stat":
        machine.write("/proc/stat", "cpu  1 2 3 4\n")
    elif what == "nonsense in pressure":
        machine.write("/proc/pressure/io", "some avg10=0 tot\n")
    elif what == "half a line of pressure":
        machine.write("/proc/pressure/io", "some avg10=0\n")
    elif what == "nonsense in the cgroup":
        machine.write("/cg/pod/cpu.stat", "nr_periods x\nnr_throttled 0\nthrottled_usec 0\n")


@pytest.mark.parametrize(
    ("what", "feature", "reason"),
    [
        ("no pressure", "pressure", "no_psi"),
        ("nonsense in pressure", "pressure", "no_psi"),
        ("half a line of pressure", "pressure", "no_psi"),
        ("no schedstat", "run_queue", "no_schedstat"),
        ("no cgroup", "cgroup_cpu", "no_cgroup"),
        ("no controller", "cgroup_cpu", "no_cgroup"),
        ("nonsense in the cgroup", "cgroup_cpu", "no_cgroup"),
        ("no stat", "host_cpu", "no_proc"),
        ("nonsense in stat", "host_cpu", "no_proc"),
        ("an old kernel's stat", "host_cpu", "no_proc"),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["from the start", "later"])
def test_what_is_missing_is_absent_and_has_a_reason(
    tmp_path: Path, what: str, feature: str, reason: str, late: bool
) -> None:
    machine, clock = busy(tmp_path), Clock()
    whole = host(machine).samples()
    source = host(machine, clock)
    if late and feature != "run_queue":  # a kernel does not change its mind
        assert source.lacking() == {}
        source.samples()
        clock.now += 60
    damage(machine, what)
    samples = source.samples()
    assert source.lacking() == {feature: reason}
    for family in whole:
        if family in FAMILIES[feature]:
            assert not samples.get(family), "never a 0"
        else:
            assert samples[family], family


@pytest.mark.parametrize(
    ("refused", "feature"),
    [
        ("stat", "host_cpu"),
        ("pressure/io", "pressure"),
        ("cgroup", "cgroup_cpu"),
        ("schedstat", "run_queue"),
    ],
)
def test_what_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, feature: str
) -> None:
    """Root may read everything, so the refusal is played."""
    machine = busy(tmp_path)
    names = {
        "stat": (machine.proc / "stat",),
        "pressure/io": (machine.proc / "pressure/io",),
        "cgroup": (machine.proc / f"{ENGINE_PID}/cgroup",),
        "schedstat": tuple(
            machine.proc / f"{pid}/task/{thread}/schedstat"
            for pid, thread in ((ENGINE_PID, 1), (ENGINE_PID, 2), (FRONT_PID, 1))
        ),
    }[refused]
    really = open

    def guarded(file: Any, *args: Any, **options: Any) -> Any:
        if Path(file) in names:
            raise PermissionError(13, "Permission denied", str(file))
        return really(file, *args, **options)

    monkeypatch.setattr("builtins.open", guarded)
    monkeypatch.setattr("io.open", guarded)
    source = host(machine)
    samples = source.samples()
    assert source.lacking() == {feature: "no_permission"}
    left = {key for family in FAMILIES[feature] for key in samples.get(family, {})}
    assert left == ({(MODEL, "agent")} if feature == "run_queue" else set())


def test_what_comes_back_is_told_again(tmp_path: Path) -> None:
    machine, clock = busy(tmp_path), Clock()
    source = host(machine, clock)
    text = (machine.root / "cg/pod/cpu.stat").read_text()
    damage(machine, "no cgroup")
    assert source.samples()["llmobs_cgroup_cpu_periods_total"] == {}
    clock.now += 2
    machine.write("/cg/pod/cpu.stat", text)
    assert source.samples()["llmobs_cgroup_cpu_periods_total"] == {(MODEL,): 90}
    assert source.lacking() == {}


def test_modes_never_fall(tmp_path: Path) -> None:
    """The kernel's iowait does."""
    machine, clock = busy(tmp_path), Clock()
    source = host(machine, clock)
    source.samples()
    machine.write("/proc/stat", f"cpu  {11 * HERTZ} {HERTZ} 0 0 {HERTZ} 0 0 {4 * HERTZ} 0 0\n")
    clock.now += 2
    seconds = source.samples()["llmobs_cpu_seconds_total"]
    assert seconds[MODEL, "iowait"] == 2
    assert (seconds[MODEL, "user"], seconds[MODEL, "steal"]) == (11, 4)


def test_it_is_read_once_a_second_when_asked_and_every_five_when_not(tmp_path: Path) -> None:
    machine, clock = busy(tmp_path), Clock()
    source = host(machine, clock)

    def load() -> float:
        return source.samples()["llmobs_load_average"][MODEL, "1m"]

    assert load() == 3.25
    machine.write("/proc/loadavg", "9.5 1 1\n")
    clock.now += 0.9
    assert load() == 3.25
    clock.now += 0.2
    assert load() == 9.5
    machine.process(ENGINE_PID, cpu=(8 * HERTZ, 0), cgroup="0::/pod\n")
    clock.now += 4.9
    source.poll()
    shutil.rmtree(machine.proc / str(ENGINE_PID))
    clock.now += 0.2
    source.poll()  # too late for what was not read before
    clock.now += 2
    cpu = source.samples()["llmobs_process_cpu_seconds_total"]
    assert cpu[MODEL, "engine_core"] == 6


def test_what_costs_much_is_done_seldom(tmp_path: Path) -> None:
    """Very many threads: a look takes 100 ms of CPU time."""
    machine, clock, spent = busy(tmp_path), Clock(), count(step=0.1)
    source = Host(machine.run, machine.proc, machine.root, clock, lambda: next(spent))
    source.samples()
    machine.write("/proc/loadavg", "9.5 1 1\n")
    clock.now += 9.9
    source.poll()
    assert source.samples()["llmobs_load_average"][MODEL, "1m"] == 3.25
    clock.now += 0.2
    assert source.samples()["llmobs_load_average"][MODEL, "1m"] == 9.5


def test_what_takes_long_is_not_done_less_often(tmp_path: Path) -> None:
    """Beside a busy neighbour the agent waits for a CPU too: just then its figures matter."""
    machine, looks = busy(tmp_path), count(1000, 10)
    source = Host(machine.run, machine.proc, machine.root, lambda: next(looks), lambda: 0)
    source.samples()
    machine.write("/proc/loadavg", "9.5 1 1\n")
    assert source.samples()["llmobs_load_average"][MODEL, "1m"] == 9.5


def test_a_server_that_ended_leaves_its_figures(tmp_path: Path) -> None:
    machine, clock = busy(tmp_path), Clock()
    source = host(machine, clock)
    before = source.samples()
    for name, pid in (("front", FRONT_PID), ("engine", ENGINE_PID)):
        machine.sources[name].alive = False
        shutil.rmtree(machine.proc / str(pid))
    clock.now += 2
    after = source.samples()
    assert source.lacking() == {}
    assert after.pop("llmobs_cpus") == {}
    before.pop("llmobs_cpus")
    assert after == before


def test_a_process_that_vanishes_while_we_look_lacks_nothing(tmp_path: Path) -> None:
    machine = busy(tmp_path)
    shutil.rmtree(machine.proc / str(ENGINE_PID))  # the ring still says alive
    source = host(machine)
    source.samples()
    assert source.lacking() == {}


@pytest.mark.parametrize("text", ["", "Cpus_allowed_list:\n", "Cpus_allowed_list:\tx\n"])
def test_where_the_affinity_cannot_be_read_there_is_no_number_of_cpus(
    tmp_path: Path, text: str
) -> None:
    machine = busy(tmp_path)
    for pid in (ENGINE_PID, FRONT_PID):
        machine.write(f"/proc/{pid}/status", text)
    source = host(machine)
    assert source.samples()["llmobs_cpus"] == {}
    assert source.lacking() == {}


def test_version_1(tmp_path: Path) -> None:
    machine = busy(tmp_path)
    for pid in (ENGINE_PID, FRONT_PID):
        machine.write(f"/proc/{pid}/cgroup", "7:memory:/m\n3:cpu,cpuacct:/docker/x\n0::/\n")
    machine.mounts(V1.format(root="/docker/x", point="/cg1"))
    machine.write("/cg1/cpu.cfs_quota_us", "-1\n")
    machine.write("/cg1/cpu.cfs_period_us", "100000\n")
    machine.write("/cg1/cpu.stat", "nr_periods 8\nnr_throttled 4\nthrottled_time 1500000000\n")
    samples = host(machine).samples()
    assert samples["llmobs_cgroup_cpu_throttled_seconds_total"] == {(MODEL,): 1.5}
    assert samples["llmobs_cpus"] == {(MODEL,): 6}


def test_on_the_page_of_a_real_machine(tmp_path: Path) -> None:
    new_ring(tmp_path, FRONT)
    new_ring(tmp_path, ENGINE)
    run = Run(tmp_path)
    run.signals.append(Host(run))
    run.poll()
    samples = {
        (s.name, s.labels.get("mode") or s.labels.get("process")): s.value
        for family in RunCollector(run).collect()
        for s in family.samples
        if s.labels["model_name"] == MODEL
    }
    with open("/proc/stat") as file:
        ticks = file.readline().split()
    assert 0 < samples["llmobs_cpu_seconds_total", "idle"] <= int(ticks[4]) / HERTZ
    assert samples["llmobs_cpu_seconds_total", "idle"] > int(ticks[4]) / HERTZ - 60
    assert samples["llmobs_cpus", None] <= len(os.sched_getaffinity(0))
    # Both rings are this process's, and so is the agent.
    for name in ("llmobs_process_cpu_seconds_total", "llmobs_process_run_queue_seconds_total"):
        values = {samples[name, role] for role in ("api_server", "engine_core", "agent")}
        assert max(values) - min(values) < 0.1
        assert min(values) > 0
