"""From the agent's state to Prometheus metric families."""

import re
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from prometheus_client import Metric as Family
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from llmobs import __version__, schema
from llmobs.agent import kv_cache
from llmobs.agent.pace import Paced
from llmobs.agent.run import Run, Source
from llmobs.agent.signals import Samples
from llmobs.agent.store import Histogram
from llmobs.features import FEATURES
from llmobs.metrics import BY_NAME, DROP_REASONS, METRICS, OBJECTIVES, TERMS, Metric, Type
from llmobs.probes import NUMBERS, ROLES
from llmobs.process import missing_probes
from llmobs.slo import SLO

FROM_TOTALS: dict[str, tuple[str, float]] = {
    "llmobs_requests_received_total": ("received", 1),
    "llmobs_requests_total": ("ended", 1),
    "llmobs_request_outcome_seconds_total": ("ended_ns", 1e-9),
    "llmobs_rejections_total": ("rejections", 1),
    "llmobs_prompt_tokens_total": ("prompt_tokens", 1),
    "llmobs_generated_tokens_total": ("generated_tokens", 1),
    "llmobs_preemptions_total": ("preemptions", 1),
    "llmobs_requests": ("requests", 1),
    "llmobs_batch_size_squares_total": ("batch_squares", 1),
    "llmobs_queue_reason_seconds_total": ("wait_ns", 1e-9),
    "llmobs_step_log_moment_total": ("log_moment", 1),
    "llmobs_spec_tokens_total": ("spec_tokens", 1),
    "llmobs_waiting_tokens": ("waiting_tokens", 1),
    "llmobs_engine_last_step_timestamp_seconds": ("last_step_wall_ns", 1e-9),
}
"""Metric: the total it is read from, and its scale."""
HISTOGRAMS_FROM_TOTALS = {
    "llmobs_gc_pause_seconds": ("gc_pause", "gc_pause_ns"),
    "llmobs_event_loop_lag_seconds": ("loop_lag", "loop_lag_ns"),
}
"""Metric: the totals of its buckets, and of its sum in nanoseconds."""
ABSENT_AT_ZERO = {"llmobs_event_loop_lag_seconds"}
"""No process without an event loop has a lag of it."""


class RunCollector(Collector):
    """Yields every family of the table, in its order."""

    def __init__(self, run: Run, openmetrics: bool = False) -> None:
        self.run = run
        self.openmetrics = openmetrics

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> Iterator[Family]:
        run = self.run
        run.poll()
        with run.lock:
            families = [self._family(metric) for metric in run.pace.over(METRICS, 1)]
            families += self._target_info()
        for family in families:
            family.samples = Paced(family.samples, run.pace)
            yield family

    def _target_info(self) -> list[Family]:
        """The server's resource attributes, as OpenTelemetry's own exporter shows them."""
        resource = next((r for r in self.run.requests.resources.values() if r), None)
        if resource is None:
            return []
        labels = {re.sub("[^a-zA-Z0-9_]", "_", name): value for name, value in resource.items()}
        family = GaugeMetricFamily("target_info", "The server.", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return [family]

    def _family(self, metric: Metric) -> Any:
        labels = list(metric.labels)
        family: Any
        if metric.type is Type.HISTOGRAM:
            family = HistogramMetricFamily(metric.name, metric.help, labels=labels)
            for values, child in histograms(self.run, metric).items():
                family.add_metric(values, child.cumulative(), child.sum)
            return family
        make: Any = CounterMetricFamily if metric.type is Type.COUNTER else GaugeMetricFamily
        if self.openmetrics and metric.name.removesuffix("_total") in BY_NAME.keys() - {
            metric.name
        }:
            # In OpenMetrics a counter's family has no _total, and there the gauge of that name is.
            make = UnknownMetricFamily
        family = make(metric.name, metric.help, labels=labels)
        for values, value in sorted(self.samples(metric).items()):
            family.add_metric(values, value)
        return family

    def samples(self, metric: Metric) -> Samples:
        samples: Samples = dict(self.run.store.counters.get(metric.name, {}))
        if metric.name in FROM_TOTALS:
            total, scale = FROM_TOTALS[metric.name]
            self._totals(samples, metric, total, scale)
        elif metric.name in OWN:
            samples = OWN[metric.name](self.run)
        served = _served(self.run)
        for signal in self.run.signals:
            for values, value in signal.samples().get(metric.name, {}).items():
                named = len(values) == len(metric.labels)
                samples[values if named else (served, *values)] = value
        return samples

    def _totals(self, samples: Samples, metric: Metric, total: str, scale: float) -> None:
        """Add up one total over the processes."""
        per_engine = "engine" in metric.labels
        role = "engine_core" if per_engine else "api_server"
        per_model = total in schema.PER_MODEL
        dimensions = (schema.PER_MODEL if per_model else schema.PER_PROCESS)[total]
        combinations = list(product(*(schema.LABELS[name] for name in dimensions)))
        for source in self.run.sources.values():
            roles = source.roles
            # Tokens are counted by engines and front ends alike, each its own.
            both = total == "generated_tokens" and "engine_core" in roles
            if role not in roles and not both:
                continue
            if metric.type is Type.GAUGE and not source.alive:
                continue
            cells = source.floats if total in schema.FLOAT_TOTALS else source.cells
            for number, model in enumerate(_models(source, per_model)):
                base = schema.model_cell(total, number) if per_model else schema.PROCESS_CELL[total]
                prefix = (model, str(source.info.get("engine", "0"))) if per_engine else (model,)
                for offset, values in enumerate(combinations):
                    key = (*prefix, *values)
                    samples[key] = samples.get(key, 0) + cells[base + offset] * scale


def histograms(run: Run, metric: Metric) -> dict[tuple[str, ...], Histogram]:
    """The children of a histogram, by the values of its labels."""
    if metric.name not in HISTOGRAMS_FROM_TOTALS:
        return run.store.histograms.get(metric.name, {})
    buckets, total = (schema.PROCESS_CELL[name] for name in HISTOGRAMS_FROM_TOTALS[metric.name])
    children: dict[tuple[str, ...], Histogram] = {}
    for source in run.sources.values():
        counts = list(source.cells[buckets : buckets + len(metric.bounds) + 1])
        if not source.models or (not any(counts) and metric.name in ABSENT_AT_ZERO):
            continue
        key = (source.models[0], source.roles[0])
        child = children.setdefault(key, Histogram(metric.bounds))
        child.counts = [a + b for a, b in zip(child.counts, counts, strict=True)]
        child.sum += source.cells[total] / 1e9
    return children


def _models(source: Source, per_model: bool) -> list[str]:
    """The models whose cells are in use, by number."""
    models = source.models
    if not per_model:
        return models[:1]
    return models + ["other"] * (len(models) >= schema.MODEL_SLOTS - 1)


def _served(run: Run) -> str:
    for source in run.sources.values():
        if source.models:
            return source.models[0]
    return ""


def _lost(run: Run) -> Samples:
    samples: Samples = {}
    for source in run.sources.values():
        for role in source.roles[:1]:
            key = (source.models[0], role)
            samples[key] = samples.get(key, 0) + source.lost
    return samples


def _guard(run: Run) -> Samples:
    samples: Samples = {}
    for source in run.sources.values():
        for role in source.roles:
            for probe, number in NUMBERS.items():
                if ROLES.get(probe, source.roles[0]) == role:
                    key = (source.models[0], role, probe)
                    failures = source.cells[schema.GUARD_CELL + number]
                    samples[key] = samples.get(key, 0) + failures
    return samples


def _attached(run: Run) -> Samples:
    samples: Samples = {}
    for source in run.sources.values():
        if not source.alive:
            continue
        for probe, attached in source.info.get("probes", {}).items():
            role = ROLES.get(probe, "")
            if role in source.roles:
                key = (source.models[0], role, probe)
                samples[key] = min(samples.get(key, 1), attached)
    # Without the probe that gives it its role a process has no ring: its note tells.
    missing = missing_probes(run.folder)
    for source in run.sources.values():
        for server, probe in missing:
            if source.alive and server == source.info.get("server") and probe in ROLES:
                samples[source.models[0], ROLES[probe], probe] = 0
    return samples


def _features(run: Run) -> Samples:
    samples: Samples = {}
    alive = [source for source in run.sources.values() if source.alive and source.models]
    for model in _alive_models(run):
        lacking: dict[str, str] = {}
        for engine in run.engines.values():
            if engine.models[:1] == [model] and engine.latency.reason:
                lacking["latency_model"] = engine.latency.reason
        for signal in run.signals:
            lacking |= signal.lacking()
        for source in alive:
            if source.models[0] == model:
                lacking |= source.info.get("lacking", {})
        for feature in FEATURES:
            reason = lacking.get(feature.name, "")
            samples[model, feature.name, reason] = float(not reason)
    return samples


def _alive_models(run: Run) -> set[str]:
    """The served names of the servers that run."""
    return {source.models[0] for source in run.sources.values() if source.alive and source.models}


def _coefficients(run: Run) -> Samples:
    samples: Samples = {}
    for engine in run.engines.values():
        if engine.models and engine.latency.coefficients is not None:
            for term, value in zip(TERMS, engine.latency.coefficients, strict=True):
                samples[engine.models[0], engine.name, term] = value
    return samples


def _targets(run: Run) -> Samples:
    return {
        (model, bucket.name, objective): SLO.target(place, objective)
        for model in _alive_models(run)
        for place, bucket in enumerate(SLO.buckets)
        for objective in OBJECTIVES
    }


def _build(run: Run) -> Samples:
    versions = [str(s.info["vllm"]) for s in run.sources.values() if "vllm" in s.info]
    return {(_served(run), __version__, versions[0] if versions else ""): 1}


def _torch(run: Run, total: str) -> Samples:
    """Totals of the workers, by their rank; none of one that has not read its allocator yet."""
    samples: Samples = {}
    (dimension,) = schema.PER_PROCESS[total]
    for source in run.sources.values():
        cells = source.cells
        if "worker" not in source.roles or not cells[schema.PROCESS_CELL["torch_reads"]]:
            continue
        if total == "torch_memory" and not source.alive:
            continue
        who = [str(source.info.get(name, "0")) for name in ("engine", "rank")]
        for offset, value in enumerate(schema.LABELS[dimension]):
            key = (source.models[0], *who, value)
            cell = cells[schema.PROCESS_CELL[total] + offset]
            samples[key] = samples.get(key, 0) + cell
    return samples


OWN: dict[str, Callable[[Run], Samples]] = {
    "llmobs_incomplete_requests_total": lambda run: {(_served(run),): run.requests.incomplete},
    "llmobs_records_lost_total": _lost,
    "llmobs_spans_dropped_total": lambda run: {
        (_served(run), reason): run.dropped_spans()[reason] for reason in DROP_REASONS
    },
    "llmobs_guard_errors_total": _guard,
    "llmobs_probe_attached": _attached,
    "llmobs_feature_available": _features,
    "llmobs_latency_model_coefficient": _coefficients,
    "llmobs_slo_target_seconds": _targets,
    "llmobs_torch_memory_bytes": lambda run: _torch(run, "torch_memory"),
    "llmobs_torch_memory_events_total": lambda run: _torch(run, "torch_events"),
    "llmobs_agent_restarts_total": lambda run: {(_served(run),): run.restarts},
    "llmobs_build_info": _build,
    "llmobs_kv_blocks": kv_cache.blocks,
    "llmobs_kv_block_events_total": kv_cache.events,
    "llmobs_kv_allocation_failures_total": kv_cache.failures,
    "llmobs_kv_cache_bytes": kv_cache.size,
}
"""Families that are neither totals nor kept in the store."""

if unknown := set(FROM_TOTALS) - set(BY_NAME):
    sys.exit(f"no such metrics: {unknown}")
