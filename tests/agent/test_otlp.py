"""Span trees over the wire, and collectors in trouble, against a receiver that decodes OTLP."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from demo.receiver import Receiver
from llmobs.agent.otlp import OtlpSink, UnusableExporter, span_exporter
from llmobs.agent.request import TraceContext
from llmobs.agent.spans import span_tree
from llmobs.agent.traces import Kept
from tests.agent.test_traces import decoding, request

PROTOCOLS = ("http/protobuf", "grpc")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", request.param)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    return str(request.param)


def url(receiver: Receiver, protocol: str) -> str:
    return receiver.grpc_url if protocol == "grpc" else receiver.http_url


def kept(trace: TraceContext | None = None, resource: dict[str, str] | None = None) -> Kept:
    one = decoding([])
    one.trace = trace or TraceContext()
    one.trace.identify()
    return Kept((False, 0.3, 0), span_tree(one, "m", ("sample",)), one, resource or {})


def sink(said: list[str]) -> OtlpSink:
    return OtlpSink(said.append)


def test_a_tree_arrives_with_the_ids_it_was_promised(
    receiver: Receiver, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url(receiver, protocol))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue")
    said: list[str] = []
    assert sink(said).export([kept(TraceContext(0xABC, 0, 0xDEF), {"mem": "24GB"})])
    (spans,) = receiver.traces().values()
    assert [span.name for span in spans] == [
        "llm.request",
        "llm.preprocess",
        "llm.queue",
        "llm.prefill",
        "llm.decode",
        "llm.deliver",
    ]
    root = spans[0]
    assert (root.trace, root.id, root.parent) == (f"{0xABC:032x}", f"{0xDEF:016x}", "")
    assert root.kind == 2  # SERVER
    assert all(span.parent == root.id for span in spans[1:])
    assert root.resource["mem"] == "24GB"
    assert root.resource["service.name"] == "vllm"
    assert root.attributes["llm.outcome"] == "length"
    assert any(header.get("x-tenant") == "blue" for header in receiver.headers)
    assert said == []


def test_a_caller_s_trace_goes_on_with_its_state(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.http_url)
    where = TraceContext(0x77, 0x55, sampled=True, remote_sampled=True, state=b"rojo=1,congo=2")
    inside = TraceContext(0x78, 0x56, sampled=False, local=True)
    assert sink([]).export([kept(where), kept(inside)])
    roots = {span.trace: span for span in receiver.spans if span.name == "llm.request"}
    remote, local = roots[f"{0x77:032x}"], roots[f"{0x78:032x}"]
    assert (remote.parent, remote.state, remote.kind) == (f"{0x55:016x}", "rojo=1,congo=2", 2)
    assert (local.parent, local.kind) == (f"{0x56:016x}", 1)  # INTERNAL: a server span has it
    assert local.attributes["llm.parent_sampled"] is False
    assert "llm.parent_sampled" not in remote.attributes


def test_an_error_is_an_error_over_the_wire(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.http_url)
    refused = request(0.2)
    tree = span_tree(refused, "m", ("rejected",))
    assert sink([]).export([Kept((False, 0.2, 0), tree, refused, {})])
    (root, _) = sorted(receiver.spans, key=lambda span: span.name, reverse=True)
    assert root.status == 2  # ERROR
    assert root.attributes["http.response.status_code"] == 503


def test_trouble_is_said_once_and_its_end_too(
    receiver: Receiver, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url(receiver, protocol))
    said: list[str] = []
    exporting = sink(said)
    receiver.status = 503
    assert not exporting.export([kept()])
    assert not exporting.export([kept()])
    assert len(said) == 1
    assert said[0].startswith("llmobs: spans do not arrive (")
    receiver.status = 200
    assert exporting.export([kept()])
    assert exporting.export([kept()])
    assert said[1:] == ["llmobs: spans arrive again"]


def test_a_dead_collector_a_slow_one_and_one_that_speaks_otherwise_fail_within_the_timeout(
    receiver: Receiver, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}"
    right = url(receiver, protocol)
    wrong = receiver.http_url if protocol == "grpc" else receiver.grpc_url
    for endpoint, delay in (
        (dead, 0.0),
        (right, 30.0),
        (right.replace("http:", "https:"), 0.0),
        (wrong, 0.0),
    ):
        receiver.delay = delay
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        said: list[str] = []
        exporting = sink(said)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(exporting.export, [kept()]).result(15) is False, endpoint
        assert len(said) == 1, endpoint


def test_settings_that_no_exporter_can_be_made_of_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")
    with pytest.raises(UnusableExporter, match=r"OTEL_EXPORTER_OTLP_PROTOCOL='carrier-pigeon'.*"):
        span_exporter()


def test_a_limit_that_is_no_number_is_said_and_kills_nothing(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.http_url)
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "abc")
    said: list[str] = []
    exporting = sink(said)
    assert not exporting.export([kept()])
    assert not exporting.export([kept()])
    assert len(said) == 1
    assert "OTEL_SPAN_EVENT_COUNT_LIMIT" in said[0]
