"""The worker's probes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from llmobs import process, worker
from llmobs.ring import Reader
from tests.rings import read_all

MODEL = SimpleNamespace(served_model_name="m")
PARALLEL = SimpleNamespace(data_parallel_rank=2, distributed_executor_backend="ray")
CONFIG = SimpleNamespace(
    model_config=MODEL,
    parallel_config=PARALLEL,
    device_config=SimpleNamespace(device_type="cpu"),
)


def test_a_step_of_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMOBS_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(process, "_watch", lambda *_: None)
    clock = iter(range(100, 1000, 100))
    monkeypatch.setattr(worker, "now", lambda: next(clock))
    monkeypatch.setenv("_LLMOBS_SERVER_RUN", str(tmp_path / "1-1"))
    worker.starts(None, None, None, CONFIG, 3)
    ring = process.current().ring
    assert ring is not None
    batch = SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 9}, total_num_scheduled_tokens=10)
    empty = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    worker.forwarded(worker.call_starts(None), None, None, batch)
    worker.sampled(worker.call_starts(None), None, None)
    worker.forwarded(worker.call_starts(None), None, None, empty)
    reader = Reader(ring.path)
    info = reader.info()
    assert (info["roles"], info["engine"], info["rank"]) == (["worker"], 2, 3)
    records = [(r[1], r[5][:3], r[6]) for r in read_all(reader)[0]]
    assert records == [(32, [100, 2, 10], 200), (33, [300, 0, 0], 400)]


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
