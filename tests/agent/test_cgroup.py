"""The server's cgroup is found in both versions, from the host and from containers, and what its
quota did is added up."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmobs.agent.cgroup import Cgroup, Throttled
from tests.agent.machine import V1, V2, Machine
from tests.quota import container, group, throttled

PID = 40


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def v2_group(machine: Machine, path: str, periods: int, throttled: int, micro: int) -> None:
    machine.write(
        f"{path}/cpu.stat",
        "usage_usec 900\nuser_usec 500\nsystem_usec 400\ncore_sched.force_idle_usec 0\n"
        f"nr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec {micro}\n"
        "nr_bursts 0\nburst_usec 0\n",
    )


def v1_group(machine: Machine, path: str, periods: int, throttled: int, nano: int) -> None:
    machine.write(
        f"{path}/cpu.stat",
        f"nr_periods {periods}\nnr_throttled {throttled}\nthrottled_time {nano}\n",
    )


def read(machine: Machine) -> Cgroup:
    cgroup = Cgroup(machine.proc, machine.root)
    cgroup.read(PID)
    return cgroup


# By name: what stands in /proc/PID/cgroup, the agent's mounts, the process's own mounts, and the
# folder below the agent's root where the truth is.
POD = "kubepods.slice/pod1.slice/cri-2.scope"
VIEWS = {
    "version 2, from the host": (
        f"0::/{POD}\n",
        V2.format(root="/", point="/sys/fs/cgroup"),
        "",
        f"/sys/fs/cgroup/{POD}",
    ),
    "version 2, in the same container": (
        "0::/\n",
        V2.format(root="/", point="/sys/fs/cgroup"),
        "",
        "/sys/fs/cgroup",
    ),
    "version 2, from another container": (
        "0::/../cri-2.scope\n",
        V2.format(root="/", point="/sys/fs/cgroup"),
        V2.format(root="/../cri-2.scope", point="/sys/fs/cgroup"),
        f"/proc/{PID}/root/sys/fs/cgroup",
    ),
    "version 2, from a container that sees the host's": (
        "0::/../../pod1.slice/cri-2.scope\n",
        V2.format(root="/../..", point="/host/cgroup"),
        "",
        "/host/cgroup/pod1.slice/cri-2.scope",
    ),
    "version 1, from the host": (
        "5:memory:/elsewhere\n4:cpu,cpuacct:/docker/abc\n0::/user.slice\n",
        V1.format(root="/", point="/sys/fs/cgroup/cpu,cpuacct"),
        "",
        "/sys/fs/cgroup/cpu,cpuacct/docker/abc",
    ),
    "version 1, in a container without a namespace": (
        "4:cpuacct,cpu:/docker/abc\n",
        V1.format(root="/docker/abc", point="/sys/fs/cgroup/cpu"),
        "",
        "/sys/fs/cgroup/cpu",
    ),
    "version 1, a part of the hierarchy first": (
        "4:cpu:/docker/abc/inner\n",
        V1.format(root="/docker/other", point="/other")
        + "\n"
        + V1.format(root="/docker/abc", point="/mine"),
        "",
        "/mine/inner",
    ),
    "hybrid, the controller in version 1": (
        "1:name=systemd:/x\n3:cpu,cpuacct:/a\n0::/b\n",
        V2.format(root="/", point="/sys/fs/cgroup/unified")
        + "\n"
        + V1.format(root="/", point="/sys/fs/cgroup/cpu"),
        "",
        "/sys/fs/cgroup/cpu/a",
    ),
    "hybrid, the controller in version 2": (
        "1:name=systemd:/x\n3:memory:/m\n0::/b\n",
        V1.format(root="/", point="/sys/fs/cgroup/cpu")
        + "\n"
        + V2.format(root="/", point="/sys/fs/cgroup/unified"),
        "",
        "/sys/fs/cgroup/unified/b",
    ),
    "a mount point with a space": (
        "0::/a:b\n",
        V2.format(root="/", point="/my\\040groups"),
        "",
        "/my groups/a:b",
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_the_servers_own_cgroup_is_found(machine: Machine, name: str) -> None:
    membership, mounts, own_mounts, folder = VIEWS[name]
    machine.process(PID, cgroup=membership)
    machine.mounts(mounts)
    machine.mounts(own_mounts, process=PID)
    for decoy in ("/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/host/cgroup", "/other"):
        v2_group(machine, decoy, 1, 1, 1)
    if "cgroup2" in mounts and "controller in version 1" not in name:
        v2_group(machine, folder, 200, 50, 2_500_000)
        machine.write(f"{folder}/cpu.max", "150000 100000\n")
    else:
        v1_group(machine, folder, 200, 50, 2_500_000_000)
        machine.write(f"{folder}/cpu.cfs_quota_us", "30000\n")
        machine.write(f"{folder}/cpu.cfs_period_us", "20000\n")
    cgroup = read(machine)
    assert cgroup.total == Throttled(nanoseconds=2_500_000_000, throttled=50, periods=200)
    assert cgroup.quota == 1.5
    assert cgroup.readable


@pytest.mark.parametrize(
    ("membership", "mounts"),
    [
        ("0::/\n", ""),  # nothing is mounted
        ("", V2.format(root="/", point="/sys/fs/cgroup")),
        ("4:memory:/a\n", V1.format(root="/", point="/sys/fs/cgroup")),
        ("0::/../sibling\n", V2.format(root="/", point="/sys/fs/cgroup")),
        # Below the mount's root by names that nobody knows from here.
        ("0::/\n", V2.format(root="/../..", point="/sys/fs/cgroup")),
        ("0::/gone (deleted)\n", V2.format(root="/", point="/sys/fs/cgroup")),
        ("0::/no-controller\n", V2.format(root="/", point="/sys/fs/cgroup")),
    ],
)
def test_where_none_is_seen_nothing_is_said(machine: Machine, membership: str, mounts: str) -> None:
    machine.process(PID, cgroup=membership)
    machine.mounts(mounts)
    machine.write("/sys/fs/cgroup/cpu.stat", "usage_usec 900\nuser_usec 500\nsystem_usec 400\n")
    machine.write("/sys/fs/cgroup/no-controller/cpu.stat", "usage_usec 9\n")
    machine.write("/sys/fs/cgroup/sibling/cpu.stat", "nr_periods 1\n")
    cgroup = Cgroup(machine.proc, machine.root)
    with pytest.raises(FileNotFoundError):
        cgroup.read(PID)
    assert not cgroup.readable


@pytest.fixture
def pod(machine: Machine) -> Machine:
    """A container in a pod, seen from the host; both had their quota before we came."""
    machine.process(PID, cgroup="0::/pod/container\n")
    machine.mounts(V2.format(root="/", point="/cg"))
    machine.write("/cg/cpu.stat", "usage_usec 900\n")
    machine.write("/cg/pod/cpu.max", "200000 100000\n")
    machine.write("/cg/pod/container/cpu.max", "max 100000\n")
    v2_group(machine, "/cg/pod", 1000, 500, 90_000_000)
    v2_group(machine, "/cg/pod/container", 0, 0, 0)
    return machine


def test_a_quota_above_counts_from_our_first_look_on(pod: Machine) -> None:
    cgroup = read(pod)
    assert cgroup.total == Throttled(0, 0, 0), "what the pod had before may be another's"
    assert cgroup.quota == 2
    v2_group(pod, "/cg/pod", 1010, 504, 91_000_000)
    cgroup.read(PID)
    assert cgroup.total == Throttled(1_000_000_000, 4, 10)


def test_of_two_levels_the_one_that_throttles_longest_counts(pod: Machine) -> None:
    v2_group(pod, "/cg/pod/container", 100, 10, 3_000_000)
    pod.write("/cg/pod/container/cpu.max", "50000 100000\n")
    cgroup = read(pod)
    assert cgroup.total == Throttled(3_000_000_000, 10, 100)
    assert cgroup.quota == 0.5
    v2_group(pod, "/cg/pod", 1020, 500, 90_000_000)
    v2_group(pod, "/cg/pod/container", 110, 15, 3_500_000)
    cgroup.read(PID)
    assert cgroup.total == Throttled(3_500_000_000, 15, 110)
    v2_group(pod, "/cg/pod", 1050, 515, 96_000_000)
    v2_group(pod, "/cg/pod/container", 120, 16, 3_600_000)
    cgroup.read(PID)
    assert cgroup.total == Throttled(9_500_000_000, 30, 140)


def test_a_server_that_is_moved_takes_its_sum_along(pod: Machine) -> None:
    v2_group(pod, "/cg/pod/container", 100, 10, 3_000_000)
    cgroup = read(pod)
    v2_group(pod, "/cg/new", 7, 3, 500_000)
    pod.process(PID, cgroup="0::/new\n")
    cgroup.read(PID)
    assert cgroup.total == Throttled(3_500_000_000, 13, 107)
    pod.process(PID, cgroup="0::/pod/container\n")
    v2_group(pod, "/cg/pod/container", 101, 10, 3_000_000)
    cgroup.read(PID)
    assert cgroup.total == Throttled(3_500_000_000, 13, 108)


def test_a_cgroup_made_anew_under_its_name_counts_from_0(pod: Machine) -> None:
    v2_group(pod, "/cg/pod/container", 100, 10, 3_000_000)
    cgroup = read(pod)
    v2_group(pod, "/cg/pod/container", 20, 2, 250_000)
    cgroup.read(PID)
    assert cgroup.total == Throttled(3_250_000_000, 12, 120)


LOOK = """
import sys
import os
import subprocess
import sys
import time
from pathlib import Path
from llmobs.agent.cgroup import Cgroup
cgroup = Cgroup(Path("/proc"), Path("/"))
cgroup.read(int(sys.argv[1]))
print(cgroup.quota, cgroup.total.periods, cgroup.total.throttled, cgroup.total.nanoseconds / 1e9)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("server_in", ["a container", "the host's namespace"])
@pytest.mark.parametrize("agent_in", ["another container", "the host's namespace"])
def test_on_a_real_kernel(server_in: str, agent_in: str) -> None:
    """Real namespaces, and a process that uses up a real quota."""
    spin = [sys.executable, "-c", "while True: pass"]
    look = [sys.executable, "-c", LOOK]
    with group(0.2) as folder, group(1) as elsewhere:
        if server_in == "a container":
            server = container(folder, spin)
        else:
            server = subprocess.Popen(spin, stdout=subprocess.PIPE, text=True)
            (folder / "cgroup.procs").write_text(str(server.pid))
        with server:
            while not throttled(folder)[1]:
                assert server.poll() is None
                time.sleep(0.1)
            before = throttled(folder)
            if agent_in == "another container":
                agent = container(elsewhere, [*look, str(server.pid)])
            else:
                agent = subprocess.Popen(
                    [*look, str(server.pid)], stdout=subprocess.PIPE, text=True
                )
            with agent:
                said = agent.communicate()[0].split()
            after = throttled(folder)
            server.kill()
        while (folder / "cgroup.procs").read_text() or (elsewhere / "cgroup.procs").read_text():
            time.sleep(0.01)
    assert said[0] == "0.2"
    for least, value, most in zip(before, map(float, said[1:]), after, strict=True):
        assert least <= value <= most
