"""PyTorch's allocator, read in a worker, and on the agent's page."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmobs import allocator, process, worker
from llmobs.agent.collect import RunCollector
from llmobs.agent.run import Run
from llmobs.ring import Reader

SECOND = 1_000_000_000
DEVICE = SimpleNamespace(type="cuda", index=1)
# As torch._C._cuda_memoryStats answers, but for what nobody asks.
STATS = {
    "num_alloc_retries": 3,
    "num_ooms": 1,
    "allocated_bytes": {
        "all": {"current": 50_000, "peak": 70_000, "allocated": 900_000, "freed": 850_000},
        "small_pool": {"current": 1, "peak": 2, "allocated": 3, "freed": 2},
    },
    "reserved_bytes": {"all": {"current": 80_000, "peak": 90_000}},
}
PARALLEL = SimpleNamespace(data_parallel_rank=2, distributed_executor_backend="mp")
MODEL = SimpleNamespace(served_model_name="m")


def config(device: str = "cuda") -> Any:
    return SimpleNamespace(
        model_config=MODEL,
        parallel_config=PARALLEL,
        device_config=SimpleNamespace(device_type=device),
    )


class Cuda:
    """torch.cuda, as far as it is used. It counts how often it is asked."""

    def __init__(self) -> None:
        self.stats: Any = copy.deepcopy(STATS)
        self.asked = 0
        self.uuid: Any = "1111-22"

    def is_initialized(self) -> bool:
        return False  # nothing to take the time of

    def memory_stats_as_nested_dict(self, device: Any) -> Any:
        assert device is DEVICE
        self.asked += 1
        return self.stats

    def get_device_properties(self, device: Any) -> Any:
        assert device is DEVICE
        return SimpleNamespace(**({"uuid": self.uuid} if self.uuid else {}))


@pytest.fixture
def cuda(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """A worker that is on its GPU."""
    made = Cuda()
    monkeypatch.setenv("_LLMOBS_SERVER_RUN", str(tmp_path / "runs" / "1-1"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setitem(worker.sys.modules, "torch", SimpleNamespace(cuda=made))
    monkeypatch.setattr(worker, "ALLOCATOR", None)
    worker.starts(None, None, None, config(), 3)
    return made


def info() -> dict[str, Any]:
    ring = process.current().ring
    assert ring is not None
    return Reader(ring.path).info()


def on_device(device: Any = DEVICE) -> None:
    worker.on_device(None, None, SimpleNamespace(device=device))


def step(monkeypatch: pytest.MonkeyPatch, time: int) -> None:
    monkeypatch.setattr(worker, "now", lambda: time)
    batch = SimpleNamespace(num_scheduled_tokens={"a": 1}, total_num_scheduled_tokens=1)
    worker.forwarded(time, None, None, batch)


def page() -> dict[tuple[str, ...], float]:
    ring = process.current().ring
    assert ring is not None
    found = {}
    for family in RunCollector(Run(ring.path.parent)).collect():
        if family.name.startswith("llmobs_torch_memory"):
            for sample in family.samples:
                labels = sample.labels
                assert (labels["model_name"], labels["engine"], labels["rank"]) == ("m", "2", "3")
                found[sample.name, labels.get("kind") or labels["event"]] = sample.value
    return found


ALL = {
    ("llmobs_torch_memory_bytes", "allocated"): 50_000,
    ("llmobs_torch_memory_bytes", "reserved"): 80_000,
    ("llmobs_torch_memory_bytes", "peak"): 70_000,
    ("llmobs_torch_memory_events_total", "alloc_retry"): 3,
    ("llmobs_torch_memory_events_total", "oom"): 1,
}


def test_a_worker_tells_where_it_is(cuda: Cuda) -> None:
    assert info()["gpu"] == {"type": "cuda"}
    on_device()
    assert info()["gpu"] == {
        "type": "cuda",
        "index": 1,
        "uuid": "1111-22",
        "visible": "4,5",
        "order": None,
    }
    assert cuda.asked == 0


def test_a_pytorch_that_knows_no_uuid(cuda: Cuda) -> None:
    cuda.uuid = None
    on_device()
    assert info()["gpu"]["uuid"] is None


def test_once_warm_the_figures_are_there(cuda: Cuda) -> None:
    on_device()
    assert page() == {}, "nothing has been read yet, which is no 0"
    worker.warmed_up(None, None, None)
    assert page() == ALL


def test_at_most_once_a_second(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device()
    for milliseconds in range(0, 3500, 10):
        step(monkeypatch, 50 * SECOND + milliseconds * 1_000_000)
    assert cuda.asked == 4
    assert page() == ALL
    cuda.stats["num_ooms"] = 2
    cuda.stats["allocated_bytes"]["all"]["current"] = 10
    step(monkeypatch, 60 * SECOND)
    changed = {
        ("llmobs_torch_memory_bytes", "allocated"): 10,
        ("llmobs_torch_memory_events_total", "oom"): 2,
    }
    assert page() == ALL | changed


@pytest.mark.parametrize(
    "stats",
    [None, {}],  # as PyTorch answers before CUDA is initialised
)
def test_nothing_to_read_yet(cuda: Cuda, monkeypatch: pytest.MonkeyPatch, stats: Any) -> None:
    cuda.stats = stats
    on_device()
    step(monkeypatch, 50 * SECOND)
    assert page() == {}
    assert "torch_memory" not in info()["lacking"]


@pytest.mark.parametrize(
    "stats",
    [
        {"num_ooms": 0},
        {"allocated_bytes": 5},
        {**STATS, "reserved_bytes": {}},
        {**STATS, "num_ooms": "many"},
    ],
)
def test_an_allocator_that_tells_something_else(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, stats: Any
) -> None:
    cuda.stats = stats
    on_device()
    for second in range(50, 55):
        step(monkeypatch, second * SECOND)
    assert cuda.asked == 1
    assert page() == {}
    assert info()["lacking"]["torch_memory"] == "not_supported"


def test_a_worker_on_the_cpu(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.starts(None, None, None, config("cpu"), 3)
    on_device(SimpleNamespace(type="cpu", index=None))
    worker.warmed_up(None, None, None)
    step(monkeypatch, 50 * SECOND)
    assert info()["gpu"] == {"type": "cpu"}
    assert cuda.asked == 0
    assert page() == {}


def test_a_worker_that_never_got_a_device(cuda: Cuda) -> None:
    on_device(None)
    worker.warmed_up(None, None, None)
    assert cuda.asked == 0


def test_the_real_pytorch_is_not_woken_up() -> None:
    """It has the function that is used, which on its own initialises nothing."""
    import torch

    made = allocator.Allocator(torch, 0)
    ring: Any = None  # is not touched
    made.look(ring, 7)
    assert made.due == 7 + SECOND
    assert not torch.cuda.is_initialized()
