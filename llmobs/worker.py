"""Probes of the worker: the time of each step's forward pass and sampling, of the host and, where
there is one, of its GPU; that GPU's memory."""

import sys
import time
from collections.abc import Callable
from typing import Any

from llmobs import process
from llmobs.allocator import Allocator, place
from llmobs.gpu_clock import GpuClock, cuda
from llmobs.guard import GUARD
from llmobs.schema import Kind

now = time.monotonic_ns
FORWARD, SAMPLE = int(Kind.FORWARD), int(Kind.SAMPLE)  # bound once: a lookup takes as long as `now`

ALLOCATOR: Allocator | None = None
"""Of the GPU that this worker is on, once it is."""
CLOCK: GpuClock | None = None
_looked = False
"""Whether there is a GPU was asked: after the first forward pass, when it must be in use."""


def starts(token: Any, result: Any, worker: Any, vllm_config: Any, rank: Any) -> None:
    """After Worker.__init__: this process is a worker, maybe the engine core's own process."""
    global ALLOCATOR, CLOCK, _looked
    ALLOCATOR, CLOCK, _looked = None, None, False
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


def forward_starts(worker: Any, scheduler_output: Any) -> int:
    if CLOCK is not None and (tokens := scheduler_output.total_num_scheduled_tokens):
        _clock(CLOCK.forward_starts, tokens == len(scheduler_output.num_scheduled_tokens))
    return now()


def forwarded(token: int, result: Any, worker: Any, scheduler_output: Any) -> None:
    ring = process.current().ring
    if ring is not None and scheduler_output.total_num_scheduled_tokens:
        time_now = now()
        if CLOCK is not None:
            _clock(CLOCK.forward_ends, token)
        elif not _looked:
            _look()
        sequences = len(scheduler_output.num_scheduled_tokens)
        tokens = scheduler_output.total_num_scheduled_tokens
        ring.put(FORWARD, time_now, 0, 0, 0, token, sequences, tokens)
        if ALLOCATOR is not None and time_now >= ALLOCATOR.due:
            ALLOCATOR.look(ring, time_now)


def sampling_starts(worker: Any) -> int:
    if CLOCK is not None:
        _clock(CLOCK.sampling_starts)
    return now()


def sampled(token: int, result: Any, worker: Any) -> None:
    ring = process.current().ring
    if ring is not None:
        time_now = now()
        if CLOCK is not None:
            _clock(CLOCK.sampling_ends)
        ring.put(SAMPLE, time_now, 0, 0, 0, token)


def _look() -> None:
    """Whether there is a GPU to read the clock of."""
    global CLOCK, _looked
    _looked = True
    found = cuda()
    if found is None:
        process.current().lacks("no_gpu", "gpu_clock", said=False)
    else:
        CLOCK = GpuClock(found, _gpu_timed)


def _gpu_timed(began: int, forward: int, sampling: int) -> None:
    ring = process.current().ring
    if ring is not None:
        ring.put(Kind.GPU, now(), 0, 0, 0, began, forward, sampling)


def _clock(call: Callable[..., None], *arguments: Any) -> None:
    """One that fails once is not asked again, and the host's times go on."""
    global CLOCK
    try:
        call(*arguments)
    except Exception:
        CLOCK = None
        GUARD.failed("gpu_clock")
        process.current().lacks("failed", "gpu_clock", said=False)
