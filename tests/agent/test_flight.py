"""The flight record: what the agent writes beside the rings, and where."""

import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmobs import schema
from llmobs.agent.flight import Flight, prune
from llmobs.agent.run import Run
from llmobs.ring import Writer
from tests.rings import ENGINE, FRONT, new_ring, python

pytestmark = pytest.mark.timeout(60)
TELLS = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 15)
"""Whether the kernel tells whoever asks how a process ended."""
INFO = {"server": "77-88", "began": 1000.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "runs" / "77-88"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "volume"


Make = Callable[..., Flight]


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    made: list[Flight] = []

    def make(volume: Path | None, said: list[str] | None = None) -> Flight:
        run = Run(folder)
        run.poll()
        flight = Flight(run, volume, (said if said is not None else []).append)
        run.signals.append(flight)
        made.append(flight)
        return flight

    yield make
    for flight in made:
        if flight._thread.is_alive():
            flight.close()


def read(path: Path, fits: Callable[[dict[str, Any]], bool] = lambda record: True) -> Any:
    """The record, once there is one that fits."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if path.exists() and fits(record := json.loads(path.read_text())):
            return record
        time.sleep(0.02)
    raise AssertionError(f"{path}: {path.exists() and path.read_text()}")


def only(volume: Path) -> Path:
    end = time.monotonic() + 20
    while not list(volume.glob("*.flight.json")) and time.monotonic() < end:
        time.sleep(0.02)
    (path,) = volume.glob("*.flight.json")
    return path


def look(flight: Flight) -> None:
    flight._next = 0.0
    flight.run.poll()


def test_the_same_in_the_run_folder_and_on_the_volume(
    folder: Path, volume: Path, make: Make
) -> None:
    front = new_ring(folder, {**FRONT, **INFO})
    front.put(1, time.monotonic_ns(), 1, 1)
    flight = make(volume)
    look(flight)
    path = only(volume)
    record = read(path)
    assert record == read(folder / "77-88.flight.json")
    assert path.name.endswith("-77-88.flight.json")
    assert path.stat().st_mode & 0o777 == 0o600
    assert (record["server"], record["run_folder"]) == ("77-88", str(folder))
    assert record["scene"]["in_flight"] == {"unknown": {"preprocess": 1}}
    (sample,) = record["samples"]
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith("VmRSS")]
    kilobytes = sample["resident"][str(os.getpid())] / 1024
    assert kilobytes == pytest.approx(int(line.split()[1]), rel=0.2)
    look(flight)
    assert len(read(path, lambda r: len(r["samples"]) == 2)["samples"]) == 2


def test_not_more_often_than_once_a_second(folder: Path, make: Make) -> None:
    new_ring(folder, {**FRONT, **INFO})
    flight = make(None)
    for _ in range(50):
        flight.run.poll()
    assert len(read(folder / "77-88.flight.json")["samples"]) == 1


def test_a_folder_that_cannot_be_written_to_is_one_line(
    folder: Path, tmp_path: Path, make: Make
) -> None:
    (tmp_path / "file").write_text("")
    new_ring(folder, {**FRONT, **INFO})
    said: list[str] = []
    flight = make(tmp_path / "file" / "volume", said)
    for count in range(1, 4):
        look(flight)
        read(folder / "77-88.flight.json", lambda r, n=count: len(r["samples"]) == n)
    (line,) = said
    assert line == (
        f"llmobs: no flight record in {tmp_path}/file/volume (Not a directory); "
        "LLMOBS_FLIGHT_DIR must be a folder that this server's user can write to"
    )


def test_a_slow_volume_keeps_nobody_waiting(
    folder: Path, volume: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_ring(folder, {**FRONT, **INFO})
    go_on = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: go_on.wait(20))
    flight = make(volume)
    for _ in range(5):
        look(flight)  # would hang, and the test with it
    go_on.set()
    record = read(folder / "77-88.flight.json", lambda r: len(r["samples"]) == 5)
    assert record == read(only(volume), lambda r: len(r["samples"]) == 5)


DIES = """
import os, sys
from pathlib import Path
from llmobs.ring import Writer, start_ticks
folder, role, numbers = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
pid = os.getpid()
info = {"roles": [role], "models": ["m"], "vllm": "0.32.0", "server": "77-88"}
ring = Writer(folder / f"{role}-{pid}-{start_ticks(pid)}.ring", 256, info)
for number in map(int, numbers):
    ring.put(1, number * 1_000_000, number, 1)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_once_a_process_died_the_scene_stays_and_its_end_is_told_by_the_rings(
    folder: Path, volume: Path, make: Make
) -> None:
    """What is seen between the first death and the last is the others' fall."""
    front = python(DIES, folder, "api_server", 1, 2, 3, stdin=-1)
    engine = python(DIES, folder, "engine_core", stdin=-1)
    assert front.stdout is not None
    assert engine.stdout is not None
    front.stdout.readline()
    engine.stdout.readline()
    flight = make(volume)
    look(flight)
    path = only(volume)
    assert read(path)["scene"]["in_flight"] == {"unknown": {"preprocess": 3}}
    engine.kill()
    engine.wait()
    look(flight)
    look(flight)
    front.kill()
    front.wait()
    look(flight)
    look(flight)  # now the front end's ring is done with, and its requests dropped
    look(flight)
    flight.close()
    record = read(path)
    assert not flight.run.requests.requests
    assert record["scene"]["in_flight"] == {"unknown": {"preprocess": 3}}
    assert [p["alive"] for p in record["scene"]["processes"]] == [False, False]
    assert record["samples"][-1]["resident"] == {}
    ends = {pid: code for pid, (code, _) in record["ends"].items()}
    assert ends == ({str(engine.pid): -9, str(front.pid): -9} if TELLS else {})


def test_a_server_that_comes_back_to_life_is_told_on(folder: Path, make: Make) -> None:
    """A script that makes one engine after another, and the agent came between two."""
    dead = python(DIES, folder, "api_server", 1, stdin=-1)
    assert dead.stdout is not None
    dead.stdout.readline()
    dead.kill()
    dead.wait()
    flight = make(None)
    look(flight)
    path = folder / "77-88.flight.json"
    assert read(path)["scene"]["in_flight"] == {"unknown": {"preprocess": 1}}
    ring = new_ring(folder, {**FRONT, **INFO})
    ring.put(1, time.monotonic_ns(), 1, 1)
    ring.put(1, time.monotonic_ns(), 2, 1)
    look(flight)
    read(path, lambda r: r["scene"]["in_flight"] == {"unknown": {"preprocess": 2}})


def test_nothing_that_goes_wrong_keeps_the_rings_from_being_read(
    folder: Path, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    front = new_ring(folder, {**FRONT, **INFO})
    flight = make(None)
    monkeypatch.setattr("llmobs.agent.flight.scene_of", lambda *_: 1 / 0)
    for number in range(3):
        front.put(1, time.monotonic_ns(), number, 1)
        look(flight)
    assert len(flight.run.requests.requests) == 3
    assert caplog.text.count("no flight record") == 1


def test_an_agent_that_comes_after_another_goes_on_with_its_record(
    folder: Path, make: Make
) -> None:
    new_ring(folder, {**FRONT, **INFO})
    first = make(None)
    for count in range(1, 4):
        look(first)
        read(folder / "77-88.flight.json", lambda r, n=count: len(r["samples"]) == n)
    second = make(None)
    look(second)
    read(folder / "77-88.flight.json", lambda r: len(r["samples"]) == 4)


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", '{"version": 1}', '{"version": 0, "scene": {}}', "[" * 100_000),
        '{"version": 1, "scene": {"a": 1}, "samples": [1], "ends": []}',
    ],
)
def test_a_damaged_record_of_before_is_no_harm(folder: Path, make: Make, content: str) -> None:
    new_ring(folder, {**FRONT, **INFO})
    (folder / "77-88.flight.json").write_text(content)
    look(make(None))
    path = folder / "77-88.flight.json"
    end = time.monotonic() + 20
    while path.read_text() == content and time.monotonic() < end:
        time.sleep(0.02)
    assert len(json.loads(path.read_text())["samples"]) == 1


def test_servers_that_share_an_agent_have_a_record_each(folder: Path, make: Make) -> None:
    Writer(folder / "a.ring", 16, {**FRONT, "server": "1-2"}).put(1, 10**9, 1, 1)
    Writer(folder / "b.ring", 16, {**ENGINE, "server": "3-4"})
    look(make(None))
    assert read(folder / "1-2.flight.json")["scene"]["in_flight"] == {"unknown": {"preprocess": 1}}
    assert read(folder / "3-4.flight.json")["scene"]["in_flight"] == {}


def test_kv_blocks_and_the_like_are_sampled_every_fifth_time(folder: Path, make: Make) -> None:
    """Figures of the page that the server has."""
    ring = new_ring(folder, {**ENGINE, **INFO})
    ring.cells[schema.PROCESS_CELL["waiting_tokens"]] = 777
    flight = make(None)
    for _ in range(6):
        look(flight)
    record = read(folder / "77-88.flight.json", lambda r: len(r["samples"]) == 6)
    told = [s["gauges"]["llmobs_waiting_tokens"] for s in record["samples"] if "gauges" in s]
    labels = {"model_name": "deepseek-v4", "engine": "0"}
    assert told == [[[labels, 777.0]]] * 2


def test_old_records_are_removed(volume: Path) -> None:
    volume.mkdir(parents=True)
    now, day = time.time(), 86400
    for number in range(40):
        for name in (f"host-{number}-1.flight.json", f"other-{number}.json"):
            (volume / name).write_text("{}")
            os.utime(volume / name, (now - number * day - 100, now - number * day - 100))
    (volume / "host-99-1.flight.json.new").write_text("half")
    os.utime(volume / "host-99-1.flight.json.new", (1, 1))
    for number in range(3):  # of servers that run
        (volume / f"live-{number}-1.flight.json").write_text("{}")
    prune(volume)
    left = {path.name for path in volume.glob("*.flight.json*")}
    assert left == {f"live-{n}-1.flight.json" for n in range(3)} | {
        f"host-{n}-1.flight.json" for n in range(16)
    }
    assert len(list(volume.glob("other-*"))) == 40


def test_however_few_none_is_kept_for_ever(volume: Path) -> None:
    volume.mkdir(parents=True)
    (volume / "host-1-1.flight.json").write_text("{}")
    os.utime(volume / "host-1-1.flight.json", (1, 1))
    prune(volume)
    assert list(volume.iterdir()) == []
    prune(volume / "missing")
