"""An asynchronous client of an OpenAI-compatible server that times what it sees itself."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# vLLM itself requires aiohttp; httpx comes only by way of other packages. And aiohttp hands over
# body chunks as they arrive, cheaply enough not to blur the times taken here.
import aiohttp

MODEL = "deepseek-v4"

Prompt = str | list[int] | list[list[int]]
Messages = list[dict[str, Any]]


@dataclass
class Outcome:
    """What the client saw of one request; never any text.

    All times are of `time.monotonic()`, in seconds; None means that it never came.
    """

    kind: str  # completion, chat, responses or embeddings
    status: int = 0  # HTTP status; 0: no response at all
    error: str | None = None  # type of an error object or exception, never its message
    error_code: int | None = None  # of the error object; a stream that has begun keeps status 200
    prompt_tokens: int | None = None  # from the server's `usage`; None where it sent none
    completion_tokens: int | None = None
    started: float = 0.0  # just before the request is handed to the HTTP client
    first_body: float | None = None  # first bytes of the body, whatever they carry
    first_chunk: float | None = None  # first data that carries content
    last_chunk: float | None = None
    ended: float = 0.0
    chunks: int = 0  # data that carried content; a chunk may hold several tokens
    gaps: list[float] = field(default_factory=list)  # seconds between content chunks of one choice
    finish_reason: str | None = None  # of the choice that ended last; a responses status
    aborted: bool = False  # this client left before the end

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.error is None and not self.aborted

    @property
    def longest_gap(self) -> float | None:
        return max(self.gaps, default=None)

    @property
    def ttft(self) -> float | None:
        """Seconds from the start to the first content."""
        return None if self.first_chunk is None else self.first_chunk - self.started

    @property
    def seconds(self) -> float:
        return self.ended - self.started


def open_session() -> aiohttp.ClientSession:
    """A session with none of aiohttp's own limits.

    By default it keeps everything beyond 100 connections waiting, which would be timed as the
    server's doing, and gives up after 5 minutes.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


async def completion(
    session: aiohttp.ClientSession,
    base_url: str,
    prompt: Prompt,
    *,
    max_tokens: int,
    stream: bool,
    n: int = 1,
    stop: str | list[str] | None = None,
    temperature: float = 0.0,
    ignore_eos: bool = True,
    headers: Mapping[str, str] | None = None,
    abort_after_s: float | None = None,
    abort_after_chunks: int | None = None,
    extra: dict[str, Any] | None = None,
    model: str = MODEL,
) -> Outcome:
    """One `/v1/completions` request.

    `abort_after_s` leaves that many seconds after the start, `abort_after_chunks` after that many
    content chunks. `extra` is added to the request's body. vLLM refuses `n` > 1 at temperature 0.
    Failures are recorded in the outcome, never raised. A stream that vLLM refuses late (a full
    queue, a token id out of range) has status 200 and an error event, thus `error_code` 503 or 400.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "n": n,
        "temperature": temperature,
        "ignore_eos": ignore_eos,
    }
    if stop is not None:
        body["stop"] = stop
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    request = _Request(session, f"{base_url}/v1/completions", body | (extra or {}), headers)
    return await request.run("completion", _read_choices, abort_after_s, abort_after_chunks)


async def chat(
    session: aiohttp.ClientSession,
    base_url: str,
    prompt: str | Messages,
    *,
    max_tokens: int,
    stream: bool,
    n: int = 1,
    stop: str | list[str] | None = None,
    temperature: float = 0.0,
    ignore_eos: bool = True,
    headers: Mapping[str, str] | None = None,
    abort_after_s: float | None = None,
    abort_after_chunks: int | None = None,
    extra: dict[str, Any] | None = None,
    model: str = MODEL,
) -> Outcome:
    """One `/v1/chat/completions` request; a string is one user message. Else as `completion`."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "max_completion_tokens": max_tokens,
        "n": n,
        "temperature": temperature,
        "ignore_eos": ignore_eos,
    }
    if stop is not None:
        body["stop"] = stop
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    request = _Request(session, f"{base_url}/v1/chat/completions", body | (extra or {}), headers)
    return await request.run("chat", _read_choices, abort_after_s, abort_after_chunks)


async def responses(
    session: aiohttp.ClientSession,
    base_url: str,
    prompt: str | Messages,
    *,
    max_tokens: int,
    stream: bool,
    temperature: float = 0.0,
    ignore_eos: bool = True,
    headers: Mapping[str, str] | None = None,
    abort_after_s: float | None = None,
    abort_after_chunks: int | None = None,
    extra: dict[str, Any] | None = None,
    model: str = MODEL,
) -> Outcome:
    """One `/v1/responses` request; a string is one user message. Else as `completion`.

    The stream begins with events that carry no content (`response.created`, `.in_progress`): they
    count for `first_body`, only text deltas for `first_chunk`. Usage comes with the last event.
    """
    body: dict[str, Any] = {
        "model": model,
        "input": prompt,
        "max_output_tokens": max_tokens,
        "temperature": temperature,
        "ignore_eos": ignore_eos,
        "store": False,
        "stream": stream,
    }
    request = _Request(session, f"{base_url}/v1/responses", body | (extra or {}), headers)
    return await request.run("responses", _read_response, abort_after_s, abort_after_chunks)


async def embeddings(
    session: aiohttp.ClientSession,
    base_url: str,
    prompt: Prompt | list[str],
    *,
    headers: Mapping[str, str] | None = None,
    abort_after_s: float | None = None,
    extra: dict[str, Any] | None = None,
    model: str = MODEL,
) -> Outcome:
    """One `/v1/embeddings` request, of a server that runs an embedding model."""
    body: dict[str, Any] = {"model": model, "input": prompt}
    request = _Request(session, f"{base_url}/v1/embeddings", body | (extra or {}), headers)
    return await request.run("embeddings", _read_choices, abort_after_s, None)


# Takes one JSON value of an answer (a whole body or one event); returns the indices of the
# choices that it carries content of.
_Reader = Callable[[Outcome, dict[str, Any]], list[int]]


class _Left(Exception):
    """The client has seen as many chunks as it wanted."""


@dataclass
class _Request:
    session: aiohttp.ClientSession
    url: str
    body: dict[str, Any]
    headers: Mapping[str, str] | None

    async def run(
        self,
        kind: str,
        read: _Reader,
        abort_after_s: float | None,
        abort_after_chunks: int | None,
    ) -> Outcome:
        outcome = Outcome(kind)
        outcome.started = time.monotonic()
        try:
            async with asyncio.timeout(abort_after_s):
                await self._exchange(outcome, read, abort_after_chunks)
        except (_Left, TimeoutError):
            outcome.aborted = True
        except (aiohttp.ClientError, OSError, ValueError) as error:
            outcome.error = type(error).__name__
        outcome.ended = time.monotonic()
        return outcome

    async def _exchange(
        self, outcome: Outcome, read: _Reader, abort_after_chunks: int | None
    ) -> None:
        response = await self.session.post(self.url, json=self.body, headers=self.headers)
        # Closes the connection if the body was not read to its end: that is what aborts.
        async with _closing(response):
            outcome.status = response.status
            if "text/event-stream" in response.headers.get("Content-Type", ""):
                await _read_events(response, outcome, read, abort_after_chunks)
            else:
                await _read_body(response, outcome, read)


class _closing:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        self._response.close()


async def _read_body(response: aiohttp.ClientResponse, outcome: Outcome, read: _Reader) -> None:
    body = b""
    async for chunk in response.content.iter_any():
        if outcome.first_body is None:
            outcome.first_body = time.monotonic()
        body += chunk
    if response.status != 200:
        outcome.error = "unknown"
        with contextlib.suppress(ValueError):
            _read_error(outcome, json.loads(body))
        return
    if read(outcome, json.loads(body)):
        outcome.first_chunk = outcome.last_chunk = outcome.first_body
        outcome.chunks = 1


async def _read_events(
    response: aiohttp.ClientResponse,
    outcome: Outcome,
    read: _Reader,
    abort_after_chunks: int | None,
) -> None:
    last: dict[int, float] = {}
    async for now, data in _events(response, outcome):
        if data == b"[DONE]":
            continue
        event = json.loads(data)
        _read_error(outcome, event)
        indices = read(outcome, event)
        for index in indices:
            if index in last:
                outcome.gaps.append(now - last[index])
            last[index] = now
        if indices:
            outcome.chunks += 1
            outcome.first_chunk = now if outcome.first_chunk is None else outcome.first_chunk
            outcome.last_chunk = now
            if outcome.chunks == abort_after_chunks:
                raise _Left


async def _events(
    response: aiohttp.ClientResponse, outcome: Outcome
) -> AsyncIterator[tuple[float, bytes]]:
    """The data of each server-sent event with the time at which its last byte arrived.

    Not by aiohttp's own line reader: it refuses lines beyond its buffer, and the last event of
    the responses API repeats the whole answer.
    """
    buffer = b""
    async for chunk in response.content.iter_any():
        now = time.monotonic()
        if outcome.first_body is None:
            outcome.first_body = now
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now, line[5:].strip()


def _read_choices(outcome: Outcome, value: dict[str, Any]) -> list[int]:
    """Read a completion, a chat completion or an embedding, whole or one chunk of it."""
    _read_usage(outcome, value.get("usage"), "prompt_tokens", "completion_tokens")
    carrying = []
    for choice in value.get("choices", ()):
        if choice.get("finish_reason") is not None:
            outcome.finish_reason = choice["finish_reason"]
        # A chat's first chunk only names the role. Other chunks count even with empty text: it is
        # a token all the same, such as a part of a character.
        if "role" not in choice.get("delta", ()):
            carrying.append(choice["index"])
    return carrying or [item["index"] for item in value.get("data", ())]


def _read_response(outcome: Outcome, value: dict[str, Any]) -> list[int]:
    """Read an answer of the responses API, whole or one event of its stream."""
    if value.get("type") == "response.output_text.delta":
        return [0]
    whole = value.get("response", value)
    _read_usage(outcome, whole.get("usage"), "input_tokens", "output_tokens")
    if whole.get("status") in ("completed", "incomplete", "failed"):
        details = whole.get("incomplete_details") or {}
        outcome.finish_reason = details.get("reason") or whole["status"]
    return [0] if "output" in value else []


def _read_usage(outcome: Outcome, usage: dict[str, Any] | None, prompt: str, output: str) -> None:
    if usage:
        outcome.prompt_tokens = usage.get(prompt)
        outcome.completion_tokens = usage.get(output)


def _read_error(outcome: Outcome, value: dict[str, Any]) -> None:
    error = value.get("error")
    if isinstance(error, dict):
        outcome.error, outcome.error_code = str(error.get("type")), error.get("code")
