"""A server with workers on GPUs, as its rings tell of it; and what the agent's page says then."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from llmobs import schema
from llmobs.agent.collect import RunCollector
from llmobs.agent.run import Run
from llmobs.ring import Writer, start_ticks

NVML_FEATURES = (
    *("gpu_memory", "gpu_utilization", "gpu_power", "gpu_throttling", "gpu_pcie", "gpu_nvlink"),
    *("gpu_ecc", "gpu_xid"),
)

WANTED = ("llmobs_gpu_", "llmobs_torch_", "llmobs_feature_available")


def on_gpu(index: int | None, **more: Any) -> dict[str, Any]:
    """What a worker says that is on its device."""
    return {"type": "cuda", "index": index, "uuid": None, "visible": None, "order": None, **more}


def kv(engine: Writer, size: int, blocks: int, used: int) -> None:
    """An engine's pool: bytes in each worker, blocks in it but for vLLM's null block."""
    cells, at = engine.cells, schema.PROCESS_CELL
    cells[at["kv_cache_bytes"]] = size
    cells[at["kv_pool_blocks"]] = blocks
    cells[at["kv_block_events"]] = 1000 + used
    cells[at["kv_block_events"] + 1] = 1000


class _Wanted(RunCollector):
    """Without the other families, which are not asked for and take long to write."""

    def collect(self) -> Iterator[Any]:
        return (family for family in super().collect() if family.name.startswith(WANTED))


class Server:
    """`workers` say this of their GPUs, by rank; None says nothing."""

    def __init__(self, run: Run, folder: Path, workers: tuple[dict[str, Any] | None, ...]) -> None:
        self.run = run
        self.said: list[str] = []
        self.folder = folder
        about = {"models": ["m"], "vllm": "0.32.0", "server": "1-2", "engine": 0}
        self.engine = self.ring("engine_core", about | {"roles": ["engine_core"]})
        self.workers = [
            self.ring(
                f"worker{rank}",
                about | {"roles": ["worker"], "rank": rank} | ({"gpu": gpu} if gpu else {}),
            )
            for rank, gpu in enumerate(workers)
        ]

    def ring(self, name: str, info: dict[str, Any]) -> Writer:
        pid = os.getpid()
        return Writer(self.folder / f"{name}-{pid}-{start_ticks(pid)}.ring", 16, info)

    def page(self) -> dict[str, float]:
        """The lines of the agent's page about GPUs, without `model_name`."""
        registry = CollectorRegistry()
        registry.register(_Wanted(self.run))
        lines = generate_latest(registry).decode().splitlines()
        return {
            series.replace('model_name="m",', "").replace(',model_name="m"', ""): float(value)
            for series, _, value in (line.rpartition(" ") for line in lines)
            if series.startswith(WANTED)
        }

    def lacking(self, page: dict[str, float] | None = None) -> dict[str, str]:
        """The features that the page says are not there, with the reason; of GPUs only."""
        found = {}
        for series, value in (page or self.page()).items():
            if series.startswith("llmobs_feature_available"):
                _, feature, _, reason, _ = series.split('"')
                assert value == (not reason)
                if reason and feature.startswith(("gpu", "torch")):
                    found[feature] = reason
        return found

    def figures(self) -> set[str]:
        """The names of the metrics of GPUs that have a series."""
        return {series.partition("{")[0] for series in self.page()} - {"llmobs_feature_available"}

    def until(self, condition: Callable[[], Any], seconds: float = 20) -> Any:
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, (self.page(), self.said)
            time.sleep(0.02)
        return found

    def until_figures(self) -> dict[str, float]:
        """The page, once the GPUs were looked at."""
        self.until(lambda: "llmobs_gpu_info" in self.figures())
        return self.page()
