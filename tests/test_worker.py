"""The worker's probes."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmobs import process, worker
from llmobs.guard import GUARD
from llmobs.ring import Reader
from tests.rings import read_all
from tests.test_gpu_clock import Gpu

MODEL = SimpleNamespace(served_model_name="m")
PARALLEL = SimpleNamespace(data_parallel_rank=2, distributed_executor_backend="ray")
CONFIG = SimpleNamespace(
    model_config=MODEL,
    parallel_config=PARALLEL,
    device_config=SimpleNamespace(device_type="cpu"),
)
BATCH = SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 9}, total_num_scheduled_tokens=10)
EMPTY = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a worker that just started. Its clock goes by 100 at each look."""
    monkeypatch.setenv("LLMOBS_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(process, "_watch", lambda *_: None)
    clock = iter(range(100, 100_000, 100))
    monkeypatch.setattr(worker, "now", lambda: next(clock))
    monkeypatch.setenv("_LLMOBS_SERVER_RUN", str(tmp_path / "1-1"))
    worker.starts(None, None, None, CONFIG, 3)
    return process.current().ring


def step(batch: Any = BATCH) -> None:
    worker.forwarded(worker.forward_starts(None, batch), None, None, batch)
    worker.sampled(worker.sampling_starts(None), None, None)


def records(ring: Any) -> list[tuple[int, list[int], int]]:
    return [(r[1], r[5][:3], r[6]) for r in read_all(Reader(ring.path))[0]]


def test_a_step_of_a_worker(ring: Any) -> None:
    step()
    worker.forwarded(worker.forward_starts(None, EMPTY), None, None, EMPTY)
    info = Reader(ring.path).info()
    assert (info["roles"], info["engine"], info["rank"]) == (["worker"], 2, 3)
    assert records(ring) == [(32, [100, 2, 10], 200), (33, [300, 0, 0], 400)]


def test_without_a_gpu_that_is_said_and_the_hosts_time_goes_on(
    ring: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert Reader(ring.path).info()["lacking"] == {}, "nothing has run yet, so nothing is known"
    step()
    assert Reader(ring.path).info()["lacking"] == {"gpu_clock": "no_gpu"}
    step()
    assert [kind for kind, _, _ in records(ring)] == [32, 33, 32, 33]
    assert not caplog.records  # that there is none, whoever runs on a CPU knows


def test_with_a_gpu_its_time_of_a_step_is_told_at_the_next(
    ring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu: Any = Gpu()
    gpu.is_initialized = lambda: True
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=gpu))
    step()  # by its end it is known that there is one
    for _ in range(2):
        worker.forwarded(worker.forward_starts(None, BATCH), None, None, BATCH)
        token = worker.sampling_starts(None)
        gpu.time += 7_000
        worker.sampled(token, None, None)
    assert Reader(ring.path).info()["lacking"] == {}
    told = records(ring)
    assert [kind for kind, _, _ in told] == [32, 33, 32, 33, 34, 32, 33]
    began = told[2][1][0]
    assert told[4][1] == [began, 0, 7_000]


def test_a_gpu_clock_that_fails_is_not_asked_again(
    ring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Gpu):
        def is_current_stream_capturing(self) -> bool:
            raise RuntimeError("CUDA error")

    gpu: Any = Broken()
    gpu.is_initialized = lambda: True
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=gpu))
    for _ in range(4):
        step()
    assert [kind for kind, _, _ in records(ring)] == [32, 33] * 4
    assert GUARD.failures == {"gpu_clock": 1}
    assert Reader(ring.path).info()["lacking"] == {"gpu_clock": "failed"}


def test_a_worker_that_the_server_did_not_start_has_no_ring_and_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts its actors by itself: such a worker would be a server of its own."""
    monkeypatch.setenv("LLMOBS_RUN_DIR", str(tmp_path / "runs"))
    process.mark_server()
    worker.starts(None, None, None, CONFIG, 0)
    assert process.current().ring is None
    assert not (tmp_path / "runs").exists()


def test_without_a_ring_nothing_is_done() -> None:
    worker.forwarded(1, None, None, None)
    worker.sampled(1, None, None)
