"""Drives vLLM's own scheduler and block pool, with the probes on, and compares after every call.

python -m tests.kv_pool FOLDER     prints what each workload did; fails at the first difference

A process of its own: it imports vLLM. The truth is the pool's own: its free queue walked from end
to end, the reference counts of its blocks, what goes through that queue, and what vLLM's scheduler
got when it asked for blocks.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from demo.model import make_model
from llmobs import engine, process, schema
from llmobs.guard import GUARD
from llmobs.probes import attach
from llmobs.ring import Reader
from tests.rings import read_all

BLOCK, WINDOW, BLOCK_BYTES = 16, 40, 4096
CHUNK, PREEMPT, LEAVE, STARVED = 17, 18, 22, 26
CELL = schema.PROCESS_CELL["kv_block_events"]


@dataclass(frozen=True)
class Workload:
    name: str
    blocks: int = 40
    caching: bool = True
    hybrid: bool = False
    policy: str = "fcfs"
    steps: int = 150


WORKLOADS = (
    Workload("caching"),
    Workload("no_caching", caching=False),
    Workload("hybrid", hybrid=True, blocks=60),
    Workload("hybrid_no_caching", hybrid=True, caching=False, blocks=60),
    Workload("priority", policy="priority", caching=False, blocks=32),
    Workload("roomy", blocks=2000),
)


class Truth:
    """What really happened to one pool."""

    def __init__(self) -> None:
        self.out = self.back = self.evicted = self.failed = 0
        self.tables: dict[str, list[int]] = {}
        self.starved: Counter[str] = Counter()

    def of(self, pool: Any) -> None:
        """Count what goes through its free queue."""
        queue = pool.free_block_queue
        for name in ("popleft", "popleft_n", "remove", "append", "append_n", "prepend_n"):
            if hasattr(queue, name):
                setattr(queue, name, self._counted(name, getattr(queue, name)))

    def _counted(self, name: str, original: Any) -> Any:
        def call(what: Any = None) -> Any:
            result = original() if name == "popleft" else original(what)
            blocks = {"popleft_n": result, "popleft": [result]}.get(name, what)
            number = len(blocks) if isinstance(blocks, list) else 1
            if name in ("popleft", "popleft_n", "remove"):
                self.out += number
            else:
                self.back += number
            if name.startswith("popleft"):  # a block that has a hash is one of the prefix cache
                self.evicted += sum(block.block_hash is not None for block in blocks)
            return result

        return call


TRUTH = Truth()


def watch_vllm() -> None:
    """Before our probes are there: what its own methods return, and what tables are given up."""
    allocate, free = KVCacheManager.allocate_slots, KVCacheManager.free

    def allocate_slots(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = allocate(self, request, *args, **kwargs)
        if result is None:
            TRUTH.failed += 1
            TRUTH.starved[request.request_id] += 1
        return result

    def free_request(self: Any, request: Any) -> Any:
        groups = self.coordinator.get_blocks(request.request_id)
        TRUTH.tables.setdefault(request.request_id, []).append(
            sum(not block.is_null for group in groups for block in group)
        )
        return free(self, request)

    KVCacheManager.allocate_slots = allocate_slots
    KVCacheManager.free = free_request


@cache
def config_of(workload: Workload, model: Path) -> VllmConfig:
    scheduling = SchedulerConfig(
        max_num_seqs=12,
        max_num_batched_tokens=256,
        max_model_len=1024,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        policy=workload.policy,
    )
    caching = CacheConfig(block_size=BLOCK, enable_prefix_caching=workload.caching)
    caching.num_gpu_blocks = workload.blocks + 1
    return VllmConfig(
        scheduler_config=scheduling,
        model_config=ModelConfig(model=str(model), dtype="float32", seed=1),
        cache_config=caching,
        device_config=DeviceConfig("cpu"),
    )


def scheduler_of(workload: Workload, model: Path) -> Any:
    config = config_of(workload, model)
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(block_size=BLOCK, **shape))]
    if workload.hybrid:
        window = SlidingWindowSpec(block_size=BLOCK, sliding_window=WINDOW, **shape)
        groups.append(KVCacheGroupSpec(["window"], window))
    size = BLOCK_BYTES * (workload.blocks + 1)
    tensors = [
        KVCacheTensor(size=size, layers=[*group.layer_names], layer_stride=1, block_stride=1)
        for group in groups
    ]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(workload.blocks + 1, tensors, groups),
        block_size=BLOCK,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )


class Run:
    def __init__(self, workload: Workload, model: Path, seed: int) -> None:
        global TRUTH
        TRUTH = Truth()
        self.random = Random(f"{workload.name} {seed}")
        self.workload = workload
        self.scheduler = scheduler_of(workload, model)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.before = [*self.cells()[:3], self.failures()]
        TRUTH.of(self.pool)
        self.names = map("{}".format, count())
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.did: Counter[str] = Counter()

    def cells(self) -> list[int]:
        ring = process.current().ring
        return [0, 0, 0] if ring is None else list(ring.cells[CELL : CELL + 3])

    def failures(self) -> int:
        ring = process.current().ring
        return 0 if ring is None else ring.cells[schema.PROCESS_CELL["kv_allocation_failures"]]

    def check(self, what: str) -> None:
        free = {id(block) for block in self.pool.free_block_queue.get_all_free_blocks()}
        idle = [b for b in self.pool.blocks if not b.ref_cnt and not b.is_null]
        assert free == {id(block) for block in idle}, "vLLM's own two truths differ"
        out, back, evicted = (a - b for a, b in zip(self.cells(), self.before, strict=False))
        told = {
            "used": out - back,
            "allocate": out,
            "free": back,
            "evict": evicted,
            "failures": self.failures() - self.before[3],
        }
        true = {
            "used": self.workload.blocks - len(free),
            "allocate": TRUTH.out,
            "free": TRUTH.back,
            "evict": TRUTH.evicted,
            "failures": TRUTH.failed,
        }
        assert told == true, (self.workload, what, told, true)
        usage = self.scheduler.kv_cache_manager.usage
        assert abs(usage - true["used"] / self.workload.blocks) < 1e-9
        assert not GUARD.failures, GUARD.failures

    def add(self) -> None:
        prefix = self.random.choice([0, 0, 33, 70, 200])
        length = prefix + self.random.randint(1, 150)
        tokens = [self.random.randint(0, 1 << 30) for _ in range(length)]
        tokens[:prefix] = range(prefix)  # the same for all who have it
        params = SamplingParams(max_tokens=self.random.randint(1, 120), ignore_eos=True)
        params.update_from_generation_config({}, 2)
        hasher = self.hasher if self.workload.caching else None
        name = next(self.names)
        priority = self.random.randint(0, 3)
        self.scheduler.add_request(
            Request(name, tokens, params, None, block_hasher=hasher, priority=priority)
        )
        self.did["requests"] += 1

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.check("schedule")
        names = list(output.num_scheduled_tokens)
        self.did["tokens"] += output.total_num_scheduled_tokens
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([self.random.randint(0, 1 << 30)] if done else [])
        places = {name: place for place, name in enumerate(names)}
        runner = ModelRunnerOutput(names, places, sampled)
        self.scheduler.update_from_output(output, runner)
        self.check("update")

    def go(self) -> dict[str, Any]:
        for _ in range(self.workload.steps):
            if self.random.random() < 0.25 and len(self.scheduler.requests) < 30:
                self.add()
            if self.scheduler.requests and self.random.random() < 0.03:
                name = self.random.choice(list(self.scheduler.requests))
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                self.check("abort")
                self.did["aborts"] += 1
            if self.random.random() < 0.01:
                self.scheduler.reset_prefix_cache(reset_running_requests=True)
                self.check("reset")
                self.did["resets"] += 1
            if self.workload.caching and self.random.random() < 0.02:  # as a KV connector does
                cached = [b.block_id for b in self.pool.blocks if b.block_hash is not None]
                some = set(self.random.sample(cached, min(len(cached), 3)))
                self.scheduler.kv_cache_manager.evict_blocks(some)
                TRUTH.evicted += len(some)
                self.check("evict")
            self.step()
        for _ in range(5000):
            if self.scheduler.requests:
                self.step()
        assert not self.scheduler.requests, "some request never ends"
        assert self.cells()[0] == self.cells()[1], "none is in use at the end"
        return {
            **dict(self.did),
            "allocated": TRUTH.out,
            "evicted": TRUTH.evicted,
            "failed": TRUTH.failed,
        }


def other_pool() -> None:
    """Another pool in this process, such as a KV connector has for the CPU's memory."""
    before = Run.cells(None)  # type: ignore[arg-type]
    pool = BlockPool(num_gpu_blocks=9, enable_caching=True, hash_block_size=BLOCK)
    blocks = pool.get_new_blocks(5)
    name = make_block_hash_with_group_id(BlockHash(b"x"), 0)
    pool._insert_block_hash(name, blocks[0], num_tokens=BLOCK)
    pool.free_blocks(blocks)
    pool.get_new_blocks(8)
    assert len(pool.cached_block_hash_to_block) == 0, "it was evicted"
    assert Run.cells(None) == before  # type: ignore[arg-type]


def records(reader: Reader, run: Run) -> dict[str, int]:
    """What the records tell of each request, beside what vLLM gave up for it."""
    rows, lost = read_all(reader)
    assert not lost
    names = {}
    told: dict[int, list[int]] = {}
    attempts: Counter[int] = Counter()
    firsts: Counter[int] = Counter()
    for _, kind, _, _, number, columns, _, _ in rows:
        if kind == 16:
            names[number] = len(names)
        elif kind == PREEMPT:
            told.setdefault(number, []).append(columns[4])
        elif kind == LEAVE:
            told.setdefault(number, []).append(columns[2])
            attempts[number] += columns[5]
        elif kind == CHUNK:
            attempts[number] += columns[7]
        elif kind == STARVED:
            firsts[number] += 1
    for number, name in names.items():
        assert told[number] == TRUTH.tables[str(name)], (run.workload, name)
    # A running request's attempts end in a preemption: they are in no record of its own.
    assert sum(attempts.values()) <= TRUTH.failed
    for number in attempts:
        assert attempts[number] <= TRUTH.starved[str(names[number])]
        assert (attempts[number] > 0) == (firsts[number] > 0)
    preempted = sum(kind == PREEMPT and x == 1 for _, kind, x, *_ in rows)
    assert sum(attempts.values()) + preempted == TRUTH.failed
    return {"preempted": preempted, "starved": sum(firsts.values())}


def main(folder: Path) -> int:
    model = make_model(folder / "model")
    init_none_hash(sha256)
    watch_vllm()
    attach()
    process._watch = lambda *_: None  # no agent
    for workload in WORKLOADS:
        for seed in range(3):
            ring = process.current().ring
            reader = None if ring is None else Reader(ring.path)
            if reader is not None and ring is not None:
                reader.position = reader.newest() + 1
            run = Run(workload, model, seed)
            if reader is None:
                reader = Reader(process.current().ring.path)  # type: ignore[union-attr]
            assert engine.ENGINE is not None
            did = run.go()
            did |= records(reader, run)
            reader.close()
            print(json.dumps({"workload": workload.name, "seed": seed, **did}), flush=True)
    other_pool()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
