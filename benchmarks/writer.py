"""Plays a server for the agent: true records of an API server, an engine core and a worker.

llmobs' own code writes them: the ASGI edge, the probes of engine and worker. In vLLM's place stand
an app of few lines and the tests' scheduler, and the writer keeps its own plain count of what
happened, which the agent's page is compared with.
"""

import contextvars
import itertools
import random
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmobs import engine, frontend, pauses, process, schema, worker
from llmobs.engine import Engine
from llmobs.ring import Writer
from llmobs.schema import Finish, Kind
from tests.fake_scheduler import Scheduler, request

MODEL = "deepseek-v4"
ROLES = ("api_server", "engine_core", "worker")
PROMPTS = ((0.70, 20, 1024), (0.20, 1025, 4096), (0.08, 4097, 20000), (0.02, 32769, 40000))
"""Share, shortest and longest: chats and documents, in all four context buckets."""
BUCKETS = ("0-1k", "1k-4k", "4k-32k", "32k+")
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}
STALL_NS = 300_000_000
BEHIND_NS = 250_000_000
"""Further behind the clock than this the writer gives the lost time up."""
CHUNK = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
LAST = {"type": "http.response.body", "body": b"data: [DONE]\n\n"}


@dataclass(frozen=True)
class Traffic:
    """What the clients do. `streams` are in the server at any time, `running` of them at most in
    the engine; with `arrivals` so many come before each step instead, however many there are. A
    step takes `step_ns` and at most `budget` tokens; one in `stall_every` takes 300 ms (0: none
    does). `preprocess_ns` is the time from arrival to the hand-over. The shares are of the
    requests, but for preemptions, which are of the steps."""

    streams: int = 66
    running: int = 64
    tokens: tuple[int, int] = (100, 300)
    step_ns: int = 5_000_000
    budget: int = 8192
    arrivals: int = 0
    stall_every: int = 0
    preprocess_ns: int = 2_000_000
    aborted: float = 0.02
    rejected: float = 0.01
    stopped: float = 0.1
    preempted: float = 0.005


@types.coroutine
def _pause() -> Generator[None, None, None]:
    """Wait until the writer goes on with this coroutine."""
    yield


class Stream:
    """A request and its client. It is its own state in vLLM's output processor, too."""

    def __init__(self, number: int, choose: random.Random, traffic: Traffic) -> None:
        self.request_id = f"chatcmpl-{number:032x}-{number:08x}"
        self.refused = choose.choice((400, 503)) if choose.random() < traffic.rejected else 0
        where = choose.random()
        for place, (share, low, high) in enumerate(PROMPTS):
            self.bucket = BUCKETS[place]
            self.prompt_len = choose.randint(low, high)
            where -= share
            if where < 0:
                break
        self.most = choose.randint(*traffic.tokens)
        self.stops_at = choose.randint(1, self.most) if choose.random() < traffic.stopped else 0
        self.leaves_at = choose.randint(0, self.most) if choose.random() < traffic.aborted else -1
        self.tokens = 0
        self.gone = False
        # vLLM's own names:
        self.is_prefilling = True
        self.num_cached_tokens = self.prompt_len // 2
        self.detokenizer = self
        self.coroutine: Any = None
        self.context = contextvars.copy_context()

    def num_output_tokens(self) -> int:
        return self.tokens

    def go_on(self) -> bool:
        """Run the server's coroutine to its next pause; False at its end."""
        try:
            self.context.run(self.coroutine.send, None)
        except StopIteration:
            return False
        return True


@dataclass
class Truth:
    """What the writer knows, by plain counting."""

    received: Counter[str] = field(default_factory=Counter)
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    preempted: Counter[str] = field(default_factory=Counter)
    prompts: Counter[str] = field(default_factory=Counter)
    generated: Counter[str] = field(default_factory=Counter)
    gaps: Counter[str] = field(default_factory=Counter)
    firsts: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    written: dict[str, int] = field(default_factory=dict)


class Tape:
    """Rings that hold all that was ever written, so that it can be played later; `marks` say how
    far each had come by a time, and what its totals were."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.rings = {role: Writer(folder / f"{role}.tape", capacity, {}) for role in ROLES}
        self.slots = {role: slots(ring) for role, ring in self.rings.items()}
        self.marks: list[tuple[int, dict[str, tuple[int, bytes]]]] = []

    def mark(self, time_: int, written: dict[str, int]) -> None:
        state = {role: (written[role], bytes(ring.cells)) for role, ring in self.rings.items()}
        self.marks.append((time_, state))

    def shift(self, nanoseconds: int) -> None:
        """Let it all have happened so much later."""
        for own in self.slots.values():
            own["time"] += nanoseconds
            for kind, columns in TIMES.items():
                chosen = own["kind"] == kind
                for column in columns:
                    own["columns"][chosen, column] += nanoseconds
        self.marks = [(time_ + nanoseconds, state) for time_, state in self.marks]


TIMES = {
    Kind.ARRIVE: (3,),
    Kind.END: (2,),
    Kind.STEP: (0, 1, 2, 8),
    Kind.FORWARD: (0,),
    Kind.SAMPLE: (0,),
}
"""The columns that hold a time."""


def slots(ring: Writer) -> Any:
    """A ring's slots as an array."""
    buffer = memoryview(ring._map)
    return np.ndarray((ring.capacity,), schema.SLOT, buffer=buffer, offset=schema.SLOTS_OFFSET)


def written(ring: Writer) -> int:
    """How many records a ring's writer has written."""
    return int(repr(ring._next.__self__)[len("count(") : -1]) - 1  # type: ignore[attr-defined]


def play(source: Any, target: Any, start: int, end: int) -> None:
    """Write the records numbered from `start` to before `end` as a ring's own writer would: heads
    first, tails last."""
    while start < end:
        at = start % len(target)
        count = min(end - start, len(target) - at)
        taken, put = source[start : start + count], target[at : at + count]
        put["head"] = taken["head"]
        for name in ("kind", "x", "y", "z", "columns", "time"):
            put[name] = taken[name]
        put["tail"] = taken["tail"]
        start += count


class Server:
    """The processes of one server, in this one. Its rings are opened, and its agent is started, as
    in any server's process; the settings come from the environment."""

    def __init__(self, read: Any, seed: int = 1) -> None:
        self.read = read
        """How many engine steps the agent has told of (a shared value)."""
        process.mark_server()
        front = process.current()
        front.open("api_server", MODEL, vllm="0.32.0")
        assert front.ring is not None
        pauses.stop()  # its own are none of the replay's
        pauses.LONG_FREEZE_NS = 1 << 62
        self.front = front
        self.folder = front.ring.path.parent
        rings = {"api_server": front.ring}
        for role in ROLES[1:]:
            path = self.folder / front.ring.path.name.replace("api_server", role)
            info = {**front._info(), "roles": [role], "engine": 0}
            rings[role] = Writer(path, front.ring.capacity, info)
        self.live = rings
        self.time = time.monotonic_ns()
        self.choose = random.Random(seed)
        self.numbers = itertools.count(1)
        self.streams: dict[str, Stream] = {}
        self.tokenising: deque[tuple[int, Stream]] = deque()
        self.leaving: list[Stream] = []
        self.tape: Tape | None = None
        self.request_states = self.streams  # as vLLM's output processor calls them
        self.truth = Truth()
        self.app = frontend.EdgeApp(self._app)
        self.worker = SimpleNamespace(ring=None, lacks=lambda *_, **__: None)
        # The probes read this clock.
        frontend.now = engine.now = worker.now = lambda: self.time
        worker.process = SimpleNamespace(current=lambda: self.worker)
        self.engine = Engine(rings["engine_core"], several_tokens=False)
        self.scheduler = Scheduler(self.engine, lambda: self.time)
        self.use(rings)

    def use(self, rings: dict[str, Writer]) -> None:
        """Write to these from now on."""
        self.rings = rings
        self.front.ring = rings["api_server"]
        self.engine.ring = rings["engine_core"]
        self.worker.ring = rings["worker"]

    def written(self) -> dict[str, int]:
        """How many records were written so far, by ring."""
        return {role: written(ring) for role, ring in self.rings.items()}

    # vLLM's part

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        stream: Stream = scope["stream"]
        if stream.refused:
            await send({"type": "http.response.start", "status": stream.refused, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
            return
        await _pause()  # until its prompt is tokenised
        kind = "cut" if stream.stops_at else "plain"
        known = request(stream.request_id, stream.prompt_len, stream.most, kind)
        asked = SimpleNamespace(
            request_id=stream.request_id,
            prompt_token_ids=range(stream.prompt_len),
            sampling_params=known.sampling_params,
            lora_request=None,
        )
        frontend.processed(None, asked, None)
        frontend.admitted(None, None, self, asked, None, 0)
        self.scheduler.add(known)
        await _pause()  # until its first token
        if not stream.gone:
            await send(START)
            await send(CHUNK)
            await _pause()  # until its end
        if stream.gone:
            await receive()
            frontend.aborted(None, [stream.request_id], self)
        else:
            await send(LAST)

    # The writer's loop

    def arrive(self, traffic: Traffic) -> None:
        """One request more."""
        stream = Stream(next(self.numbers), self.choose, traffic)
        bucket = "unknown" if stream.refused else stream.bucket
        self.truth.received[bucket] += 1
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [],
            "stream": stream,
        }
        stream.coroutine = self.app(scope, _disconnected, _sent)
        if stream.go_on():
            self.streams[stream.request_id] = stream
            self.tokenising.append((self.time + traffic.preprocess_ns, stream))
        else:
            self.truth.ended[bucket, "rejected"] += 1
            self.truth.rejected[str(stream.refused)] += 1

    def step(self, traffic: Traffic) -> None:
        """One engine step, and what the front end does between two."""
        while self.tokenising and self.tokenising[0][0] <= self.time:
            stream = self.tokenising.popleft()[1]
            stream.go_on()
            if not stream.leaves_at:
                self.leaving.append(stream)
        for stream in self.leaving:
            self._leave(stream)
        self.leaving.clear()
        began = self.time
        length = traffic.step_ns
        if traffic.stall_every and not (self.truth.steps + 1) % traffic.stall_every:
            length = STALL_NS

        def until(share: float) -> Callable[[], None]:
            return lambda: setattr(self, "time", began + int(length * share))

        if self.scheduler.requests:
            victims = int(self.choose.random() < traffic.preempted)
            self.scheduler.max_num_running_reqs = traffic.running
            budget = self.scheduler.max_num_scheduled_tokens = traffic.budget
            waiting = [self.streams[known.request_id] for known in self.scheduler.waiting]
            cached = iter([stream.num_cached_tokens for stream in waiting])
            output = self.scheduler.schedule(began, victims, budget, budget, cached, until(0.03))
            for victim, _ in output.preempted:
                self.truth.preempted[self.streams[victim.request_id].bucket] += 1
            token = worker.forward_starts(None, output)
            until(0.85)()
            worker.forwarded(token, None, None, output)
            token = worker.sampling_starts(None)
            until(0.93)()
            worker.sampled(token, None, None)
            came_out = self.scheduler.update(
                output, lambda known, most: 1, lambda known: False, until(0.96)
            )
            self.truth.steps += bool(output.num_scheduled_tokens)
            for known, count in came_out:
                self._deliver(known, count)
        self.time = began + length

    def stream(self, traffic: Traffic, steps: int, most_unread: int = 0) -> None:
        """So many engine steps, each at its time. With `most_unread` it waits for the agent where
        that has not read as many of them."""
        engine.SNAPSHOT_NS = 200 * traffic.step_ns
        end = self.truth.steps + steps
        while self.truth.steps < end:
            while most_unread and self.truth.steps - self.read.value > most_unread:
                time.sleep(0.01)
            self._fill(traffic)
            self._wait(self.time + traffic.step_ns)
            self.step(traffic)

    def drain(self, traffic: Traffic) -> None:
        """Until the last request is over."""
        while self.streams:
            self._wait(self.time + traffic.step_ns)
            self.step(traffic)

    def record(self, traffic: Traffic, steps: int, capacity: int) -> None:
        """Do so many steps at once, to play them later: this process could not write as fast."""
        self.tape = tape = Tape(self.folder.parent, capacity)
        for role, ring in tape.rings.items():
            ring._next = itertools.count(written(self.live[role]) + 1).__next__
            ring.cells[:] = self.live[role].cells
        self.use(tape.rings)
        tape.mark(self.time, self.written())
        for number in range(steps):
            self._fill(traffic)
            self.step(traffic)
            if number % 4 == 3:
                tape.mark(self.time, self.written())
        while self.streams:
            self.step(traffic)
        tape.mark(self.time, self.written())

    def blast(self) -> float:
        """Play what was recorded, whoever keeps up; tells the seconds it took."""
        assert self.tape is not None
        tape, targets = self.tape, {role: slots(ring) for role, ring in self.live.items()}
        tape.shift(time.monotonic_ns() - tape.marks[0][0])
        before = {role: written(ring) + 1 for role, ring in self.live.items()}
        for at, state in tape.marks:
            self._wait(at)
            for role, (last, cells) in state.items():
                play(tape.slots[role], targets[role], before[role], last + 1)
                self.live[role].cells[:] = memoryview(cells).cast("q")
                before[role] = last + 1
        for role, ring in self.live.items():
            ring._next = itertools.count(before[role]).__next__
        self.use(self.live)
        self.time = time.monotonic_ns()
        return (self.time - tape.marks[0][0]) / 1e9

    def _fill(self, traffic: Traffic) -> None:
        for _ in range(traffic.arrivals):
            self.arrive(traffic)
        while not traffic.arrivals and len(self.streams) < traffic.streams:
            self.arrive(traffic)

    def _wait(self, until: int) -> None:
        """Sleep until the clock of the machine stands there."""
        ahead = until - time.monotonic_ns()
        if ahead > 0:
            time.sleep(ahead / 1e9)
        elif self.rings is self.live and ahead < -BEHIND_NS:
            self.time -= ahead

    def _deliver(self, known: Any, count: int) -> None:
        """The front end takes what came out of the engine for one request."""
        stream = self.streams[known.request_id]
        stream.tokens += count
        if stream.is_prefilling:
            stream.is_prefilling = False
            self.truth.firsts[stream.bucket] += 1
            stream.go_on()
        if stream.tokens == stream.stops_at or known.finished:
            stopped = stream.tokens == stream.stops_at
            finish = Finish.STOP if stopped else Finish.LENGTH
            frontend.finished(None, None, self, stream, finish)
            self._end(stream, "stop" if stopped else "length")
            if not known.finished:
                self.scheduler.abort(stream.request_id)
        elif stream.tokens == stream.leaves_at:
            self.leaving.append(stream)

    def _leave(self, stream: Stream) -> None:
        """A client closes its connection."""
        stream.gone = True
        self._end(stream, "abort")
        self.scheduler.abort(stream.request_id)

    def _end(self, stream: Stream, outcome: str) -> None:
        stream.go_on()
        del self.streams[stream.request_id]
        truth, bucket = self.truth, stream.bucket
        truth.ended[bucket, outcome] += 1
        truth.generated[bucket] += stream.tokens
        truth.gaps[bucket] += max(stream.tokens - 1, 0)
        if not stream.is_prefilling:
            truth.prompts[bucket] += stream.prompt_len


async def _sent(message: dict[str, Any]) -> None:
    """uvicorn's send."""


async def _disconnected() -> dict[str, Any]:
    """uvicorn's receive, once the client is gone."""
    return {"type": "http.disconnect"}


def serve(commands: Any, read: Any) -> None:
    """The server's process: does what it is told, and answers with the truth."""
    server = Server(read)
    commands.send(server.folder)
    while (command := commands.recv()) is not None:
        name, *arguments = command
        result = getattr(server, name)(*arguments)
        server.truth.written = {role: written(ring) for role, ring in server.live.items()}
        commands.send((result, server.truth))
