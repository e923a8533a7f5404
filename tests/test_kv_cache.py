"""What is counted of the KV cache's blocks, beside vLLM's own scheduler and pool."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmobs import engine, kv_cache, process, schema
from tests.test_features import config

CELLS = schema.PROCESS_CELL["kv_block_events"]


@pytest.fixture(scope="module")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What tests/kv_pool.py did and compared, in a process that has vLLM imported."""
    folder = tmp_path_factory.mktemp("pool")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kv_pool", str(folder)],
        env=os.environ
        | {
            "LLMOBS_RUN_DIR": str(folder / "runs"),
            "LLMOBS_RING_BYTES": str(1 << 26),
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_every_count_is_vllms_own_after_every_call(workloads: list[dict[str, Any]]) -> None:
    """Compared there after each step, end, abort, reset and eviction, and record by record."""
    names = {"caching", "no_caching", "hybrid", "hybrid_no_caching", "priority", "roomy"}
    assert {done["workload"] for done in workloads} == names
    assert len(workloads) == 18


@pytest.mark.parametrize(
    "what", ["allocated", "failed", "preempted", "starved", "aborts", "resets"]
)
def test_there_was_something_to_count(workloads: list[dict[str, Any]], what: str) -> None:
    for name in ("caching", "no_caching", "hybrid", "hybrid_no_caching", "priority"):
        assert sum(done.get(what, 0) for done in workloads if done["workload"] == name) > 0, name


def test_evictions_are_of_the_prefix_cache(workloads: list[dict[str, Any]]) -> None:
    for done in workloads:
        if done["workload"] in ("caching", "hybrid"):
            assert done["evicted"] > 50, done
        elif done["workload"] != "roomy":
            assert done["evicted"] == 0, done


def test_nobody_starves_where_there_is_room(workloads: list[dict[str, Any]]) -> None:
    for done in workloads:
        if done["workload"] == "roomy":
            assert done["failed"] == done["preempted"] == done["starved"] == 0


# What vLLM's own objects cannot be brought to do here


def queue(free: int) -> Any:
    return SimpleNamespace(num_free_blocks=free)


def tensor(size: int, **more: Any) -> Any:
    return SimpleNamespace(size=size, **more)


def scheduler(blocks: int = 9, tensors: tuple[Any, ...] = ()) -> Any:
    pool = SimpleNamespace(free_block_queue=queue(blocks), num_gpu_blocks=blocks + 1)
    manager = SimpleNamespace(
        block_pool=pool,
        coordinator=SimpleNamespace(single_type_managers=()),
        kv_cache_config=SimpleNamespace(kv_cache_tensors=tensors),
        allocate_slots=lambda request: None,
    )
    return SimpleNamespace(kv_cache_manager=manager)


@pytest.fixture
def started(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(engine, "ENGINE", None)
    monkeypatch.setattr(kv_cache, "POOL", None)
    process.mark_server()
    engine.starts(None, config())
    return process.current().ring


@pytest.mark.parametrize(
    ("tensors", "size"),
    [
        # Until 0.25 each tensor is its own, unless they are packed; from 0.30 on they lie in one.
        ((tensor(100), tensor(100), tensor(50)), 250),
        ((tensor(100, block_stride=0), tensor(50, block_stride=0)), 150),
        ((tensor(600, block_stride=8), tensor(600, block_stride=8)), 600),
        (
            (
                tensor(600, block_stride=8, host_resident=False),
                tensor(9000, block_stride=8, host_resident=True),
            ),
            600,
        ),
        ((), 0),
    ],
)
def test_the_size(started: Any, tensors: tuple[Any, ...], size: int) -> None:
    engine.started(None, None, scheduler(tensors=tensors), None)
    assert started.cells[schema.PROCESS_CELL["kv_cache_bytes"]] == size
    assert started.cells[schema.PROCESS_CELL["kv_pool_blocks"]] == 9


def test_a_scheduler_after_another_has_all_blocks_free(started: Any) -> None:
    first = scheduler()
    engine.started(None, None, first, None)
    first.kv_cache_manager.block_pool.free_block_queue.num_free_blocks = 2
    kv_cache.returning(first.kv_cache_manager.block_pool)
    assert list(started.cells[CELLS : CELLS + 2]) == [7, 0]
    engine.starts(None, config())
    engine.started(None, None, scheduler(), None)
    assert list(started.cells[CELLS : CELLS + 2]) == [7, 7]


@pytest.mark.parametrize(
    "other",
    [SimpleNamespace(), SimpleNamespace(kv_cache_manager=SimpleNamespace()), scheduler(0)],
    ids=["a scheduler of one's own", "another manager", "a model without attention"],
)
def test_without_a_pool_that_is_said(started: Any, other: Any) -> None:
    engine.started(None, None, other, None)
    assert process.current().lacking == {"kv_cache": "no_kv_pool"}
    assert kv_cache.POOL is None
    assert started.cells[schema.PROCESS_CELL["kv_pool_blocks"]] == 0


@pytest.mark.parametrize("probe", ["kv_free", "kv_evict", "kv_attempt", "preempt", "schedule"])
def test_without_a_probe_that_is_needed_nothing_is_told(started: Any, probe: str) -> None:
    process.current().miss(probe, "gone", at_once=False)
    engine.starts(None, config())
    engine.started(None, None, scheduler(), None)
    assert process.current().lacking == {"kv_cache": "no_kv_pool"}


@pytest.mark.parametrize("failed", [None, False])
@pytest.mark.parametrize("method", ["allocate_slots", "can_fit_full_sequence"])
def test_attempts_are_watched_while_the_waiting_ones_are_tried(
    started: Any, failed: bool | None, method: str
) -> None:
    """In 0.20 a prompt that does not fit as a whole fails before it asks for blocks."""
    one = scheduler()
    manager = one.kv_cache_manager
    manager.can_fit_full_sequence = lambda request: True
    setattr(manager, method, original := lambda request: failed)
    engine.started(None, None, one, None)
    assert engine.ENGINE is not None
    engine.ENGINE.starve = lambda request: None  # type: ignore[method-assign]
    engine.admission_tried(None, None, one)
    assert getattr(manager, method) is original, "this is no step's scheduling"
    engine.schedule_starts(one)
    for _ in range(2):
        engine.admission_tried(None, None, one)
    assert getattr(manager, method)("one") is failed
    assert getattr(manager, method)(request="one") is failed
    output = SimpleNamespace(total_num_scheduled_tokens=0, num_scheduled_tokens={})
    engine.scheduled(1, output, one)
    assert getattr(manager, method) is original
    assert started.cells[schema.PROCESS_CELL["kv_allocation_failures"]] == 2
