"""Span trees through OpenTelemetry's SDK and exporters, configured by OpenTelemetry's variables."""

import importlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from llmobs import __version__
from llmobs.agent.request import TraceContext
from llmobs.agent.spans import Span
from llmobs.agent.traces import Kept

log = logging.getLogger("llmobs.agent")

GRPC, HTTP = "grpc", "http/protobuf"


class UnusableExporter(ValueError):
    """The settings ask for an exporter that cannot be had; the text says which and what is."""


def protocol(signal: str) -> str:
    """What OTEL_EXPORTER_OTLP_[signal_]PROTOCOL asks for. Like the SDK's, our default is grpc."""
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        value = os.environ.get(name, "").strip().lower()
        if value in (GRPC, HTTP):
            return value
        if value:
            raise UnusableExporter(f"{name}={value!r} is not one of {GRPC}, {HTTP}")
    return GRPC


def otlp_exporter(signal: str, module: str, name: str) -> Any:
    """The OTLP exporter of a signal that OpenTelemetry's variables describe. Raises
    UnusableExporter."""
    transport = "http" if protocol(signal) == HTTP else "grpc"
    try:
        found = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{transport}.{module}")
        return getattr(found, name)()
    except ImportError as error:
        raise UnusableExporter(
            f"{error.name} is not installed: pip install opentelemetry-exporter-otlp"
        ) from error
    except Exception as error:  # an endpoint that is no URL, a timeout that is no number
        raise UnusableExporter(f"{type(error).__name__}: {error}") from error


def span_exporter() -> SpanExporter:
    """The exporter of spans. Raises UnusableExporter."""
    exporter: SpanExporter = otlp_exporter("TRACES", "trace_exporter", "OTLPSpanExporter")
    return exporter


class _Ids(IdGenerator):
    """Gives a request's own span the ids that were told before (exemplars, vLLM's tracing)."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.trace = self.span = 0

    def generate_span_id(self) -> int:
        span, self.span = self.span, 0
        return span or self._random.generate_span_id()

    def generate_trace_id(self) -> int:
        return self.trace or self._random.generate_trace_id()


class _Collected(SpanProcessor):
    """Gathers the spans of one export."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)

    def take(self) -> list[ReadableSpan]:
        spans, self.spans = self.spans, []
        return spans


class _Server:
    """The SDK's tracer for one server, by its resource. Samples always: we decided already."""

    def __init__(self, resource: dict[str, str]) -> None:
        attributes = {"service.name": "vllm", **resource}
        self.ids = _Ids()
        self.collected = _Collected()
        self.provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create(attributes),
            id_generator=self.ids,
            shutdown_on_exit=False,
        )
        self.provider.add_span_processor(self.collected)
        self.tracer = self.provider.get_tracer("llmobs", __version__)

    def record(self, tree: Span, where: TraceContext) -> None:
        context = Context()
        if where.parent:
            flags = TraceFlags(TraceFlags.SAMPLED if where.sampled else TraceFlags.DEFAULT)
            state = TraceState.from_header([where.state.decode("latin-1")]) if where.state else None
            parent = SpanContext(where.trace, where.parent, True, flags, state)
            context = trace.set_span_in_context(NonRecordingSpan(parent), context)
        self.ids.trace, self.ids.span = where.trace, where.span
        # Inside of a server span we are no second one.
        kind = SpanKind.INTERNAL if where.local else SpanKind.SERVER
        self._span(tree, context, kind)

    def _span(self, tree: Span, context: Context, kind: SpanKind) -> None:
        span = self.tracer.start_span(
            tree.name, context, kind, attributes=tree.attributes, start_time=tree.start
        )
        for name, time, attributes in tree.events:
            span.add_event(name, attributes, time)
        if tree.error:
            span.set_status(Status(StatusCode.ERROR, tree.error))
        inside = trace.set_span_in_context(span, context)
        for child in tree.children:
            self._span(child, inside, SpanKind.INTERNAL)
        span.end(tree.end)


class OtlpSink:
    """Exports through one exporter. `say` is told once when spans do not arrive, and once when they
    do again."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.exporter: SpanExporter | None = span_exporter()
        self.failing = False
        self._servers: dict[tuple[tuple[str, str], ...], _Server] = {}
        self._reason = LastError()
        logging.getLogger("opentelemetry").addHandler(self._reason)
        logging.getLogger("opentelemetry").propagate = False

    def export(self, kept: list[Kept]) -> bool:
        """Blocks for the exporter's own timeout at most (OTEL_EXPORTER_OTLP_TIMEOUT)."""
        try:
            arrived = self._export(self._recorded(kept))
        except Exception as error:  # limits that are no numbers (OTEL_SPAN_EVENT_COUNT_LIMIT=x)
            self._reason.text = f"{type(error).__name__}: {error}"
            arrived = False
        if arrived == self.failing:
            self.failing = not arrived
            self.say(
                "llmobs: spans arrive again"
                if arrived
                else f"llmobs: spans do not arrive ({self._reason.text}); they are dropped and "
                "counted in llmobs_spans_dropped_total until they do"
            )
        return arrived

    def _recorded(self, kept: list[Kept]) -> list[ReadableSpan]:
        spans: list[ReadableSpan] = []
        for one in kept:
            key = tuple(sorted(one.resource.items()))
            server = self._servers.get(key)
            if server is None:
                server = self._servers[key] = _Server(one.resource)
            server.record(one.tree, one.request.trace)
            spans += server.collected.take()
        return spans

    def _export(self, spans: Sequence[ReadableSpan]) -> bool:
        try:
            if self.exporter is None:
                self.exporter = span_exporter()
            if self.exporter.export(spans) is SpanExportResult.SUCCESS:
                return True
        except Exception as error:
            self._reason.text = f"{type(error).__name__}: {error}"
        # A fresh exporter next time: a channel that gave up may back off for minutes.
        exporter, self.exporter = self.exporter, None
        if exporter is not None:
            threading.Thread(target=exporter.shutdown, daemon=True).start()
        return False

    def close(self) -> None:
        if self.exporter is not None:
            self.exporter.shutdown()


class LastError(logging.Handler):
    """Why an export failed: the exporters say it to their logs only."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = "no reason given"

    def emit(self, record: logging.LogRecord) -> None:
        self.text = " ".join(record.getMessage().split())[:300]
