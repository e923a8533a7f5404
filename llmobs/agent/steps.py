"""What the engine's records say: steps, and the life of each sequence in them."""

import time as clock
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from llmobs import schema
from llmobs.agent import stalls
from llmobs.agent.coldstarts import ColdStarts
from llmobs.agent.latency import LatencyModel
from llmobs.agent.stalls import Pauses, Stall, Suspect
from llmobs.agent.store import Histogram, Store
from llmobs.schema import BatchKind, Entry, Flag, Kind, SequenceState
from llmobs.slo import BUCKET_NAMES, SLO

now = clock.monotonic_ns
WAITING, PREFILL, DECODE, PREEMPTED = SequenceState
SECOND = 1e9
SETTLE_NS = 500_000_000
EVENTS_KEPT = 16
PREEMPTIONS_KEPT = 10_000
STEPS_KEPT = 1 << 17
"""Eleven minutes at 200 steps a second. Sequences that decode for longer are folded."""
UNTIMED_KEPT = 512
"""Steps that wait for the GPU's time of them, which comes some steps later or not at all."""

STEP_COLUMNS = np.dtype(
    [
        *[(name, "<i8") for name in ("start", "scheduled", "update", "end")],
        *[(name, "<i8") for name in ("forward_start", "forward", "sampling_start", "sampling")],
        *[(name, "<i8") for name in ("gpu_forward", "gpu_sampling")],
        *[(name, "<i4") for name in ("sequences", "tokens", "out", "waiting", "longest")],
        ("kind", "u1"),
        ("wait", "u1"),
    ]
)


@dataclass
class Preemption:
    """From losing the blocks until what was lost is computed again (0: not yet). `resumed` is when
    the recompute began, `usage` the share of the KV cache in use at the start, in millionths;
    `blocks` were lost, `left` were free just before. `starved`: others wanted the blocks."""

    start: int
    end: int = 0
    resumed: int = 0
    lost_tokens: int = 0
    usage: int = 0
    blocks: int = 0
    left: int = 0
    starved: bool = True


@dataclass(slots=True)
class Taken:
    """KV-cache blocks that a sequence took until `time`, all in all, and those left to all then.
    `closing`: told at the end of what it was doing, not at its start."""

    time: int
    blocks: int
    left: int
    closing: bool


@dataclass(slots=True)
class Starved:
    """There was no block for a sequence that was first in line; so many attempts failed."""

    time: int
    left: int
    attempts: int = 1


@dataclass(slots=True, eq=False)
class Sequence:
    """One request of the engine. Times in nanoseconds (monotonic), 0 where it has not happened.

    `runs` are the stretches of steps (indices into the log, both ends included) in which it yielded
    a token a step, but for those in `skipped`; `odd` maps a step to the tokens it yielded there
    where that is not one.
    """

    number: int
    key: int
    cell: int
    prompt: int
    flags: int
    complete: bool
    joined: int = 0
    started: int = 0
    first: int = 0
    last: int = 0
    left: int = 0
    state: SequenceState = WAITING
    cached: int = 0
    cold: bool = False
    """Its prefill is a cold start of its context bucket."""
    predicted: float = 0.0
    """What the fit said at its start of its prefill, in seconds; 0: nothing."""
    ahead: int = 0
    ahead_tokens: int = 0
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    """Time, tokens and tokens computed before, of the first EVENTS_KEPT parts of its prefills."""
    to_recompute: int = 0
    runs: list[list[int]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    odd: dict[int, int] = field(default_factory=dict)
    preemptions: list[Preemption] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    starved: list[Starved] = field(default_factory=list)
    blocks: int = 0
    """The most KV-cache blocks that it was seen to hold."""
    places: int = 0
    """How long its block tables were at the last look."""
    longest_gap: int = 0
    """Of what was folded away, and after the end of everything; nanoseconds."""
    folded: int = 0
    """Tokens that it yielded in steps that were folded away."""
    booked: int = 0
    """Tokens whose gaps went into the histogram when they were folded away (cut sequences only)."""
    emitted: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
    """When it yielded tokens and how many each time, as of its end (cut sequences only): its client
    may take so long to read that the log has gone round before the front end has the last word."""

    @property
    def counted(self) -> bool:
        """Whether its gaps go into the histogram step by step."""
        return self.complete and not self.flags & Flag.CUT

    @property
    def computed(self) -> int:
        """Prompt tokens that its prefill computes."""
        return max(self.prompt - self.cached, 0)

    @property
    def prefill(self) -> float:
        """Seconds from first scheduled to the first token, without what preemptions took."""
        lost = 0
        for loss in self.preemptions:
            lost += max(min(loss.end or self.first, self.first) - loss.start, 0)
        return (self.first - self.started - lost) / SECOND


class EngineView:
    """Follows one engine through its records.

    The decoding sequences fall into those that yielded a token in the last step, known only by
    their number per cell, and the few in `behind`, by the time of their last token. So the usual
    step costs one histogram update per cell, whatever the batch.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        changed: Callable[["EngineView", Sequence], None],
        slow: Callable[[Sequence, Histogram, float], None] | None = None,
    ) -> None:
        self.name = name
        self.store = store
        self._changed = changed
        self._slow = slow
        self.models: list[str] = []
        self.front_end = True
        """Whether some front end will speak of the sequences."""
        self.block_bytes = 0.0
        """Of a KV-cache block, in one worker; 0 where that is not known."""
        self.sequences: dict[int, Sequence] = {}
        self.cold_starts = ColdStarts()
        self.latency = LatencyModel()
        self.log: npt.NDArray[np.void] = np.zeros(STEPS_KEPT, STEP_COLUMNS)
        self._ends: npt.NDArray[np.int64] = self.log["end"]
        self.steps = 0
        self.longest = 0
        """The longest prompt among those that run; `longest_left` says to look for the next."""
        self.longest_left = False
        self.last_end = 0
        self.level: dict[int, int] = {}
        self.behind: dict[int, int] = {}
        self.pairs: list[int] = []
        self.skips: list[int] = []
        self.more: list[int] = []
        self.summed = False
        """Whether tokens of a step were told by their sum over many sequences."""
        self.preempted: deque[int] = deque(maxlen=PREEMPTIONS_KEPT)
        """When sequences were preempted, lately."""
        self.recomputing: dict[int, list[Sequence]] = {}
        self.resync = False
        self.snapshot: set[int] | None = None
        self.unmatched: deque[tuple[int, int, int]] = deque(maxlen=1024)
        self.forwards: deque[list[int]] = deque(maxlen=1024)
        self.host_only = False
        """Whether its worker is known to have no GPU: then it computes while the host waits."""
        self.untimed: dict[int, int] = {}
        """Steps by the beginning of their forward pass."""
        self.early: dict[int, tuple[int, int]] = {}
        """GPU times by the same, that came before the step's own record."""
        self.chunks: dict[int, list[int]] = {}
        """By step: the tokens of prompts in it, and of recomputes."""
        self.pauses = Pauses()
        self.suspects: deque[tuple[int, Suspect]] = deque(maxlen=stalls.KEPT)
        """Steps that took long, with their index, until all is there to say why."""
        self.stalls: deque[Stall] = deque(maxlen=stalls.KEPT)
        self.alive_wall = 0
        """When the engine core's process last showed that it runs; 0: never, or it is dead."""
        self._gaps: dict[int, Histogram] = {}
        self._stages: dict[tuple[str, int], Histogram] = {}
        self._sizes: dict[int, Histogram] = {}
        self._handlers: dict[int, Callable[..., None]] = {
            Kind.JOIN: self._join,
            Kind.CHUNK: self._chunk,
            Kind.PREEMPT: self._preempt,
            Kind.TOKENS: self._tokens,
            Kind.SKIP: self._skip,
            Kind.MORE: self._more,
            Kind.KV_STARVED: self._starved,
            Kind.STEP: self._step,
            Kind.LEAVE: self._leave,
            Kind.SNAPSHOT: self._snapshot,
            Kind.SNAPSHOT_ENTRY: self._snapshot_entry,
            Kind.FORWARD: self._forward,
            Kind.SAMPLE: self._sample,
            Kind.GPU: self._gpu,
        }

    # Histogram children, bound once

    def model(self, cell: int) -> str:
        index = cell // schema.BUCKETS
        return self.models[index] if index < len(self.models) else "other"

    def gaps(self, cell: int) -> Histogram:
        child = self._gaps.get(cell)
        if child is None:
            bucket = BUCKET_NAMES[cell % schema.BUCKETS]
            child = self._gaps[cell] = self.store.histogram(
                "decode_token_latency_seconds", self.model(cell), self.name, bucket, "next"
            )
        return child

    def stage(self, stage: str, kind: int) -> Histogram:
        child = self._stages.get((stage, kind))
        if child is None:
            labels = (self.models[0], self.name, stage, BatchKind(kind).name.lower())
            child = self._stages[stage, kind] = self.store.histogram("llmobs_step_seconds", *labels)
        return child

    def forward(self, clock: str, kind: int) -> Histogram:
        child = self._stages.get((clock, kind))
        if child is None:
            labels = (self.models[0], self.name, clock, BatchKind(kind).name.lower())
            child = self.store.histogram("llmobs_forward_seconds", *labels)
            self._stages[clock, kind] = child
        return child

    def sizes(self, kind: int) -> Histogram:
        child = self._sizes.get(kind)
        if child is None:
            labels = (self.models[0], self.name, BatchKind(kind).name.lower())
            child = self._sizes[kind] = self.store.histogram("batch_size_distribution", *labels)
        return child

    # Records

    def feed(self, record: tuple[Any, ...]) -> bool:
        """Take one record; False if it is none of an engine's or worker's."""
        handler = self._handlers.get(record[1])
        if handler is None:
            return False
        if self.resync and record[1] not in (Kind.SNAPSHOT, Kind.SNAPSHOT_ENTRY, Kind.LEAVE):
            return True
        _, _, x, y, z, columns, time, _ = record
        handler(x, y, z, columns, time)
        return True

    def gap(self) -> None:
        """Records were lost: nothing is known any more until the next snapshot."""
        self.resync = True
        self.snapshot = None
        for sequence in self.sequences.values():
            sequence.complete = False
        self.level.clear()
        self.behind.clear()
        self.pairs.clear()
        self.skips.clear()
        self.more.clear()
        self.recomputing.clear()
        self.unmatched.clear()
        self.forwards.clear()
        self.cold_starts.unknown()
        self.chunks.clear()

    def forget(self, sequence: Sequence) -> None:
        """Its request is over. Where records were lost its end may be among them, and of those that
        wait no snapshot speaks."""
        if not sequence.complete and sequence.state is WAITING:
            self.sequences.pop(sequence.number, None)

    def _join(self, x: int, y: int, z: int, columns: Any, time: int) -> None:
        sequence = Sequence(z, columns[0], y, columns[1], x, True, joined=time)
        sequence.ahead, sequence.ahead_tokens = columns[2], columns[3]
        self.sequences[z] = sequence
        self._changed(self, sequence)

    def _unknown(self, number: int, key: int, cell: int) -> Sequence:
        """A sequence whose beginning was lost."""
        sequence = self.sequences[number] = Sequence(number, key, cell, 0, 0, False)
        return sequence

    def _chunk(self, x: int, y: int, z: int, columns: Any, time: int) -> None:
        tokens, before, step, key = columns[:4]
        sequence = self.sequences.get(z) or self._unknown(z, key, y)
        if len(sequence.chunks) < EVENTS_KEPT:
            sequence.chunks.append((time, tokens, before))
        self._take(sequence, time, columns[4:7], x != Entry.CONTINUED)
        self._stop_starving(sequence, columns[7])
        self.longest = max(self.longest, sequence.prompt)
        if x == Entry.RESUMED and sequence.preemptions:
            sequence.preemptions[-1].resumed = time
        if sequence.state is WAITING:
            sequence.started = time
            sequence.cached = before
            self._prefill_begins(sequence, time)
        elif x == Entry.RESUMED:
            sequence.to_recompute = max(sequence.to_recompute - before, 0)
        sequence.state = PREFILL
        recomputes = bool(sequence.preemptions) and not sequence.preemptions[-1].end
        self.chunks.setdefault(step & 0xFFFFFFFF, [0, 0])[recomputes] += tokens
        if recomputes and not sequence.first:
            # Preempted before its first token: whole again once this much is computed.
            sequence.to_recompute -= tokens
            if sequence.to_recompute <= 0:
                self.recomputing.setdefault(step & 0xFFFFFFFF, []).append(sequence)

    def _prefill_begins(self, sequence: Sequence, time: int) -> None:
        if sequence.complete and not sequence.flags & Flag.POOLING:
            idle = (time - self.last_end) / SECOND if self.last_end else 0.0
            sequence.cold = self.cold_starts.begins(sequence.cell % schema.BUCKETS, idle)
            sequence.predicted = self.latency.predict(sequence.computed)

    def _prefill_ends(self, sequence: Sequence) -> None:
        if not sequence.complete:
            return
        bucket = sequence.cell % schema.BUCKETS
        labels = self.model(sequence.cell), self.name, BUCKET_NAMES[bucket]
        seconds = sequence.prefill
        self.cold_starts.ends(bucket)
        if sequence.predicted:
            ratio = seconds / sequence.predicted
            self.store.histogram("llmobs_latency_residual_ratio", *labels).observe(ratio)
        if sequence.cold:
            self.store.histogram("llmobs_cold_start_seconds", *labels).observe(seconds)
        elif not sequence.preemptions:  # these two do not tell how long their length takes
            self.latency.add(sequence.first, sequence.computed, seconds)

    def _take(self, sequence: Sequence, time: int, held: list[int], begins: bool | None) -> None:
        """What it holds by now: at the beginning of a prefill (`begins`), at a later part of one,
        or (None) at the end of it all."""
        blocks, places, left = held
        sequence.blocks = max(sequence.blocks, blocks)
        new = blocks if begins else max(places - sequence.places, 0)
        sequence.places = places
        if begins is False and sequence.taken and not sequence.taken[-1].closing:
            last = sequence.taken[-1]
            last.time, last.blocks, last.left = time, last.blocks + new, left
        elif new and len(sequence.taken) < EVENTS_KEPT:
            sequence.taken.append(Taken(time, new, left, begins is None))

    def _starved(self, x: int, y: int, z: int, columns: Any, time: int) -> None:
        sequence = self.sequences.get(z)
        if sequence is not None and len(sequence.starved) < EVENTS_KEPT:
            sequence.starved.append(Starved(time, columns[1]))

    def _stop_starving(self, sequence: Sequence, attempts: int) -> None:
        if attempts and sequence.starved:
            sequence.starved[-1].attempts = attempts

    def _preempt(self, x: int, y: int, z: int, columns: Any, time: int) -> None:
        self.preempted.append(time)
        sequence = self.sequences.get(z)
        if sequence is None:
            return
        self._stop_decoding(sequence)
        owed = 0
        if sequence.preemptions and not sequence.preemptions[-1].end:
            # Preempted again before all was computed: what was owed then is owed still.
            sequence.preemptions[-1].end = time
            owed = max(sequence.to_recompute, 0)
            for others in self.recomputing.values():
                if sequence in others:
                    others.remove(sequence)
        self._stop_running(sequence)
        self._take(sequence, time, columns[4:7], None)
        sequence.places = 0
        sequence.preemptions.append(
            Preemption(
                time,
                lost_tokens=columns[0],
                usage=columns[3],
                blocks=columns[4],
                left=columns[6],
                starved=bool(x),
            )
        )
        sequence.to_recompute = owed + columns[0]
        sequence.state = PREEMPTED

    def _tokens(self, x: int, y: int, z: int, columns: Any, time: int) -> None:
        self.pairs += _numbers(columns)[:x]

    def _skip(self, x: int, y: int, z: int, columns: Any, time: int) -> None:
        self.skips += _numbers(columns)[:x]

    def _more(self, x: int, y: int, z: int, columns: Any, time: int) -> None:
        self.more += _numbers(columns)[:x]
        self.summed = True

    def _step(self, x: int, y: int, z: int, columns: Any, time: int) -> None:
        start, scheduled, update, count, tokens, out, waiting = columns[:7]
        index = self.steps
        self.steps += 1
        if self.longest_left:
            running = (s.prompt for s in self.sequences.values() if s.state in (PREFILL, DECODE))
            self.longest = max(running, default=0)
            self.longest_left = False
        self.log[index % STEPS_KEPT] = (
            *(start, scheduled, update, time, 0, 0, 0, 0, 0, 0),
            *(count, tokens, out, waiting, self.longest, x, y),
        )
        self.sizes(x).observe(count)
        self.stage("schedule", x).observe((scheduled - start) / SECOND)
        self.stage("update", x).observe((time - update) / SECOND)
        self.unmatched.append((index, count, tokens))
        chunk = self.chunks.pop(z, (0, 0))
        if len(self.chunks) > EVENTS_KEPT:  # of steps that failed
            self.chunks.clear()
        if time - self.last_end > stalls.LEAST_NS:
            self._suspect(index, start, time, count, *chunk)
        self._yielded(index, time)
        for sequence in self.recomputing.pop(z, ()):
            if sequence.preemptions and not sequence.preemptions[-1].end:
                sequence.preemptions[-1].end = time
        self.last_end = time
        if index % (STEPS_KEPT // 4) == 0 and index:
            self._fold_long(index)

    def _suspect(
        self, index: int, start: int, end: int, count: int, prompt: int, recomputed: int
    ) -> None:
        """Look at a step that ended long after the one before it."""
        waited = any(s.state is DECODE for s in self.sequences.values())
        if waited or any(
            s.state is PREFILL and s.started <= self.last_end for s in self.sequences.values()
        ):
            start = self.last_end
        length = end - start
        if length > stalls.LEAST_NS and length > stalls.TIMES_USUAL * self._usual(index):
            step = Suspect(start, end, count, prompt, recomputed, waited)
            self.suspects.append((index, step))

    def _usual(self, index: int) -> float:
        """The median time of the steps before this one, without what was idle between them."""
        before = np.arange(max(index - stalls.STEPS_COMPARED, 0), index) % STEPS_KEPT
        if len(before) < 2:
            return 0.0
        steps = self.log[before]
        starts = np.maximum(steps["end"][:-1], steps["start"][1:])
        return float(np.median(steps["end"][1:] - starts))

    def judge(self, settled: int) -> None:
        """Say why steps took long that ended until then: what explains them has been read."""
        while self.suspects and self.suspects[0][1].end <= settled:
            index, step = self.suspects.popleft()
            row = self.log[index % STEPS_KEPT]
            computing = int(row["forward"]) + int(row["sampling"])
            if not computing or not self.host_only:
                # A worker's host only launches what the GPU does, or nothing is known of it.
                computing = int(row["update"]) - max(int(row["scheduled"]), step.start)
            stall = stalls.cause_of(step, computing, self.pauses)
            if stall is not None:
                self.stalls.append(stall)
                seconds = (stall.end - stall.start) / SECOND
                labels = (self.models[0], self.name, stall.cause)
                self.store.add("llmobs_stall_seconds_total", *labels, amount=seconds)

    def stalls_between(self, start: int, end: int) -> list[Stall]:
        """The stalls within this time of a request, as far as they are in it. It may have ended in
        one, where the engine stood still until its client left."""
        self.judge(now())
        found = stalls.between(self.stalls, start, end)
        since = max(min(self.last_end, end), start)
        usual = self._usual(self.steps)
        if end - since > max(stalls.LEAST_NS, stalls.TIMES_USUAL * usual):
            still = self.pauses.most_of(since, end) or (stalls.UNKNOWN, "")
            if self.alive_wall and clock.time_ns() - self.alive_wall > stalls.SILENT_NS:
                still = (stalls.FROZEN, "engine_core")
            found.append(Stall(since, end, *still))
        return found

    def _yielded(self, index: int, time: int) -> None:
        """Book the tokens of a step: the odd ones one by one, the rest by number."""
        level = self.level
        beginning: list[Sequence] = []
        returning: list[Sequence] = []
        apart: dict[int, int] = {}
        pairs, self.pairs = self.pairs, []
        skips, self.skips = self.skips, []
        for number in skips:
            sequence = self.sequences.get(number)
            if sequence is None:
                continue
            sequence.skipped.append(index)
            if number not in self.behind:
                self.behind[number] = self.last_end
                if sequence.counted:
                    level[sequence.cell] -= 1
        seen = set(skips)
        for place in range(0, len(pairs), 2):
            sequence = self.sequences.get(pairs[place])
            if sequence is None:
                continue
            tokens = pairs[place + 1]
            seen.add(sequence.number)
            if sequence.state is DECODE:
                if sequence.number in self.behind:
                    last = self.behind.pop(sequence.number)
                    returning.append(sequence)
                else:
                    last = self.last_end
                    if sequence.counted:
                        apart[sequence.cell] = apart.get(sequence.cell, 0) + 1
            else:
                last = sequence.last
                if sequence.state is PREFILL:
                    beginning.append(sequence)
                else:  # already on its way when it was preempted
                    sequence.runs.append([index, index])
            sequence.odd[index] = tokens
            sequence.last = time
            if not sequence.first:
                sequence.first, last = time, 0
                self._prefill_ends(sequence)
            self._observe(sequence, time - last if last else None, tokens)
        if self.behind:
            for number in [n for n in self.behind if n not in seen]:
                sequence = self.sequences[number]
                self._observe(sequence, time - self.behind.pop(number), 1)
                returning.append(sequence)
        for cell, count in level.items():
            count -= apart.get(cell, 0)
            if count:
                gap = (time - self.last_end) / SECOND
                self.gaps(cell).observe(gap, count)
                if gap > SLO.buckets[cell % schema.BUCKETS].token_gap:
                    self._slow_gap(cell, gap, seen)
        more, self.more = self.more, []
        for cell, tokens in zip(more[::2], more[1::2], strict=True):
            if tokens:  # at once with the one each that is booked above
                self.gaps(cell).observe(0.0, tokens)
        for sequence in beginning:
            if sequence.preemptions and not sequence.preemptions[-1].end:
                sequence.preemptions[-1].end = time
            sequence.state = DECODE
            sequence.runs.append([index, -1])
        for sequence in (*beginning, *returning):
            if sequence.counted:
                level[sequence.cell] = level.get(sequence.cell, 0) + 1

    def _slow_gap(self, cell: int, gap: float, apart: set[int]) -> None:
        """Name one of the many that waited this long."""
        if self._slow is None or not self.gaps(cell).wants_exemplar(gap):
            return
        for sequence in self.sequences.values():
            if sequence.cell == cell and sequence.state is DECODE and sequence.number not in apart:
                self._slow(sequence, self.gaps(cell), gap)
                return

    def _observe(self, sequence: Sequence, gap: int | None, tokens: int) -> None:
        """k tokens at once are one gap and k-1 of zero length; the first token is no gap."""
        if not sequence.counted:
            return
        gaps = self.gaps(sequence.cell)
        if gap is not None:
            gaps.observe(gap / SECOND)
        if tokens > 1:
            gaps.observe(0.0, tokens - 1)

    def _stop_running(self, sequence: Sequence) -> None:
        if sequence.prompt >= self.longest:
            self.longest_left = True

    def _stop_decoding(self, sequence: Sequence) -> None:
        """Close its run: it yielded its last token for now in the last step, or before."""
        if sequence.state is not DECODE:
            return
        last = self.behind.pop(sequence.number, None)
        if last is None:
            last = self.last_end
            if sequence.counted:
                self.level[sequence.cell] -= 1
        sequence.last = last
        sequence.runs[-1][1] = self.steps - 1

    def _leave(self, x: int, y: int, z: int, columns: Any, time: int) -> None:
        sequence = self.sequences.pop(z, None)
        if sequence is None:
            sequence = Sequence(z, columns[1], 0, 0, 0, False)
        self._stop_running(sequence)
        if not self.resync:
            self._stop_decoding(sequence)
        sequence.left = time
        if sequence.cold and not sequence.first:
            self.cold_starts.gives_up(sequence.cell % schema.BUCKETS)
        self._take(sequence, time, columns[2:5], None)
        self._stop_starving(sequence, columns[5])
        if sequence.complete:
            steps = self._token_steps(sequence, 1 << 62)
            times = self._ends[steps % STEPS_KEPT]
            if len(times) > 1:
                gaps = times[1:] - times[:-1]
                sequence.longest_gap = max(sequence.longest_gap, int(gaps.max()))
            if sequence.flags & Flag.CUT:
                counts = [sequence.odd.get(step, 1) for step in steps.tolist()]
                sequence.emitted = times, np.array(counts, np.int64)
        self._changed(self, sequence)

    def _fold_long(self, index: int) -> None:
        """Make the log's older half free: sequences that began there keep its longest gap only."""
        limit = index - STEPS_KEPT // 2
        for sequence in self.sequences.values():
            if not sequence.runs or sequence.runs[0][0] >= limit:
                continue
            steps = self._token_steps(sequence, limit)
            gaps = np.diff(self._ends[steps % STEPS_KEPT])
            if len(gaps):
                sequence.longest_gap = max(sequence.longest_gap, int(gaps.max()))
            if sequence.complete and sequence.flags & Flag.CUT and len(steps):
                # Long past by now at the front end, so none of these will be cut off.
                tokens = sum(sequence.odd.get(int(step), 1) for step in steps[:-1])
                sequence.booked += tokens
                self._book(sequence, gaps, tokens - len(steps) + 1)
            keep = int(steps[-1]) if len(steps) else limit
            more = sum(n - 1 for step, n in sequence.odd.items() if step < keep)
            sequence.folded += max(len(steps) - 1, 0) + more
            sequence.runs = [[max(a, keep), b] for a, b in sequence.runs if b < 0 or b >= keep]
            sequence.skipped = [step for step in sequence.skipped if step >= keep]
            sequence.odd = {step: n for step, n in sequence.odd.items() if step >= keep}

    def _token_steps(self, sequence: Sequence, upto: int) -> npt.NDArray[np.int64]:
        """The steps in which a sequence yielded tokens, in order."""
        newest = min(self.steps - 1, upto)
        parts = [
            np.arange(first, min(last if last >= 0 else newest, newest) + 1)
            for first, last in sequence.runs
        ]
        if len(parts) == 1 and not sequence.skipped:
            return parts[0]
        steps = np.concatenate(parts) if parts else np.empty(0, np.int64)
        if sequence.skipped:
            steps = steps[~np.isin(steps, sequence.skipped)]
        return np.unique(steps)

    def tokens_of(self, sequence: Sequence) -> int:
        """What a sequence that is still here has yielded so far: at least, where records are
        missing or (by speculation) several tokens of a step are told by their sum only."""
        newest = self.steps - 1
        ran = sum((last if last >= 0 else newest) - first + 1 for first, last in sequence.runs)
        more = sum(n - 1 for n in sequence.odd.values())
        return sequence.folded + ran - len(sequence.skipped) + more

    def steps_between(self, start: int, end: int) -> npt.NDArray[np.void]:
        """The steps that ended after `start` and not after `end`, as far as the log goes back."""
        newest = self.steps % STEPS_KEPT
        parts = [self.log[:newest]]
        if self.steps > STEPS_KEPT:
            parts.insert(0, self.log[newest:])
        found = []
        for part in parts:
            ends = part["end"]
            found.append(
                part[np.searchsorted(ends, start, "right") : np.searchsorted(ends, end, "right")]
            )
        return np.concatenate(found)

    def cut(self, sequence: Sequence, tokens: int) -> None:
        """The front end decided how many tokens of a sequence count: book them now."""
        if sequence.emitted is None:
            return
        times, per_step = sequence.emitted
        sequence.emitted = None
        before = np.cumsum(per_step) - per_step + sequence.booked
        wanted = before < tokens
        times, per_step, before = times[wanted], per_step[wanted], before[wanted]
        if not len(times):
            return
        per_step = np.minimum(per_step, tokens - before)
        sequence.last = int(times[-1])
        gaps = np.diff(times)
        longest = int(gaps.max()) if len(gaps) else 0
        sequence.longest_gap = max(sequence.longest_gap, longest) if sequence.booked else longest
        self._book(sequence, gaps, int(per_step.sum()) - len(times))

    def _book(self, sequence: Sequence, gaps: npt.NDArray[np.int64], zeros: int) -> None:
        """Put gaps in nanoseconds, and so many of no length, into the histogram."""
        child = self.gaps(sequence.cell)
        for gap in gaps.tolist():
            child.observe(gap / SECOND)
        if zeros > 0:
            child.observe(0.0, zeros)

    # After a gap

    def _snapshot(self, x: int, y: int, z: int, columns: Any, time: int) -> None:
        if not self.resync:
            return
        if x:
            self.snapshot = set()
        elif self.snapshot is not None:
            for number in [n for n in self.sequences if n not in self.snapshot]:
                gone = self.sequences[number]
                if gone.state is not WAITING:
                    del self.sequences[number]
                    gone.left = time
                    self._changed(self, gone)
            self.snapshot = None
            self.resync = False
            self.longest_left = True
            self.last_end = time

    def _snapshot_entry(self, x: int, y: int, z: int, columns: Any, time: int) -> None:
        if not self.resync or self.snapshot is None:
            return
        self.snapshot.add(z)
        known = self.sequences.get(z)
        sequence = Sequence(z, columns[0], y, columns[1], columns[2], False)
        if known is not None:
            sequence.joined, sequence.started, sequence.first = (
                known.joined,
                known.started,
                known.first,
            )
        sequence.state = SequenceState(x)
        if sequence.state is DECODE:
            sequence.runs.append([self.steps, -1])
        self.sequences[z] = sequence

    # Workers

    def _forward(self, x: int, y: int, z: int, columns: Any, time: int) -> None:
        self.match()  # what came before has its sampling by now
        self.forwards.append([columns[0], time, columns[1], columns[2], 0, 0])

    def _sample(self, x: int, y: int, z: int, columns: Any, time: int) -> None:
        if self.forwards and not self.forwards[-1][4]:
            self.forwards[-1][4:] = time - columns[0], columns[0]

    def match(self) -> None:
        """Bring the worker's calls together with the engine's steps, both in order.

        A call belongs to the first step of the same size that was scheduled before it."""
        while self.unmatched and self.forwards:
            index, count, tokens = self.unmatched[0]
            start, end, worker_count, worker_tokens, sampling, sampling_start = self.forwards[0]
            step = self.log[index % STEPS_KEPT]
            if start < step["start"]:
                self.forwards.popleft()  # its step failed, or was lost
            elif (count, tokens) != (worker_count, worker_tokens) or start > step["end"]:
                self.unmatched.popleft()
            elif not sampling and len(self.forwards) == 1 and now() - end < SETTLE_NS:
                return  # its sampling may still be on the way to us
            else:
                self.unmatched.popleft()
                self.forwards.popleft()
                step["forward_start"], step["forward"] = start, end - start
                step["sampling_start"], step["sampling"] = sampling_start, sampling
                kind = int(step["kind"])
                self.stage("forward", kind).observe((end - start) / SECOND)
                self.forward("host", kind).observe((end - start) / SECOND)
                if sampling:
                    self.stage("sampling", kind).observe(sampling / SECOND)
                if start in self.early:
                    self._gpu_timed(index, *self.early.pop(start))
                elif not self.host_only:
                    _keep(self.untimed, start, index)

    def _gpu(self, x: int, y: int, z: int, columns: Any, time: int) -> None:
        began, forward, sampling = columns[:3]
        index = self.untimed.pop(began, None)
        if index is None:
            _keep(self.early, began, (forward, sampling))
        else:
            self._gpu_timed(index, forward, sampling)

    def _gpu_timed(self, index: int, forward: int, sampling: int) -> None:
        step = self.log[index % STEPS_KEPT]
        step["gpu_forward"], step["gpu_sampling"] = forward, max(sampling, 0)
        self.forward("gpu", int(step["kind"])).observe(forward / SECOND)


def _keep(steps: dict[int, Any], began: int, value: Any) -> None:
    """Only the newest: many are never asked for."""
    steps[began] = value
    if len(steps) > UNTIMED_KEPT:
        del steps[next(iter(steps))]


def _numbers(columns: Any) -> list[int]:
    """The eighteen 32-bit numbers that stand in the place of the columns."""
    numbers: list[int] = []
    for column in columns:
        numbers += (column & 0xFFFFFFFF, column >> 32 & 0xFFFFFFFF)
    return numbers
