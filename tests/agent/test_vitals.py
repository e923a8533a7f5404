"""Memory of processes and of their cgroup, by fixtures of both versions."""

from pathlib import Path
from typing import Any

from llmobs.agent.vitals import Vitals

V1 = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n" + "".join(
    f"{n} 31 0:{n} {root} /sys/fs/cgroup/{name} rw,relatime - cgroup cgroup rw,{name}\n"
    for n, name, root in ((32, "cpu", "/"), (33, "memory", "{root}"))
)
UNIFIED = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def made(root: Path, path: str, **files: str) -> Path:
    folder = root / path
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def memory(root: Path, membership: str, mounts: str) -> dict[str, Any]:
    """Of a process 5 that calls itself 1."""
    made(root, "proc/self", mountinfo=mounts)
    made(root, "proc/5", statm="900 100 10 1 0 5 0\n", cgroup=membership)
    told = Vitals(root / "proc", root).memory({1: 5})
    assert told["resident"] == {"1": 409600}
    prefix = str(root / "sys/fs/cgroup")
    return {name.removeprefix(prefix): figures for name, figures in told["cgroups"].items()}


def test_version_1(tmp_path: Path) -> None:
    made(
        *(tmp_path, "sys/fs/cgroup/memory/a/b"),
        memory__usage_in_bytes="1000\n",
        memory__limit_in_bytes="9223372036854771712\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    )
    (tmp_path / "sys/fs/cgroup/memory/a/memory.usage_in_bytes").write_text("4000\n")
    (tmp_path / "sys/fs/cgroup/memory/a/memory.limit_in_bytes").write_text("5000\n")
    (tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes").write_text("9999\n")
    membership = "9:name=systemd:/\n4:memory:/a/b\n1:cpu:/\n0::/\n"
    assert memory(tmp_path, membership, V1.format(root="/") + UNIFIED) == {
        "/memory/a/b": {"used": 1000, "oom_kills": 3},
        "/memory/a": {"used": 4000, "limit": 5000},  # the pod's, say; the root has none
    }


def test_version_1_in_a_container_that_sees_its_own_part_only(tmp_path: Path) -> None:
    made(tmp_path, "sys/fs/cgroup/memory", memory__usage_in_bytes="7\n")
    mounts = V1.format(root="/docker/1234")
    assert memory(tmp_path, "4:cpu,memory:/docker/1234\n", mounts) == {"/memory": {"used": 7}}


def test_version_2(tmp_path: Path) -> None:
    made(
        *(tmp_path, "sys/fs/cgroup/pod/c"),
        memory__current="77\n",
        memory__max="99\n",
        memory__events="low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\noom_group_kill 0\n",
    )
    (tmp_path / "sys/fs/cgroup/pod/memory.max").write_text("max\n")
    assert memory(tmp_path, "0::/pod/c\n", V2.format(root="/")) == {
        "/pod/c": {"used": 77, "limit": 99, "oom_kills": 1}
    }


def test_without_a_cgroup_that_can_be_seen(tmp_path: Path) -> None:
    assert memory(tmp_path, "0::/gone\n", V2.format(root="/")) == {}


def test_the_cgroup_of_a_dead_process_is_looked_at_on(tmp_path: Path) -> None:
    folder = made(
        *(tmp_path, "sys/fs/cgroup/pod"),
        memory__current="77\n",
        memory__events="oom_kill 0\n",
    )
    made(tmp_path, "proc/self", mountinfo=V2.format(root="/"))
    process = made(tmp_path, "proc/5", statm="900 100 10 1 0 5 0\n", cgroup="0::/pod\n")
    vitals = Vitals(tmp_path / "proc", tmp_path)
    first = vitals.memory({1: 5})
    assert first["resident"] == {"1": 409600}  # by the pid that it knows itself by
    assert first["cgroups"] == {str(folder): {"used": 77, "oom_kills": 0}}
    (process / "statm").write_text("0 0 0 0 0 0 0\n")  # a zombie, moved to the root
    (process / "cgroup").write_text("0::/\n")
    (folder / "memory.events").write_text("oom_kill 1\n")
    last = vitals.memory({1: 5})
    assert last == {"resident": {}, "cgroups": {str(folder): {"used": 77, "oom_kills": 1}}}
    assert vitals.memory({1: None}) == {"resident": {}, "cgroups": {}}
