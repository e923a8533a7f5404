"""The spans of one request, as plain data: names, times, attributes, events (docs/traces.md)."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from llmobs.agent.request import (
    Request,
    Segment,
    chosen_sequence,
    cold_start,
    first_token,
    predicted_prefill,
    segments_of,
)
from llmobs.agent.steps import EVENTS_KEPT, SECOND, EngineView, Sequence
from llmobs.schema import BatchKind, Outcome, Route, Wait
from llmobs.slo import BUCKET_NAMES, SLO, UNKNOWN

SLOWEST_STEPS = 1
SLOWEST_STEPS_OF_MISSED = 3
"""How many of the slowest decode steps are spans of their own: an ordinary request stays within 12
spans, one whose longest gap missed its target tells more."""

OPERATIONS = {
    Route.CHAT: "chat",
    Route.RESPONSES: "chat",
    Route.MESSAGES: "chat",
    Route.COMPLETION: "text_completion",
    Route.POOLING: "embeddings",
}
"""gen_ai.operation.name, of OpenTelemetry's semantic conventions for generative AI."""


def operation(route: int) -> str:
    """What OpenTelemetry calls what came by this route."""
    return OPERATIONS.get(Route(route), "text_completion")


STALLS_KEPT = 4
"""The longest of a stretch are events: others of its events say something, too."""

Attributes = dict[str, str | int | float | bool | tuple[str, ...]]
Event = tuple[str, int, Attributes]


@dataclass(slots=True)
class Span:
    """Times in nanoseconds since the epoch."""

    name: str
    start: int
    end: int
    attributes: Attributes = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    children: list["Span"] = field(default_factory=list)
    error: str = ""

    def __len__(self) -> int:
        """How many spans there are, this one and all below."""
        return 1 + sum(map(len, self.children))


def span_tree(request: Request, model: str, reasons: tuple[str, ...]) -> Span:
    """The tree of a request that ended; `reasons` say why it was kept."""
    return _Tree(request, model, reasons).root()


class _Tree:
    def __init__(self, request: Request, model: str, reasons: tuple[str, ...]) -> None:
        self.request = request
        self.model = model
        self.reasons = reasons
        self.shift = request.wall - request.wall_at
        self.segments: list[Segment] = []
        chosen = chosen_sequence(request)
        self.start: Sequence | None = chosen[1] if chosen else None
        self.sequence: Sequence | None = chosen[2] if chosen else None
        engines = [a.engine for a in request.admissions.values() if a.engine is not None]
        self.engine: EngineView | None = engines[0] if engines else None
        for admission in request.admissions.values():
            if admission.sequence is self.sequence and admission.engine is not None:
                self.engine = admission.engine

    def wall(self, time: int) -> int:
        return time + self.shift

    def span(self, name: str, start: int, end: int, **attributes: Any) -> Span:
        chosen = {k.replace("__", "."): v for k, v in attributes.items() if v is not None}
        return Span(name, self.wall(start), self.wall(end), chosen)

    def root(self) -> Span:
        request = self.request
        root = Span("llm.request", self.wall(request.arrival), self.wall(request.end))
        root.attributes = self._attributes()
        if request.outcome is Outcome.ERROR or (
            request.outcome is Outcome.REJECTED and request.status >= 500
        ):
            root.error = f"{request.outcome.name.lower()} {request.status or ''}".strip()
        self.segments = segments_of(request)
        root.children = [self._segment(segment) for segment in self.segments]
        return root

    def _attributes(self) -> Attributes:
        request = self.request
        known = request.bucket < len(BUCKET_NAMES)
        first = first_token(request)
        sequences = [a.sequence for a in request.admissions.values() if a.sequence is not None]
        gaps = [s.longest_gap / SECOND for s in sequences if s.first]
        outcome = request.outcome.name.lower()
        attributes: Attributes = {
            "gen_ai.operation.name": operation(request.route),
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": self.model,
            "gen_ai.response.model": self.model,
            "llm.context_bucket": BUCKET_NAMES[request.bucket] if known else UNKNOWN,
            "llm.outcome": outcome,
            "llm.kept_because": self.reasons,
        }
        if request.admissions:
            attributes["gen_ai.usage.input_tokens"] = sum(
                a.prompt for a in request.admissions.values()
            )
            attributes["gen_ai.usage.output_tokens"] = request.tokens
            attributes["llm.sequences"] = len(request.admissions)
            limits = [a.max_tokens for a in request.admissions.values() if a.max_tokens]
            if limits:
                attributes["gen_ai.request.max_tokens"] = max(limits)
            if request.outcome in (Outcome.STOP, Outcome.LENGTH):
                attributes["gen_ai.response.finish_reasons"] = (outcome,)
        if request.status:
            attributes["http.response.status_code"] = request.status
        if known:
            target = SLO.buckets[request.bucket]
            attributes["llm.first_token.target"] = target.first_token
            attributes["llm.token_gap.target"] = target.token_gap
            attributes["llm.missed"] = request.missed
        if first:
            ttft = (first - request.arrival) / SECOND
            attributes["gen_ai.server.time_to_first_token"] = ttft
            engine_first = min((s.first for s in sequences if s.first), default=0)
            if engine_first:
                attributes["llm.first_token.engine"] = (engine_first - request.arrival) / SECOND
        if gaps:
            attributes["llm.token_gap.longest"] = max(gaps)
        predicted = predicted_prefill(request)
        if predicted is not None:
            attributes["llm.latency.predicted"] = predicted
        if cold_start(request):
            attributes["llm.cold_start"] = True
        if request.trace.parent and not request.trace.sampled:
            # Whoever owns the parent did not export it: this trace has no beginning elsewhere.
            attributes["llm.parent_sampled"] = False
        return attributes

    # One span per segment

    def _segment(self, segment: Segment) -> Span:
        make = getattr(self, f"_{segment.phase}")
        span: Span = make(segment)
        return span

    def _preprocess(self, segment: Segment) -> Span:
        return self.span("llm.preprocess", segment.start, segment.end)

    def _deliver(self, segment: Segment) -> Span:
        return self.span("llm.deliver", segment.start, segment.end)

    def _queue(self, segment: Segment) -> Span:
        span = self.span("llm.queue", segment.start, segment.end)
        span.events = self._kv(segment)
        if self.start is not None and self.start.joined:
            span.attributes["llm.queue.ahead"] = self.start.ahead
            span.attributes["llm.queue.ahead_tokens"] = self.start.ahead_tokens
            span.attributes["llm.queue.reason"] = self._queue_reason(segment)
        return span

    def _queue_reason(self, segment: Segment) -> str:
        """What it waited for longest."""
        assert self.start is not None
        waits: Counter[str] = Counter({"hand_over": self.start.joined - segment.start})
        if self.engine is not None:
            since = self.start.joined
            steps = self.engine.steps_between(since, segment.end)
            if len(steps):
                # What a step left waiting it left for its own reason until the next began.
                lengths = np.diff(steps["end"], prepend=since)
                for reason in np.unique(steps["wait"]).tolist():
                    waits[Wait(reason).name.lower()] += int(lengths[steps["wait"] == reason].sum())
                since = int(steps["end"][-1])
            waits["engine_busy"] += segment.end - since
        return max(waits, key=lambda reason: waits[reason])

    def _prefill(self, segment: Segment) -> Span:
        span = self.span("llm.prefill", segment.start, segment.end)
        sequence = self.start
        if sequence is None:
            return span
        span.attributes["llm.tokens.cached"] = sequence.cached
        span.attributes["llm.tokens.computed"] = sequence.computed
        stalls = self._stalls(span, segment, beside=False)
        span.events = _in_order(self._kv(segment) + stalls, self._chunks(sequence, segment))
        if self.engine is not None and sequence.first and segment.end >= sequence.first:
            steps = self.engine.steps_between(sequence.first - 1, sequence.first)
            span.children = [s for step in steps[-1:] if (s := self._sampling(step, segment))]
        return span

    def _stalls(self, span: Span, segment: Segment, beside: bool) -> list[Event]:
        """Where the engine stood still in this stretch, also for what it computed `beside`."""
        if self.engine is None:
            return []
        found = self.engine.stalls_between(segment.start, segment.end)
        if not beside:  # a prompt's own length is no stall of it
            found = [stall for stall in found if stall.cause in ("frozen", "gc", "unknown")]
        if found:
            lengths = sum(stall.end - stall.start for stall in found)
            span.attributes["llm.stall.seconds"] = lengths / SECOND
        longest = sorted(found, key=lambda stall: stall.start - stall.end)[:STALLS_KEPT]
        events: list[Event] = []
        for stall in longest:
            about: Attributes = {
                "llm.stall.seconds": (stall.end - stall.start) / SECOND,
                "llm.stall.cause": stall.cause,
            }
            if stall.process:
                about["llm.stall.process"] = stall.process
            events.append(("stall", self.wall(stall.start), about))
        return events

    def _chunks(self, sequence: Sequence, segment: Segment) -> list[Event]:
        events: list[Event] = []
        for time, tokens, before in sequence.chunks:
            if segment.start <= time < segment.end:
                about: Attributes = {"llm.tokens.computed": tokens, "llm.tokens.before": before}
                events.append(("llm.prefill.chunk", self.wall(time), about))
        return events[:EVENTS_KEPT]

    def _kv(self, segment: Segment) -> list[Event]:
        """What it took of the KV cache in this stretch, and where there was nothing for it."""
        sequence = self.sequence or self.start
        if sequence is None:
            return []
        found: list[tuple[str, int, Attributes]] = []
        for taken in sequence.taken:
            if self._holder(taken.time, taken.closing) is segment:
                about: Attributes = {
                    "llm.kv.blocks": taken.blocks,
                    "llm.kv.blocks_left": taken.left,
                }
                found.append(("kv.allocate", taken.time, about))
        for starved in sequence.starved:
            if self._holder(starved.time, False) is segment:
                about = {"llm.kv.attempts": starved.attempts, "llm.kv.blocks_left": starved.left}
                found.append(("kv.starved", starved.time, about))
        for loss in sequence.preemptions:
            if loss.starved and self._holder(loss.start, True) is segment:
                about = {"llm.kv.blocks_left": loss.left, "llm.kv.blocks_lost": loss.blocks}
                found.append(("kv.starved", loss.start, about))
        found.sort(key=lambda event: event[1])
        return [
            (name, self.wall(min(time, segment.end)), about)
            for name, time, about in found[-EVENTS_KEPT // 2 :]
        ]

    def _holder(self, time: int, closing: bool) -> Segment | None:
        """The stretch of the engine's that a moment belongs to; one that closes something belongs
        to what it closes, though it be told a little later."""
        holder = None
        for segment in self.segments:
            if segment.phase in ("queue", "prefill", "preempted", "decode") and (
                segment.start < time if closing else segment.start <= time
            ):
                holder = segment
        return holder

    def _preempted(self, segment: Segment) -> Span:
        span = self.span("llm.preempted", segment.start, segment.end)
        loss = segment.loss
        if loss is None:
            return span
        span.attributes["llm.tokens.lost"] = loss.lost_tokens
        span.attributes["llm.kv.usage"] = loss.usage / 1e6
        if loss.blocks:
            span.attributes["llm.kv.blocks_lost"] = loss.blocks
        span.events = self._kv(segment)
        if loss.resumed and segment.start <= loss.resumed < segment.end:
            recompute = self.span("llm.prefill", loss.resumed, segment.end, llm__recompute=True)
            if self.sequence is not None:
                recompute.events = self._chunks(
                    self.sequence, Segment("preempted", loss.resumed, segment.end)
                )
            span.children = [recompute]
        return span

    def _decode(self, segment: Segment) -> Span:
        span = self.span("llm.decode", segment.start, segment.end)
        span.events = _in_order(self._kv(segment), self._stalls(span, segment, beside=True))
        if self.engine is None or self.sequence is None:
            return span
        steps = self.engine.steps_between(segment.start, segment.end)
        if not len(steps):
            return span
        gaps = np.diff(steps["end"], prepend=segment.start)
        span.attributes |= {
            "llm.steps": len(steps),
            "llm.token_gap.longest": float(gaps.max()) / SECOND,
            "llm.schedule.seconds": float((steps["scheduled"] - steps["start"]).sum()) / SECOND,
            "llm.forward.seconds": float(steps["forward"].sum()) / SECOND,
            "llm.sampling.seconds": float(steps["sampling"].sum()) / SECOND,
        }
        count = SLOWEST_STEPS_OF_MISSED if "token_gap" in self.reasons else SLOWEST_STEPS
        slowest = sorted(np.argsort(gaps)[-count:].tolist())
        span.children = [self._step(steps[index], gaps[index], segment) for index in slowest]
        return span

    def _step(self, step: npt.NDArray[np.void], gap: Any, segment: Segment) -> Span:
        start, end = max(int(step["start"]), segment.start), min(int(step["end"]), segment.end)
        span = self.span(
            "llm.decode.step",
            min(start, end),
            end,
            llm__batch__size=int(step["sequences"]),
            llm__batch__kind=BatchKind(int(step["kind"])).name.lower(),
            llm__batch__tokens=int(step["tokens"]),
            llm__batch__longest_context=int(step["longest"]),
            llm__waiting=int(step["waiting"]),
            llm__token_gap=float(gap) / SECOND,
        )
        if step["forward"]:
            begin = int(step["forward_start"])
            span.children.append(
                self._call("llm.forward", begin, begin + int(step["forward"]), step["gpu_forward"])
            )
        sampling = self._sampling(step, segment)
        if sampling is not None:
            span.children.append(sampling)
        return span

    def _sampling(self, step: Any, segment: Segment) -> Span | None:
        if not step["sampling"]:
            return None
        begin = int(step["sampling_start"])
        end = min(begin + int(step["sampling"]), segment.end)
        if begin >= end:
            return None
        return self._call("llm.sampling", begin, end, step["gpu_sampling"])

    def _call(self, name: str, begin: int, end: int, gpu: Any) -> Span:
        """A call of the worker's. The span is the host's time; the GPU's is not known of each."""
        span = self.span(name, begin, end, llm__clock="host")
        span.attributes["llm.host_seconds"] = (end - begin) / SECOND
        if gpu:
            span.attributes["llm.gpu_seconds"] = int(gpu) / SECOND
        return span


def _in_order(first: list[Event], then: list[Event]) -> list[Event]:
    """As many as a span may have; the first ones are more important."""
    events = [*first, *then][:EVENTS_KEPT]
    return sorted(events, key=lambda event: event[1])
