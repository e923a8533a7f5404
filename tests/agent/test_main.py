"""The life of an agent: real processes, as the server starts them."""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmobs.agent.state import State
from llmobs.agent.watch import prune
from llmobs.ring import Writer, start_ticks
from tests.rings import FRONT, SLOTS_AT, python

pytestmark = pytest.mark.timeout(60)

SERVER = """
import os, sys, time
from pathlib import Path
from llmobs.ring import Writer, start_ticks
folder, count, capacity = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
pid = os.getpid()
info = {"roles": ["api_server"], "models": ["m"], "vllm": "0.32.0"}
ring = Writer(folder / f"api_server-{pid}-{start_ticks(pid)}.ring", capacity, info)
for n in range(1, count + 1):
    ring.put(1, n * 1000, n, 1)
    ring.put(5, n * 1000 + 500, n, 4, 400, 4, 0, n * 1000)
    ring.cells[CELL] += 1
print("ready", flush=True)
sys.stdin.readline()
"""


def server_code() -> str:
    from llmobs import schema

    return SERVER.replace("CELL", str(schema.PROCESS_CELL["edges_ended"]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "runs" / "12345-67890"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def start() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts processes, and ends what is left of them."""
    started: list[subprocess.Popen[str]] = []

    def start_(command: list[str], **environ: str) -> "subprocess.Popen[str]":
        started.append(
            subprocess.Popen(
                command,
                env={**os.environ, "OTEL_EXPORTER_PROMETHEUS_PORT": str(free_port()), **environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start_
    for process in started:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def agent(start: Any, folder: Path, *options: str, **environ: str) -> "subprocess.Popen[str]":
    process = start([sys.executable, "-m", "llmobs.agent", *options, str(folder)], **environ)
    assert isinstance(process, subprocess.Popen)
    return process


def server(start: Any, folder: Path, count: int = 3, capacity: int = 256) -> Any:
    process = start([sys.executable, "-c", server_code(), str(folder), str(count), str(capacity)])
    assert process.stdout.readline() == "ready\n"
    return process


def until(condition: Callable[[], Any], seconds: float = 15) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
    return found


def state(folder: Path, pid: int) -> dict[str, Any]:
    """What this agent says of itself, once it does."""

    def own() -> Any:
        try:
            found = json.loads((folder / "agent.json").read_text())
        except OSError:
            return None
        return found if found.get("pid") == pid else None

    return dict(until(own))


def page(folder: Path, pid: int) -> str:
    address = state(folder, pid)["page"]
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


ENDED = 'llmobs_request_seconds_count{context_bucket="unknown",model_name="m"}'


def value(text: str, series: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(series + " ")]
    return float(line.rpartition(" ")[2])


def test_it_serves_and_ends_with_the_server(folder: Path, start: Any) -> None:
    serving = server(start, folder)
    watching = agent(start, folder)
    assert value(page(folder, watching.pid), ENDED) == 3
    target = folder.parent / "file_sd" / "12345-67890.json"
    (entry,) = json.loads(target.read_text())
    assert entry["labels"] == {"run": "12345-67890"}
    (address,) = entry["targets"]
    assert re.fullmatch(r"localhost:\d+", address)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        assert answer.status == 200
    serving.kill()  # as vLLM's own are ended: without a word
    serving.wait()
    began = time.monotonic()
    assert watching.wait(10) == 0
    assert time.monotonic() - began < 15  # 5 s on a quiet machine
    assert not target.exists()
    assert list(folder.glob("*.ring")), "the record of what was stays"


def test_it_outlives_one_of_two_processes(folder: Path, start: Any) -> None:
    first, second = server(start, folder, 3), server(start, folder, 4)
    watching = agent(start, folder)
    page(folder, watching.pid)
    first.kill()
    first.wait()
    time.sleep(2)
    assert watching.poll() is None
    assert value(page(folder, watching.pid), ENDED) == 7
    second.kill()
    second.wait()
    assert watching.wait(20) == 0


def test_a_second_one_leaves_at_once(folder: Path, start: Any) -> None:
    server(start, folder)
    first = agent(start, folder)
    state(folder, first.pid)
    second = agent(start, folder)
    began = time.monotonic()
    out, err = second.communicate(timeout=10)
    assert (second.returncode, out, err) == (0, "", "")
    assert time.monotonic() - began < 15
    assert first.poll() is None


def test_told_to_end_again_and_again(folder: Path, start: Any) -> None:
    """Signals come while an earlier one is being taken, and at any moment of its waiting."""
    server(start, folder)
    watching = agent(start, folder)
    state(folder, watching.pid)
    for _ in range(2000):
        watching.send_signal(signal.SIGTERM)
    assert watching.wait(20) == 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it(folder: Path, start: Any, how: signal.Signals) -> None:
    server(start, folder)
    watching = agent(start, folder)
    state(folder, watching.pid)
    target = folder.parent / "file_sd" / "12345-67890.json"
    until(target.exists)
    watching.send_signal(how)
    assert watching.wait(20) == 0
    assert "Traceback" not in watching.communicate()[1]
    assert not target.exists()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "No such file or directory"),
        ("file", "Not a directory"),
        ("file below", "Not a directory"),
    ],
)
def test_a_folder_that_is_none(tmp_path: Path, start: Any, kind: str, message: str) -> None:
    bad = tmp_path / "bad"
    if kind != "missing":
        bad.write_text("")
    if kind == "file below":
        bad = bad / "run"
    process = agent(start, bad)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert out == ""
    assert err == f"llmobs agent: {bad}: {message}\n"


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--nonsense", "a"]])
def test_wrong_arguments(start: Any, arguments: list[str]) -> None:
    process = start([sys.executable, "-m", "llmobs.agent", *arguments])
    _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("llmobs agent: error: ")


def test_help(start: Any) -> None:
    process = start([sys.executable, "-m", "llmobs.agent", "--help"])
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert "--detach" in out


def test_a_new_one_rebuilds_all_and_counts_its_restart(folder: Path, start: Any) -> None:
    server(start, folder, 50)
    restarts = 'llmobs_agent_restarts_total{model_name="m"}'
    for number in range(3):
        watching = agent(start, folder)
        text = page(folder, watching.pid)
        assert value(text, restarts) == number
        assert value(text, ENDED) == 50
        watching.kill()
        watching.wait()


def test_a_new_one_does_not_count_twice_what_went_round(folder: Path, start: Any) -> None:
    """The first had counted them; they are no news for the second."""
    server(start, folder, 200, capacity=256)
    first = agent(start, folder)
    page(folder, first.pid)
    first.kill()
    first.wait()
    second = agent(start, folder)
    assert value(page(folder, second.pid), ENDED) == 0


def test_the_rings_of_a_dead_server(folder: Path, start: Any) -> None:
    """Everything is read, and the agent does not stay."""
    dead = server(start, folder, 5)
    dead.kill()
    dead.wait()
    watching = agent(start, folder)
    assert value(page(folder, watching.pid), ENDED) == 5
    assert watching.wait(20) == 0


def test_damaged_rings_are_no_end_and_no_loop(folder: Path, start: Any) -> None:
    (folder / "engine_core-1-1.ring").write_bytes(os.urandom(200_000))
    serving = server(start, folder)
    (ring,) = folder.glob("api_server-*.ring")
    watching = agent(start, folder)
    assert value(page(folder, watching.pid), ENDED) == 3
    os.truncate(ring, SLOTS_AT)
    time.sleep(2.5)
    assert watching.poll() is None, "its server lives"
    assert value(page(folder, watching.pid), ENDED) == 3
    serving.kill()
    serving.wait()
    assert watching.wait(20) == 0
    warnings = [line for line in watching.communicate()[1].splitlines() if "WARNING" in line]
    assert len(warnings) == 2
    assert "ring refused: " in warnings[0]
    assert "cut short" in warnings[1]


def test_a_run_folder_that_is_removed(folder: Path, start: Any) -> None:
    """The server still lives, and its ring is still mapped: the page goes on, to the server's
    end."""
    serving = server(start, folder)
    watching = agent(start, folder)
    address = state(folder, watching.pid)["page"]
    shutil.rmtree(folder.rename(folder.with_name("gone")))  # at once: the agent writes meanwhile
    time.sleep(1)
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        assert value(answer.read().decode(), ENDED) == 3
    serving.kill()
    serving.wait()
    assert watching.wait(20) == 0
    assert "Traceback" not in watching.communicate()[1]


def test_a_lock_that_was_replaced_is_anothers(folder: Path, start: Any) -> None:
    """Of two agents the one whose lock nobody can see any more ends."""
    server(start, folder)
    first = agent(start, folder)
    state(folder, first.pid)
    (folder / "agent.lock").unlink()
    second = agent(start, folder)
    assert first.wait(20) == 0
    assert value(page(folder, second.pid), ENDED) == 3
    assert second.poll() is None


def test_a_disk_that_has_space_again(folder: Path) -> None:
    """What could not be written is written then; nothing half is left behind."""
    folder.rmdir()
    told = State(folder)
    told.say("llmobs: metrics on somewhere")
    told.retry()
    folder.mkdir()
    told.retry()
    assert json.loads((folder / "agent.json").read_text())["notices"] == [
        "llmobs: metrics on somewhere"
    ]
    with pytest.raises(TypeError):
        told.update(page={1})  # no JSON
    assert [path.name for path in folder.iterdir()] == ["agent.json"]


def test_a_taken_port_is_told(folder: Path, start: Any) -> None:
    server(start, folder)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        code = f"import socket; s = socket.create_server(('127.0.0.1', {port}))"
        assert python(code).wait() == 1  # taken indeed
        watching = agent(
            start,
            folder,
            OTEL_EXPORTER_PROMETHEUS_PORT=str(port),
            OTEL_EXPORTER_PROMETHEUS_HOST="127.0.0.1",
        )
        said = state(folder, watching.pid)
    other = int(said["page"].rpartition(":")[2])
    assert port < other < port + 100
    assert said["notices"][0].startswith(
        f"llmobs: metrics on http://localhost:{other}/metrics; port "
    )
    assert f"port {port} is taken by " in said["notices"][0]
    assert f"(pid {os.getpid()}), set OTEL_EXPORTER_PROMETHEUS_PORT" in said["notices"][0]
    assert said["joined"] is False


@pytest.mark.parametrize("host", ["203.0.113.1", "foo..bar", "a" * 80, "no such name"])
def test_an_address_that_is_not_ours_is_told(folder: Path, start: Any, host: str) -> None:
    server(start, folder)
    watching = agent(start, folder, OTEL_EXPORTER_PROMETHEUS_HOST=host)
    notice = until(
        lambda: (
            (folder / "agent.json").exists()
            and json.loads((folder / "agent.json").read_text())["notices"][0]
        )
    )
    assert notice.startswith("llmobs: no metrics page, ")
    assert f"OTEL_EXPORTER_PROMETHEUS_HOST={host!r}" in notice
    assert watching.poll() is None


def test_no_page_where_none_is_wanted(folder: Path, start: Any) -> None:
    server(start, folder)
    watching = agent(start, folder, OTEL_METRICS_EXPORTER="none")
    until(lambda: (folder / "agent.starts").exists())
    time.sleep(1)
    assert watching.poll() is None
    assert not (folder / "agent.json").exists()


def test_nothing_is_left_open_to_others(folder: Path, start: Any) -> None:
    server(start, folder)
    watching = agent(start, folder)
    state(folder, watching.pid)
    until((folder.parent / "file_sd" / "12345-67890.json").exists)
    assert (folder.parent / "file_sd").stat().st_mode & 0o777 == 0o700
    assert (folder / "agent.json").stat().st_mode & 0o777 == 0o600
    assert (folder / "agent.lock").stat().st_mode & 0o777 == 0o600


# The run folders of dead servers


def dead_run(base: Path, pid: int, age: float) -> Path:
    folder = base / f"{pid}-1"
    folder.mkdir()
    ring = folder / f"api_server-{pid}-1.ring"
    Writer(ring, 16, FRONT)
    os.utime(ring, (time.time() - age, time.time() - age))
    (base / "file_sd").mkdir(exist_ok=True)
    (base / "file_sd" / f"{folder.name}.json").write_text("[]")
    return folder


def test_the_last_three_dead_are_kept(tmp_path: Path) -> None:
    """No process has these pids: they are beyond the kernel's limit."""
    base = tmp_path
    dead = [dead_run(base, 5_000_000 + n, age=n * 100) for n in range(6)]
    pid = os.getpid()
    own = base / f"{pid}-{start_ticks(pid)}"
    own.mkdir()
    # A folder whose first process is dead, but another one of it lives.
    living = dead_run(base, 6_000_000, age=10_000)
    Writer(living / f"engine_core-{pid}-{start_ticks(pid)}.ring", 16, FRONT)
    # One in another container: its pids are not ours, but its agent holds the lock.
    elsewhere = dead_run(base, 7_000_000, age=10_000)
    lock = os.open(elsewhere / "agent.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    strangers = [base / "notes", base / "1-2-3", base / "12-x", base / "3-4", base / "²-1"]
    for stranger in strangers:
        stranger.mkdir()
    (base / "77-77").write_text("a file")
    prune(own)
    assert [folder.exists() for folder in dead] == [True, True, True, False, False, False]
    assert own.exists()
    assert living.exists()
    assert elsewhere.exists()
    assert all(stranger.exists() for stranger in strangers)
    assert (base / "77-77").exists()
    targets = {path.name for path in (base / "file_sd").iterdir()}
    kept = {f"{folder.name}.json" for folder in [*dead[:3], living, elsewhere]}
    assert targets == kept
    os.close(lock)


def test_a_parent_that_cannot_be_read(tmp_path: Path) -> None:
    prune(tmp_path / "nowhere" / "own")


def test_a_ring_with_a_strange_name_stops_nothing(tmp_path: Path) -> None:
    for name in ("a.ring", "a-b-c.ring", "api_server-1.ring", "-.ring", "x-1-ü.ring"):
        folder = dead_run(tmp_path, 5_000_000 + len(name), age=1)
        (folder / name).write_bytes(b"")
        prune(tmp_path / "own")
        assert folder.exists()
        shutil.rmtree(folder)
