"""A run folder as the agent finds it: rings of the living and the dead, damaged ones among them."""

import math
import os
import resource
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from llmobs import schema
from llmobs.agent.collect import RunCollector
from llmobs.agent.run import FairLock, Run
from llmobs.ring import Writer
from tests.rings import ENGINE, FRONT, SLOT, SLOTS_AT, new_ring, python

ENDED = 'llmobs_request_seconds_count{context_bucket="unknown",model_name="deepseek-v4"}'
INCOMPLETE = 'llmobs_incomplete_requests_total{model_name="deepseek-v4"}'
KINDS = (1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20, 21, 22, 23, 24, 32, 33, 34, 40, 41, 42)
QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
pytestmark = pytest.mark.timeout(120)


def page(run: Run) -> str:
    registry = CollectorRegistry()
    registry.register(RunCollector(run))
    return generate_latest(registry).decode()


def value(text: str, series: str) -> float:
    """The value of one series, as a line of the page has it."""
    (line,) = [line for line in text.splitlines() if line.startswith(series + " ")]
    return float(line.rpartition(" ")[2])


def healthy(folder: Path) -> Writer:
    """A front end that does well."""
    ring = Writer(folder / "api_server-healthy.ring", 64, {**FRONT, "models": ["healthy"]})
    one_request(ring, 1)
    return ring


def one_request(ring: Writer, number: int) -> None:
    ring.put(1, 10**9, number, 1, 0)
    ring.put(5, 2 * 10**9, number, 4, 400, 4, 0, 10**9, 0, 0)
    ring.cells[schema.PROCESS_CELL["edges_ended"]] += 1


def check_the_others_are_read(run: Run, ring: Writer) -> None:
    """Whatever became of a damaged ring."""
    series = 'llmobs_request_seconds_count{context_bucket="unknown",model_name="healthy"}'
    assert value(page(run), series) == 1
    one_request(ring, 2)
    for _ in range(3):
        run.poll()
    assert value(page(run), series) == 2


# Damage

SMALL = st.integers(-2, 6)
ANY = SMALL | st.integers(-(2**63), 2**63 - 1) | st.sampled_from([10**9, 2**31, -(2**31) - 1])
RECORD = st.tuples(
    st.sampled_from(KINDS) | st.integers(0, 255),
    *(ANY, st.integers(0, 4) | st.integers(0, 2**32 - 1)),
    *(st.integers(0, 4) | st.integers(0, 255), st.integers(0, 4) | st.integers(0, 2**16 - 1)),
    *[ANY] * 9,
)
ROLES = st.sampled_from(
    [["engine_core"], ["api_server"], ["worker"], ["engine_core", "worker", "api_server"]]
)


@given(ROLES, st.lists(st.lists(RECORD, max_size=30), min_size=1, max_size=4))
@settings(QUIET, max_examples=30)
def test_records_that_make_no_sense(roles: list[str], turns: list[list[Any]]) -> None:
    """Whole by their numbers, nonsense by their content."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        other = healthy(folder)
        ring = new_ring(folder, {**ENGINE, "roles": roles}, capacity=64)
        run = Run(folder)
        for records in turns:
            for record in records:
                ring.put(*record)
            run.poll()
        check_the_others_are_read(run, other)


LIKELY = st.tuples(
    st.sampled_from(KINDS),
    *(st.integers(1, 40).map(lambda n: n * 10**7), st.integers(0, 3)),
    *(st.integers(0, 3), st.integers(0, 7)),
    *[st.integers(0, 5)] * 9,
)


@given(ROLES, st.lists(st.lists(LIKELY, max_size=60), min_size=1, max_size=4))
@settings(QUIET, max_examples=30)
def test_records_in_an_order_that_cannot_be(roles: list[str], turns: list[list[Any]]) -> None:
    """Every number likely, the whole impossible."""
    test_records_that_make_no_sense.hypothesis.inner_test(roles, turns)


SPLASH = st.tuples(st.integers(0, SLOTS_AT + 64 * SLOT), st.binary(min_size=1, max_size=200))


@given(ROLES, st.lists(SPLASH, min_size=1, max_size=8), st.lists(SPLASH, max_size=8))
@settings(QUIET, max_examples=30)
def test_bytes_that_make_no_sense(
    roles: list[str], before: list[tuple[int, bytes]], after: list[tuple[int, bytes]]
) -> None:
    """Anywhere in the file, before and while it is read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        other = healthy(folder)
        ring = new_ring(folder, {**ENGINE, "roles": roles}, capacity=64)
        for number in range(1, 40):
            ring.put(21, number * 10**7, number, 1, 0, number, number, number, 3, 3, 3, 0, 0, 0)
        run = Run(folder)
        for splashes in (before, after):
            with open(ring.path, "r+b") as file:
                for at, content in splashes:
                    file.seek(at % (SLOTS_AT + 64 * SLOT - len(content)))
                    file.write(content)
            for _ in range(3):
                run.poll()
        check_the_others_are_read(run, other)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(
    st.dictionaries(
        st.sampled_from(["roles", "models", "probes", "engine", "server", "vllm", "probe_numbers"]),
        JSON
        | st.lists(st.sampled_from(["api_server", "engine_core", "worker", "m"]), max_size=3)
        | st.just({"join": 1}),
    )
)
@settings(QUIET, max_examples=30)
def test_a_description_that_makes_no_sense(info: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        other = healthy(folder)
        info = {"roles": ["engine_core"], **info}
        Writer(folder / "engine_core-1-1.ring", 64, info).put(21, 5, 1)
        run = Run(folder)
        run.poll()
        check_the_others_are_read(run, other)


@pytest.mark.parametrize("length", [0, 64, 16_384, 20_000, SLOTS_AT, SLOTS_AT + SLOT])
def test_a_file_cut_short_while_it_is_watched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    """What it said before stands; it is said once; its process still lives, and so does the
    agent."""
    other = healthy(tmp_path)
    ring = new_ring(tmp_path, FRONT, capacity=4096)
    ring.cells[schema.model_cell("received", 0)] = 7
    run = Run(tmp_path)
    run.poll()
    os.truncate(ring.path, length)
    for _ in range(3):
        run.poll()
    text = page(run)
    series = 'llmobs_requests_received_total{context_bucket="0-1k",model_name="deepseek-v4"}'
    assert value(text, series) == 7
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning == f"ring given up: {ring.path}: cut short"
    assert run.alive()
    check_the_others_are_read(run, other)


def test_a_nonsensical_record_is_lost_and_the_totals_still_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, however many there are; what comes after the next snapshot is read again."""
    other = healthy(tmp_path)
    ring = new_ring(tmp_path, ENGINE, capacity=64)
    ring.cells[schema.model_cell("requests", 0)] = 3
    ring.cells[schema.model_cell("preemptions", 0)] = 4
    run = Run(tmp_path)
    labels = '{context_bucket="0-1k",engine="0",model_name="deepseek-v4"'
    gauge = labels.replace("}", "") + ',state="waiting"}'
    assert value(page(run), f"llmobs_requests{gauge}") == 3
    for _ in range(3):
        ring.put(21, 10**9, 1, 77)  # there is no such kind of batch
        run.poll()
    ring.cells[schema.model_cell("requests", 0)] = 2
    ring.cells[schema.model_cell("preemptions", 0)] = 5
    text = page(run)
    assert value(text, f"llmobs_requests{gauge}") == 2
    assert value(text, f"llmobs_preemptions_total{labels}}}") == 5
    lost = 'llmobs_records_lost_total{model_name="deepseek-v4",process="engine_core"}'
    assert value(text, lost) == 1  # after a gap nothing is read but the next snapshot
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith(f"ring damaged: {ring.path}: ")
    ring.put(23, 2 * 10**9, 101, 1)
    ring.put(23, 2 * 10**9, 101, 0)
    written(ring, iter(range(300, 303)))
    series = (
        'batch_size_distribution_count{batch_kind="decode",engine="0",model_name="deepseek-v4"}'
    )
    assert value(page(run), series) == 3
    check_the_others_are_read(run, other)


def test_a_ring_that_cannot_be_opened_just_now_is_opened_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent had no descriptor left."""
    ring = new_ring(tmp_path, FRONT, capacity=64)
    ring.cells[schema.model_cell("received", 0)] = 7
    run = Run(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/", os.O_RDONLY)
    os.close(lowest)
    # One more: to list the folder takes one, and mapping a file takes a second for itself.
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, limits[1]))
    try:
        for _ in range(3):
            run.poll()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not run.sources
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning == f"ring refused: {ring.path}: Too many open files"
    series = 'llmobs_requests_received_total{context_bucket="0-1k",model_name="deepseek-v4"}'
    assert value(page(run), series) == 7


@pytest.mark.parametrize("content", [b"", b"x" * 100_000, b"LLMOBSR1" + bytes(70_000)])
def test_what_is_no_ring_is_refused_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    other = healthy(tmp_path)
    (tmp_path / "engine_core-1-1.ring").write_bytes(content)
    (tmp_path / "notes.txt").write_text("not ours")
    run = Run(tmp_path)
    for _ in range(3):
        run.poll()
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith(f"ring refused: {tmp_path}/engine_core-1-1.ring: ")
    check_the_others_are_read(run, other)


def test_a_description_that_is_just_being_rewritten(tmp_path: Path) -> None:
    """Nothing is lost: the ring is read when it is known whose it is."""
    ring = new_ring(tmp_path, ENGINE, capacity=64)
    ring.put(21, 10**9, 1, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    (length,) = struct.unpack_from("<I", ring._map, 28)
    struct.pack_into("<I", ring._map, 28, 0)
    run = Run(tmp_path)
    assert run.poll() == 0
    assert "batch_size_distribution_sum" not in page(run)
    struct.pack_into("<I", ring._map, 28, length)
    assert run.poll() == 1
    series = 'batch_size_distribution_sum{batch_kind="decode",engine="0",model_name="deepseek-v4"}'
    assert value(page(run), series) == 4


def test_a_huge_count_takes_no_time(tmp_path: Path) -> None:
    """A list of beams of four thousand million tokens each is a matter of arithmetic."""
    front = Writer(tmp_path / "api_server-1-1.ring", 64, FRONT)
    engine = Writer(tmp_path / "engine_core-1-1.ring", 64, ENGINE)
    front.put(1, 10**9, 1, 1)
    front.put(2, 10**9, 1, 4 | 8, 0, 55, 10, 100, 0, 0)
    front.put_list(6, 10**9, [2**32 - 1] * 18, 1)
    engine.put(16, 10**9, 1, 0, 0, 55, 10)
    engine.put(17, 10**9, 1, 1, 0, 10, 0, 1, 55)
    engine.put_list(19, 2 * 10**9, [1, 1])
    engine.put(21, 2 * 10**9, 1, 0, 0, 10**9, 10**9, 10**9, 1, 10, 1)
    engine.put(22, 2 * 10**9, 1, 0, 0, 1, 55)
    front.put(5, 3 * 10**9, 1, 0, 200, 0, 18, 10**9, 0, 0)
    run = Run(tmp_path)
    run.poll()
    series = (
        'decode_token_latency_seconds_count{context_bucket="0-1k",engine="0",'
        'model_name="deepseek-v4",token="next"}'
    )
    assert value(page(run), series) == 18 * (2**32 - 2)


# The dead

SERVER = """
import os, sys
from pathlib import Path
from llmobs.frontend import sequence_key
from llmobs.ring import Writer
folder, role, order = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
info = {"roles": [role], "models": ["deepseek-v4"], "engine": 0}
ring = Writer(folder / f"{order}-{role}-{os.getpid()}-1.ring", 4096, info)
MS = 1_000_000
for n in range(1, 101):
    key, start = sequence_key(f"r{n}"), n * 100 * MS
    if role == "api_server":
        ring.put(1, start, n, 1, 0)
        ring.put(2, start + MS, n, 8, 0, key, 10, 100, 0, 0)
        ring.put(3, start + 9 * MS, n)
        ring.put(4, start + 30 * MS, n, 1, 0, key, 2, 0)
        ring.put(5, start + 30 * MS, n, 1, 200, 0, 2, start, 1, 0)
        ring.cells[CELL] += 1
    else:
        ring.put(16, start + 2 * MS, n, 0, 0, key, 10)
        ring.put(17, start + 3 * MS, n, 1, 0, 10, 0, 2 * n, key)
        ring.put_list(19, start + 8 * MS, [n, 1])
        ring.put(21, start + 8 * MS, 2 * n, 0, 0, start + 3 * MS, start + 3 * MS, start, 1, 10, 1)
        ring.put(21, start + 28 * MS, 2 * n + 1, 1, 0, start + 9 * MS, start, start, 1, 1, 1)
        ring.put(22, start + 28 * MS, n, 0, 0, 2, key)
""".replace("CELL", str(schema.PROCESS_CELL["edges_ended"]))


@pytest.mark.parametrize("first", ["api_server", "engine_core"])
def test_the_rings_of_a_dead_server_tell_all(tmp_path: Path, first: str) -> None:
    """In whichever order they are found."""
    for role in ("api_server", "engine_core"):
        process = python(SERVER, tmp_path, role, int(role != first))
        assert process.communicate()[1] == ""
    run = Run(tmp_path)
    run.poll()
    run.poll()
    assert not run.alive()
    assert len(run.requests.finished) == 100
    assert run.requests.incomplete == 0
    for request in run.requests.finished:
        assert request.outcome == "length"
        phases = [round(phase * 1000, 6) for phase in request.phases]
        assert phases == [1, 2, 5, 0, 20, 2]
        assert math.isclose(request.first_token or 0, 0.009)
        assert math.isclose(request.longest_gap or 0, 0.02)
    assert not run.requests.requests


def test_requests_that_a_dead_front_end_left_open_are_forgotten(tmp_path: Path) -> None:
    process = python(SERVER.split("        ring.put(4,")[0] + "        pass", tmp_path, "worker", 0)
    process.communicate()
    code = SERVER.replace("        ring.put(5,", "        0 and ring.put(5,")
    python(code, tmp_path, "api_server", 1).communicate()
    run = Run(tmp_path)
    for _ in range(3):
        run.poll()
    assert not run.requests.requests
    assert not run.requests.by_key
    assert not run.requests.finished


# Starting again


def written(ring: Writer, numbers: Iterator[int]) -> None:
    for number in numbers:
        ring.put(21, number * 10**7, number, 1, 0, number, number, number, 2, 2, 2, 0, 0, 0)


def test_a_new_agent_rebuilds_what_the_ring_still_has(tmp_path: Path) -> None:
    ring = new_ring(tmp_path, ENGINE, capacity=64)
    written(ring, iter(range(1, 51)))
    for _ in range(2):
        run = Run(tmp_path)
        run.skip_to_newest()
        run.poll()
        (engine,) = run.engines.values()
        assert engine.steps == 50
        assert not engine.resync


def test_a_new_agent_counts_nothing_twice(tmp_path: Path) -> None:
    """The ring has gone round: what was read before is left to what was told then."""
    ring = new_ring(tmp_path, ENGINE, capacity=64)
    written(ring, iter(range(1, 101)))
    run = Run(tmp_path)
    run.skip_to_newest()
    run.poll()
    (engine,) = run.engines.values()
    assert engine.steps == 0
    ring.put(23, 101 * 10**7, 101, 1)
    ring.put(23, 101 * 10**7, 101, 0)
    written(ring, iter(range(102, 105)))
    run.poll()
    assert engine.steps == 3
    series = 'batch_size_distribution_sum{batch_kind="decode",engine="0",model_name="deepseek-v4"}'
    assert value(page(run), series) == 6
    assert (
        value(
            page(run), 'llmobs_records_lost_total{model_name="deepseek-v4",process="engine_core"}'
        )
        == 0
    )


def test_a_run_folder_that_is_missing(tmp_path: Path) -> None:
    run = Run(tmp_path / "nowhere")
    assert run.poll() == 0
    assert not run.alive()
    page(run)


def test_a_ring_that_went_round_thrice_counts_each_end_once(tmp_path: Path) -> None:
    ring = Writer(tmp_path / "api_server-1-1.ring", 20_000, FRONT)
    run = Run(tmp_path)
    run.poll()
    for number in range(1, 30_001):
        one_request(ring, number)
    for _ in range(3):
        run.poll()
        shown = page(run)
        told = value(shown, ENDED)
        assert told > 5000
        assert told + value(shown, INCOMPLETE) == 30_000
    (source,) = run.sources.values()
    assert source.records + source.lost == 60_000


def test_who_waits_for_the_lock_has_it_next() -> None:
    """Whoever takes it again at once has it after them."""
    lock, order = FairLock(), list[str]()

    def waits() -> None:
        with lock:
            order.append("waiter")

    waiter = threading.Thread(target=waits)
    with lock:
        waiter.start()
        while not lock._next.locked():
            time.sleep(0.001)
    with lock:
        order.append("again")
    waiter.join()
    assert order == ["waiter", "again"]
