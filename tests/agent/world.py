"""Engine, front end and agent under test beside a model that keeps everything by brute force.

`World` moves a clock, drives the fake scheduler, writes the front end's records by hand, and notes
what really happened, request by request and step by step, in the plainest way there is. The tests
compare that with what the agent made of the two rings.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmobs import engine, process, schema
from llmobs.agent import run
from llmobs.agent.requests import RequestView
from llmobs.agent.steps import EngineView
from llmobs.agent.store import Histogram, Store
from llmobs.engine import Engine
from llmobs.frontend import sequence_key
from llmobs.ring import Reader, Writer
from tests.fake_scheduler import Request, Scheduler, request
from tests.rings import read_all

# The contract's figures, written out again.
FINE = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 3.0, 5.0, 8.0, 15.0, 30.0, 60.0),
)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
STEPS = (0.0005, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 5.0)
FIRST_TARGET = {"0-1k": 0.3, "1k-4k": 0.3, "4k-32k": 0.8, "32k+": 0.8}
BUCKETS = ("0-1k", "1k-4k", "4k-32k", "32k+")
ARRIVE, ADMIT, FIRST, SEQUENCE_END, END = 1, 2, 3, 4, 5
CUT, POOLING, HTTP = 1, 2, 8
STOP, LENGTH, ABORT, ERROR = 0, 1, 2, 3
OUTCOMES = ("stop", "length", "abort", "error")


def bucket(prompt: int) -> int:
    for place, limit in enumerate((1024, 4096, 32768)):
        if prompt <= limit:
            return place
    return 3


@dataclass(eq=False)
class Life:
    """One request, as it really was. Times in nanoseconds."""

    number: int
    request: Request
    kind: str
    model: str
    streamed: bool
    cut_at: int
    arrival: int
    admitted: int = 0
    joined: int = 0
    started: int = 0
    owing: bool = False
    """It has yielded nothing since it was started or preempted."""
    preempted: bool = False
    tokens: list[tuple[int, int]] = field(default_factory=list)
    losses: list[list[int]] = field(default_factory=list)
    needed: int = 0
    recomputed_by: Any = None
    left: int = 0
    first_chunk: int = 0
    counted: int = 0
    """Tokens that the front end took, at its end."""
    end: int = 0
    outcome: int = STOP

    @property
    def bucket(self) -> str:
        return BUCKETS[bucket(self.request.num_prompt_tokens)]

    @property
    def own(self) -> list[tuple[int, int]]:
        """The tokens that count."""
        if self.kind != "cut":
            return self.tokens
        own, taken = [], 0
        for time, count in self.tokens:
            if taken < max(self.counted, 1):
                own.append((time, min(count, max(self.counted, 1) - taken)))
                taken += count
        return own

    @property
    def gaps(self) -> list[int]:
        """The gap before each token but the first."""
        times = [time for time, count in self.own for _ in range(count)]
        return [b - a for a, b in pairwise(times)]

    @property
    def first(self) -> int:
        """When the first token was there, 0: it never was."""
        if self.first_chunk:
            return self.first_chunk
        if self.streamed and self.outcome in (ABORT, ERROR):
            return 0
        first = self.tokens[0][0] if self.tokens else 0
        return first if first <= self.end else 0

    @property
    def prefill(self) -> int:
        """From first scheduled to the first token that came out, without what was lost to
        preemptions."""
        first = self.tokens[0][0]
        lost = [max(min(loss[1] or first, first) - loss[0], 0) for loss in self.losses]
        return first - self.started - sum(lost)

    @property
    def phases(self) -> tuple[int, ...]:
        """preprocess, queue, prefill, preempted, decode, deliver: a state for each moment."""
        whole = self.outcome in (STOP, LENGTH)
        end = self.end
        first = self.tokens[0][0] if self.tokens else 0
        last = (self.own[-1][0] if self.tokens else self.left) if whole else end
        sums = Counter[str]()
        moments = {self.arrival, self.admitted, self.started or end, first or last, last, end}
        moments |= {moment or end for loss in self.losses for moment in loss}
        inside = sorted(m for m in moments if self.arrival <= m <= end)
        for a, b in pairwise(inside):
            if b <= self.admitted:
                phase = "preprocess"
            elif not self.started or b <= self.started:
                phase = "queue"
            elif b > last:
                phase = "deliver"
            elif any(loss[0] <= a and b <= (loss[1] or end) for loss in self.losses):
                phase = "preempted"
            elif b <= (first or last):
                phase = "prefill"
            else:
                phase = "decode"
            sums[phase] += b - a
        names = ("preprocess", "queue", "prefill", "preempted", "decode", "deliver")
        return tuple(sums[name] for name in names)


@dataclass
class Step:
    started: int
    scheduled: int
    update: int
    end: int
    sequences: int
    tokens: int
    kind: str
    came_out: int


MODELS = ["m", "lora-a", "lora-b"]


class World:
    """What the tests drive. `ahead` and `drafts` are the fake scheduler's: it schedules the next
    batch before the last came back; so many drafts a step. The records are read in any order by
    `read`, or, with `whole`, as the agent itself reads a run folder."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: Any,
        ahead: bool = False,
        drafts: int = 0,
        capacity: int = 1 << 14,
        whole: bool = False,
    ) -> None:
        self.time = 10**12
        self.state = process.Process(SimpleNamespace())  # type: ignore[arg-type]
        self.state.models = list(MODELS)
        monkeypatch.setattr(engine, "now", lambda: self.time)
        monkeypatch.setattr(process, "_current", self.state)
        monkeypatch.setattr(run, "time", SimpleNamespace(monotonic_ns=lambda: self.time))
        info = {"models": MODELS, "engine": 0}
        self.engine_ring = Writer(
            folder / "engine_core.ring", capacity, {"roles": ["engine_core"], **info}
        )
        self.front_ring = Writer(
            folder / "api_server.ring", capacity, {"roles": ["api_server"], **info}
        )
        self.scheduler = Scheduler(
            Engine(self.engine_ring, drafts > 0), lambda: self.time, ahead, drafts
        )
        self.ahead = ahead
        self.lives: list[Life] = []
        self.by_name: dict[str, Life] = {}
        self.begun: list[Life] = []
        """In the order in which they were first scheduled."""
        self.steps: list[Step] = []
        self.in_flight: deque[Any] = deque()
        self.aborts: list[Life] = []
        self.preemptions: Counter[tuple[str, str]] = Counter()

        self.run = None
        if whole:
            self.run = run.Run(folder)
            self.run.poll()
            self.store, self.requests = self.run.store, self.run.requests
            (self.view,) = self.run.engines.values()
            return
        self.engine_reader = Reader(folder / "engine_core.ring")
        self.front_reader = Reader(folder / "api_server.ring")
        self.store = Store()
        self.requests = RequestView(self.store)
        self.requests.models[1] = MODELS
        self.view = EngineView("0", self.store, self.requests.sequence_changed)
        self.view.models = MODELS

    # What may happen

    def tick(self, nanoseconds: int) -> None:
        self.time += nanoseconds

    def join(
        self,
        prompt: int,
        max_tokens: int,
        kind: str,
        adapter: str | None,
        streamed: bool,
        cut_at: int,
        pause: int,
    ) -> None:
        self._abort_late()
        number = len(self.lives) + 1
        new = request(f"r{number}", prompt, max_tokens, kind, adapter)
        if kind == "plain" and max_tokens == 1:
            kind = "cut"  # beam search asks for one token at a time
        life = Life(number, new, kind, adapter or "m", streamed, cut_at, self.time)
        self.front_ring.put(ARRIVE, self.time, number, 1, 0)
        self.tick(pause)
        life.admitted = self.time
        flags = HTTP | {"cut": CUT, "pooling": POOLING}.get(kind, 0)
        cell = self.state.model(adapter) * 4 + bucket(prompt)
        key = sequence_key(new.request_id)
        self.front_ring.put(ADMIT, self.time, number, flags, cell, key, prompt, max_tokens, 0, 0)
        self.tick(pause)
        life.joined = self.time
        self.lives.append(life)
        self.by_name[new.request_id] = life
        self.scheduler.add(new)

    def abort(self, which: int, late: bool) -> None:
        """The client of some request leaves. `late`: the engine hears of it a little later."""
        self._abort_late()
        live = [life for life in self.lives if not life.left and not life.end]
        if not live:
            return
        life = live[which % len(live)]
        self._end(life, ABORT)
        self.aborts.append(life)
        if not late:
            self._abort_late()

    def _abort_late(self) -> None:
        for life in self.aborts:
            if not life.left:
                life.left = self.time
                self.scheduler.abort(life.request.request_id)
        self.aborts.clear()

    def step(
        self,
        victims: int,
        budget: int,
        chunk: int,
        cached: list[int],
        yields: list[int],
        errors: list[bool],
        pauses: list[int],
    ) -> None:
        """One turn of the engine's loop: schedule, and update what is due."""
        pause = cycle(pauses)
        started = self.time
        self.tick(next(pause))
        preempted_at = self.time
        output = self.scheduler.schedule(
            started, victims, budget, chunk, cycle(cached), lambda: self.tick(next(pause))
        )
        for victim, computed in output.preempted:
            self._preempted(self.by_name[victim.request_id], preempted_at, computed)
        self._scheduled(output)
        self.in_flight.append(output)
        self.tick(next(pause))
        self._abort_late()
        if len(self.in_flight) > (1 if self.ahead else 0) or not output.num_scheduled_tokens:
            self.update(yields, errors, pause)

    def _preempted(self, life: Life, time: int, computed: int) -> None:
        self.preemptions[life.model, life.bucket] += 1
        if not life.losses or life.losses[-1][1]:
            life.needed = 0
        else:
            life.losses[-1][1] = time
        life.losses.append([time, 0])
        life.needed = max(life.needed, computed)
        life.recomputed_by = None
        life.owing = life.preempted = True

    def _scheduled(self, output: Any) -> None:
        prefills = 0
        for name, tokens in output.num_scheduled_tokens.items():
            life = self.by_name[name]
            before = output.before[name]
            anew = not life.started or life.preempted
            life.preempted = False
            if not life.started:
                life.started, life.owing = output.started, True
                self.begun.append(life)
            if life.owing and (anew or before < life.request.num_tokens):
                prefills += 1
            open_loss = life.losses and not life.losses[-1][1]
            if open_loss and not life.tokens and before + tokens >= life.needed:
                life.recomputed_by = life.recomputed_by or output
        if not prefills:
            output.kind = "decode"
        else:
            all_of_them = prefills == len(output.num_scheduled_tokens)
            output.kind = "prefill" if all_of_them else "mixed"

    def update(self, yields: list[int], errors: list[bool], pause: Iterator[int]) -> None:
        """The oldest batch comes back."""
        output = self.in_flight.popleft()
        chosen, failing = cycle(yields), cycle(errors)

        def sampled(known: Request, most: int) -> int:
            count = min(next(chosen), most)
            if known.status.name == "PREEMPTED":
                count = max(count, 1)
            return count

        alive = list(self.scheduler.requests)
        update = self.time
        came_out = self.scheduler.update(
            output, sampled, lambda _: next(failing), lambda: self.tick(next(pause))
        )
        time = self.time
        for known, count in came_out:
            life = self.by_name[known.request_id]
            if count:
                life.tokens.append((time, count))
                if not life.preempted:
                    life.owing = False
                    if life.losses and not life.losses[-1][1]:
                        life.losses[-1][1] = time
        for life in self.lives:
            if life.recomputed_by is output and life.losses and not life.losses[-1][1]:
                life.losses[-1][1] = time
        if output.num_scheduled_tokens:
            self.steps.append(
                Step(
                    *(output.started, output.scheduled, update, time),
                    len(output.num_scheduled_tokens),
                    sum(output.num_scheduled_tokens.values()),
                    output.kind,
                    sum(count for _, count in came_out),
                )
            )
        for name in alive:
            life = self.by_name[name]
            if life.request.finished and not life.left:
                life.left = time
        self._deliver(next(pause))

    def _deliver(self, pause: int) -> None:
        """The front end sees what came out."""
        self.tick(pause)
        for life in self.lives:
            if life.end:
                continue
            seen = sum(count for _, count in life.tokens)
            if life.streamed and seen and not life.first_chunk:
                life.first_chunk = self.time
                self.front_ring.put(FIRST, self.time, life.number)
            if life.left:
                failed = life.request.status.name == "FINISHED_ERROR"
                length = life.request.status.name == "FINISHED_LENGTH_CAPPED"
                self._end(life, ERROR if failed else LENGTH if length else STOP)
            elif life.kind == "cut" and seen >= life.cut_at:
                self._end(life, STOP)
                self.aborts.append(life)

    def _end(self, life: Life, outcome: int) -> None:
        life.end, life.outcome = self.time, outcome
        seen = sum(count for _, count in life.tokens)
        life.counted = min(seen, life.cut_at) if life.kind == "cut" and outcome == STOP else seen
        key = sequence_key(life.request.request_id)
        self.front_ring.put(
            SEQUENCE_END, self.time, life.number, min(outcome, 3), 0, key, life.counted, 0
        )
        self.front_ring.cells[schema.PROCESS_CELL["edges_ended"]] += 1
        place = bucket(life.request.num_prompt_tokens)
        model = self.state.models.index(life.model)
        self.front_ring.put(
            *(END, self.time, life.number, outcome, 200),
            *(place, life.counted, life.arrival, int(life.streamed), model),
        )

    def finish(self) -> None:
        """All that is in flight comes back, everybody leaves, all is read."""
        self.tick(1000)
        self._abort_late()
        while self.in_flight:
            self.update([1], [False], cycle([1000]))
            self._abort_late()
        for life in self.lives:
            if not life.end:
                self._end(life, ABORT)
                self.aborts.append(life)
        self._abort_late()
        for _ in range(3):
            self.read(True)

    def read(self, engine_first: bool) -> None:
        """The agent looks at the rings."""
        if self.run is not None:
            self.run.poll()
            return
        turns: list[Callable[[], None]] = [self._read_engine, self._read_front]
        for turn in turns if engine_first else turns[::-1]:
            turn()

    def _read_engine(self) -> None:
        records, lost = read_all(self.engine_reader)
        assert not lost
        for record in records:
            self.view.feed(record)

    def _read_front(self) -> None:
        records, lost = read_all(self.front_reader)
        assert not lost
        for record in records:
            self.requests.feed(1, record)

    # Comparing

    def gauges(self) -> tuple[Counter[tuple[str, str, str]], int]:
        """Sequences by model, state and bucket; prompt tokens of those that wait."""
        counts: Counter[tuple[str, str, str]] = Counter()
        tokens = 0
        for state, some in (
            ("waiting", self.scheduler.waiting),
            ("running", self.scheduler.running),
        ):
            for known in some:
                life = self.by_name[known.request_id]
                counts[life.model, state, life.bucket] += 1
                tokens += known.num_prompt_tokens if state == "waiting" else 0
        return counts, tokens

    def waited(self) -> int:
        """Nanoseconds that all have waited for their first start, once all have left."""
        return sum((life.started or life.left) - life.joined for life in self.lives)

    def moments(self) -> list[float]:
        """Sums of the powers of ln(step in us)."""
        logarithms = []
        before = 0
        for step in self.steps:
            duration = step.end - max(step.started, before)
            before = step.end
            logarithms.append(math.log(max(duration / 1000, 1)))
        return [math.fsum(value**power for value in logarithms) for power in range(5)]


def check_histogram(found: Histogram | None, values: list[float], bounds: tuple) -> None:
    """Compare with numpy's own count of the same values."""
    if found is None:
        assert values == []
        return
    places = np.searchsorted(np.array(bounds, float), np.array(values, float), side="left")
    expected = np.bincount(places, minlength=len(bounds) + 1).tolist()
    assert found.counts == expected
    assert math.isclose(found.sum, math.fsum(values), rel_tol=1e-9, abs_tol=1e-12)


def grouped(pairs: Iterator[tuple[Any, list[float]]]) -> dict[Any, list[float]]:
    groups: dict[Any, list[float]] = defaultdict(list)
    for key, values in pairs:
        groups[key] += values
    return groups
