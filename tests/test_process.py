"""One process of the server: its ring, its run folder, its agent, its settings."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmobs import process, schema
from llmobs.guard import GUARD
from llmobs.process import Process, current, mark_server
from llmobs.ring import Reader, start_ticks
from tests.rings import read_all

pytestmark = pytest.mark.timeout(60)
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def opened(role: str = "engine_core", **extra: Any) -> Process:
    mark_server()
    state = current()
    state.open(role, "deepseek-v4", **extra)
    return state


def only_warning(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    message = record.getMessage()
    assert "\n" not in message
    return message


def test_the_run_folder_is_private_and_shared_by_the_family(runs: Path) -> None:
    state = opened(engine=3)
    folder = runs / f"{os.getpid()}-{start_ticks(os.getpid())}"
    assert os.environ["_LLMOBS_SERVER_RUN"] == str(folder)
    assert stat.S_IMODE(runs.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (ring,) = folder.glob("*.ring")
    assert ring.name == f"engine_core-{os.getpid()}-{start_ticks(os.getpid())}.ring"
    info = Reader(ring).info()
    assert (info["roles"], info["models"], info["engine"]) == (["engine_core"], ["deepseek-v4"], 3)
    assert state.ring is not None
    assert state.ring.capacity == 78  # 8192 bytes of 104


def test_a_second_role_shares_the_ring(runs: Path) -> None:
    state = opened()
    ring = state.ring
    state.open("worker", "deepseek-v4", rank=1)
    assert state.ring is ring
    assert ring is not None
    info = Reader(ring.path).info()
    assert (info["roles"], info["rank"]) == (["engine_core", "worker"], 1)


def test_a_family_has_one_folder(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark_server()
    first = os.environ["_LLMOBS_SERVER_RUN"]
    monkeypatch.setattr(process, "_current", None)
    mark_server()
    assert os.environ["_LLMOBS_SERVER_RUN"] == first


def test_adapters_get_numbers_until_there_are_too_many(runs: Path) -> None:
    state = opened()
    assert state.model(None) == 0
    assert [state.model(f"adapter-{n}") for n in range(1, 21)] == list(range(1, 21))
    assert [state.model("one more"), state.model("and more")] == [21, 21]
    assert state.model("adapter-7") == 7
    assert state.ring is not None
    models = Reader(state.ring.path).info()["models"]
    assert models == ["deepseek-v4", *[f"adapter-{n}" for n in range(1, 21)]]


def test_failures_from_before_the_ring_are_handed_over(runs: Path) -> None:
    current().probe_numbers = {"join": 11, "leave": 15}
    for probe in ("join", "join", "attach"):
        try:
            raise RuntimeError
        except RuntimeError:
            GUARD.failed(probe)
    state = opened()
    assert state.ring is not None
    assert state.ring.cells[schema.GUARD_CELL + 11] == 2
    try:
        raise RuntimeError
    except RuntimeError:
        GUARD.failed("leave")
    assert state.ring.cells[schema.GUARD_CELL + 15] == 1


def test_a_forked_child_has_no_ring_of_its_parent(runs: Path) -> None:
    parent = opened()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        state = current()
        answer = [state is parent, state.ring is None]
        state.open("worker", "deepseek-v4")
        answer.append(state.ring is not None and state.ring.path.name.startswith("worker-"))
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads(os.read(read, 100)) == [False, True, True]
    assert parent.ring is not None
    assert Reader(parent.ring.path).info()["roles"] == ["engine_core"]


# Run folders that cannot be used


@ROOT
def test_a_base_owned_by_another_user(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs.mkdir()
    os.chown(runs, 65534, 65534)
    state = opened()
    assert state.ring is None
    message = only_warning(caplog)
    for part in (str(runs), "owned by another user (uid 65534)", "LLMOBS_RUN_DIR", "8192 bytes"):
        assert part in message
    # Said once, not at every role.
    state.open("worker", "deepseek-v4")
    only_warning(caplog)


@pytest.mark.parametrize("kind", ["file", "below a file", "agent's is missing", "dangling"])
def test_a_base_that_is_none(
    runs: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    runs.parent.joinpath("file").write_text("")
    if kind == "file":
        monkeypatch.setenv("LLMOBS_RUN_DIR", str(runs.parent / "file"))
    elif kind == "below a file":
        monkeypatch.setenv("LLMOBS_RUN_DIR", str(runs.parent / "file" / "runs"))
    elif kind == "dangling":
        runs.symlink_to(runs.parent / "nowhere")
    else:
        monkeypatch.setenv("LLMOBS_AGENT", str(runs / "agents"))
    assert opened().ring is None
    message = only_warning(caplog)
    assert message.startswith("llmobs: off in this process, cannot write to the run folder /")
    assert "(None)" not in message


OPEN = (
    "import logging, os, resource, sys; logging.basicConfig()\n"
    "from llmobs import process\n"
    "process._watch = lambda *_: None\n"
    "exec(sys.argv[1])\n"
    "process.mark_server(); state = process.current(); state.open('worker', 'm')\n"
    "print(state.ring is not None)"
)


def opened_elsewhere(first: str) -> tuple[str, list[str]]:
    """Whether a process gets its ring that has done something first, and the lines it wrote."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN, first], capture_output=True, text=True, timeout=30
    )
    return done.stdout.strip(), done.stderr.splitlines()


@ROOT
@pytest.mark.parametrize(("mode", "usable"), [(0o777, True), (0o755, False)])
def test_without_rights(monkeypatch: pytest.MonkeyPatch, mode: int, usable: bool) -> None:
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, mode)
        monkeypatch.setenv("LLMOBS_RUN_DIR", f"{parent}/runs")
        said, lines = opened_elsewhere("os.setgroups([]); os.setgid(65534); os.setuid(65534)")
    assert said == str(usable)
    if usable:
        assert lines == []
    else:
        (line,) = lines
        assert f"{parent}/runs (Permission denied)" in line


def test_no_space_is_one_clear_line(runs: Path) -> None:
    said, lines = opened_elsewhere("resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))")
    assert said == "False"
    (line,) = lines
    assert "cannot write to the run folder" in line
    assert "File too large" in line
    assert "8192 bytes free" in line
    assert list(runs.glob("*/*.ring")) == []
    assert list(runs.glob("*/*.new")) == []


@ROOT
def test_a_full_tmpfs(runs: Path) -> None:
    runs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(runs)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount here")
    try:
        said, lines = opened_elsewhere("")
        assert said == "False"
        (line,) = lines
        assert "No space left on device" in line
        assert list(runs.glob("*/*.ring")) == []
    finally:
        subprocess.run(["umount", str(runs)], check=True)


# The thread that keeps an agent alive


@pytest.fixture
def watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Process, list[float]]]:
    """A process whose watch runs fast; `started` has the times when it started an agent."""
    started: list[float] = []
    monkeypatch.setenv("LLMOBS_RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.setattr(process, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(process, "spawn_agent", lambda folder: started.append(time.time()))
    yield opened("api_server"), started
    process._current = None  # ends the thread
    for thread in threading.enumerate():
        if thread.name == "llmobs-watch":
            thread.join(5)


def until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_agent_is_started_once_in_a_while(
    watched: tuple[Process, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, started = watched
    until(lambda: started)
    time.sleep(0.2)
    assert len(started) == 1  # it is given time to take the lock
    monkeypatch.setattr(process, "SPAWN_GRACE_SECONDS", 0.1)
    until(lambda: len(started) > 2)


def test_what_the_agent_says_is_logged_once(
    watched: tuple[Process, list[float]], caplog: pytest.LogCaptureFixture
) -> None:
    state, _ = watched
    assert state.ring is not None
    file = state.ring.path.parent / "agent.json"
    for content in (
        "{",
        "[" * 100_000,
        '["notices"]',
        '{"other": 1}',
        '{"notices": ["metrics on :9464"]}',
    ):
        file.write_text(content)
        time.sleep(0.1)
    until(lambda: caplog.records)
    file.write_text('{"notices": ["metrics on :9464", "metrics on :9465"]}')
    until(lambda: len(caplog.records) > 1)
    time.sleep(0.1)
    said = [r.getMessage() for r in caplog.records]
    assert said == ["metrics on :9464", "metrics on :9465"]
    assert GUARD.failures == {}


def test_a_run_folder_that_is_removed(
    watched: tuple[Process, list[float]], caplog: pytest.LogCaptureFixture
) -> None:
    """Said once; whoever writes to the ring never notices."""
    state, started = watched
    until(lambda: started)
    assert state.ring is not None
    shutil.rmtree(state.ring.path.parent)
    until(lambda: caplog.records)
    time.sleep(0.2)
    folder = state.ring.path.parent
    assert f"its file in the run folder {folder} was removed" in only_warning(caplog)
    state.ring.put(1, 2, 3)
    state.write_info()
    assert GUARD.failures == {}


# The agent belongs to nobody, and never to a bare Python


def test_the_agents_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent must not be instrumented itself."""
    commands: list[Any] = []

    class Popen:
        def __init__(self, command: list[str], **options: Any) -> None:
            commands.append((command, options))

        def wait(self) -> None: ...

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setenv("PYTHONPATH", "/a/auto_instrumentation:/mine::/b/auto_instrumentation/")
    process.spawn_agent(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/a/opentelemetry/instrumentation/auto_instrumentation")
    process.spawn_agent(tmp_path)
    (command, options), (_, second) = commands
    assert command == [
        *(sys.executable, "-P", "-m", "llmobs.agent"),
        *("--detach", str(tmp_path)),
    ]
    assert options["env"]["PYTHONPATH"] == "/mine"
    assert "PYTHONPATH" not in second["env"]
    assert "cwd" not in options  # paths in the environment may be relative


def running_with(path: Path) -> list[psutil.Process]:
    """The processes that name the path in their command; others come and go meanwhile, and one that
    ends just then has no command (psutil leaves it empty here, where `cmdline()` raises)."""
    return [
        found
        for found in psutil.process_iter(["cmdline"])
        if any(str(path) in word for word in found.info["cmdline"] or ())
    ]


def test_a_spawned_agent_is_nobodys_child(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    assert not process.agent_runs(tmp_path)
    process.spawn_agent(tmp_path)
    until(lambda: process.agent_runs(tmp_path))
    (agent,) = running_with(tmp_path)
    try:
        assert agent.pid not in [child.pid for child in psutil.Process().children(recursive=True)]
        assert os.getpgid(agent.pid) == agent.pid
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait(10)
    assert not process.agent_runs(tmp_path)


def test_a_bare_python_starts_nothing(tmp_path: Path) -> None:
    command = shutil.which("opentelemetry-instrument", path=str(Path(sys.executable).parent))
    assert command is not None
    code = (
        "import sys; import llmobs.probes\n"
        "print(llmobs.probes._hooked, 'vllm' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [command, sys.executable, "-c", code],
        env={
            **os.environ,
            "LLMOBS_RUN_DIR": str(tmp_path / "runs"),
            "OTEL_TRACES_EXPORTER": "none",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_LOGS_EXPORTER": "none",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["True", "False"]
    assert not (tmp_path / "runs").exists()
    assert not running_with(tmp_path)


# What a post-mortem goes by

DYING = """
import multiprocessing, os, sys, time
from llmobs import process

def child():
    process.current().open("worker", "m")
    print("child", os.getpid(), flush=True)
    time.sleep(60)

if __name__ == "__main__":
    process.mark_server()
    state = process.current()
    state.open("engine_core", "m")
    made = multiprocessing.get_context("fork").Process(target=child)
    made.start()
    while sys.stdin.readline() == "raise\\n":
        kind = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})
        process.raised("forward", kind("a prompt"))
        process.raised("forward", ValueError("a prompt"))
        print("raised", flush=True)
"""


def test_signs_of_life_and_how_it_ended(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes say that they live; the parent sees its child end, and says good-bye itself.
    Of what was raised the class alone is kept."""
    monkeypatch.setenv("LLMOBS_RING_BYTES", "100000")
    monkeypatch.setenv("LLMOBS_AGENT", str(runs))  # so that no agent is started
    runs.mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-c", DYING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    child = int(parent.stdout.readline().split()[1])
    parent.stdin.write("raise\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "raised\n"

    def beats() -> list[float]:
        cells = [Reader(ring).totals() for ring in sorted(runs.glob("*.ring"))]
        return [c[schema.PROCESS_CELL["alive_wall_ns"]] / 1e9 for c in cells]

    deadline = time.time() + 20
    while (len(beats()) < 2 or min(beats()) < time.time() - 3) and time.time() < deadline:
        time.sleep(0.1)
    assert len(beats()) == 2
    assert min(beats()) == pytest.approx(time.time(), abs=5)
    os.kill(child, signal.SIGSTOP)
    time.sleep(0.2)
    (stopped,) = runs.glob("worker*.ring")
    before = Reader(stopped).totals()[schema.PROCESS_CELL["alive_wall_ns"]]
    time.sleep(1.5)
    assert Reader(stopped).totals()[schema.PROCESS_CELL["alive_wall_ns"]] == before
    os.kill(child, signal.SIGKILL)
    (ring,) = runs.glob("engine_core*.ring")

    def told() -> list[tuple[int, int, int, int]]:
        return [(r[1], r[2], r[5][0], r[5][1]) for r in read_all(Reader(ring))[0] if r[1] == 43]

    while not told() and time.time() < deadline:
        time.sleep(0.05)
    assert told() == [(43, 0, child, -9)]
    parent.stdin.close()
    assert parent.wait(20) == 0
    assert told() == [(43, 0, child, -9), (43, 1, 0, 0)]
    texts = [
        b"".join(c.to_bytes(8, "little", signed=True) for c in r[5])[: r[2]]
        for r in read_all(Reader(ring))[0]
        if r[1] == 44
    ]
    assert texts == [b"torch.OutOfMemoryError", b"ValueError"]
    assert b"a prompt" not in ring.read_bytes()
