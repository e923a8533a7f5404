"""What the probes cost per engine step, inside each process: with probes and bare, in turn.

Stand-ins for vLLM's scheduler, worker and HTTP server do nothing but yield what vLLM's would, one
output per running request; the same calls run with the real probes around them and without,
alternating, and the medians of many rounds are told. See steps.py for a real server.
"""

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmobs import engine, frontend, kv_cache, process, worker
from llmobs.guard import wrap, wrap_rare
from llmobs.ring import Reader, Writer

ROUNDS, STEPS = 41, 500
PROMPTS = (100, 300, 2_000, 10_000, 500, 40_000)
"""Of all four context buckets."""

Step = Callable[[], Any]


class Pool:
    """Its blocks never run out, and each had a cached prefix in it."""

    def __init__(self) -> None:
        self.num_gpu_blocks = 1 << 40
        self.free_block_queue = SimpleNamespace(num_free_blocks=self.num_gpu_blocks - 1)

    def evict(self, block: Any) -> bool:
        return True

    def free_blocks(self, blocks: list[Any]) -> None:
        self.free_block_queue.num_free_blocks += len(blocks)


class Scheduler:
    """One step: everything that runs yields a token, or with `drafts` one to four. Where they are
    `kept`, each is added to its request's list, as vLLM does."""

    def __init__(self, running: int, drafts: bool = False, kept: bool = False) -> None:
        counts = list(islice(cycle((1, 4, 2, 3) if drafts else (1,)), running))
        ids = [f"chatcmpl-{n:032x}-{n:08x}" for n in range(running)]
        self.ids = ids
        self.requests = {
            name: SimpleNamespace(
                request_id=name,
                num_computed_tokens=101,
                num_tokens=100,
                _output_token_ids=[],
            )
            for name in ids
        }
        self.max_num_running_reqs = self.max_num_scheduled_tokens = 1 << 30
        self.output = SimpleNamespace(
            total_num_scheduled_tokens=running,
            num_scheduled_tokens=dict.fromkeys(ids, 1),
            scheduled_new_reqs=[],
            scheduled_spec_decode_tokens={name: [1, 1, 1] for name in ids} if drafts else {},
        )
        outputs = [
            SimpleNamespace(request_id=name, new_token_ids=[1] * count)
            for name, count in zip(ids, counts, strict=True)
        ]
        stats = SimpleNamespace(num_draft_tokens=3 * running, num_accepted_tokens=sum(counts))
        self.result = {
            0: SimpleNamespace(
                outputs=outputs,
                scheduler_stats=SimpleNamespace(spec_decoding_stats=stats if drafts else None),
            )
        }
        self.sampled = [
            (self.requests[output.request_id]._output_token_ids, output.new_token_ids)
            for output in outputs
            if kept
        ]

        self.pool = Pool()
        self.kv_cache_manager = SimpleNamespace(
            block_pool=self.pool,
            coordinator=SimpleNamespace(single_type_managers=()),
            kv_cache_config=SimpleNamespace(kv_cache_tensors=()),
        )

    def schedule(self) -> Any:
        self.pool.free_block_queue.num_free_blocks -= 1  # somebody needs a block at each step
        return self.output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        for tokens, new in self.sampled:
            tokens += new
        return self.result

    def start_over(self) -> None:
        for tokens, _ in self.sampled:
            tokens.clear()


def engine_step(
    running: int,
    ring: Writer,
    drafts: bool = False,
    prompts: tuple[int, ...] = PROMPTS,
    kept: bool = False,
) -> tuple[Step, Step]:
    """Bare, and with the engine's probes on, all its sequences decoding."""
    scheduler = Scheduler(running, drafts, kept)
    follower = engine.Engine(ring, several_tokens=drafts)
    for name, prompt in zip(scheduler.ids, cycle(prompts), strict=False):
        follower.join(
            SimpleNamespace(
                request_id=name,
                _output_token_ids=scheduler.requests[name]._output_token_ids,
                num_prompt_tokens=prompt,
                sampling_params=SimpleNamespace(stop=[], max_tokens=1000),
                lora_request=None,
            )
        )
    follower.pool = kv_cache.Pool(ring, scheduler)
    engine.ENGINE = follower
    schedule = wrap("schedule", Scheduler.schedule, engine.scheduled, engine.schedule_starts)
    update = wrap(
        "update",
        Scheduler.update_from_output,
        engine.updated,
        engine.update_starts,
        parameters=("scheduler_output", "model_runner_output"),
    )
    scheduler.output.scheduled_new_reqs = [SimpleNamespace(req_id=name) for name in scheduler.ids]
    update(scheduler, schedule(scheduler), None)  # from here on all decode
    scheduler.output.scheduled_new_reqs = []
    steps = itertools.count(1)

    def bare() -> None:
        scheduler.update_from_output(scheduler.schedule(), None)
        start_over()

    def probed() -> None:
        update(scheduler, schedule(scheduler), None)
        start_over()

    def start_over() -> None:
        if next(steps) % 1000 == 0:  # requests are not as long as this runs
            scheduler.start_over()
            follower.recount()

    return bare, probed


def evict_step(blocks: int, ring: Writer) -> tuple[Step, Step]:
    """So many blocks lose their cached prefix."""
    scheduler = Scheduler(1)
    pool = scheduler.pool
    kv_cache.POOL = kv_cache.Pool(ring, scheduler)
    evict = wrap_rare("kv_evict", Pool.evict, kv_cache.evicted)

    def bare() -> None:
        for block in range(blocks):
            pool.evict(block)

    def probed() -> None:
        for block in range(blocks):
            evict(pool, block)

    return bare, probed


def free_step(times: int, ring: Writer) -> tuple[Step, Step]:
    """So many requests end."""
    scheduler = Scheduler(1)
    pool = scheduler.pool
    kv_cache.POOL = kv_cache.Pool(ring, scheduler)
    free = wrap("kv_free", Pool.free_blocks, kv_cache.returned, kv_cache.returning)

    def bare() -> None:
        for _ in range(times):
            pool.free_blocks([1])

    def probed() -> None:
        for _ in range(times):
            free(pool, [1])

    return bare, probed


class Worker:
    """A worker whose forward pass and sampling take no time."""

    def execute_model(self, scheduler_output: Any) -> None:
        pass

    def sample_tokens(self, grammar_output: Any) -> None:
        pass


def worker_step(running: int, ring: Writer) -> tuple[Step, Step]:
    subject = Worker()
    output = Scheduler(running).output
    forward = wrap(
        *("forward", Worker.execute_model, worker.forwarded, worker.forward_starts),
        parameters=("scheduler_output",),
    )
    sample = wrap("sample", Worker.sample_tokens, worker.sampled, worker.sampling_starts)

    def bare() -> None:
        subject.execute_model(output)
        subject.sample_tokens(None)

    def probed() -> None:
        forward(subject, output)
        sample(subject, None)

    return bare, probed


def chunk_step(running: int, ring: Writer) -> tuple[Step, Step]:
    """A streamed chunk of each request, after its first."""
    chunk = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
    finished: asyncio.Future[None] = asyncio.Future(loop=asyncio.new_event_loop())

    class Cycle:
        def send(self, message: dict[str, Any]) -> Awaitable[None]:
            return finished

    sends = [Cycle().send for _ in range(running)]
    relays = []
    for send in sends:
        edge = frontend.Edge(1, frontend.Route.CHAT)
        edge.yielded = edge.streamed = True
        edge.open["r"] = frontend.Live(edge, 1, SimpleNamespace(is_prefilling=False), {})
        relays.append(edge.sender(send))
        relays[-1](chunk)  # the first

    def bare() -> None:
        for send in sends:
            send(chunk)

    def probed() -> None:
        for relay in relays:
            relay(chunk)

    return bare, probed


def microseconds(step: Step) -> float:
    """Of CPU time: what else the machine does meanwhile is not ours."""
    began = time.thread_time()
    for _ in range(STEPS):
        step()
    return (time.thread_time() - began) / STEPS * 1e6


def cost(make: Callable[..., tuple[Step, Step]], *arguments: Any) -> tuple[float, float]:
    """Microseconds of ours per step, and records per step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.ring"
        ring = Writer(path, 1 << 15, {})
        process.current().ring = ring
        bare, probed = make(arguments[0], ring, *arguments[1:])
        reader = Reader(path)
        before = reader.newest()
        times = [(microseconds(bare), microseconds(probed)) for _ in range(ROUNDS)]
        records = (reader.newest() - before) / (ROUNDS * STEPS)
    own = statistics.median(t for _, t in times) - statistics.median(t for t, _ in times)
    return own, records


def main() -> int:
    print("| running | engine core | worker | front end, streaming | together | records |")
    print("| --- | --- | --- | --- | --- | --- |")
    for running in (8, 64, 256):
        core, records = cost(engine_step, running)
        work, more = cost(worker_step, running)
        front, _ = cost(chunk_step, running)
        print(
            f"| {running} | {core:.2f} | {work:.2f} | {front:.2f} | {core + work + front:.2f} "
            f"| {records + more:.2f} |"
        )
    print("\n| running, speculating | buckets | engine core | more per running request, ns |")
    print("| --- | --- | --- | --- |")
    for running in (8, 64, 256):
        # With lists to go through meanwhile less is in the caches, speculating or not.
        steady, _ = cost(engine_step, running, False, PROMPTS, True)
        for buckets, prompts in (("all four", PROMPTS), ("one", PROMPTS[:1])):
            core, _ = cost(engine_step, running, True, prompts, True)
            more = (core - steady) / running * 1e3
            print(f"| {running} | {buckets} | {core:.2f} | {more:.0f} |")
    print("\n| KV cache | ns |\n| --- | --- |")
    print(f"| a block is evicted | {cost(evict_step, 16)[0] / 16 * 1e3:.0f} |")
    print(f"| a request's blocks return | {cost(free_step, 16)[0] / 16 * 1e3:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
