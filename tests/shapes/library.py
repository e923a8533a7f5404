"""A user's own program: `library.py LLM|AsyncLLM|EngineCore OPTIONS`, the options as JSON.

Prints what it was told of each request, one JSON object a line, then `done`; ends when its stdin
does. With EngineCore it is a front end of its own, as vLLM's Rust one is: it speaks to the engine
core as vLLM's front end does, and nothing of that front end is in it.
"""

import asyncio
import json
import sys
from typing import Any

LENGTHS = (300, 2000, 6000)
VERY_LONG = 4000


def tell(prompt: int, tokens: int, reason: str, sequences: int = 1, seen: int = 0) -> None:
    """What came of a request. `seen`: outputs that were taken before it was given up."""
    told = {"prompt": prompt, "tokens": tokens, "reason": reason}
    print(json.dumps(told | {"sequences": sequences, "seen": seen}), flush=True)


def prompt_ids(n: int, seed: int) -> list[int]:
    return [300 + (seed * 131 + i * i * 7) % 700 for i in range(n)]


def tell_output(output: Any) -> None:
    ends = output.outputs
    tokens = sum(len(end.token_ids) for end in ends)
    tell(len(output.prompt_token_ids), tokens, ends[-1].finish_reason, len(ends))


def asked() -> list[tuple[dict[str, Any], Any]]:
    """Prompts and their parameters: mixed lengths, several sequences, stop strings, one token."""
    from vllm import SamplingParams

    greedy = {"temperature": 0.0, "ignore_eos": True}
    kinds = [
        *((n, greedy | {"max_tokens": 40}) for n in LENGTHS),
        *((n, greedy | {"max_tokens": 25}) for n in LENGTHS),
        (200, {"temperature": 0.8, "ignore_eos": True, "n": 2, "max_tokens": 30}),
        (60, {"seed": 7, "ignore_eos": True, "stop": ["ba", "ko", "zi"], "max_tokens": 300}),
        (70, greedy | {"max_tokens": 1}),
    ]
    return [
        ({"prompt_token_ids": prompt_ids(length, seed)}, SamplingParams(**kind))
        for seed, (length, kind) in enumerate(kinds)
    ]


def use_llm(options: dict[str, Any]) -> Any:
    from vllm import LLM, SamplingParams

    llm = LLM(**options)
    prompts, params = zip(*asked(), strict=True)
    for output in llm.generate(list(prompts), list(params)):
        tell_output(output)
    chats = [[{"role": "user", "content": text}] for text in (" bafo gudi", " lemo" * 1500)]
    for output in llm.chat(chats, SamplingParams(max_tokens=9, ignore_eos=True)):
        tell_output(output)
    return llm


async def use_async_llm(options: dict[str, Any]) -> Any:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    async def whole(prompt: Any, params: Any, name: str) -> None:
        finished: dict[int, tuple[int, str]] = {}
        async for output in engine.generate(prompt, params, name):
            for end in output.outputs:
                finished[end.index] = len(end.token_ids), end.finish_reason
        tokens = sum(count for count, _ in finished.values())
        tell(len(prompt["prompt_token_ids"]), tokens, finished[0][1], len(finished))

    async def leave(length: int, seed: int) -> None:
        params = SamplingParams(max_tokens=VERY_LONG, ignore_eos=True)
        prompt = {"prompt_token_ids": prompt_ids(length, seed)}
        answer = engine.generate(prompt, params, f"leave-{seed}")
        seen = 0
        async for output in answer:
            seen = len(output.outputs[0].token_ids)
            if seen >= 20:
                break
        await answer.aclose()
        tell(length, 0, "abort", seen=seen)

    async def refused(ids: list[int], name: str) -> None:
        try:
            async for _ in engine.generate(
                {"prompt_token_ids": ids}, SamplingParams(max_tokens=5), name
            ):
                pass
        except (ValueError, VLLMClientError):
            tell(0, 0, "rejected")

    await asyncio.gather(*(whole(*pair, f"whole-{i}") for i, pair in enumerate(asked())))
    await asyncio.gather(*(leave(90 + seed, seed) for seed in (50, 51)))
    await refused(prompt_ids(40000, 60), "too-long")
    await refused([10_000_000], "no-such-token")
    return engine


def use_engine_core(options: dict[str, Any]) -> Any:
    import time

    from vllm import EngineArgs, SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor.abstract import Executor

    config = EngineArgs(**options).create_engine_config()
    client = EngineCoreClient.make_client(
        multiprocess_mode=True,
        asyncio_mode=False,
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=False,
    )
    prompts: dict[str, tuple[int, int]] = {}

    def add(name: str, length: int, seed: int, **params: Any) -> None:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, **params)
        prompts[name] = length, sampling.max_tokens or 0
        client.add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=prompt_ids(length, seed),
                mm_features=None,
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )

    for seed, length in enumerate((*LENGTHS, 50, 60)):
        add(f"whole-{seed}", length, seed, max_tokens=40)
    add("one", 70, 70, max_tokens=1)
    add("stop", 80, 80, max_tokens=30, stop=["never in any text"])
    add("leave", 90, 90, max_tokens=VERY_LONG)
    tokens = dict.fromkeys(prompts, 0)
    while prompts:
        for output in client.get_output().outputs:
            name = output.request_id
            tokens[name] += len(output.new_token_ids)
            if name == "leave" and name in prompts and tokens[name] >= 20:
                client.abort_requests([name])
                tell(prompts.pop(name)[0], 0, "abort", seen=tokens[name])
            elif output.finish_reason is not None and name in prompts:
                tell(prompts.pop(name)[0], tokens[name], str(output.finish_reason))
    return client


def main() -> None:
    how, options = sys.argv[1], json.loads(sys.argv[2])
    kept: Any
    if how == "AsyncLLM":

        async def run() -> None:
            engine = await use_async_llm(options)
            print("done", flush=True)
            await asyncio.to_thread(sys.stdin.read)
            engine.shutdown()

        asyncio.run(run())
        return
    kept = {"LLM": use_llm, "EngineCore": use_engine_core}[how](options)
    print("done", flush=True)
    sys.stdin.read()
    if how == "EngineCore":
        kept.shutdown()


if __name__ == "__main__":
    main()
