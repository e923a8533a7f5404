"""The metrics over OTLP: cumulative, each under its own name, and under OpenTelemetry's names for
generative AI where those name the same thing."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from llmobs import __version__
from llmobs.agent.collect import RunCollector, histograms
from llmobs.agent.otlp import LastError, otlp_exporter
from llmobs.agent.run import Run
from llmobs.agent.store import Histogram as Kept
from llmobs.metrics import METRICS, Type

log = logging.getLogger("llmobs.agent")

Labels = tuple[str, ...]

# OpenTelemetry's semantic conventions for generative AI: name, unit, description.
TTFT = ("gen_ai.server.time_to_first_token", "s", "Time to generate the first token")
TPOT = ("gen_ai.server.time_per_output_token", "s", "Time per output token after the first")
DURATION = ("gen_ai.server.request.duration", "s", "Duration of a request")
USAGE = ("gen_ai.client.token.usage", "{token}", "Number of input and output tokens used")


class OtlpMetrics:
    """Exports every OTEL_METRIC_EXPORT_INTERVAL milliseconds (default 60,000), and at the end."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self.run = run
        self.say = say
        self.exporter: MetricExporter = otlp_exporter(
            "METRICS", "metric_exporter", "OTLPMetricExporter"
        )
        self.interval = _interval()
        self.began = time.time_ns()
        self.failing = False
        self._stop = threading.Event()
        self._reason = LastError()
        logging.getLogger("opentelemetry").addHandler(self._reason)
        self._thread = threading.Thread(target=self._work, name="otlp-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _work(self) -> None:
        while not self._stop.wait(self.interval):
            self.export()

    def export(self) -> None:
        """Send all figures as they stand. A failure is said once, and once that it is over."""
        try:
            self.run.poll()
            with self.run.lock:
                data = self.data()
            arrived = self.exporter.export(data) is MetricExportResult.SUCCESS
        except Exception as error:
            self._reason.text, arrived = f"{type(error).__name__}: {error}", False
        if arrived == self.failing:
            self.failing = not arrived
            self.say(
                "llmobs: OTLP metrics arrive again"
                if arrived
                else f"llmobs: OTLP metrics do not arrive ({self._reason.text}); they are "
                "cumulative, so nothing is lost once they do"
            )

    def close(self) -> None:
        """The last figures of a server that is gone."""
        self._stop.set()
        last = threading.Thread(target=self.export, daemon=True)
        last.start()
        last.join(1.0)

    def data(self) -> MetricsData:
        """All families, with the run's lock held."""
        metrics = [m for table in METRICS if (m := self._metric(table)) is not None]
        metrics += self._conventional()
        resource = Resource.create({"service.name": "vllm", **self._resource()})
        scope = ScopeMetrics(InstrumentationScope("llmobs", __version__), metrics, "")
        return MetricsData([ResourceMetrics(resource, [scope], "")])

    def _now(self) -> int:
        """The time of a point. The wall clock may have been set back: no point ends before it
        began."""
        now = time.time_ns()
        self.began = min(self.began, now)
        return now

    def _resource(self) -> dict[str, str]:
        for resource in self.run.requests.resources.values():
            if resource:
                return resource
        return {}

    def _metric(self, table: Any) -> Metric | None:
        names = list(table.labels)
        name = table.name
        if table.type is Type.HISTOGRAM:
            children = histograms(self.run, table)
            unit = "s" if table.unit == "seconds" else "1"
            return self._histogram(
                name,
                unit,
                table.help,
                [(dict(zip(names, v, strict=True)), c) for v, c in children.items()],
            )
        samples = RunCollector(self.run).samples(table)
        now = self._now()
        points = [
            NumberDataPoint(dict(zip(names, values, strict=True)), self.began, now, value)
            for values, value in samples.items()
        ]
        if table.type is Type.COUNTER:
            data: Any = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
        else:
            data = Gauge(points)
        return Metric(name, table.help, "s" if table.unit == "seconds" else "1", data)

    def _histogram(
        self, name: str, unit: str, text: str, children: Sequence[tuple[dict[str, str], Kept]]
    ) -> Metric:
        now = self._now()
        points = [
            HistogramDataPoint(
                attributes=labels,
                start_time_unix_nano=self.began,
                time_unix_nano=now,
                count=sum(child.counts),
                sum=child.sum,
                bucket_counts=list(child.counts),
                explicit_bounds=list(child.bounds),
                min=float("inf"),
                max=float("-inf"),
            )
            for labels, child in children
        ]
        return Metric(name, text, unit, Histogram(points, AggregationTemporality.CUMULATIVE))

    def _conventional(self) -> list[Metric]:
        """The same histograms under OpenTelemetry's names."""
        operations = self.run.requests.operations
        tokens = self._children("decode_token_latency_seconds")
        made = [
            self._histogram(
                *name, [(_about(v, operations), c) for v, c in tokens if v["token"] == token]
            )
            for name, token in ((TTFT, "first"), (TPOT, "next"))
        ]
        durations = self._children("llmobs_request_seconds")
        made.append(self._histogram(*DURATION, [(_about(v, operations), c) for v, c in durations]))
        usage = [
            (_about(v, operations) | {"gen_ai.token.type": kind}, c)
            for kind, name in (("input", "context_len_histogram"), ("output", "output_tokens"))
            for v, c in self._children(name)
        ]
        made.append(self._histogram(*USAGE, usage))
        return made

    def _children(self, name: str) -> list[tuple[dict[str, str], Kept]]:
        labels = LABELS[name]
        children = self.run.store.histograms.get(name, {})
        return [(dict(zip(labels, values, strict=True)), c) for values, c in children.items()]


LABELS = {metric.name: tuple(metric.labels) for metric in METRICS} | {
    "output_tokens": ("model_name",)
}


def _about(labels: dict[str, str], operations: dict[str, str]) -> dict[str, str]:
    """The attributes that the conventions ask for, and the context bucket. The operation is that of
    the model's first request: the figures are not kept apart by endpoint."""
    attributes = {
        "gen_ai.operation.name": operations.get(labels["model_name"], "chat"),
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": labels["model_name"],
    }
    if "context_bucket" in labels:
        attributes["llm.context_bucket"] = labels["context_bucket"]
    return attributes


def _interval() -> float:
    try:
        milliseconds = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "60000"))
    except ValueError:
        milliseconds = 0.0
    if 100 <= milliseconds <= 86_400_000:
        return milliseconds / 1000
    log.warning("OTEL_METRIC_EXPORT_INTERVAL is no time from 100 to 86400000 ms; using 60000")
    return 60.0
