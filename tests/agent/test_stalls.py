"""Steps that stood still, from records written by hand: which are stalls, how long, and why."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llmobs import schema
from llmobs.agent.request import Admission, Request
from llmobs.agent.run import Run
from llmobs.agent.spans import Span, span_tree
from llmobs.agent.steps import EngineView
from llmobs.ring import Writer
from llmobs.schema import Outcome
from tests.rings import ENGINE

MS = 1_000_000
JOIN, CHUNK, PREEMPT, TOKENS, STEP, LEAVE = 16, 17, 18, 19, 21, 22
FORWARD, SAMPLE, GPU, COLLECTION, FROZEN = 32, 33, 34, 40, 42
PREFILL, DECODE, MIXED = 0, 1, 2
WORKER = {**ENGINE, "roles": ["worker"], "rank": 0}
NO_GPU = {"lacking": {"gpu_clock": "no_gpu"}}


class Server:
    """An engine core and its worker, whose records are written here. Times in milliseconds."""

    def __init__(self, folder: Path, gpu: bool = False) -> None:
        self.engine = Writer(folder / "engine_core.ring", 1024, ENGINE)
        self.worker = Writer(folder / "worker.ring", 1024, WORKER | ({} if gpu else NO_GPU))
        self.run = Run(folder)
        self.time = 1000
        self.number = 0
        self.sequences = 0

    def join(self, prompt: int = 10) -> None:
        """A sequence comes, and waits."""
        self.sequences += 1
        self.engine.put(*(JOIN, self.time * MS, self.sequences, 0, 0), self.sequences, prompt)

    def step(
        self,
        took: int,
        forward: int | None = None,
        kind: int = DECODE,
        first: int = 0,
        chunk: int = 0,
        again: bool = False,
        gpu: int = 0,
        waits: int = 0,
    ) -> None:
        """A step of so many ms, `forward` of them in the worker; it may be a chunk of a prefill of
        the newest sequence, and its first token. `waits`: before it is scheduled."""
        self.number += 1
        start = (self.time + waits) * MS
        end = (self.time + took) * MS
        if chunk:
            entry = 2 if again else 1
            place = (self.sequences, entry, 0)
            self.engine.put(CHUNK, start, *place, chunk, 0, self.number, self.sequences)
        if first:
            self.engine.put_list(TOKENS, end, [first, 1])
        tokens = self.sequences + max(chunk - 1, 0)
        computing = max(took - waits - 2, 0) if forward is None else forward
        begin = start + MS
        until = begin + (computing if not gpu else 1) * MS
        self.worker.put(FORWARD, until, 0, 0, 0, begin, self.sequences, tokens)
        self.worker.put(SAMPLE, until, 0, 0, 0, until - MS // 2)
        if gpu:
            self.worker.put(GPU, until + MS, 0, 0, 0, begin, gpu * MS, MS)
        about = (start, begin, end - MS, self.sequences, tokens, 1, 0)
        self.engine.put(STEP, end, self.number, kind, 0, *about)
        self.time += took

    def decoding(self, others: int = 0, steps: int = 20) -> None:
        """So many sequences and one more decode, 10 ms a step."""
        for number in range(1, others + 2):
            self.join()
            self.step(12, kind=MIXED if others else PREFILL, first=number, chunk=10)
        for _ in range(steps):
            self.step(10)

    def idle(self, milliseconds: int) -> None:
        self.time += milliseconds

    def leave(self) -> None:
        for number in range(1, self.sequences + 1):
            self.engine.put(LEAVE, self.time * MS, number, 0, 0, 1, number)

    @property
    def view(self) -> EngineView:
        (view,) = self.run.engines.values()
        return view

    def stalls(self) -> list[tuple[int, int, str, str]]:
        """Start, length, cause, process."""
        self.run.poll()
        return [
            (s.start // MS, (s.end - s.start) // MS, s.cause, s.process) for s in self.view.stalls
        ]

    def seconds(self) -> dict[str, float]:
        """By cause, as the counter has it."""
        counters = self.run.store.counters["llmobs_stall_seconds_total"]
        return {labels[-1]: value for labels, value in counters.items() if value}


def test_steps_as_usual_are_none(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.decoding(others=3, steps=60)
    server.step(199)  # nobody's target is missed
    assert server.stalls() == []
    assert server.seconds() == {}


@pytest.mark.parametrize(
    ("process", "record", "cause"),
    [
        ("engine_core", FROZEN, "frozen"),
        ("worker", FROZEN, "frozen"),
        ("engine_core", COLLECTION, "gc"),
        ("worker", COLLECTION, "gc"),
    ],
)
def test_a_process_that_stood_still(tmp_path: Path, process: str, record: int, cause: str) -> None:
    server = Server(tmp_path)
    server.decoding()
    ring = server.engine if process == "engine_core" else server.worker
    since = server.time + 150
    ring.put(record, (since + 850) * MS, 0, 2, 0, since * MS)
    server.step(1000, forward=900 if process == "worker" else 5)
    assert server.stalls() == [(since - 150, 1000, cause, process)]
    assert server.seconds() == {cause: pytest.approx(1.0)}


def test_stopped_within_a_collection_it_was_stopped(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.decoding()
    for kind in (COLLECTION, FROZEN):
        server.engine.put(kind, (server.time + 900) * MS, 0, 2, 0, (server.time + 10) * MS)
    server.step(1000, forward=5)
    assert [stall[2] for stall in server.stalls()] == ["frozen"]


def test_a_pause_that_explains_little_is_not_the_cause(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.decoding()
    server.engine.put(COLLECTION, (server.time + 300) * MS, 0, 2, 0, server.time * MS)
    server.step(1000, forward=5)
    assert [stall[2] for stall in server.stalls()] == ["unknown"]


def test_several_collections_explain_it_together(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.decoding()
    for start in (0, 300, 600):
        begin = server.time + start
        server.engine.put(COLLECTION, (begin + 200) * MS, 0, 2, 0, begin * MS)
    server.step(1000, forward=5)
    assert [stall[2] for stall in server.stalls()] == ["gc"]


def test_between_two_steps_counts_as_well(tmp_path: Path) -> None:
    """The engine did not even schedule."""
    server = Server(tmp_path)
    server.decoding()
    before = server.time
    server.step(510, waits=500)
    assert server.stalls() == [(before, 510, "unknown", "")]


def test_the_worker_took_it(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.decoding()
    before = server.time
    server.step(600, forward=590)
    assert server.stalls() == [(before, 600, "worker", "")]


def test_a_prompt_beside_the_decoding_ones(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.decoding(others=3)
    server.join(prompt=4000)
    server.step(700, kind=MIXED, first=5, chunk=4000)
    assert [stall[1:3] for stall in server.stalls()] == [(700, "prefill")]


def test_a_prompt_with_nobody_beside_it_is_no_stall(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.join(prompt=4000)
    for place in range(3):
        server.step(900, kind=PREFILL, first=place // 2, chunk=1333)
    assert server.stalls() == []


def test_a_prompt_with_nobody_beside_it_that_does_not_compute_is_one(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.join(prompt=4000)
    server.step(900, forward=100, kind=PREFILL, first=1, chunk=4000)
    assert [stall[1:3] for stall in server.stalls()] == [(900, "unknown")]


def test_what_was_preempted_is_computed_again(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.decoding(others=3)
    server.engine.put(PREEMPT, server.time * MS, 4, 0, 0, 3000, 20, 4, 999_000)
    server.step(10)
    server.step(800, kind=MIXED, first=4, chunk=3000, again=True)
    assert [stall[1:3] for stall in server.stalls()] == [(800, "preemption")]


def test_idle_time_is_no_stall(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.decoding()
    server.leave()
    server.idle(60_000)
    server.join()
    server.step(30, kind=PREFILL, first=2, chunk=10)
    server.step(10)
    assert server.stalls() == []


def test_where_every_step_takes_long_none_is_a_stall(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.decoding(steps=2)
    for _ in range(40):
        server.step(300)
    early = server.stalls()
    assert len(early) <= 25, "until half of the steps that are compared are slow"
    for _ in range(20):
        server.step(350)
    server.step(2900)
    assert server.stalls() == early
    before = server.time
    server.step(3600)
    assert server.stalls() == [*early, (before, 3600, "worker", "")]


def test_with_a_gpu_the_host_does_not_compute_but_waits(tmp_path: Path) -> None:
    server = Server(tmp_path, gpu=True)
    server.decoding()
    before = server.time
    server.step(600, gpu=590)
    assert server.stalls() == [(before, 600, "worker", "")]


# On spans


def decoded(server: Server, left: bool = True) -> Request:
    """A request of the first sequence, from its arrival until now."""
    (sequence,) = [s for s in server.view.sequences.values() if s.number == 1]
    admission = Admission(1, 1000 * MS, 0, 10, sequence=sequence, engine=server.view)
    end = server.time * MS
    request = Request(1000 * MS, admissions={1: admission}, end=end, bucket=0, cell=0)
    request.outcome = Outcome.LENGTH if left else Outcome.ABORT
    if left:
        sequence.last = sequence.left = end
    return request


def events(span: Span) -> list[tuple[int, dict[str, Any]]]:
    """When in the span, in ms, and about what."""
    return [((at - span.start) // MS, about) for name, at, about in span.events if name == "stall"]


def child(tree: Span, name: str) -> Span:
    (found,) = [span for span in tree.children if span.name == name]
    return found


def test_the_decode_span_tells_it(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.decoding()
    frozen = server.time
    server.engine.put(FROZEN, (frozen + 5990) * MS, 0, 0, 0, (frozen + 600) * MS)
    server.step(6000, forward=5)
    for _ in range(5):
        server.step(10)
    server.run.poll()
    span = child(span_tree(decoded(server), "m", ("token_gap",)), "llm.decode")
    about = {
        "llm.stall.seconds": 6.0,
        "llm.stall.cause": "frozen",
        "llm.stall.process": "engine_core",
    }
    assert events(span) == [(200, about)]
    assert span.attributes["llm.stall.seconds"] == 6.0


def test_the_prefill_span_tells_what_its_own_work_does_not_explain(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.join(prompt=4000)
    server.step(900, kind=PREFILL, chunk=2000)
    frozen = server.time
    server.engine.put(FROZEN, (frozen + 1900) * MS, 0, 0, 0, (frozen + 100) * MS)
    server.step(2000, forward=900, kind=PREFILL, first=1, chunk=2000)
    server.step(10)
    server.run.poll()
    tree = span_tree(decoded(server), "m", ("first_token",))
    told = events(child(tree, "llm.prefill"))
    assert [(about["llm.stall.seconds"], about["llm.stall.cause"]) for _, about in told] == [
        (2.0, "frozen")
    ]
    assert events(child(tree, "llm.decode")) == []


def test_at_most_sixteen_events_and_the_longest_stalls_among_them(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.join(prompt=40_000)
    lengths = [400, 900, 300, 800, 500, 700, 600]
    for place in range(30):
        took = lengths[place % 7] if place >= 20 else 20
        server.step(took, forward=10, kind=PREFILL, chunk=1000)
    server.step(10, kind=PREFILL, first=1, chunk=1)
    server.step(10)
    server.run.poll()
    span = child(span_tree(decoded(server), "m", ("first_token",)), "llm.prefill")
    assert len(span.events) == 16
    assert sorted(about["llm.stall.seconds"] for _, about in events(span)) == [0.7, 0.8, 0.9, 0.9]
    assert all(a[1] <= b[1] for a, b in pairwise(span.events))


@pytest.mark.parametrize("silent", [False, True])
def test_a_client_that_left_while_the_engine_stood_still(tmp_path: Path, silent: bool) -> None:
    """No step has ended since, so none tells of it."""
    server = Server(tmp_path)
    wall = schema.PROCESS_CELL["alive_wall_ns"]
    server.engine.cells[wall] = 1_000_000_000 if silent else 1 << 62
    server.decoding()
    server.run.poll()
    server.time += 4000
    span = child(span_tree(decoded(server, left=False), "m", ("abort",)), "llm.decode")
    ((_, about),) = events(span)
    assert about["llm.stall.seconds"] == 4.0
    assert about["llm.stall.cause"] == ("frozen" if silent else "unknown")


# The GPU's time


@pytest.mark.parametrize("worker_first", [False, True])
def test_the_gpus_time_finds_its_step(tmp_path: Path, worker_first: bool) -> None:
    """Whichever ring is read first, and however much later it comes."""
    server = Server(tmp_path, gpu=True)
    server.run.poll()
    engine = Writer(tmp_path / "x-engine_core.ring", 64, ENGINE) if worker_first else None
    if engine is not None:
        server.engine = engine
    server.decoding(steps=3)
    server.step(30, gpu=25)
    server.step(10)
    server.run.poll()
    children = server.run.store.histograms["llmobs_forward_seconds"]
    host = children["deepseek-v4", "0", "host", "decode"]
    assert sum(host.counts) == 5
    gpu = children["deepseek-v4", "0", "gpu", "decode"]
    assert (sum(gpu.counts), gpu.sum) == (1, pytest.approx(0.025))
    step = child(span_tree(decoded(server), "m", ("sample",)), "llm.decode").children[0]
    forward, sampling = step.children
    assert forward.attributes["llm.host_seconds"] == pytest.approx(0.001)
    assert forward.attributes["llm.gpu_seconds"] == pytest.approx(0.025)
    assert sampling.attributes["llm.gpu_seconds"] == pytest.approx(0.001)


def test_without_a_gpu_there_is_no_series_and_no_attribute(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.decoding()
    server.run.poll()
    children = server.run.store.histograms["llmobs_forward_seconds"]
    assert {labels[2] for labels in children} == {"host"}
    step = child(span_tree(decoded(server), "m", ("sample",)), "llm.decode").children[0]
    assert all("llm.gpu_seconds" not in span.attributes for span in step.children)
    assert "llm.host_seconds" in step.children[0].attributes
