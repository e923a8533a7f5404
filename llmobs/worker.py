"""Probes of the worker: the host time of each step's forward pass and sampling."""

import time
from typing import Any

from llmobs import process
from llmobs.schema import Kind

now = time.monotonic_ns


def starts(token: Any, result: Any, worker: Any, vllm_config: Any, rank: Any) -> None:
    """After Worker.__init__: this process is a worker, maybe the engine core's own process."""
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
    )


def call_starts(worker: Any, *_: Any) -> int:
    return now()


def forwarded(token: int, result: Any, worker: Any, scheduler_output: Any) -> None:
    ring = process.current().ring
    if ring is not None and scheduler_output.total_num_scheduled_tokens:
        time_now = now()
        sequences = len(scheduler_output.num_scheduled_tokens)
        tokens = scheduler_output.total_num_scheduled_tokens
        ring.put(Kind.FORWARD, time_now, 0, 0, 0, token, sequences, tokens)


def sampled(token: int, result: Any, worker: Any) -> None:
    ring = process.current().ring
    if ring is not None:
        ring.put(Kind.SAMPLE, now(), 0, 0, 0, token)
