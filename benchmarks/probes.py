"""What the engine's probes cost per step, inside the process: with probes and bare, in turn.

A stand-in for vLLM's scheduler yields one output per running request, as vLLM's does; the same
steps run with the real probes around it and without, alternating, and the medians of many rounds
are told.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmobs import engine
from llmobs.guard import wrap
from llmobs.ring import Reader, Writer

ROUNDS, STEPS = 41, 500


class Scheduler:
    """One step: everything that runs yields one token."""

    def __init__(self, running: int) -> None:
        outputs = [
            SimpleNamespace(request_id=f"chatcmpl-{n:032x}-{n:08x}", new_token_ids=[n])
            for n in range(running)
        ]
        self.running = outputs
        self.requests = {
            o.request_id: SimpleNamespace(num_computed_tokens=101, num_tokens=100) for o in outputs
        }
        self.max_num_running_reqs = self.max_num_scheduled_tokens = 1 << 30
        self.output = SimpleNamespace(
            total_num_scheduled_tokens=running,
            num_scheduled_tokens={o.request_id: 1 for o in outputs},
            scheduled_new_reqs=[],
            scheduled_spec_decode_tokens={},
        )
        self.result = {0: SimpleNamespace(outputs=outputs, scheduler_stats=None)}

    def schedule(self) -> Any:
        return self.output

    def update_from_output(self, scheduler_output: Any) -> Any:
        return self.result


def observed(
    running: int, ring: Writer
) -> tuple[Scheduler, Callable[..., Any], Callable[..., Any]]:
    """A scheduler with the engine's probes on, all its sequences decoding."""
    scheduler = Scheduler(running)
    follower = engine.Engine(ring, several_tokens=False)
    for output in scheduler.running:
        params = SimpleNamespace(stop=[], max_tokens=1000)
        follower.join(
            SimpleNamespace(
                request_id=output.request_id,
                num_prompt_tokens=100,
                sampling_params=params,
                lora_request=None,
            )
        )
    engine.ENGINE = follower
    schedule = wrap("schedule", Scheduler.schedule, engine.scheduled, engine.schedule_starts)
    update = wrap(
        "update",
        Scheduler.update_from_output,
        engine.updated,
        engine.update_starts,
        parameters=("scheduler_output",),
    )
    scheduler.output.scheduled_new_reqs = [
        SimpleNamespace(req_id=output.request_id) for output in scheduler.running
    ]
    update(scheduler, schedule(scheduler))  # the prefill: from here on all decode
    scheduler.output.scheduled_new_reqs = []
    return scheduler, schedule, update


def microseconds(
    scheduler: Scheduler, schedule: Callable[..., Any], update: Callable[..., Any]
) -> float:
    began = time.perf_counter()
    for _ in range(STEPS):
        update(scheduler, schedule(scheduler))
    return (time.perf_counter() - began) / STEPS * 1e6


def main() -> int:
    print("| running | bare µs/step | with probes µs/step | probes µs/step | records/step |")
    print("| --- | --- | --- | --- | --- |")
    for running in (8, 64, 256):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bench.ring"
            ring = Writer(path, 1 << 15, {})
            scheduler, schedule, update = observed(running, ring)
            reader = Reader(path)
            before = reader.newest()
            bare, probed = [], []
            for _ in range(ROUNDS):
                bare.append(
                    microseconds(scheduler, Scheduler.schedule, Scheduler.update_from_output)
                )
                probed.append(microseconds(scheduler, schedule, update))
            records = (reader.newest() - before) / (ROUNDS * STEPS)
        low, high = statistics.median(bare), statistics.median(probed)
        print(f"| {running} | {low:.2f} | {high:.2f} | {high - low:.2f} | {records:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
