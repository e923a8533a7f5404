"""The one place that decides everything numeric: context buckets, targets, histogram boundaries.

The figures themselves are in `slo.yaml`; LLMOBS_SLO_FILE names a file of one's own. They are read
once, when this is imported, since the layout of the ring files goes by the number of buckets.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path

from llmobs.settings import slo_file
from llmobs.slo_file import (
    Address,
    Count,
    FieldError,
    Hold,
    Number,
    Seconds,
    Share,
    SloError,
    Switch,
    Word,
    read,
)
from llmobs.thresholds import Severity, Thresholds

DEFAULT = Path(__file__).with_name("slo.yaml")
UNKNOWN = "unknown"
"""The bucket of a request that was never tokenised."""
MOST_BUCKETS = 8
"""More would not fit into a ring's totals, and not into a dashboard either."""


@dataclass(frozen=True)
class ContextBucket:
    """A class of requests by prompt length.

    `limit` is the largest prompt, in tokens, that still belongs here (None: no limit). The targets
    are in seconds: `first_token` from arrival to the first token, `token_gap` for the longest pause
    between two output tokens of one request, `cold_start` for the first prefill after a pause.
    """

    name: Word
    limit: Count | None
    first_token: Seconds
    token_gap: Seconds
    cold_start: Seconds


@dataclass(frozen=True)
class DynamicTarget:
    """For information: `short` up to `short_limit` tokens, else `long`, × (1 + log2(n/1024))."""

    short_limit: Count
    short: Seconds
    long: Seconds

    def seconds(self, prompt_tokens: int) -> float:
        """The target of a prompt. Taken literally the formula is 0 at 512 tokens and negative
        below, so the logarithm is held at 0."""
        base = self.short if prompt_tokens <= self.short_limit else self.long
        return base * (1 + max(0.0, math.log2(max(prompt_tokens, 1) / 1024)))


@dataclass(frozen=True)
class ColdStart:
    """After `idle` without a step of the engine each bucket's next prefill is a cold start;
    `exclude` takes these requests out of the verdicts on the first token."""

    idle: Seconds
    exclude: Switch


@dataclass(frozen=True)
class Boundaries:
    """Of the histograms; targets and limits that are none of them are added."""

    fine_seconds: tuple[Seconds, ...]
    step_seconds: tuple[Seconds, ...]
    batch_sizes: tuple[Count, ...]
    context_tokens: tuple[Count, ...]
    cold_start_seconds: tuple[Seconds, ...]
    kv_bytes: tuple[Count, ...]
    residual_ratios: tuple[Number, ...]

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            values = getattr(self, name)
            if list(values) != sorted(set(values)):
                raise FieldError(name, f"{name} is {list(values)}; accepted is what rises strictly")


@dataclass(frozen=True)
class Objectives:
    """The share of good events that is promised."""

    availability: Share
    health: Share
    first_token: Share


@dataclass(frozen=True)
class BurnWindow:
    """A row of multi-window burn rates: alert when both windows burn `rate` times as fast as the
    budget allows. `at_least` bad events in the short one, so that a single one pages nobody."""

    long: Seconds
    short: Seconds
    rate: Number
    for_: Hold
    severity: Severity
    at_least: Count


@dataclass(frozen=True)
class Links:
    """Where the annotations of an alert lead (no runbook: to a page of that Prometheus)."""

    grafana: Address
    runbook: Address | None


@dataclass(frozen=True)
class Slo:
    """Service level objectives, and what follows from them."""

    context_buckets: tuple[ContextBucket, ...]
    dynamic_target: DynamicTarget
    cold_start: ColdStart
    boundaries: Boundaries
    objectives: Objectives
    burn_windows: tuple[BurnWindow, ...]
    alerts: Thresholds
    links: Links
    limits: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        *head, last = self.context_buckets
        names = [bucket.name for bucket in self.context_buckets]
        limits = tuple(bucket.limit for bucket in head if bucket.limit is not None)
        if len(limits) < len(head) or last.limit is not None:
            raise FieldError(
                "context_buckets",
                f"the limits of context_buckets are {[b.limit for b in self.context_buckets]}; "
                "accepted is a number for all but the last, which has null",
            )
        if list(limits) != sorted(set(limits)):
            raise FieldError(
                "context_buckets",
                f"limits of context_buckets are {list(limits)}; accepted is what rises strictly",
            )
        if len(set(names)) < len(names) or UNKNOWN in names or len(names) > MOST_BUCKETS:
            raise FieldError(
                "context_buckets",
                f"context_buckets are {', '.join(names)}; accepted are 1 to {MOST_BUCKETS}, each "
                f"with a name of its own, none of them `{UNKNOWN}`",
            )
        if any(window.short >= window.long for window in self.burn_windows):
            raise FieldError(
                "burn_windows", "a burn window has short ≥ long; accepted is short < long"
            )
        object.__setattr__(self, "limits", limits)

    @property
    def buckets(self) -> tuple[ContextBucket, ...]:
        return self.context_buckets

    def bucket_index(self, prompt_tokens: int) -> int:
        """The index in `buckets` of a prompt of that many tokens."""
        return bisect_left(self.limits, prompt_tokens)

    def target(self, bucket: int, objective: str) -> float:
        """The target in seconds of an objective (`first_token`, `token_gap`)."""
        seconds: float = getattr(self.buckets[bucket], objective)
        return seconds

    @property
    def cold_after_seconds(self) -> float:
        """An engine that made no step for so long is cold again."""
        return self.cold_start.idle

    @property
    def exclude_cold_starts(self) -> bool:
        """Whether a request that was a cold start is left out of the verdicts."""
        return self.cold_start.exclude

    @cached_property
    def fine_seconds(self) -> tuple[float, ...]:
        """Boundaries where latencies are judged: every target is one."""
        targets = {t for b in self.buckets for t in (b.first_token, b.token_gap)}
        return tuple(sorted({*self.boundaries.fine_seconds, *targets}))

    @cached_property
    def step_seconds(self) -> tuple[float, ...]:
        """The coarse grid of times, and what the alerts judge on it."""
        judged = {self.alerts.event_loop_lag.above, self.alerts.gc_pause.longer_than}
        return tuple(sorted({*self.boundaries.step_seconds, *judged}))

    @cached_property
    def batch_sizes(self) -> tuple[float, ...]:
        return self.boundaries.batch_sizes

    @cached_property
    def context_tokens(self) -> tuple[float, ...]:
        return tuple(sorted({*self.boundaries.context_tokens, *self.limits}))

    @cached_property
    def cold_start_seconds(self) -> tuple[float, ...]:
        targets = {bucket.cold_start for bucket in self.buckets}
        return tuple(sorted({*self.boundaries.cold_start_seconds, *targets}))

    @cached_property
    def kv_bytes(self) -> tuple[float, ...]:
        return self.boundaries.kv_bytes

    @cached_property
    def residual_ratios(self) -> tuple[float, ...]:
        """Of actual over expected prefill time."""
        return tuple(sorted({*self.boundaries.residual_ratios, self.alerts.slow_for_length.above}))


def load(path: Path | None) -> Slo:
    """The SLO of a file (None: the default). Raises SloError."""
    default = read(Slo, DEFAULT)
    return default if path is None else read(Slo, path, default)


def _load_or_default() -> tuple[Slo, str]:
    try:
        return load(slo_file()), ""
    except SloError as error:
        return load(None), str(error)


SLO, PROBLEM = _load_or_default()
"""What this process goes by; why it is not what LLMOBS_SLO_FILE says, if so."""
BUCKET_NAMES = tuple(bucket.name for bucket in SLO.buckets)
BUCKET_LIMITS = [[bucket.name, bucket.limit] for bucket in SLO.buckets]
STEP_SECONDS = list(SLO.step_seconds)
"""These stand in the header of every ring: a reader with others must not read on."""
