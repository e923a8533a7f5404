"""Servers that are killed, and what is told of their end with no agent and no server alive.

One server here in `make test`; the others take one each and are run by `make postmortems`.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmobs.cli import main
from tests.agent.test_flight import TELLS
from tests.e2e.page import eventually
from tests.faults_of_ours.bench import Bench, Load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(280)]

CALLS, AT_ONCE = 6, 4
ARGS = ("--max-model-len=4096", f"--max-num-seqs={AT_ONCE}")
GONE_S = 60.0

HUNGRY = """
import os, threading, time

def eat():
    while not os.path.exists(f"{os.environ['HUNGER']}/eat-{os.getpid()}"):
        time.sleep(0.1)
    eaten = []
    while True:
        eaten.append(bytearray(16 << 20))

threading.Thread(target=eat, daemon=True).start()
"""
"""As sitecustomize: a process of the server eats memory until it is killed, once a file says so."""


class Crash:
    """A server under load that comes to a bad end by `kill`, and what its client knew."""

    def __init__(self, folder: Path, kill: Callable[["Crash"], None], **env: str) -> None:
        self.folder = folder
        self.volume = folder / "volume"
        environ = {"LLMOBS_FLIGHT_DIR": str(self.volume), **env}
        with Bench(folder / "server", env=environ, args=ARGS) as bench:
            self.bench = bench
            self.agent = bench.agent()
            self.pids = {p.role: p.pid for p in bench.server.processes()}
            with Load([bench.completion(3900) for _ in range(CALLS)]) as load:
                eventually("tokens", self._flowing, 60)
                self.killed_at = time.time()
                kill(self)
                self._wait()
            self.run = bench.run
        answers = [call.answer for call in load.calls]
        assert not any(answer.ok for answer in answers)
        self.chunks = sorted(answer.chunks for answer in answers)
        last = max(answer.last_chunk or 0.0 for answer in answers)
        self.last_token = time.time() - time.monotonic() + last

    def _flowing(self) -> bool:
        """And the agent has written it down, as it does every second."""
        told = self.bench.totals()
        if told["received"] < CALLS or told["generated tokens"] < 100:
            return False
        (record,) = self.volume.glob("*.flight.json")
        in_flight = json.loads(record.read_text())["scene"]["in_flight"]
        return in_flight == {"0-1k": {"decode": AT_ONCE, "queue": CALLS - AT_ONCE}}

    def _wait(self) -> None:
        """Until all of the server and of ours is gone."""

        def gone() -> bool:
            self.bench.server.returncode  # noqa: B018 - so that no zombie is left of it
            alive = [p for p in self.bench.family if _runs(p)]
            return not alive and not self.bench.agents()

        eventually("the server is gone", gone, GONE_S)

    def told(self, folder: Path) -> dict[str, Any]:
        """What is told of what lies in a folder, as JSON; and that the page says it too."""
        out, page = io.StringIO(), io.StringIO()
        assert main(["postmortem", "--json", str(folder)], out) == 1
        assert main(["postmortem", str(folder)], page) == 1
        print(page.getvalue())
        found: dict[str, Any] = json.loads(out.getvalue())
        text = " ".join(page.getvalue().split())
        assert " ".join(found["cause"]["what"].split()) in text
        assert f": {CALLS} requests" in text
        return found

    def check(self, found: dict[str, Any]) -> None:
        """Against what the client knew."""
        scene = found["scene"]
        in_flight = scene["in_flight"]
        assert sum(n for phases in in_flight.values() for n in phases.values()) == CALLS
        # Its longest prompts have some sixty tokens, and no more of them run at once.
        assert in_flight == {"0-1k": {"decode": AT_ONCE, "queue": CALLS - AT_ONCE}}
        tokens = sorted(r["output_tokens"] for r in scene["requests"])
        for told, seen in zip(tokens, self.chunks, strict=True):
            assert seen <= told < 3900  # some may have been on their way
        assert scene["waiting"]["sequences"] == CALLS - AT_ONCE
        assert scene["waiting"]["reason"] == "max_num_seqs"
        assert scene["steps"][-1]["at"] == pytest.approx(self.last_token, abs=1.0)
        assert sum(second["tokens"] for second in scene["trend"]) >= sum(self.chunks)
        assert {p["pid"] for p in scene["processes"]} == {
            self.pids[role] for role in ("api_server", "engine_core", "worker")
        }
        assert not any(p["alive"] for p in scene["processes"])
        pid = str(self.pids["engine_core"])
        resident = [s["resident"][pid] for s in found["samples"] if pid in s["resident"]]
        assert 100 << 20 < resident[-1] < 8 << 30

    def process(self, found: dict[str, Any], role: str) -> dict[str, Any]:
        (process,) = [p for p in found["scene"]["processes"] if p["pid"] == self.pids[role]]
        return process


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def kill(role: str) -> Callable[[Crash], None]:
    return lambda crash: os.kill(crash.pids[role], signal.SIGKILL)


def kill_agent_then_engine(crash: Crash) -> None:
    crash.agent.kill()
    crash.agent.wait(10)
    kill("engine_core")(crash)


def test_the_agent_is_killed_and_then_the_engine_core(tmp_path: Path) -> None:
    """The rings are enough; and what the agent had written lies on the volume."""
    crash = Crash(tmp_path, kill_agent_then_engine)
    found = crash.told(crash.run)
    crash.check(found)
    assert found["cause"]["kind"] == "killed"
    assert f"EngineCore (pid {crash.pids['engine_core']})" in found["cause"]["what"]
    assert "SIGKILL" in found["cause"]["what"]
    assert crash.process(found, "engine_core")["exit"] == -9
    assert crash.process(found, "engine_core")["exit_seen_by"] == crash.pids["api_server"]
    # The whole machine's memory is gone with it:
    shutil.rmtree(crash.run.parent)
    found = crash.told(crash.volume)
    (record,) = crash.volume.glob("*.flight.json")
    assert found["read"] == [f"the flight record {record}"]
    assert found["scene"]["server"] == crash.run.name
    assert found["scene"]["at"] == pytest.approx(crash.killed_at, abs=10)


# By `make postmortems`


@pytest.mark.long
def test_the_engine_core_is_killed(tmp_path: Path) -> None:
    """Whole on the volume, too: the agent outlived it."""
    crash = Crash(tmp_path, kill("engine_core"))
    found = crash.told(crash.run)
    crash.check(found)
    shutil.rmtree(crash.run.parent)
    volume = crash.told(crash.volume)
    crash.check(volume)
    for told in (found, volume):
        assert told["cause"]["kind"] == "killed"
        assert crash.process(told, "engine_core")["exit"] == -9


@pytest.mark.long
def test_the_worker_is_killed(tmp_path: Path) -> None:
    crash = Crash(tmp_path, kill("worker"))
    found = crash.told(crash.run)
    crash.check(found)
    assert found["cause"]["kind"] == "killed"
    assert f"Worker (pid {crash.pids['worker']}) was ended by" in found["cause"]["what"]
    assert crash.process(found, "worker")["exit"] == -9


@pytest.mark.long
def test_the_api_server_is_killed(tmp_path: Path) -> None:
    """Nobody of ours is its parent; a new kernel tells the agent. vLLM's others run on for ever
    then, until whoever keeps house ends them."""

    def kill_and_clean_up(crash: Crash) -> None:
        kill("api_server")(crash)
        time.sleep(5)
        os.killpg(crash.bench.server.pid, signal.SIGKILL)

    crash = Crash(tmp_path, kill_and_clean_up)
    found = crash.told(crash.run)
    front = crash.process(found, "api_server")
    if TELLS:
        crash.check(found)
        assert (front["exit"], front["exit_seen_by"]) == (-9, "agent")
        assert found["cause"]["kind"] == "killed"
        assert f"API server (pid {front['pid']}) was ended by" in found["cause"]["what"]
    else:
        assert front["exit"] is None
        assert found["cause"]["kind"] == "front_end_ended"


@pytest.mark.long
def test_the_whole_process_group_is_killed_with_the_agent(tmp_path: Path) -> None:
    """As a container's end does it."""

    def container(crash: Crash) -> None:
        crash.agent.suspend()
        os.killpg(crash.bench.server.pid, signal.SIGKILL)
        crash.agent.kill()

    crash = Crash(tmp_path, container)
    found = crash.told(crash.run)
    crash.check(found)
    assert found["cause"]["kind"] == "killed_together"
    assert all(p["exit"] is None for p in found["scene"]["processes"])
    shutil.rmtree(crash.run.parent)
    volume = crash.told(crash.volume)
    assert volume["cause"]["kind"] == "killed_together"
    assert volume["scene"]["at"] == pytest.approx(crash.killed_at, abs=5)


@pytest.mark.long
def test_the_engine_core_is_stopped_and_then_killed(tmp_path: Path) -> None:
    def stop(crash: Crash) -> None:
        os.kill(crash.pids["engine_core"], signal.SIGSTOP)
        time.sleep(20)
        kill("engine_core")(crash)

    crash = Crash(tmp_path, stop)
    found = crash.told(crash.run)
    crash.check(found)
    assert found["cause"]["kind"] == "killed"
    still = [line for line in found["cause"]["evidence"] if "gave no sign of life for" in line]
    assert f"EngineCore (pid {crash.pids['engine_core']})" in still[0]


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 256 MiB. Needs root."""
    first = Path("/sys/fs/cgroup/memory")
    root, limit = (
        (first, "memory.limit_in_bytes") if first.is_dir() else (first.parent, "memory.max")
    )
    folder = root / f"llmobs-test-{os.getpid()}"
    folder.mkdir()
    (folder / limit).write_text(str(256 << 20))
    yield folder
    eventually("the cgroup is empty", lambda: not (folder / "cgroup.procs").read_text(), 30)
    folder.rmdir()


@pytest.mark.long
def test_the_engine_core_is_killed_for_memory(tmp_path: Path, cgroup: Path) -> None:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HUNGRY)

    def eat(crash: Crash) -> None:
        (cgroup / "cgroup.procs").write_text(str(crash.pids["engine_core"]))
        time.sleep(2)  # the agent looks every second where a process is
        (tmp_path / f"eat-{crash.pids['engine_core']}").touch()

    path = os.pathsep.join([str(tmp_path / "hook"), os.environ.get("PYTHONPATH", "")])
    crash = Crash(tmp_path, eat, PYTHONPATH=path, HUNGER=str(tmp_path))
    found = crash.told(crash.run)
    crash.check(found)
    assert found["cause"]["kind"] == "out_of_memory_kill"
    assert (
        f"the kernel killed EngineCore (pid {crash.pids['engine_core']})" in found["cause"]["what"]
    )
    assert f"{cgroup}: oom_kill went from 0 to 1" in found["cause"]["evidence"]
    assert crash.process(found, "engine_core")["exit"] == -9
