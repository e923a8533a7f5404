"""One server's run folder: finds its rings, tails them, knows who is alive."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from llmobs import schema
from llmobs.agent.pace import Pace
from llmobs.agent.requests import U64, RequestView
from llmobs.agent.signals import Signal
from llmobs.agent.steps import SETTLE_NS, EngineView
from llmobs.agent.store import Store
from llmobs.metrics import DROP_REASONS, HAND_OVER, METRICS, Exactness, Type
from llmobs.ring import SUFFIX, Reader, RingError
from llmobs.schema import Kind
from llmobs.slo import BUCKET_LIMITS, STEP_SECONDS

log = logging.getLogger("llmobs.agent")

LOOKS = 50
"""So often a ring may have no description: it is missing for a moment while it is rewritten."""
BATCH = 2048
"""Records at a time: as Python's objects they take six times their place in the ring."""
PROCESS_ROLES = ("api_server", "engine_core", "worker")
FRONT_KINDS = frozenset({k for k in Kind if k < Kind.JOIN})
PROCESS_KINDS = frozenset({Kind.EXIT, Kind.RAISED, Kind.BROKEN})
PAUSE_KINDS = frozenset({Kind.COLLECTION, Kind.LAG, Kind.FROZEN})


class Raised(NamedTuple):
    """A method of vLLM's raised: when (monotonic), the exception's class, the probe that saw it."""

    time: int
    name: str
    probe: int


class Fate:
    """What a process told of its own end, and of its children's. Times are monotonic."""

    def __init__(self) -> None:
        self.children: dict[int, tuple[int, int]] = {}
        """By pid: when the end was seen, and the exit code or minus the signal."""
        self.raised: list[Raised] = []
        self.broken = 0
        """When the front end learned that its engine is dead."""
        self.ends = 0
        """When the process came to an end in good order."""

    def feed(self, record: tuple[Any, ...]) -> None:
        _, kind, x, _, z, columns, time_, _ = record
        if kind == Kind.RAISED:
            text = b"".join((c & U64).to_bytes(8, "little") for c in columns)[:x]
            self.raised.append(Raised(time_, text.decode(errors="replace"), z))
        elif kind == Kind.BROKEN:
            self.broken = self.broken or time_
        elif x:
            self.ends = time_
        else:
            self.children[columns[0]] = time_, columns[1]


class FairLock:
    """A lock that is had in turn. A plain one the thread that polls takes back before who waits for
    it has woken up: with two cores and much to read a page waited for 23 s."""

    def __init__(self) -> None:
        self._next, self._held = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._held.acquire()

    def __exit__(self, *_: object) -> None:
        self._held.release()


class Source:
    """One ring, and what is left of it once its process is dead."""

    def __init__(self, number: int, reader: Reader) -> None:
        self.number = number
        self.reader = reader
        self.info: dict[str, Any] = {}
        self.lost = 0
        self.records = 0
        self.alive = True
        """Whether its process runs and its records can be read."""
        self.drained = False
        self.damaged = False
        self.gapped = False
        """Whether any of its records were lost."""
        self.cells = memoryview(bytes(8 * schema.CELLS)).cast("q")
        """The cumulative totals as of the last look."""
        self.engine: EngineView | None = None
        self.looks = 0
        self.fate = Fate()
        self.newest = 0
        """When its newest record was written (monotonic)."""

    @property
    def roles(self) -> list[str]:
        return list(self.info.get("roles", ()))

    @property
    def models(self) -> list[str]:
        return list(self.info.get("models", ()))

    @property
    def floats(self) -> "memoryview[float]":
        """The same cells as doubles."""
        return self.cells.cast("B").cast("d")

    @property
    def kv_blocks(self) -> int:
        """The blocks of the engine's KV cache; 0 where that is not known."""
        return self.cells[schema.PROCESS_CELL["kv_pool_blocks"]]

    def ended(self) -> dict[tuple[int, int], int]:
        """Requests that ended here, by the numbers of their model and bucket."""
        outcomes = len(schema.Outcome)
        counts = {}
        for model, bucket in product(range(schema.MODEL_SLOTS), range(schema.BUCKETS)):
            first = schema.model_cell("ended", model) + bucket * outcomes
            counts[model, bucket] = sum(self.cells[first : first + outcomes])
        return counts

    def finish(self) -> None:
        """Nothing more will be read: keep the totals, let the file go."""
        self.alive = False
        log.info(
            "ring %s ended, %d records read, %d lost",
            *(self.reader.path.name, self.records, self.lost),
        )
        self.reader.close()
        self.drained = True


class Run:
    """All that is known of one server. `lock` guards everything."""

    def __init__(self, folder: Path, autopsy: bool = False, until: int | None = None) -> None:
        self.folder = folder
        self.autopsy = autopsy
        """For a post-mortem: what is open stays open, be its process dead or not."""
        self.until = until
        """What was recorded after this moment (monotonic) is not taken in then."""
        self.complains = logging.DEBUG if autopsy else logging.WARNING
        self.lock = FairLock()
        self.pace = Pace()
        self.store = Store()
        self.requests = RequestView(self.store)
        self.engines: dict[tuple[str, str], EngineView] = {}
        """By server and engine: several servers may share an agent, and their engines' numbers."""
        self.sources: dict[str, Source] = {}
        self.signals: list[Signal] = []
        self.say: Callable[[str], None] = log.debug if autopsy else log.warning
        """Where a person reads it: in the server's log, once the agent has one."""
        self.refused: dict[str, str] = {}
        self._refusals: set[str] = set()
        self.restarts = 0
        self._prepared: set[tuple[str, str]] = set()

    def poll(self) -> int:
        """Read all that is new in all rings; returns the number of records."""
        with self.lock:
            return self._poll()

    def read_dead(self) -> None:
        """Read all rings to their end, for a post-mortem."""
        with self.lock:
            self._discover()
            for source in self.sources.values():
                quiet = 0
                while quiet < 2 and not source.drained:  # a torn record is looked at twice
                    quiet = 0 if self._read(source) else quiet + 1
            for engine in self.engines.values():
                engine.match()

    def _poll(self) -> int:
        self._discover()
        total = 0
        self.pace.hurry = False
        for source in self.sources.values():
            if not source.drained:
                total += self._read(source)
        for source in self.sources.values():
            if source.drained:
                self.requests.drop(source.number)
        now = time.monotonic_ns()
        for engine in self.engines.values():
            engine.match()
            engine.judge(now - SETTLE_NS)
        for signal in self.signals:
            signal.poll()
        self.requests.tidy(now, any(s.alive and s.engine for s in self.sources.values()))
        return total

    def _discover(self) -> None:
        try:
            names = sorted(p.name for p in self.folder.iterdir() if p.suffix == SUFFIX)
        except OSError:
            return
        for name in names:
            if name in self.sources or name in self.refused:
                continue
            try:
                reader = Reader(self.folder / name)
            except RingError as error:
                if name not in self._refusals or not error.passing:
                    log.log(self.complains, "ring refused: %s", error)
                self._refusals.add(name)
                if not error.passing:
                    self.refused[name] = str(error)
                continue
            source = Source(len(self.sources) + 1, reader)
            self.sources[name] = source
            with contextlib.suppress(RingError):  # the first look will say so
                self._describe(source)

    def _describe(self, source: Source) -> None:
        info = source.reader.info()
        if not info or info == source.info:
            return
        if not described(info):
            raise RingError(f"{source.reader.path}: the description of its process is damaged")
        buckets = info.get("buckets", BUCKET_LIMITS)
        steps = info.get("step_seconds", STEP_SECONDS)
        if (buckets, steps) != (BUCKET_LIMITS, STEP_SECONDS):
            # Its totals and its records go by other cells: nothing in it means what we would think.
            problem = f"its context buckets are {buckets}, the agent's {BUCKET_LIMITS}"
            if buckets == BUCKET_LIMITS:
                problem = f"its step_seconds are {steps}, the agent's {STEP_SECONDS}"
            self.say(
                f"llmobs: {source.reader.path.name} is not read, {problem}: both must go by the "
                "same LLMOBS_SLO_FILE; start the server again"
            )
            raise RingError(f"{source.reader.path}: {problem}")
        source.info = info
        models = source.models
        self.requests.models[source.number] = models
        self.requests.resources[source.number] = dict(info.get("resource", {}))
        engine_name = str(info.get("engine", "0"))
        if "engine_core" in source.roles or "worker" in source.roles:
            identity = (str(info.get("server")), engine_name)
            engine = self.engines.get(identity)
            if engine is None:
                engine = EngineView(
                    engine_name,
                    self.store,
                    self.requests.sequence_changed,
                    self.requests.slow_gap,
                )
                self.engines[identity] = engine
                self.requests.default_engine = min(name for _, name in self.engines)
                self.requests.several_engines = len(self.engines) > 1
            source.engine = engine
            lacking = info.get("lacking", {})
            engine.front_end = "front_end" not in lacking
            engine.host_only = engine.host_only or lacking.get("gpu_clock") == "no_gpu"
            if "engine_core" in source.roles or not engine.models:
                engine.models = models
        for model in models:
            for _, name in self.engines or [("", "0")]:
                self._prepare(model, name)

    def _prepare(self, model: str, engine: str) -> None:
        """Let every known series stand at 0 from the start."""
        if (model, engine) in self._prepared:
            return
        self._prepared.add((model, engine))
        for metric in METRICS:
            if metric.exactness is Exactness.RECORDS and metric.type is not Type.GAUGE:
                self.store.prepare(metric, {"model_name": (model,), "engine": (engine,)})
        waits = "llmobs_queue_reason_seconds_total"
        self.store.add(waits, model, engine, HAND_OVER, amount=0)

    def _read(self, source: Source) -> int:
        before = source.records
        alive = True
        try:
            self._tail(source)
            if source.records == before and not self.autopsy and not source.reader.alive():
                alive = False
                self._tail(source)  # once more: now what the dead process wrote is all there
        except Exception as error:
            # A ring is only bytes: whatever they say, it must not cost us the other rings.
            log.log(
                self.complains,
                "ring given up: %s",
                error if isinstance(error, RingError) else f"{source.reader.path}: {error!r}",
            )
            self._gap(source, 0)
            source.finish()
        else:
            source.alive = alive
            if not alive:
                source.finish()
                if source.engine is not None and "engine_core" in source.roles:
                    source.engine.alive_wall = 0
        return source.records - before

    def _tail(self, source: Source) -> None:
        """Read what is new in one ring."""
        self._describe(source)
        if not source.info:  # just being rewritten
            source.looks += 1
            if source.looks > LOOKS:
                raise RingError(f"{source.reader.path}: its process is not described")
            return
        source.cells = source.reader.totals()
        if source.engine is not None and "engine_core" in source.roles:
            source.engine.alive_wall = source.cells[schema.PROCESS_CELL["alive_wall_ns"]]
        if source.engine is not None and source.kv_blocks:
            bytes_ = source.cells[schema.PROCESS_CELL["kv_cache_bytes"]]
            source.engine.block_bytes = bytes_ / (source.kv_blocks + 1)  # the null block's too
        # One round of the ring, from where it can still be read: what stood there when we came is
        # then read or lost. One that is written faster than we read must not keep us from others.
        reader, lost_before = source.reader, source.lost
        end = reader.position + reader.capacity
        while reader.position < end:
            batch = reader.read(BATCH)
            self.pace.hurry |= len(batch.records) == BATCH
            if batch.lost:
                if source.lost == lost_before:
                    end = reader.position + reader.capacity
                self._gap(source, batch.lost)
            if not len(batch.records):
                break
            source.records += len(batch.records)
            self._feed(source, batch.rows())
        if source.gapped and "api_server" in source.roles and not self.autopsy:
            ended = source.cells[schema.PROCESS_CELL["edges_ended"]]
            self.requests.missed_ends(source.number, ended)
            for (model, bucket), count in source.ended().items():
                self.requests.missed_verdicts(source.number, model, bucket, count)

    def _gap(self, source: Source, lost: int) -> None:
        source.lost += lost
        source.gapped = True
        if source.engine is not None and "engine_core" in source.roles:
            source.engine.gap()
            self.requests.engine_gap(time.monotonic_ns())
        elif source.engine is not None:
            source.engine.forwards.clear()  # a worker's: only its stages are missing
        if "api_server" in source.roles:
            self.requests.gap(source.number)

    def _feed(self, source: Source, records: list[tuple[Any, ...]]) -> None:
        engine, number, until = source.engine, source.number, self.until
        source.newest = max(source.newest, records[-1][6]) if records else source.newest
        for place, record in enumerate(self.pace.over(records)):
            try:
                if record[1] in PROCESS_KINDS:
                    source.fate.feed(record)
                elif until is not None and record[6] > until:
                    continue
                elif record[1] in FRONT_KINDS:
                    self.requests.feed(number, record)
                elif record[1] in PAUSE_KINDS:
                    self._pause(source, record)
                elif engine is not None:
                    engine.feed(record)
            except Exception as error:
                # Whole by its number, nonsense by its content: what it stands among is no better.
                # The totals are not made of records and still count.
                if not source.damaged:
                    log.log(self.complains, "ring damaged: %s: %r", source.reader.path, error)
                source.damaged = True
                self._gap(source, len(records) - place)
                break
        self._describe(source)

    def _pause(self, source: Source, record: tuple[Any, ...]) -> None:
        """A process stood still: whatever it had to do waited."""
        _, kind, _, _, _, columns, end, _ = record
        pause = (source.roles[0], kind, columns[0], end)
        if source.engine is not None:
            source.engine.pauses.add(*pause)

    def skip_to_newest(self) -> None:
        """After a restart: what was read before must not be counted twice. A ring that has not gone
        round yet is read again from its start instead, and so nothing is missing at all."""
        with self.lock:
            self._discover()
            for source in self.sources.values():
                try:
                    self._describe(source)
                    newest = source.reader.newest()
                except RingError:
                    continue  # given up at the first look
                if newest > source.reader.capacity:
                    self._gap(source, 0)
                    source.reader.position = newest + 1
                    source.cells = source.reader.totals()
                    # What ended before is none of this agent's.
                    ended = source.cells[schema.PROCESS_CELL["edges_ended"]]
                    self.requests.ends_seen[source.number] = ended
                    for (model, bucket), count in source.ended().items():
                        self.requests.judged[source.number, model, bucket] = count

    def dropped_spans(self) -> dict[str, int]:
        """By reason; also called while there are no traces at all."""
        traces = self.requests.traces
        return traces.dropped if traces is not None else dict.fromkeys(DROP_REASONS, 0)

    def alive(self) -> bool:
        """Whether any process of the server still runs, be its ring readable or not."""
        return any(source.alive or source.reader.alive() for source in self.sources.values())


def described(info: dict[str, Any]) -> bool:
    """Whether a header says what the rest relies on."""
    roles, models, probes = info.get("roles"), info.get("models"), info.get("probes", {})
    lacking = info.get("lacking", {})
    return (
        isinstance(roles, list)
        and bool(roles)
        and set(map(str, roles)) <= set(PROCESS_ROLES)
        and isinstance(models, list)
        and bool(models)
        and all(isinstance(model, str) for model in models)
        and isinstance(probes, dict)
        and all(type(attached) is int for attached in probes.values())
        and isinstance(lacking, dict)
        and all(isinstance(reason, str) for reason in lacking.values())
    )
