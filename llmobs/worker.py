"""Probes of the worker: the host time of each step's forward pass and sampling; its GPU."""

import sys
import time
from typing import Any

from llmobs import process
from llmobs.allocator import Allocator, place
from llmobs.schema import Kind

now = time.monotonic_ns

ALLOCATOR: Allocator | None = None
"""Of the GPU that this worker is on, once it is."""


def starts(token: Any, result: Any, worker: Any, vllm_config: Any, rank: Any) -> None:
    """After Worker.__init__: this process is a worker, maybe the engine core's own process."""
    global ALLOCATOR
    ALLOCATOR = None
    state = process.current()
    parallel = vllm_config.parallel_config
    ray = getattr(parallel, "distributed_executor_backend", None) == "ray"
    if ray and not state.roles and process.is_first():
        return  # Ray started it, not the server: it has no run folder to share
    engine = getattr(parallel, "data_parallel_index", None)
    state.open(
        "worker",
        str(vllm_config.model_config.served_model_name),
        engine=parallel.data_parallel_rank if engine is None else engine,
        rank=rank,
        gpu={"type": str(vllm_config.device_config.device_type)},
    )


def on_device(token: Any, result: Any, worker: Any) -> None:
    """After Worker.init_device: CUDA is initialised."""
    global ALLOCATOR
    state = process.current()
    device, torch = worker.device, sys.modules.get("torch")
    if state.ring is None or torch is None or getattr(device, "type", "") != "cuda":
        return
    state.extra["gpu"] = place(torch, device)
    state.write_info()
    ALLOCATOR = Allocator(torch, device)


def warmed_up(token: Any, result: Any, worker: Any) -> None:
    """After Worker.compile_or_warm_up_model: the model and its KV cache are in memory."""
    ring = process.current().ring
    if ALLOCATOR is not None and ring is not None:
        ALLOCATOR.look(ring, now())


def call_starts(worker: Any, *_: Any) -> int:
    return now()


def forwarded(token: int, result: Any, worker: Any, scheduler_output: Any) -> None:
    ring = process.current().ring
    if ring is not None and scheduler_output.total_num_scheduled_tokens:
        time_now = now()
        sequences = len(scheduler_output.num_scheduled_tokens)
        tokens = scheduler_output.total_num_scheduled_tokens
        ring.put(Kind.FORWARD, time_now, 0, 0, 0, token, sequences, tokens)
        if ALLOCATOR is not None and time_now >= ALLOCATOR.due:
            ALLOCATOR.look(ring, time_now)


def sampled(token: int, result: Any, worker: Any) -> None:
    ring = process.current().ring
    if ring is not None:
        ring.put(Kind.SAMPLE, now(), 0, 0, 0, token)
