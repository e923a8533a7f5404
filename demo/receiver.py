"""A small OTLP receiver: keeps the spans and metrics that come over HTTP or gRPC, decoded."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_service
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc


@dataclass
class Span:
    """A span as it came over the wire; times in nanoseconds since the epoch."""

    trace: str
    id: str
    parent: str
    name: str
    kind: int
    start: int
    end: int
    status: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    resource: dict[str, Any]
    scope: str
    state: str = ""
    children: list["Span"] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


class Receiver:
    """Serves OTLP on two free ports of the loopback interface while it is entered.

    `status` is the HTTP status it answers with (over gRPC anything but 200 is UNAVAILABLE), `delay`
    how long it takes, in seconds.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.metrics: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.delay = 0.0
        self.lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self._grpc = grpc.server(ThreadPoolExecutor(4))
        trace_grpc.add_TraceServiceServicer_to_server(_Traces(self), self._grpc)
        metrics_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), self._grpc)
        self._grpc_port = self._grpc.add_insecure_port("127.0.0.1:0")

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def grpc_url(self) -> str:
        return f"http://127.0.0.1:{self._grpc_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self._grpc.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._grpc.stop(0)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(receiver.delay)
                if receiver.status == 200:
                    with receiver.lock:
                        receiver.headers.append(dict(self.headers.items()))
                    if self.path == "/v1/traces":
                        receiver.take(trace_service.ExportTraceServiceRequest.FromString(body))
                    else:
                        receiver.take_metrics(
                            metrics_service.ExportMetricsServiceRequest.FromString(body)
                        )
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def take(self, request: Any) -> None:
        spans = list(_decode(request))
        with self.lock:
            self.spans += spans

    def take_metrics(self, request: Any) -> None:
        with self.lock:
            self.metrics.append(request)

    def traces(self) -> dict[str, list[Span]]:
        """The spans by trace, in order of their start, each with its children."""
        with self.lock:
            spans = sorted(self.spans, key=lambda span: (span.start, -span.end))
        by_id = {span.id: span for span in spans}
        for span in spans:
            span.children = []
        traces: dict[str, list[Span]] = {}
        for span in spans:
            traces.setdefault(span.trace, []).append(span)
            if span.parent in by_id:
                by_id[span.parent].children.append(span)
        return traces


class _Traces(trace_grpc.TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:
        time.sleep(self.receiver.delay)
        if self.receiver.status != 200:
            context.abort(grpc.StatusCode.UNAVAILABLE, "told to be unavailable")
        with self.receiver.lock:
            self.receiver.headers.append(dict(context.invocation_metadata()))
        self.receiver.take(request)
        return trace_service.ExportTraceServiceResponse()


class _Metrics(metrics_grpc.MetricsServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:
        self.receiver.take_metrics(request)
        return metrics_service.ExportMetricsServiceResponse()


def _decode(request: Any) -> Iterator[Span]:
    for resource in request.resource_spans:
        about = attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    name=span.name,
                    kind=span.kind,
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    status=span.status.code,
                    attributes=attributes(span.attributes),
                    events=[(event.name, attributes(event.attributes)) for event in span.events],
                    resource=about,
                    scope=scope.scope.name,
                    state=span.trace_state,
                )


def attributes(pairs: Any) -> dict[str, Any]:
    """OTLP's key-value pairs as a dict."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


def lines(span: Span, depth: int = 0) -> Iterator[str]:
    """A span and what is below it, as text: offsets from the start of the request."""
    yield from _lines(span, span.start, depth)


SHOWN = (
    "llm.context_bucket",
    "llm.outcome",
    "llm.missed",
    "llm.queue.reason",
    "llm.queue.ahead",
    "llm.queue.ahead_tokens",
    "llm.tokens.cached",
    "llm.tokens.computed",
    "llm.steps",
    "llm.batch.size",
    "llm.batch.kind",
    "llm.batch.longest_context",
)


def _lines(span: Span, zero: int, depth: int) -> Iterator[str]:
    told = ", ".join(
        f"{name.removeprefix('llm.')}={span.attributes[name]}"
        for name in SHOWN
        if name in span.attributes
    )
    name = "  " * depth + span.name
    yield f"{name:26} +{(span.start - zero) / 1e6:8.1f} ms {span.seconds * 1000:9.1f} ms  {told}"
    for child in span.children:
        yield from _lines(child, zero, depth + 1)
