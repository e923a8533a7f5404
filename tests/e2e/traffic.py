"""Traffic of which the client knows what must be counted."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from demo.client import Outcome, open_session

LIMIT_S = 240.0  # nothing that a test sends takes longer, whatever the machine

Ask = Callable[[aiohttp.ClientSession], Coroutine[Any, Any, Outcome]]


@dataclass
class Call:
    """One request as the client knows it before it is sent, and what came of it.

    `prompt` has the tokens of its prompts, `sequences` is how many of it the engine answers,
    `cached` how many of the prompt's tokens are in the prefix cache already.
    """

    bucket: str
    prompt: int
    ask: Ask
    sequences: int = 1
    cached: int = 0
    _answer: Outcome | None = field(default=None, repr=False)

    async def send(self, session: aiohttp.ClientSession) -> None:
        self._answer = await self.ask(session)

    @property
    def answer(self) -> Outcome:
        assert self._answer is not None, "not sent"
        return self._answer

    @property
    def tokens(self) -> int:
        """Tokens generated, by the usage that the server told its client."""
        assert self.answer.completion_tokens is not None, self.answer
        return self.answer.completion_tokens

    @property
    def outcome(self) -> str:
        """What this client calls the end of the request, in llmobs' words."""
        if self.answer.aborted:
            return "abort"
        # Before the engine accepted, in these tests: an error event alone, in place of tokens.
        if not self.answer.ok:
            return "rejected"
        over = ("length", "max_output_tokens")  # the latter is what the responses API says
        return "length" if self.answer.finish_reason in over else "stop"

    @property
    def rejection(self) -> str:
        """The code of a rejection: of the answer, or of the event in a stream that had begun."""
        return str(self.answer.error_code or self.answer.status)


async def send_all(
    session: aiohttp.ClientSession, calls: Iterable[Call], at_once: int = 1 << 30
) -> None:
    """Send calls in order, so many at once."""
    free = asyncio.Semaphore(at_once)

    async def send(call: Call) -> None:
        async with free:
            await call.send(session)

    await asyncio.gather(*(send(call) for call in calls))


def play(traffic: Callable[[aiohttp.ClientSession], Coroutine[Any, Any, None]]) -> None:
    """Run one piece of traffic with a session of its own."""

    async def whole() -> None:
        async with asyncio.timeout(LIMIT_S), open_session() as session:
            await traffic(session)

    asyncio.run(whole())
