"""The figures that the agent itself keeps: histograms and counters by label values."""

import time
from bisect import bisect_left
from itertools import product

from prometheus_client.samples import Exemplar

from llmobs.metrics import BY_NAME, Metric

EXEMPLAR_SECONDS = 15.0
"""At most one exemplar per bucket in this time: each keeps a trace that might not be kept else."""


class Histogram:
    """Counts per bucket (the last is +Inf) and the sum, in the metric's unit."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def wants_exemplar(self, value: float) -> bool:
        """Whether the value's bucket has had none for a while."""
        last = self.exemplars.get(bisect_left(self.bounds, value))
        if last is None:
            return True
        # The wall clock may have been set back.
        return abs(time.time() - float(last.timestamp or 0)) >= EXEMPLAR_SECONDS

    def set_exemplar(self, value: float, trace: int, span: int) -> None:
        """Let the value's bucket lead to a trace."""
        labels = {"trace_id": f"{trace:032x}", "span_id": f"{span:016x}"}
        self.exemplars[bisect_left(self.bounds, value)] = Exemplar(labels, value, time.time())

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """(le, count) pairs as Prometheus writes them (OpenMetrics wants 1024.0, not 1024), with
        the bucket's exemplar where it has one."""
        total = 0
        pairs: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for place, count in enumerate(self.counts):
            total += count
            le = str(float(self.bounds[place])) if place < len(self.bounds) else "+Inf"
            exemplar = self.exemplars.get(place)
            pairs.append((le, float(total), exemplar) if exemplar else (le, float(total)))
        return pairs


Labels = tuple[str, ...]


class Store:
    """Children are made once per combination of label values and kept by whoever observes."""

    def __init__(self) -> None:
        self.histograms: dict[str, dict[Labels, Histogram]] = {}
        self.counters: dict[str, dict[Labels, float]] = {}

    def histogram(self, name: str, *labels: str) -> Histogram:
        """The child of a histogram; label values in the order of the table."""
        children = self.histograms.setdefault(name, {})
        child = children.get(labels)
        if child is None:
            child = children[labels] = Histogram(BY_NAME[name].bounds)
        return child

    def add(self, name: str, *labels: str, amount: float = 1) -> None:
        """Add to a counter."""
        children = self.counters.setdefault(name, {})
        children[labels] = children.get(labels, 0) + amount

    def prepare(self, metric: Metric, known: dict[str, tuple[str, ...]]) -> None:
        """Let every combination stand at 0 from the start; `known` has the open labels' values."""
        values = (known.get(n, v) for n, v in metric.labels.items())
        for labels in product(*([v for v in some if v not in metric.absent] for some in values)):
            if metric.type == "histogram":
                self.histogram(metric.name, *labels)
            else:
                self.add(metric.name, *labels, amount=0)
