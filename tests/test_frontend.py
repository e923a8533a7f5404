"""The front end's probes on a small ASGI app and a small output processor."""

import asyncio
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmobs import frontend, process, schema
from llmobs.agent.run import Run
from llmobs.frontend import EDGE, EdgeApp, parse_traceparent
from llmobs.guard import GUARD
from llmobs.ring import Reader
from tests.rings import read_all

CHAT = "/v1/chat/completions"
ARRIVE, ADMIT, FIRST, SEQUENCE_END, END, BEAMS = 1, 2, 3, 4, 5, 6
STOP, LENGTH, ABORT, ERROR, REJECTED = 0, 1, 2, 3, 4
UNKNOWN = 4  # the bucket of what was never tokenised


class Server:
    """A front end with its ring, its time and the parts of vLLM that it would have."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LLMOBS_RUN_DIR", str(folder / "runs"))
        monkeypatch.setenv("LLMOBS_RING_BYTES", "65536")
        monkeypatch.setattr(process, "_watch", lambda *_: None)
        monkeypatch.setattr(frontend, "LIVE", {})
        monkeypatch.setattr(frontend, "_FAMILIES", {})
        monkeypatch.setattr(frontend, "_swept", 0)
        self.time = 10**12
        monkeypatch.setattr(frontend, "now", self.now)
        process.mark_server()
        self.state = process.current()
        self.state.open("api_server", "deepseek-v4")
        assert self.state.ring is not None
        self.ring = self.state.ring
        self.reader = Reader(self.ring.path)
        self.processor = SimpleNamespace(request_states={})
        self.sent: list[dict[str, Any]] = []

    def now(self) -> int:
        self.time += 1_000_000
        return self.time

    def records(self) -> list[tuple[Any, ...]]:
        """Kind, x, y, columns."""
        return [(r[1], r[2], r[3], r[5]) for r in read_all(self.reader)[0]]

    def total(self, name: str, *places: int, model: int = 0) -> int:
        """One cell: places count along the label dimensions."""
        sizes = [len(schema.LABELS[d]) for d in schema.PER_MODEL[name]]
        offset = 0
        for size, place in zip(sizes, places, strict=True):
            offset = offset * size + place
        return self.ring.cells[schema.model_cell(name, model) + offset]

    # What vLLM would do

    def request(self, name: str = "r1", prompt: int = 10, **params: Any) -> Any:
        given_ = {"stop": [], "max_tokens": 100, **params}
        return SimpleNamespace(
            request_id=name,
            prompt_token_ids=[1] * prompt,
            prompt_embeds=None,
            lora_request=None,
            sampling_params=SimpleNamespace(**given_),
            arrival_time=0.0,
        )

    def admit(self, request: Any, index: int = 0, parent: Any = None) -> Any:
        state = SimpleNamespace(
            request_id=request.request_id,
            is_prefilling=True,
            prompt_len=len(request.prompt_token_ids),
            num_cached_tokens=4,
            tokens=0,
        )
        state.detokenizer = SimpleNamespace(num_output_tokens=lambda: state.tokens)
        self.processor.request_states[request.request_id] = state
        frontend.admitted(None, None, self.processor, request, parent, index)
        return state

    def yields(self, state: Any, tokens: int = 1) -> None:
        state.is_prefilling = False
        state.tokens += tokens

    def finish(self, state: Any, reason: int) -> None:
        frontend.finished(None, None, self.processor, state, reason)

    # The HTTP side

    async def receive(self) -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def post(self, app: Any, path: str = CHAT, **scope: Any) -> None:
        full = {"type": "http", "method": "POST", "path": path, "headers": [], **scope}
        asyncio.run(EdgeApp(app)(full, self.receive, self.send))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(tmp_path, monkeypatch)


STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


def start(status: int = 200, headers: Any = ()) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(content: bytes = b"x", more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


def test_a_streamed_answer(server: Server) -> None:
    messages = [
        start(headers=STREAM),
        body(b"role", True),
        body(b"one", True),
        body(b"two", True),
        body(b""),
    ]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert await receive() == {"type": "http.request", "body": b"", "more_body": False}
        frontend.processed(None, server.request(), None)
        state = server.admit(server.request())
        await send(messages[0])
        await send(messages[1])  # a greeting before the first token
        server.yields(state)
        await send(messages[2])
        server.yields(state)
        await send(messages[3])
        server.finish(state, 0)
        await send(messages[4])

    server.post(app)
    assert server.sent == messages
    records = server.records()
    assert [r[0] for r in records] == [ARRIVE, ADMIT, FIRST, SEQUENCE_END, END]
    _, outcome, status, columns = records[-1]
    assert (outcome, status) == (STOP, 200)
    assert columns[:2] == [0, 2]
    assert columns[3] == 1
    assert server.total("received", 0) == 1
    assert server.total("ended", 0, STOP) == 1
    assert server.total("prompt_tokens", 0, 0) == 6
    assert server.total("prompt_tokens", 0, 1) == 4
    assert server.total("generated_tokens", 0) == 0  # the engine counts them
    assert GUARD.failures == {}
    assert EDGE.get() is None
    assert frontend.LIVE == {}


def test_between_the_first_token_and_the_last_no_line_of_ours_runs_for_a_chunk(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    observe = frontend.Edge._observe

    def counting(edge: Any, message: dict[str, Any]) -> Any:
        seen.append(message.get("body"))
        return observe(edge, message)

    monkeypatch.setattr(frontend.Edge, "_observe", counting)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        states = [server.admit(server.request("a")), server.admit(server.request("b"))]
        await send(start(headers=STREAM))
        await send(body(b"greeting", True))
        for state in states:
            server.yields(state)
        await send(body(b"first", True))
        await send(body(b"second", True))
        server.finish(states[0], 0)
        await send(body(b"third", True))
        server.finish(states[1], 1)
        await send(body(b"usage", True))
        await send(body(b"done"))

    server.post(app)
    assert seen == [None, b"greeting", b"first", b"usage", b"done"]
    assert [m.get("body") for m in server.sent[1:]] == [
        *(b"greeting", b"first", b"second", b"third", b"usage", b"done")
    ]
    assert server.total("ended", 0, LENGTH) == 1
    assert GUARD.failures == {}


@pytest.mark.parametrize(
    ("leaves", "error", "outcome"),
    [
        (False, None, STOP),
        (True, None, ABORT),
        (True, asyncio.CancelledError(), ABORT),
        (False, OSError("gone"), ABORT),
        (False, RuntimeError("the app"), ERROR),
    ],
)
def test_how_a_response_ended_whose_last_chunk_was_not_seen(
    server: Server, leaves: bool, error: BaseException | None, outcome: int
) -> None:
    """Its sequences end only afterwards, so its chunks went straight to the server."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        state = server.admit(server.request())
        await send(start(headers=STREAM))
        server.yields(state)
        await send(body(b"one", True))
        if leaves:
            await receive()
        await send(body(b"two"))
        asyncio.get_running_loop().call_soon(server.finish, state, 0)
        if error is not None:
            raise error

    async def disconnect() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    server.receive = disconnect  # type: ignore[method-assign]
    if error is None:
        server.post(app)
    else:
        with pytest.raises(type(error)):
            server.post(app)
    assert server.total("ended", 0, outcome) == 1
    assert sum(server.total("ended", 0, other) for other in range(5)) == 1
    assert GUARD.failures == {}


@pytest.mark.parametrize(
    ("reason", "status", "outcome"),
    [(0, 200, STOP), (1, 200, LENGTH), (2, 200, ABORT), (3, 500, ERROR), (4, 200, STOP)],
)
def test_how_it_ended(server: Server, reason: int, status: int, outcome: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        state = server.admit(server.request(prompt=5000))
        server.yields(state, 3)
        server.finish(state, reason)
        await send(start(status))
        await send(body())

    server.post(app)
    records = server.records()
    assert records[-1][:3] == (END, outcome, status)
    assert server.total("ended", 2, outcome) == 1


@pytest.mark.parametrize(
    ("status", "code"), [(400, 0), (404, 2), (422, 4), (503, 7), (418, 8), (500, 6)]
)
def test_a_rejection(server: Server, status: int, code: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(status))
        await send(body(b"no"))

    server.post(app)
    records = server.records()
    assert [r[:3] for r in records] == [(ARRIVE, 1, 0), (END, REJECTED, status)]
    assert server.total("rejections", code) == 1
    assert server.total("received", 4) == 1
    assert server.total("ended", 4, REJECTED) == 1


def test_the_client_left(server: Server) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        state = server.admit(server.request())
        await send(start(headers=STREAM))
        server.yields(state)
        await send(body(b"one", True))
        assert (await receive())["type"] == "http.disconnect"
        frontend.aborted(None, ["r1"], server.processor)

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    server.receive = receive  # type: ignore[method-assign]
    server.post(app)
    assert server.records()[-1][:2] == (END, ABORT)
    assert server.total("ended", 0, ABORT) == 1


class TheirsError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(TheirsError("x"), ERROR), (asyncio.CancelledError(), ABORT), (BrokenPipeError(), ABORT)],
)
def test_the_app_raised(server: Server, error: BaseException, outcome: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        state = server.admit(server.request())
        server.yields(state)
        frontend.aborted(None, ["r1"], server.processor)
        raise error

    with pytest.raises(type(error)) as caught:
        server.post(app)
    assert caught.value is error
    assert server.records()[-1][:2] == (END, outcome)
    assert EDGE.get() is None


def test_the_engine_died(server: Server) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        server.admit(server.request())
        frontend.broken(None, None, server.processor)
        await send(start(500))
        await send(body())

    server.post(app)
    assert server.records()[-1][:3] == (END, ERROR, 500)


def test_stop_strings_are_counted_here(server: Server) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        state = server.admit(server.request(stop=["END"]))
        server.yields(state, 7)
        server.finish(state, 0)
        await send(start())
        await send(body())

    server.post(app)
    assert server.total("generated_tokens", 0) == 7


def test_several_sequences_count_their_prompt_once(server: Server) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        states = [server.admit(server.request(f"r{n}"), index=n) for n in range(3)]
        for state in states:
            server.yields(state, 2)
            server.finish(state, 1)
        await send(start())
        await send(body())

    server.post(app)
    records = server.records()
    assert [r[0] for r in records].count(END) == 1
    assert [r[3][1] for r in records if r[0] == ADMIT] == [10, 0, 0]
    assert records[-1][3][1] == 6
    assert server.total("prompt_tokens", 0, 0) + server.total("prompt_tokens", 0, 1) == 10
    assert server.total("received", 0) == server.total("ended", 0, LENGTH) == 1


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("/health", {}),
        ("/metrics", {}),
        (CHAT, {"method": "GET"}),
        (CHAT, {"type": "websocket"}),
        ("/my/own/route", {}),
    ],
)
def test_what_is_no_inference_is_not_seen(server: Server, path: str, scope: Any) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start())
        await send(body())

    server.post(app, path, **scope)
    assert server.records() == []
    assert len(server.sent) == 2


def test_a_users_own_route_counts_from_its_hand_over(server: Server) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        state = server.admit(server.request())
        server.yields(state)
        server.finish(state, 0)
        await send(start())
        await send(body())

    server.post(app, "/my/own/route")
    assert [r[0] for r in server.records()] == [ARRIVE, ADMIT, SEQUENCE_END, END]


def test_below_a_root_path(server: Server) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(400))
        await send(body())

    server.post(app, f"/proxy{CHAT}", root_path="/proxy")
    assert [r[:2] for r in server.records()] == [(ARRIVE, 1), (END, REJECTED)]


def test_a_call_from_python(server: Server) -> None:
    state = server.admit(server.request())
    server.yields(state, 2)
    server.finish(state, 1)
    records = server.records()
    assert [r[0] for r in records] == [ADMIT, SEQUENCE_END, END]
    assert records[-1][1:3] == (LENGTH, 0)
    assert server.total("ended", 0, LENGTH) == 1


def test_a_call_from_python_that_is_refused(server: Server) -> None:
    """The agent must not take its end for that of a request whose beginning was lost."""

    async def admission() -> None:
        raise ValueError("too long")

    with pytest.raises(ValueError, match="too long"):
        asyncio.run(frontend.observe_admission(admission()))
    assert server.total("ended", UNKNOWN, REJECTED) == 1
    assert server.total("rejections", 0) == 1  # 400
    run = Run(server.ring.path.parent)
    run.poll()
    (told,) = run.requests.finished
    assert (told.outcome, told.status, told.context_bucket) == ("rejected", 400, "unknown")
    assert run.requests.incomplete == 0


def test_whatever_fails_of_ours_the_answer_goes_out(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every one of our own functions raises."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("ours")

    messages = [start(headers=STREAM), body(b"one", True), body(b"")]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        for message in messages:
            await send(message)

    for name in ("arrive", "_put_arrival", "_maybe_end", "_outcome"):
        with monkeypatch.context() as patch:
            patch.setattr(frontend, name, broken)
            server.sent.clear()
            server.post(app)
            assert server.sent == messages
    with monkeypatch.context() as patch:
        patch.setattr(frontend.Edge, "_maybe_first", broken)
        server.sent.clear()
        server.post(app)
        assert server.sent == messages
    # A message that is none is the server's business.
    server.sent.clear()
    messages = [{"type": "http.response.start"}, {"type": "http.response.body"}]
    server.post(app)
    assert server.sent == messages
    assert GUARD.failures["http_edge"] == 6


def test_without_a_ring_nothing_is_done(tmp_path: Path) -> None:
    sent = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start())

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    asyncio.run(EdgeApp(app)(scope, send, send))
    assert sent == [start()]
    assert GUARD.failures == {}
    assert "_LLMOBS_SERVER_RUN" not in os.environ


def test_the_wrapped_app_is_the_app(server: Server) -> None:
    app = SimpleNamespace(state="theirs")
    config = SimpleNamespace(loaded_app=app)
    frontend.wrap_app(None, None, config)
    assert config.loaded_app.state == "theirs"
    once = config.loaded_app
    frontend.wrap_app(None, None, config)
    assert config.loaded_app is once


@pytest.mark.parametrize("missing", ["finish", "abort"])
def test_where_no_end_of_a_sequence_is_seen_none_is_kept(server: Server, missing: str) -> None:
    server.state.miss(missing, "gone", at_once=False)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        frontend.processed(None, server.request(), None)
        server.admit(server.request())
        await send(start())
        await send(body())

    server.post(app)
    assert frontend.LIVE == {}
    assert [record[0] for record in server.records()] == [ARRIVE, END]
    assert server.total("received", 0) == server.total("ended", 0, STOP) == 1
    assert GUARD.failures == {}


# What vLLM says of itself


NIGHTLY = "0.21.0rc1.dev12+gabc.d20260401.cu129"
VERSIONS = [
    *[(said, said) for said in ("0.33.0", NIGHTLY, "dev", "unknown")],
    *[(None, "unknown"), ("", "unknown"), ((0, 33), "(0, 33)"), (..., "unknown")],
]


@pytest.mark.parametrize(("said", "shown"), VERSIONS)
def test_any_version_of_vllm_is_taken(
    server: Server, monkeypatch: pytest.MonkeyPatch, said: Any, shown: str
) -> None:
    vllm = ModuleType("vllm")
    if said is not ...:
        vllm.__version__ = said  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="deepseek-v4"),
        observability_config=SimpleNamespace(otlp_traces_endpoint="http://collector"),
    )
    frontend.starts(None, config)
    assert server.reader.info()["vllm"] == shown
    assert server.state.vllm_traces


# Trace context

LOWER = set(b"0123456789abcdef")
GOOD = ("00", "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "01")


def context(value: bytes) -> tuple[int, int, int]:
    """By the letter of W3C Trace Context, section 3.2."""
    version, trace, span, flags, *_ = [*value.strip().split(b"-"), *[b""] * 4]
    if [len(version), len(trace), len(span), len(flags)] != [2, 32, 16, 2]:
        return 0, 0, 0
    if set(version + trace + span + flags) - LOWER:
        return 0, 0, 0
    if version == b"ff" or set(trace) == {48} or set(span) == {48}:
        return 0, 0, 0
    if version == b"00" and len(value.strip()) != 55:
        return 0, 0, 0
    return int(trace, 16), int(span, 16), 256 + int(flags, 16) % 2


PARTS = st.tuples(
    st.sampled_from(["00", "01", "cc", "ff", "0", "+0", "0X"]),
    st.sampled_from([GOOD[1], GOOD[1].upper(), "0" * 32, "f" * 32, "f" * 31, "0x" + "f" * 30]),
    st.sampled_from([GOOD[2], "0" * 16, "f" * 16, "1_1_1_1_1_1_1_12", " " + "f" * 15]),
    st.sampled_from(["00", "01", "03", "ff", "0x", "+1", " 1", "F1"]),
    st.sampled_from(["", "-", "-more", "-01", " ", "\n"]),
)


@given(st.binary(max_size=70) | PARTS.map(lambda p: ("-".join(p[:4]) + p[4]).encode()))
@settings(max_examples=500)
def test_traceparent(value: bytes) -> None:
    """Anything malformed is no context, and never an error."""
    assert parse_traceparent(value) == context(value)


def test_the_trace_context_is_kept(server: Server) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(400))
        await send(body())

    header = b"00-ffffffffffffffffa3ce929d0e0e4736-80f067aa0ba902b7-01"
    server.post(app, headers=[(b"traceparent", header)])
    _, _, flags, columns = server.records()[0]
    assert flags == 257
    assert [c & 0xFFFFFFFFFFFFFFFF for c in columns[:3]] == [
        0xFFFFFFFFFFFFFFFF,
        0xA3CE929D0E0E4736,
        0x80F067AA0BA902B7,
    ]


def test_what_a_failed_probe_left_open_is_ended_with_the_next_request(server: Server) -> None:
    """Else it would stay for ever, and what vLLM knew of it too."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        state = server.admit(server.request("r1"))
        server.yields(state, 3)
        await send(start())
        await send(body())

    server.post(app)
    working = server.admit(server.request("r2"))
    del server.processor.request_states["r1"]  # vLLM ended it; our probe `finish` failed
    assert [r[0] for r in server.records()] == [ARRIVE, ADMIT, FIRST, ADMIT]
    try:
        raise RuntimeError
    except RuntimeError:
        GUARD.failed("finish")
    server.admit(server.request("r3"))
    assert [r[0] for r in server.records()] == [SEQUENCE_END, END, ADMIT]
    assert server.total("ended", 0, STOP) == 1
    assert set(frontend.LIVE) == {"r2", "r3"}
    server.finish(working, 0)
    assert set(frontend.LIVE) == {"r3"}
