"""A client of vLLM's gRPC server."""

import asyncio
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as wire
from smg_grpc_proto import vllm_engine_pb2_grpc as service

from demo.client import Outcome
from tests.e2e.traffic import Call
from tests.shapes.load import LENGTHS, VERY_LONG, Seeds


def send(address: str, seeds: Seeds) -> list[Call]:
    """Send mixed lengths, streamed and not, several sequences, and clients that leave."""
    calls: list[Call] = []

    async def send_all() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = service.VllmEngineStub(channel)
            for stream in (True, False):
                for bucket, length in LENGTHS.items():
                    add(stub, bucket, length, stream, max_tokens=40)
                add(stub, "0-1k", 200, stream, max_tokens=30, n=2, temperature=0.8)
                add(stub, "0-1k", 70, stream, max_tokens=1)
            for length in (50, 100):
                add(stub, "0-1k", length, True, leave_after=20, max_tokens=VERY_LONG)
            await asyncio.gather(*(call.send(None) for call in calls))  # type: ignore[arg-type]

    def add(
        stub: Any, bucket: str, length: int, stream: bool, leave_after: int = 0, **params: Any
    ) -> None:
        ids, number = seeds.ids(length), len(calls)
        request = wire.GenerateRequest(
            request_id=f"request-{number}",
            tokenized=wire.TokenizedInput(input_ids=ids),
            stream=stream,
            sampling_params=wire.SamplingParams(
                **{"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0} | params,
                ignore_eos=True,
            ),
        )

        async def ask(_: object) -> Outcome:
            return await _exchange(stub, request, leave_after)

        calls.append(Call(bucket, length, ask, params.get("n", 1)))

    asyncio.run(send_all())
    return calls


async def _exchange(stub: Any, request: Any, leave_after: int) -> Outcome:
    outcome = Outcome("grpc", status=200, completion_tokens=0)
    answer = stub.Generate(request)
    async for message in answer:
        kind = message.WhichOneof("response")
        if kind == "complete":
            outcome.prompt_tokens = message.complete.prompt_tokens
            if not request.stream:  # else it has the last chunk's tokens once more
                outcome.completion_tokens += len(message.complete.output_ids)
            outcome.finish_reason = message.complete.finish_reason
        else:
            outcome.completion_tokens += len(message.chunk.token_ids)
            outcome.chunks += 1
            if outcome.chunks == leave_after:
                answer.cancel()
                outcome.aborted = True
                return outcome
    return outcome
