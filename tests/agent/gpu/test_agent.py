"""The real agent, as its own process with its page, over a stand-in for NVIDIA's driver."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmobs.ring import Writer, start_ticks
from tests.agent.gpu.machine import GIB, Machine
from tests.agent.gpu.server import on_gpu

pytestmark = pytest.mark.timeout(120)


class Agent:
    """Watches the rings of this very process."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        pid = os.getpid()
        info = {"models": ["m"], "vllm": "0.32.0", "engine": 0, "rank": 0}
        self.ring = Writer(
            folder / f"worker-{pid}-{start_ticks(pid)}.ring",
            16,
            info | {"roles": ["worker"], "gpu": on_gpu(0)},
        )
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
        self.log = (folder.parent / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmobs.agent", str(folder)],
            env={**os.environ, "OTEL_EXPORTER_PROMETHEUS_PORT": port, **environ},
            stderr=self.log,
        )

    def page(self) -> str:
        address = self.state()["page"]
        with urllib.request.urlopen(f"{address}/metrics", timeout=20) as answer:
            return str(answer.read().decode())

    def state(self) -> dict[str, Any]:
        path = self.folder / "agent.json"
        self.until(lambda: path.exists() and "page" in json.loads(path.read_text()))
        found = json.loads(path.read_text())
        assert isinstance(found, dict)
        return found

    def shows(self, *lines: str) -> None:
        """Waits for all of these lines to stand on the page."""
        self.until(lambda: set(lines) <= set(self.page().splitlines()))

    def until(self, condition: Any, seconds: float = 40) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None
            assert time.monotonic() < end, "waited too long"
            time.sleep(0.1)

    def mapped(self) -> str:
        return Path(f"/proc/{self.process.pid}/maps").read_text()

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Agent] = []

    def start_(**environ: str) -> Agent:
        made.append(Agent(tmp_path / "runs" / "1-2", **environ))
        return made[0]

    yield start_
    for agent in made:
        agent.process.kill()
        agent.process.wait()
        agent.log.close()


def test_the_page_of_an_agent(machine: Machine, library: Path, start: Any, tmp_path: Path) -> None:
    agent = start(LD_LIBRARY_PATH=str(library.parent), LLMOBS_GPU_SECONDS="1")
    memory = 'llmobs_gpu_memory_pressure_ratio{gpu="0",kind="device",model_name="m"}'
    lacks = 'llmobs_feature_available{{feature="{}",model_name="m",reason="{}"}} {}'
    agent.shows(f"{memory} 0.9", lacks.format("gpu_power", "", "1.0"))
    assert str(library) in agent.mapped()
    machine.change({"0.free": 39 * GIB, "0.error.nvmlDeviceGetPowerUsage": 4})
    agent.shows(f"{memory} 0.5", lacks.format("gpu_power", "no_permission", "0.0"))
    assert "llmobs_gpu_power_watts{" not in agent.page()

    # The driver hangs: the page does not, and shows no longer what may be no longer so.
    machine.change({"hang.nvmlDeviceGetMemoryInfo_v2": 1})
    agent.shows(lacks.format("gpu_memory", "no_answer", "0.0"))
    assert memory not in agent.page()
    machine.change({"hang.nvmlDeviceGetMemoryInfo_v2": None})
    agent.shows(f"{memory} 0.5")

    # It ends, though the driver hangs.
    machine.change({"hang.nvmlDeviceGetMemoryInfo_v2": 1})
    time.sleep(1.5)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(20) == 0
    assert "Traceback" not in agent.said()


def test_an_agent_on_a_machine_without_a_driver(start: Any, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")  # whatever this machine has
    agent = start(LD_LIBRARY_PATH=str(tmp_path))
    agent.shows(
        'llmobs_feature_available{feature="gpu_memory",model_name="m",reason="no_driver"} 0.0',
        'llmobs_feature_available{feature="front_end",model_name="m",reason=""} 1.0',
    )
    assert "llmobs_gpu_memory_bytes{" not in agent.page()
    notices = [n for n in agent.state()["notices"] if "GPU" in n]
    assert len(notices) == 1
    assert "libnvidia-ml.so.1" in notices[0]
