"""What is sent to a server, and what its client knows of it."""

import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp

from demo.client import MODEL, chat, completion, embeddings
from demo.model import CHAT_OVERHEAD, prompt_ids, prompt_text
from tests.e2e.traffic import Ask, Call, send_all

LENGTHS = {"0-1k": 300, "1k-4k": 2000, "4k-32k": 6000}
VERY_LONG = 4000  # tokens of an answer that its client will not wait for

Send = Callable[[aiohttp.ClientSession], Coroutine[Any, Any, None]]


@dataclass
class Part:
    """Traffic of one sort. `calls` by the model that they name; `exact` where each client was told
    how many tokens it got, which those who leave early are not."""

    name: str
    calls: dict[str, list[Call]]
    send: Send
    exact: bool = True


def ask(function: Any, url: str, content: Any, **options: Any) -> Ask:
    """One of the client's requests, to be sent with a session."""
    return functools.partial(function, base_url=url, prompt=content, **options)


class Seeds:
    """A new seed for each prompt, so that no two share a prefix."""

    def __init__(self, repeat: int = 0) -> None:
        self.next = 0
        self.repeat = repeat

    def ids(self, n: int) -> list[int]:
        self.next += 1
        if self.repeat:  # for speculation that looks up what came before
            return (prompt_ids(self.repeat, self.next) * (n // self.repeat + 1))[:n]
        return prompt_ids(n, self.next)

    def text(self, n: int) -> str:
        """A message of which the chat template makes n tokens."""
        self.next += 1
        return prompt_text(n - CHAT_OVERHEAD, self.next)


def mixed(url: str, models: list[str], seeds: Seeds, refused: bool = True) -> list[Part]:
    """Requests that end by themselves; then those that do not."""
    return [whole(url, models, seeds), cut_short(url, models, seeds, refused)]


def whole(url: str, models: list[str], seeds: Seeds, longest: int = 6000) -> Part:
    """Requests that end by themselves: mixed lengths, streamed and not, chats and completions,
    several sequences, stop strings, single tokens."""
    made: dict[str, list[Call]] = {model: [] for model in models}
    for model, calls in made.items():

        def ids(
            bucket: str, length: int, calls: list[Call] = calls, model: str = model, **options: Any
        ) -> None:
            asked = ask(completion, url, seeds.ids(length), model=model, **options)
            calls.append(Call(bucket, length, asked, options.get("n", 1)))

        def text(
            bucket: str, length: int, calls: list[Call] = calls, model: str = model, **options: Any
        ) -> None:
            asked = ask(chat, url, seeds.text(length), model=model, **options)
            calls.append(Call(bucket, length, asked, options.get("n", 1)))

        for stream in (True, False):
            for bucket, length in LENGTHS.items():
                if length <= longest:
                    ids(bucket, length, max_tokens=40, stream=stream)
                    text(bucket, length, max_tokens=25, stream=stream)
            ids("0-1k", 200, max_tokens=30, stream=stream, n=2, temperature=0.8)
            text("0-1k", 90, max_tokens=12, stream=stream, n=2, temperature=0.8)
            ids("0-1k", 70, max_tokens=1, stream=stream)
            random: dict[str, Any] = {"temperature": 1.0, "extra": {"seed": 7}}
            ids("0-1k", 60, max_tokens=300, stream=stream, stop=["ba", "ko", "zi"], **random)
    sent = [call for calls in made.values() for call in calls]
    return Part("whole", made, lambda session: send_all(session, sent, at_once=6))


def cut_short(url: str, models: list[str], seeds: Seeds, refused: bool = True) -> Part:
    """Clients that leave while their answer comes, and requests that are refused."""
    made: dict[str, list[Call]] = {model: [] for model in models}
    for model, calls in made.items():
        for length, leaving in (
            (50, {"stream": True, "abort_after_chunks": 20}),
            (80, {"stream": False, "abort_after_s": 2}),
            (100, {"stream": True, "abort_after_chunks": 20}),
        ):
            asked = ask(
                *(completion, url, seeds.ids(length)), model=model, max_tokens=VERY_LONG, **leaving
            )
            calls.append(Call("0-1k", length, asked))
    for stream in (True, False) if refused else ():
        some = {"max_tokens": 5, "stream": stream}
        made[models[0]] += [
            Call("unknown", 0, asked)
            for asked in (
                ask(completion, url, seeds.ids(40000), **some),  # beyond the model's length
                ask(completion, url, [10_000_000], **some),  # no such token: refused late
                ask(chat, url, "hello", **some, extra={"temperature": -1}),
                ask(chat, url, "hello", **some, model="nobody"),
            )
        ]
    sent = [call for calls in made.values() for call in calls]
    return Part("cut short", made, lambda session: send_all(session, sent, at_once=4), exact=False)


def storm(url: str, seeds: Seeds) -> Part:
    """More output at once than the KV cache has room for."""
    calls = [
        Call(
            *("0-1k", 60),
            ask(completion, url, seeds.ids(60), max_tokens=600, stream=number % 2 == 0),
        )
        for number in range(16)
    ]
    return Part("storm", {MODEL: calls}, lambda session: send_all(session, calls))


def pooled(url: str, seeds: Seeds) -> Part:
    """Embeddings, of one prompt and of several in a request."""
    calls = [
        Call("0-1k", length, ask(embeddings, url, seeds.ids(length))) for length in (1, 128, 900)
    ]
    several = [seeds.ids(length) for length in (100, 150, 200)]
    calls.append(Call("0-1k", 450, ask(embeddings, url, several)))
    calls.append(Call("1k-4k", 1500, ask(embeddings, url, seeds.ids(1500))))
    return Part("pooled", {MODEL: calls}, lambda session: send_all(session, calls, at_once=2))


async def load_adapter(session: aiohttp.ClientSession, url: str, name: str, path: str) -> None:
    """By vLLM's own endpoint."""
    body = {"lora_name": name, "lora_path": path}
    async with session.post(f"{url}/v1/load_lora_adapter", json=body) as answer:
        assert answer.status == 200, await answer.text()
