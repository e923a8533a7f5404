"""Requests, put together from what the front ends and the engines recorded."""

import random
import time
from itertools import pairwise
from typing import Any

from llmobs import schema
from llmobs.agent.finished import Finished, FinishedRequests
from llmobs.agent.request import (
    Admission,
    Request,
    TraceContext,
    cold_start,
    first_token,
    first_token_phases_of,
    phases_of,
    predicted_prefill,
)
from llmobs.agent.spans import operation
from llmobs.agent.steps import SECOND, EngineView, Sequence
from llmobs.agent.store import Histogram, Store
from llmobs.agent.traces import Traces
from llmobs.metrics import HAND_OVER, OBJECTIVES, PHASES
from llmobs.schema import Flag, Kind, Outcome
from llmobs.slo import BUCKET_NAMES, SLO, UNKNOWN

REQUESTS_KEPT = 20_000
PATIENCE_NS = 5_000_000_000
"""How long the end of a request waits for the engine's last word on it."""
ORPHANS_NS = 60_000_000_000
"""How long a sequence that no front end spoke of is kept after its end."""
ORPHANS_KEPT = 5000

U64 = 0xFFFFFFFFFFFFFFFF


def _join(high: int, low: int) -> int:
    """A trace id from its two signed halves."""
    return (high & U64) << 64 | (low & U64)


class RequestView:
    """Follows all front ends and engines of one server."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.requests: dict[tuple[int, int], Request] = {}
        self.by_key: dict[int, tuple[int, int]] = {}
        self.orphans: dict[int, tuple[EngineView, Sequence]] = {}
        self.ending: dict[tuple[int, int], Request] = {}
        self.finished = FinishedRequests(REQUESTS_KEPT)
        self.incomplete = 0
        self.ends_seen: dict[int, int] = {}
        self.judged: dict[tuple[int, int, int], int] = {}
        """By front end, model and bucket: the ends that were seen, or are known to be lost."""
        self._engines_lost_until = 0
        self._children: dict[tuple[str, str], tuple[Histogram, list[Histogram]]] = {}
        self._handlers = {
            Kind.ARRIVE: self._arrive,
            Kind.ADMIT: self._admit,
            Kind.FIRST: self._first,
            Kind.SEQUENCE_END: self._sequence_end,
            Kind.BEAMS: self._beams,
            Kind.CONTEXT: self._context,
            Kind.TRACE_STATE: self._trace_state,
            Kind.END: self._end,
        }
        self.models: dict[int, list[str]] = {}
        self.default_engine = "0"
        self.resources: dict[int, dict[str, str]] = {}
        self.operations: dict[str, str] = {}
        """OpenTelemetry's name for what a model's first request asked for."""
        self.traces: Traces | None = None
        self.several_engines = False
        """Then whose a first token was is known only when its engine spoke of the sequence."""

    # Records of front ends; `ring` tells them apart

    def feed(self, ring: int, record: tuple[Any, ...]) -> None:
        """Take one record of a front end."""
        handler = self._handlers.get(record[1])
        if handler is not None:
            _, _, x, y, z, columns, time_, _ = record
            handler((ring, z), x, y, columns, time_)

    def gap(self, ring: int) -> None:
        """Records of a front end were lost: what was open there cannot be told whole any more."""
        for identity, request in self.requests.items():
            if identity[0] == ring:
                request.complete = False

    def engine_gap(self, now: int) -> None:
        """Records of an engine were lost, all of them written before `now`: a sequence that it
        never spoke of may have been among them."""
        self._engines_lost_until = now

    def missed_ends(self, ring: int, ended: int) -> None:
        """`ended` requests ended at this front end, by its own count, and all its records are read:
        those whose end was lost span a gap."""
        missed = ended - self.ends_seen.get(ring, 0)
        if missed > 0:
            self.ends_seen[ring] = ended
            self.incomplete += missed
            # They are among the open ones that were there at the gap, and nothing tells which.
            for identity in [i for i, r in self.requests.items() if i[0] == ring]:
                request = self.requests[identity]
                if not request.complete and identity not in self.ending:
                    self._forget(identity, request)

    def missed_verdicts(self, ring: int, model: int, bucket: int, ended: int) -> None:
        """`ended` requests of one length ended at this front end, by its own count: those whose end
        was lost are excluded from the verdicts."""
        missed = ended - self.judged.get((ring, model, bucket), 0)
        if missed > 0:
            self.judged[ring, model, bucket] = ended
            self._exclude(self.model(ring, model), bucket, missed)

    def _exclude(self, model: str, bucket: int, requests: int = 1) -> None:
        """No verdict on requests that span a gap; of those of unknown length nobody wants one."""
        if bucket < schema.BUCKETS:
            for objective in OBJECTIVES:
                labels = (model, BUCKET_NAMES[bucket], objective, "excluded")
                self.store.add("llmobs_slo_requests_total", *labels, amount=requests)

    def _arrive(self, identity: tuple[int, int], x: int, y: int, columns: Any, time_: int) -> None:
        request = self.requests[identity] = Request(time_, x, wall_at=time_, wall=columns[3])
        high, low, span = columns[:3]
        if y & 256:
            sampled = bool(y & 1)
            request.trace = TraceContext(
                _join(high, low), span & U64, sampled=sampled, remote_sampled=sampled
            )

    def _context(self, identity: tuple[int, int], x: int, y: int, columns: Any, time_: int) -> None:
        request = self.requests.get(identity)
        if request is not None:
            high, low, span = columns[:3]
            request.trace.trace, request.trace.span = _join(high, low), span & U64

    def _trace_state(
        self, identity: tuple[int, int], x: int, y: int, columns: Any, time_: int
    ) -> None:
        request = self.requests.get(identity)
        if request is not None:
            text = b"".join((column & U64).to_bytes(8, "little") for column in columns)
            request.trace.state += text[:x]

    def _admit(self, identity: tuple[int, int], x: int, y: int, columns: Any, time_: int) -> None:
        key, prompt, max_tokens, index, wall, high, low, span, flags = columns
        request = self.requests.get(identity)
        if request is None:
            if x & Flag.HTTP:
                request = Request(time_, complete=False)
            else:
                # Without HTTP there is no record of the arrival; END has it.
                request = Request(time_, schema.Route.LIBRARY, complete=not index or bool(wall))
            self.requests[identity] = request
        if request.cell < 0:
            request.cell = y
        if wall:
            request.wall = wall
        if flags & 256 and not request.admissions:
            # A server span inside of the edge: it is the parent, itself the caller's child.
            remote = request.trace
            request.trace = TraceContext(
                _join(high, low),
                span & U64,
                sampled=bool(flags & 1),
                remote_sampled=remote.remote_sampled,
                state=remote.state,
                local=True,
            )
        admission = Admission(key, time_, x, prompt, max_tokens)
        request.admissions[key] = admission
        self.by_key[key] = identity
        if key in self.orphans:
            admission.engine, admission.sequence = self.orphans.pop(key)

    def _first(self, identity: tuple[int, int], x: int, y: int, columns: Any, time_: int) -> None:
        request = self.requests.get(identity)
        if request is None or not request.complete or request.cell < 0:
            return
        request.first_chunk = time_
        if not self.several_engines or any(a.engine for a in request.admissions.values()):
            self._observe_first(identity[0], request, time_)

    def _sequence_end(
        self, identity: tuple[int, int], x: int, y: int, columns: Any, time_: int
    ) -> None:
        request = self.requests.get(identity)
        admission = request.admissions.get(columns[0]) if request is not None else None
        if admission is not None:
            admission.tokens, admission.ended = columns[1], time_

    def _beams(self, identity: tuple[int, int], x: int, y: int, columns: Any, time_: int) -> None:
        request = self.requests.get(identity)
        if request is not None:
            numbers = [n for c in columns for n in (c & 0xFFFFFFFF, c >> 32 & 0xFFFFFFFF)]
            request.beams += numbers[:x]

    def _end(self, identity: tuple[int, int], x: int, y: int, columns: Any, time_: int) -> None:
        bucket, tokens, arrival, streamed, model = columns[:5]
        if not 0 <= bucket <= schema.BUCKETS:
            raise ValueError(f"no context bucket has the number {bucket}")
        outcome = Outcome(x)
        self.ends_seen[identity[0]] = self.ends_seen.get(identity[0], 0) + 1
        judged = identity[0], model, bucket
        self.judged[judged] = self.judged.get(judged, 0) + 1
        request = self.requests.get(identity)
        if request is None:
            self.incomplete += 1
            self._exclude(self.model(identity[0], model), bucket)
            return
        request.arrival, request.end, request.outcome = arrival, time_, outcome
        request.status, request.bucket, request.tokens = y, bucket, tokens
        request.streamed, request.model = bool(streamed), model
        request.wall_at = request.wall_at or arrival
        self.ending[identity] = request
        self._maybe_finish(identity, request)

    # The engine's side

    def sequence_changed(self, engine: EngineView, sequence: Sequence) -> None:
        """A sequence came to the engine, or the engine is done with it (`left` is set then)."""
        identity = self.by_key.get(sequence.key)
        if identity is None:
            if engine.front_end:
                self.orphans[sequence.key] = engine, sequence
            return
        request = self.requests[identity]
        admission = request.admissions[sequence.key]
        admission.engine, admission.sequence = engine, sequence
        if request.first_chunk and not request.first_observed:
            self._observe_first(identity[0], request, request.first_chunk)
        if sequence.left:
            self._maybe_finish(identity, request)

    def tidy(self, now: int, engines_alive: bool) -> None:
        """Give up waiting for what will not come any more."""
        for identity, request in list(self.ending.items()):
            if (
                now - request.end > PATIENCE_NS
                or not engines_alive
                or self._spans_a_gap(request)  # it will not be told whole, whatever comes
            ):
                self._finish(identity, request)
        for key, (engine, sequence) in list(self.orphans.items()):
            too_many = len(self.orphans) > ORPHANS_KEPT
            if too_many:  # its front end may yet speak of it: to that request this is a gap
                self.engine_gap(max(self._engines_lost_until, sequence.joined))
            if too_many or now - max(sequence.joined, sequence.left) > ORPHANS_NS:
                del self.orphans[key]
                engine.forget(sequence)

    def drop(self, ring: int) -> None:
        """A front end is dead and read to its end: what is open there has no end."""
        for identity in [i for i in self.requests if i[0] == ring and i not in self.ending]:
            self._forget(identity, self.requests[identity])

    def _forget(self, identity: tuple[int, int], request: Request) -> None:
        for key, admission in request.admissions.items():
            self.by_key.pop(key, None)
            if admission.engine is not None and admission.sequence is not None:
                admission.engine.forget(admission.sequence)
        self.requests.pop(identity, None)
        self.ending.pop(identity, None)

    def _maybe_finish(self, identity: tuple[int, int], request: Request) -> None:
        if not request.end:
            return
        if not request.complete or all(
            a.sequence and a.sequence.left for a in request.admissions.values()
        ):
            self._finish(identity, request)

    # The end of a request

    def model(self, ring: int, model: int) -> str:
        """The name of a model, as this front end numbers them."""
        models = self.models.get(ring, [])
        return models[model] if 0 <= model < len(models) else "other"

    def _observe_first(self, ring: int, request: Request, time_: int) -> None:
        """Book the time to the first token, and the length: both are known now."""
        request.first_observed = True
        bucket = BUCKET_NAMES[request.cell % schema.BUCKETS]
        model = self.model(ring, request.cell // schema.BUCKETS)
        engines = [a.engine.name for a in request.admissions.values() if a.engine is not None]
        engine = engines[0] if engines else self.default_engine
        child = self.store.histogram("decode_token_latency_seconds", model, engine, bucket, "first")
        seconds = (time_ - request.arrival) / SECOND
        child.observe(seconds)
        if seconds > SLO.buckets[request.cell % schema.BUCKETS].first_token:
            self._pin(request, child, seconds)
        self._observe_length(ring, request)

    def _pin(self, request: Request, child: Histogram, seconds: float) -> None:
        """Let an observation above its target lead to its trace at once: it will be kept."""
        if self.traces is not None and child.wants_exemplar(seconds):
            request.pinned = True
            request.trace.identify()
            child.set_exemplar(seconds, request.trace.trace, request.trace.span)

    def slow_gap(self, sequence: Sequence, child: Histogram, seconds: float) -> None:
        """The engine saw a gap above its target."""
        identity = self.by_key.get(sequence.key)
        request = self.requests.get(identity) if identity is not None else None
        if request is not None and request.complete:
            self._pin(request, child, seconds)

    def _observe_length(self, ring: int, request: Request) -> None:
        if not request.length_observed:
            request.length_observed = True
            model = self.model(ring, request.cell // schema.BUCKETS)
            prompt = sum(a.prompt for a in request.admissions.values())
            self.store.histogram("context_len_histogram", model).observe(prompt)

    def _finish(self, identity: tuple[int, int], request: Request) -> None:
        self._forget(identity, request)
        model = self.model(identity[0], request.model)
        bucket = BUCKET_NAMES[request.bucket] if request.bucket < schema.BUCKETS else UNKNOWN
        sequences = [a.sequence for a in request.admissions.values() if a.sequence is not None]
        if self._spans_a_gap(request):
            self.incomplete += 1
            self._exclude(model, request.bucket)
            return
        self._cut(request)
        seconds = (request.end - request.arrival) / SECOND
        whole, parts = self._durations(model, bucket)
        whole.observe(seconds)
        phases = [value / SECOND for value in phases_of(request)]
        for child, value in zip(parts, phases, strict=False):
            child.observe(value)
        prompt = sum(a.prompt for a in request.admissions.values())
        if request.admissions:
            self.store.histogram("output_tokens", model).observe(request.tokens)
            self.operations.setdefault(model, operation(request.route))
            self._observe_length(identity[0], request)
        for admission in request.admissions.values():
            sequence, engine = admission.sequence, admission.engine
            if sequence is not None and engine is not None and sequence.joined:
                waited = (sequence.joined - admission.time) / SECOND
                self.store.add(
                    "llmobs_queue_reason_seconds_total",
                    *(engine.models[0], engine.name, HAND_OVER),
                    amount=max(waited, 0.0),
                )
        first = first_token(request)
        if first and not request.first_observed and request.cell >= 0:
            self._observe_first(identity[0], request, first)
        gaps = [s.longest_gap for s in sequences if s.first]
        gap = max(gaps) / SECOND if gaps else None
        ttft = (first - request.arrival) / SECOND if first else None
        if bucket != UNKNOWN:
            self._verdict(request, model, request.bucket, ttft, gap)
        preemptions = sum(len(s.preemptions) for s in sequences)
        kv_bytes = _kv_bytes(request)
        if kv_bytes is not None and bucket != UNKNOWN:
            self.store.histogram("llmobs_request_kv_bytes", model, bucket).observe(kv_bytes)
        self._keep(identity[0], request, model, preemptions)
        self.finished.append(
            Finished(
                ended=time.time() - (time.monotonic_ns() - request.end) / SECOND,
                model=model,
                context_bucket=bucket,
                outcome=request.outcome.name.lower(),
                status=request.status,
                prompt_tokens=prompt,
                output_tokens=request.tokens,
                seconds=seconds,
                first_token=ttft,
                longest_gap=gap,
                preemptions=preemptions,
                phases=tuple(phases),
                first_token_phases=tuple(
                    [value / SECOND for value in first_token_phases_of(request, first)]
                ),
                predicted_prefill=predicted_prefill(request),
                cold_start=cold_start(request),
                kv_bytes=kv_bytes,
            )
        )

    def _spans_a_gap(self, request: Request) -> bool:
        """Whether records about it are missing."""
        return not request.complete or any(
            not a.sequence.complete
            if a.sequence is not None
            else a.time <= self._engines_lost_until
            for a in request.admissions.values()
        )

    def _durations(self, model: str, bucket: str) -> tuple[Histogram, list[Histogram]]:
        """Where the times of such requests go: the whole, and, if the length is known, each of
        PHASES."""
        children = self._children.get((model, bucket))
        if children is None:
            phases = PHASES if bucket != UNKNOWN else ()
            children = self._children[model, bucket] = (
                self.store.histogram("llmobs_request_seconds", model, bucket),
                [
                    self.store.histogram("llmobs_request_phase_seconds", model, phase, bucket)
                    for phase in phases
                ],
            )
        return children

    def _keep(self, ring: int, request: Request, model: str, preemptions: int) -> None:
        """Offer the request to the traces, with the reasons to keep it, if there are any."""
        if self.traces is None:
            return
        reasons = [*request.missed]
        if request.outcome in (Outcome.ABORT, Outcome.ERROR, Outcome.REJECTED):
            reasons.append(request.outcome.name.lower())
        if preemptions:
            reasons.append("preempted")
        if request.trace.remote_sampled:
            reasons.append("caller")
        if request.pinned:
            reasons.append("exemplar")
        if not reasons and random.random() < self.traces.share:
            reasons.append("sample")
        if reasons:
            request.trace.identify()
            self.traces.offer(request, model, self.resources.get(ring, {}), tuple(reasons))
            seconds = (request.end - request.arrival) / SECOND
            bucket = BUCKET_NAMES[request.bucket] if request.bucket < schema.BUCKETS else UNKNOWN
            child = self.store.histogram("llmobs_request_seconds", model, bucket)
            if child.wants_exemplar(seconds):
                child.set_exemplar(seconds, request.trace.trace, request.trace.span)

    def _cut(self, request: Request) -> None:
        """Book the tokens of the sequences whose end the front end decided."""
        beams = []
        for admission in request.admissions.values():
            sequence, engine = admission.sequence, admission.engine
            if sequence is None or engine is None:
                continue
            if admission.flags & Flag.BEAM:
                beams.append(sequence)
            elif admission.flags & Flag.CUT and sequence.first:
                engine.cut(sequence, max(admission.tokens, 1))
        if beams and request.beams:
            # Each round of beam search is one token of every beam; the rounds are told apart by
            # their ends.
            rounds = sorted({s.first for s in beams if s.first})
            engine = next(a.engine for a in request.admissions.values() if a.engine is not None)
            gaps = engine.gaps(request.cell)
            differences = [b - a for a, b in pairwise(rounds)]
            for length in request.beams:
                own = differences[: max(length - 1, 0)]
                for gap in own:
                    gaps.observe(gap / SECOND)
                if length - 1 > len(own):
                    gaps.observe(0.0, length - 1 - len(own))
            for sequence in beams:
                sequence.longest_gap = max(differences, default=0)

    def _verdict(
        self, request: Request, model: str, bucket: int, ttft: float | None, gap: float | None
    ) -> None:
        target = SLO.buckets[bucket]
        name = target.name
        pooling = any(a.flags & Flag.POOLING for a in request.admissions.values())
        refused = request.outcome is Outcome.REJECTED and 400 <= request.status < 500
        if pooling or refused or (SLO.exclude_cold_starts and cold_start(request)):
            first = "excluded"
        else:
            first = "good" if ttft is not None and ttft <= target.first_token else "bad"
        pauses = "excluded"
        if gap is not None:
            pauses = "good" if gap <= target.token_gap else "bad"
        verdicts = {"first_token": first, "token_gap": pauses}
        request.missed = tuple(name for name, verdict in verdicts.items() if verdict == "bad")
        self.store.add("llmobs_slo_requests_total", model, name, "first_token", first)
        self.store.add("llmobs_slo_requests_total", model, name, "token_gap", pauses)


def _kv_bytes(request: Request) -> float | None:
    """The most that its sequences held of the KV cache; None where it never had any, or where that
    is not known."""
    held = [
        a.sequence.blocks * a.engine.block_bytes
        for a in request.admissions.values()
        if a.sequence is not None and a.engine is not None
    ]
    return sum(held) or None
