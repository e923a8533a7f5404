"""A stand-in for NVIDIA's library, under the real pynvml."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from llmobs.agent.gpu.signal import Gpus
from llmobs.agent.run import Run
from tests.agent.gpu.machine import Machine, build
from tests.agent.gpu.server import Server


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, loaded: who asks for libnvidia-ml.so.1 in this process gets it by that name."""
    path = build(tmp_path_factory.mktemp("driver"))
    ctypes.CDLL(str(path))
    return path


@pytest.fixture
def machine(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """With three GPUs."""
    path = tmp_path / "machine"
    monkeypatch.setenv("STAND_IN_NVML", str(path))
    return Machine(path, 3)


@pytest.fixture
def nvml(machine: Machine) -> Iterator[Any]:
    """The real pynvml, initialised."""
    pynvml.nvmlInit()
    yield pynvml
    pynvml.nvmlShutdown()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Makes a server's rings, with an agent's view of them that looks at the GPUs very often."""
    made: list[Server] = []

    def make(*workers: dict[str, Any] | None, **options: Any) -> Server:
        folder = tmp_path / "run"
        folder.mkdir()
        run = Run(folder)
        made.append(Server(run, folder, workers))
        run.signals.append(Gpus(run, 0.05, made[0].said.append, **options))
        run.poll()
        return made[0]

    yield make
    for server in made:
        for signal in server.run.signals:
            assert isinstance(signal, Gpus)
            signal.close()
            if signal._thread is not None:
                signal._thread.join(10)
                assert not signal._thread.is_alive()
                signal._give_up()
