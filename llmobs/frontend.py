"""Probes of the front end: when a request arrived, was handed over, delivered, and how it ended.

With engine.py and worker.py one of the three files that know vLLM's attributes.
"""

import contextvars
import functools
import hashlib
import itertools
import random
import re
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from llmobs import pauses, process, schema
from llmobs.guard import GUARD
from llmobs.ring import Writer
from llmobs.schema import Finish, Flag, Kind, Outcome, Route
from llmobs.slo import SLO

now = time.monotonic_ns
UNKNOWN_BUCKET = schema.BUCKETS
TRACE_STATE_BYTES = 512
"""What every platform must be able to pass on (W3C Trace Context, section 3.3.1.5)."""

ROUTES = {
    "/v1/chat/completions": Route.CHAT,
    "/v1/chat/completions/batch": Route.CHAT,
    "/cohere/v2/chat": Route.CHAT,
    "/v1/completions": Route.COMPLETION,
    "/inference/v1/generate": Route.COMPLETION,
    "/invocations": Route.OTHER,
    "/v1/responses": Route.RESPONSES,
    "/v1/messages": Route.MESSAGES,
    "/v1/embeddings": Route.POOLING,
    "/v2/embed": Route.POOLING,
    "/pooling": Route.POOLING,
    "/classify": Route.POOLING,
    "/score": Route.POOLING,
    "/v1/score": Route.POOLING,
    "/rerank": Route.POOLING,
    "/v1/rerank": Route.POOLING,
    "/v2/rerank": Route.POOLING,
    "/generative_scoring": Route.POOLING,
    "/v1/audio/transcriptions": Route.AUDIO,
    "/v1/audio/translations": Route.AUDIO,
}
"""vLLM's inference routes. A request by another route (a user's own app) counts from the moment it
hands something to the engine."""

TRACEPARENT = re.compile(
    rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL
)

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_number = itertools.count(1).__next__


def sequence_key(request_id: str) -> int:
    """The number by which front end and engine core mean the same sequence (64 bits, signed)."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class Edge:
    """A request: over HTTP from the ASGI edge on, else from the hand-over to the engine."""

    __slots__ = (
        "_relay",
        "_send",
        "admitted",
        "arrival",
        "beams",
        "bucket",
        "cell",
        "disconnected",
        "end",
        "expected",
        "failed",
        "final_sent",
        "finish",
        "first",
        "http_done",
        "model",
        "number",
        "open",
        "passing",
        "refused",
        "route",
        "status",
        "streamed",
        "tokens",
        "yielded",
    )

    def __init__(self, arrival: int, route: Route | None) -> None:
        self.number = _number() & 0xFFFFFFFF
        self.arrival = arrival
        self.route = route
        self.open: dict[str, Live] = {}
        self.admitted = 0
        self.expected = 0
        self.bucket = -1
        self.model = 0
        self.cell = 0
        self.status = 0
        self.refused = 0
        self.first = 0
        self.end = 0
        self.tokens = 0
        self.finish = Finish.OTHER
        self.http_done = route is Route.LIBRARY
        self.disconnected = False
        self.final_sent = False
        self.streamed = False
        self.yielded = False
        self.failed = False
        self._relay: Any = None
        self.passing = False
        """Whether chunks go straight to the server: from the first one until the engine is done."""

    # The ASGI side, on the server's event loop.

    def receiver(self, receive: Receive) -> Receive:
        async def observed() -> dict[str, Any]:
            message = await receive()
            if message["type"] == "http.disconnect" and not self.final_sent:
                self.disconnected = True
            return message

        return observed

    def sender(self, send: Send) -> Send:
        """The server's `send`, watched until the first token and again for the last words."""
        self._send = send
        # What the app is given cannot be taken back, but a partial can be told to call another: no
        # line of ours runs for a chunk in between (what is left is in benchmarks/probes.py).
        relay = self._relay = functools.partial(self._observe)
        return relay

    def _observe(self, message: dict[str, Any]) -> Awaitable[None]:
        try:
            if message["type"] == "http.response.body":
                if not self.first and message.get("body"):
                    self._maybe_first()
                if not message.get("more_body"):
                    self.final_sent = True
                    return self._last(message)
                if self.first and self.open:
                    self.pass_sends(True)
            elif message["type"] == "http.response.start":
                self.status = message["status"]
                self.streamed = any(
                    name == b"content-type" and value.startswith(b"text/event-stream")
                    for name, value in message.get("headers", ())
                )
        except Exception:
            GUARD.failed("http_edge")
        return self._send(message)

    def pass_sends(self, passing: bool) -> None:
        """Let the chunks go straight to the server, or see them again."""
        self._relay.__setstate__((self._send if passing else self._observe, (), {}, {}))
        self.passing = passing

    async def _last(self, message: dict[str, Any]) -> None:
        await self._send(message)
        self.end = now()

    def _maybe_first(self) -> None:
        """The first chunk after the engine's first token: some protocols greet before it."""
        live = list(self.open.values())
        if not self.yielded and all(sequence.state.is_prefilling for sequence in live):
            return
        self.streamed = self.streamed or bool(live)
        if self.streamed and (ring := process.current().ring):
            self.first = now()
            ring.put(Kind.FIRST, self.first, self.number)


class Live:
    """A sequence that was handed to the engine and has not ended."""

    __slots__ = ("beam", "counts_prompt", "cut", "edge", "key", "state", "states")

    def __init__(self, edge: Edge, key: int, state: Any, states: dict[str, Any]) -> None:
        self.edge = edge
        self.key = key
        self.state = state
        self.states = states
        """vLLM's own, of all that it has not ended."""
        self.cut = False
        self.beam = False
        self.counts_prompt = True


class BeamCall:
    """One call of beam search: its prompt is counted once, whatever it sends to the engine."""

    __slots__ = ("prompt_counted",)

    def __init__(self) -> None:
        self.prompt_counted = False


EDGE: contextvars.ContextVar[Edge | None] = contextvars.ContextVar("llmobs_edge", default=None)
BEAM: contextvars.ContextVar[BeamCall | None] = contextvars.ContextVar("llmobs_beam", default=None)
LIVE: dict[str, Live] = {}
ENDINGS = {"finish", "abort"}
"""Where a vLLM has no place for one of these probes, LIVE would only grow."""
_swept = 0
"""How many failures of ours there had been when LIVE was last looked through."""
_FAMILIES: dict[str, Edge] = {}
"""Without HTTP: the request of each parent of several sequences."""


class EdgeApp:
    """A pure ASGI wrapper around the whole app, outside every middleware."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._loop_watched = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.app, name)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        edge = None
        try:
            if scope["type"] == "http" and scope["method"] == "POST":
                edge = arrive(scope)
            if not self._loop_watched or scope["type"] == "lifespan":
                self._loop_watched = True
                pauses.watch_loop()
        except Exception:
            GUARD.failed("http_edge")
        if edge is None:
            await self.app(scope, receive, send)
            return
        token = EDGE.set(edge)
        try:
            await self.app(scope, edge.receiver(receive), edge.sender(send))
        except BaseException as error:
            _http_done(edge, error)
            raise
        else:
            _http_done(edge, None)
        finally:
            EDGE.reset(token)


def wrap_app(token: Any, result: Any, config: Any) -> None:
    """After uvicorn.Config.load: put the edge around the app it will serve."""
    if config.loaded_app is not None and not isinstance(config.loaded_app, EdgeApp):
        config.loaded_app = EdgeApp(config.loaded_app)


def arrive(scope: dict[str, Any]) -> Edge | None:
    """A POST reached the server. Records the arrival at once where the route is one of vLLM's."""
    ring = process.current().ring
    if ring is None:
        return None
    path: str = scope["path"]
    root = scope.get("root_path") or ""
    if root and path.startswith(root):
        path = path[len(root) :]
    edge = Edge(now(), ROUTES.get(path))
    if edge.route is not None:
        _put_arrival(ring, edge, scope["headers"])
    return edge


def _put_arrival(ring: Writer, edge: Edge, headers: Any) -> None:
    trace = span = flags = 0
    state = b""
    for name, value in headers:
        if name == b"traceparent":
            trace, span, flags = parse_traceparent(value)
        elif name == b"tracestate":
            state = state + b"," + value if state else value
    high, low = _halves(trace)
    ring.put(
        Kind.ARRIVE,
        edge.arrival,
        edge.number,
        edge.route or Route.OTHER,
        flags,
        high,
        low,
        _signed(span),
        time.time_ns() - (now() - edge.arrival),
    )
    if state and flags and len(state) <= TRACE_STATE_BYTES:
        ring.put_text(Kind.TRACE_STATE, edge.arrival, state, edge.number)


def parse_traceparent(value: bytes) -> tuple[int, int, int]:
    """Trace id, parent span id, flags (bit 0 sampled, bit 8 present); zeros if it is malformed
    (W3C Trace Context, section 3.2)."""
    match = TRACEPARENT.fullmatch(value.strip())
    if match is None:
        return 0, 0, 0
    trace, span, flags = (int(part, 16) for part in match.group(2, 3, 4))
    # More than these four parts only in versions to come, and version 255 is none.
    if match[1] == b"ff" or (match[1] == b"00" and match[5]) or not trace or not span:
        return 0, 0, 0
    return trace, span, flags & 1 | 256


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _halves(number: int) -> tuple[int, int]:
    return _signed(number >> 64), _signed(number & 0xFFFFFFFFFFFFFFFF)


def _active_span() -> tuple[int, int, int, int]:
    """The active server span, if OpenTelemetry is in use in this process: trace id in two halves,
    span id, flags as in ADMIT; zeros without one."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return 0, 0, 0, 0
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return 0, 0, 0, 0
    return (
        *_halves(context.trace_id),
        _signed(context.span_id),
        int(context.trace_flags) & 1 | 256,
    )


def observe_trace_headers(headers: Awaitable[Any]) -> Awaitable[Any]:
    """The trace headers that vLLM's own tracing goes by: without any, its span and ours would be
    two traces."""
    return _observed_trace_headers(headers)


async def _observed_trace_headers(awaited: Awaitable[Any]) -> Any:
    headers = await awaited
    try:
        if not headers and process.current().vllm_traces:
            return _trace_headers() or headers
    except Exception:
        GUARD.failed("trace_headers")
    return headers


def _trace_headers() -> dict[str, str] | None:
    """The active server span as a header, else ids that our own span will have."""
    edge, ring = EDGE.get(), process.current().ring
    if edge is None or ring is None:
        return None
    high, low, span, _ = _active_span()
    if not span:
        high, low, span = (_signed(random.getrandbits(64) | 1) for _ in range(3))
        ring.put(Kind.CONTEXT, now(), edge.number, 0, 0, high, low, span)
    halves = (number & 0xFFFFFFFFFFFFFFFF for number in (high, low, span))
    return {"traceparent": "00-{:016x}{:016x}-{:016x}-01".format(*halves)}


def starts(instance: Any, vllm_config: Any) -> None:
    """Before AsyncLLM or LLMEngine is built: this process is a front end."""
    state = process.current()
    state.open("api_server", str(vllm_config.model_config.served_model_name))
    state.vllm_traces = vllm_config.observability_config.otlp_traces_endpoint is not None
    # Only vLLM's gRPC server imports this module (the package is in every process, as a plugin).
    if "smg_grpc_servicer.vllm.servicer" in sys.modules:
        state.lacks("grpc", "http_edge")


def _know_bucket(edge: Edge, request: Any) -> None:
    """Count the request as received, now that its length is known. With several prompts in one
    call the first decides."""
    state = process.current()
    if edge.bucket >= 0 or state.ring is None:
        return
    lora = request.lora_request
    edge.model = state.model(lora.lora_name if lora is not None else None)
    edge.bucket = SLO.bucket_index(_prompt_length(request))
    edge.cell = edge.model * schema.BUCKETS + edge.bucket
    state.ring.cells[schema.model_cell("received", edge.model) + edge.bucket] += 1


def _prompt_length(request: Any) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    embeds = request.prompt_embeds
    return 0 if embeds is None else len(embeds)


def processed(token: Any, request: Any, instance: Any) -> None:
    """After InputProcessor.process_inputs: the prompt is tokenised, admission may still refuse."""
    edge = EDGE.get()
    if edge is not None and edge.route is not None:
        _know_bucket(edge, request)


def admitted(
    token: Any, result: Any, output_processor: Any, request: Any, parent: Any, index: Any
) -> None:
    """After OutputProcessor.add_request: a sequence is on its way to the engine."""
    state = process.current()
    ring = state.ring
    request_id = request.request_id
    if ring is None or request_id in LIVE:  # the latter: one more chunk of a streamed input
        return
    if ENDINGS & state.missing.keys():
        return
    time_now = now()
    edge, wall = EDGE.get(), 0
    beam = BEAM.get()
    if edge is None:
        edge, wall = _library_edge(request, parent, time_now)
    elif edge.route is None:
        edge.route = Route.OTHER
        _put_arrival(ring, edge, ())
    _know_bucket(edge, request)

    if GUARD.total != _swept:
        _sweep()
    states = output_processor.request_states
    live = Live(edge, sequence_key(request_id), states[request_id], states)
    params = request.sampling_params
    flags = Flag.HTTP if edge.route is not Route.LIBRARY else 0
    if params is None:
        flags |= Flag.POOLING
    elif beam is not None:
        live.beam = True
        live.counts_prompt = not beam.prompt_counted
        beam.prompt_counted = True
        flags |= Flag.BEAM
    else:
        live.cut = is_cut(params)
        live.counts_prompt = not index  # the others of n > 1 have the same prompt
    LIVE[request_id] = edge.open[request_id] = live
    edge.admitted += 1
    ring.put(
        Kind.ADMIT,
        time_now,
        edge.number,
        flags | (Flag.CUT if live.cut else 0),
        edge.cell,
        live.key,
        _prompt_length(request) if live.counts_prompt else 0,
        (params.max_tokens or 0) if params is not None else 0,
        index or 0,
        wall,
        *_active_span(),
    )


def _sweep() -> None:
    """One of our probes failed since the last look: end what it should have ended, or it would
    stay for ever, and all that it refers to."""
    global _swept
    _swept = GUARD.total
    for request_id in [r for r, live in LIVE.items() if r not in live.states]:
        _end_sequence(LIVE.pop(request_id), Finish.OTHER)


def is_cut(params: Any) -> bool:
    """Whether the front end, not the engine, decides how many tokens of a sequence count: it looks
    for stop strings, and beam search asks for one token at a time and drops most of them."""
    return bool(params.stop) or params.max_tokens == 1


def _library_edge(request: Any, parent: Any, time_now: int) -> tuple[Edge, int]:
    """The request of a call from Python: all sequences of one parent are one request."""
    pauses.watch_loop()  # where AsyncLLM is used, one runs here
    family = parent.request_id if parent is not None else None
    if family is not None and family in _FAMILIES:
        return _FAMILIES[family], 0
    # arrival_time is wall clock: only its distance from now is used.
    waited = min(max(time.time() - request.arrival_time, 0.0), 3600.0)
    edge = Edge(time_now - int(waited * 1e9), Route.LIBRARY)
    edge.expected = parent.sampling_params.n if parent is not None else 1
    if family is not None:
        _FAMILIES[family] = edge
    return edge, time.time_ns() - (time_now - edge.arrival)


def observe_admission(admission: Awaitable[Any]) -> Awaitable[Any]:
    """AsyncLLM.add_request, unchanged, its refusals seen: a stream has answered 200 by then."""
    return _observed_admission(admission)


async def _observed_admission(admission: Awaitable[Any]) -> Any:
    try:
        return await admission
    except Exception as error:
        try:
            _refused(error)
        except Exception:
            GUARD.failed("refuse")
        raise


def _refused(error: Exception) -> None:
    """A request, or one sequence of several, was not taken."""
    ring = process.current().ring
    edge = EDGE.get()
    status = getattr(error, "http_status", None)
    if status is None:
        # vLLM's own families of errors, by name: the module has moved between releases.
        client = {"VLLMClientError", "ValueError"} & {c.__name__ for c in type(error).__mro__}
        status = 400 if client else 500
    if edge is not None:
        edge.refused = int(status)
    elif ring is not None:
        edge = Edge(now(), Route.LIBRARY)
        edge.refused, edge.end = int(status), edge.arrival
        _put_arrival(ring, edge, ())  # nothing else will tell the agent of it
        _maybe_end(ring, edge)


def finished(token: Any, result: Any, output_processor: Any, state: Any, reason: Any) -> None:
    """After OutputProcessor._update_stats_from_finished: a sequence ended by itself."""
    live = LIVE.pop(state.request_id, None)
    if live is not None:
        _end_sequence(live, Finish(int(reason)) if int(reason) < 5 else Finish.OTHER)


def aborted(token: Any, request_ids: Any, output_processor: Any) -> None:
    """After OutputProcessor.abort_requests: these sequences were given up."""
    for request_id in request_ids:
        live = LIVE.pop(request_id, None)
        if live is not None:
            _end_sequence(live, Finish.ABORT)


def broken(token: Any, result: Any, output_processor: Any) -> None:
    """After OutputProcessor.propagate_error: the engine is dead, and all it had with it."""
    ring = process.current().ring
    if ring is not None:
        ring.put(Kind.BROKEN, now())
    for request_id in list(output_processor.request_states):
        live = LIVE.pop(request_id, None)
        if live is not None:
            _end_sequence(live, Finish.ERROR)


def _end_sequence(live: Live, finish: Finish) -> None:
    process_state = process.current()
    ring = process_state.ring
    edge, state = live.edge, live.state
    del edge.open[state.request_id]
    if edge.passing and not edge.open:
        edge.pass_sends(False)  # the last chunk comes next
    if ring is None:
        return
    tokens = state.detokenizer.num_output_tokens() if state.detokenizer is not None else 0
    cached = -1
    if not state.is_prefilling:
        cached = state.num_cached_tokens
        edge.yielded = True
        if live.counts_prompt:
            cell = schema.model_cell("prompt_tokens", edge.model) + edge.bucket * 2
            ring.cells[cell] += state.prompt_len - cached
            ring.cells[cell + 1] += cached
    if not live.beam:
        edge.tokens += tokens
        if live.cut:
            ring.cells[schema.model_cell("generated_tokens", edge.model) + edge.bucket] += tokens
    edge.finish = Finish.ERROR if Finish.ERROR in (edge.finish, finish) else finish
    time_now = now()
    ring.put(Kind.SEQUENCE_END, time_now, edge.number, finish, 0, live.key, tokens, cached)
    if edge.http_done:
        # No HTTP, or a response that went out before its sequences ended.
        edge.end = max(edge.end, time_now)
    _maybe_end(ring, edge)


def observe_beams(generator: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """What beam search returns to the caller, unchanged, with its sequences counted."""
    return _observed_beams(generator, BeamCall())


async def _observed_beams(
    generator: AsyncGenerator[Any, None], call: BeamCall
) -> AsyncGenerator[Any, None]:
    try:
        while True:
            token = BEAM.set(call)
            try:
                item = await anext(generator)
            except StopAsyncIteration:
                return
            finally:
                BEAM.reset(token)
            try:
                _count_beams(item)
            except Exception:
                GUARD.failed("beam_search")
            yield item
    finally:
        await generator.aclose()


def _count_beams(item: Any) -> None:
    edge, ring = EDGE.get(), process.current().ring
    if edge is None or ring is None or edge.bucket < 0:
        return
    lengths = [len(output.token_ids) for output in item.outputs]
    edge.tokens += sum(lengths)
    ring.cells[schema.model_cell("generated_tokens", edge.model) + edge.bucket] += sum(lengths)
    ring.put_list(Kind.BEAMS, now(), lengths, edge.number)
    reasons = {output.finish_reason for output in item.outputs}
    if "length" in reasons:
        edge.finish = Finish.LENGTH
    elif reasons <= {"stop"}:
        edge.finish = Finish.STOP


def _http_done(edge: Edge, error: BaseException | None) -> None:
    """The app returned: the response is out, or will never be."""
    try:
        edge.http_done = True
        edge._relay = None  # they refer to each other: no garbage for the collector
        edge.failed = (
            error is not None and not isinstance(error, OSError) and isinstance(error, Exception)
        )
        if edge.passing:
            edge.passing = False
            edge.final_sent = error is None
        if not edge.final_sent and not edge.failed:
            edge.disconnected = not edge.refused
        edge.end = edge.end or now()
        ring = process.current().ring
        if ring is not None:
            _maybe_end(ring, edge)
    except Exception:
        GUARD.failed("http_edge")


def _maybe_end(ring: Writer, edge: Edge) -> None:
    """Count and record the end, once the response is out and all sequences ended."""
    if edge.open or not edge.http_done:
        return
    if edge.route is Route.LIBRARY:
        if edge.admitted < edge.expected:
            return
        for family in [f for f, other in _FAMILIES.items() if other is edge]:
            del _FAMILIES[family]
    elif edge.route is None:
        return
    outcome = _outcome(edge)
    bucket = edge.bucket if edge.bucket >= 0 else UNKNOWN_BUCKET
    # The record before the totals: the agent takes an end that it has not seen for a lost one.
    ring.put(
        Kind.END,
        edge.end,
        edge.number,
        outcome,
        edge.refused or edge.status,
        bucket,
        edge.tokens,
        edge.arrival,
        int(edge.streamed),
        edge.model,
    )
    cells = ring.cells
    if edge.bucket < 0:
        cells[schema.model_cell("received", edge.model) + bucket] += 1
    position = bucket * len(Outcome) + outcome
    cells[schema.model_cell("ended", edge.model) + position] += 1
    cells[schema.model_cell("ended_ns", edge.model) + position] += edge.end - edge.arrival
    if outcome is Outcome.REJECTED:
        code = str(edge.refused or edge.status or 500)
        codes = schema.REJECTION_CODES
        index = codes.index(code) if code in codes else len(codes) - 1
        cells[schema.model_cell("rejections", edge.model) + index] += 1
    cells[schema.PROCESS_CELL["edges_ended"]] += 1


def _outcome(edge: Edge) -> Outcome:
    if not edge.admitted:
        if edge.disconnected:
            return Outcome.ABORT
        taken = 200 <= edge.status < 300 and not edge.refused
        return Outcome.STOP if taken else Outcome.REJECTED
    if edge.disconnected:
        return Outcome.ABORT
    if edge.failed or edge.refused or edge.status >= 400 or edge.finish is Finish.ERROR:
        return Outcome.ERROR
    if edge.finish is Finish.ABORT:
        return Outcome.ABORT
    return Outcome.LENGTH if edge.finish is Finish.LENGTH else Outcome.STOP
