"""The table of faults that a running server takes and runs on: how each is made, and unmade."""

import contextlib
import fcntl
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.e2e.page import eventually
from tests.faults_of_ours.bench import POINTS, Bench
from tests.faults_of_ours.hook.fault_board import FOR_EVER, HOWS

Undo = Callable[[], None]


@dataclass(frozen=True)
class Fault:
    """`inject` is called while requests run, what it returns when they have ended.

    `exact` says whether all counters are exact through it; else (a probe that raises counts
    nothing) those of what comes after it. `ends_agent`: the page is away for a while. `needs`: what
    the bench must have, `disk`, `nobody` or `clock`, or that it is not nobody's (`ours`).
    `traffic`: what else is asked for, by the name of a method of the bench.
    """

    name: str
    inject: Callable[[Bench], Undo]
    exact: bool = True
    ends_agent: bool = False
    needs: str = ""
    traffic: str = ""


def nothing() -> None:
    """There is nothing to undo."""


# The agent


def backdate(bench: Bench) -> None:
    """Let the last start of an agent be long ago: the next one is then started at once."""
    os.utime(bench.run / "agent.started", (1, 1))


def signalled(how: signal.Signals) -> Callable[[Bench], Undo]:
    def inject(bench: Bench) -> Undo:
        agent = bench.agent()
        backdate(bench)
        agent.send_signal(how)
        return nothing

    return inject


def stopped(bench: Bench) -> Undo:
    agent = bench.agent()
    agent.suspend()
    return agent.resume


def slow(bench: Bench) -> Undo:
    """It runs a tenth of the time."""
    agent = bench.agent()
    done = threading.Event()

    def work() -> None:
        while not done.wait(0.005):
            agent.suspend()
            done.wait(0.045)
            agent.resume()

    thread = threading.Thread(target=work)
    thread.start()

    def undo() -> None:
        done.set()
        thread.join()

    return undo


def limited(limit: int, amount: Callable[[psutil.Process], int]) -> Callable[[Bench], Undo]:
    """The agent has no more of something than it has now, or less."""

    def inject(bench: Bench) -> Undo:
        agent = bench.agent()
        soft, hard = agent.rlimit(limit)
        agent.rlimit(limit, (amount(agent), hard))
        with contextlib.suppress(OSError):  # something for it to do
            (bench.run / f"limit-{time.time_ns()}.ring").write_bytes(b"")
        time.sleep(0.3)

        def undo() -> None:
            with contextlib.suppress(psutil.Error):
                agent.rlimit(limit, (soft, hard))
            for path in bench.run.glob("limit-*.ring"):
                path.unlink()

        return undo

    return inject


def flooded(bench: Bench) -> Undo:
    """A hundred connections to the page that never say what they want."""
    bench.agent()
    connections = []
    for _ in range(100):
        with contextlib.suppress(OSError):
            connections.append(socket.create_connection(("127.0.0.1", bench.port), timeout=1))

    def undo() -> None:
        for connection in connections:
            connection.close()

    return undo


def lock_taken(bench: Bench) -> Undo:
    """A stranger holds the lock, so that no agent can come."""
    agent = bench.agent()
    path = bench.run / "agent.lock"
    eventually("the lock's file", path.exists)  # it may just have been removed
    lock = os.open(path, os.O_RDWR)
    backdate(bench)
    agent.kill()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.005)
    return lambda: os.close(lock)


def lock_removed(bench: Bench) -> Undo:
    """A second agent comes, and the first gives way."""
    bench.agent()
    backdate(bench)
    (bench.run / "agent.lock").unlink(missing_ok=True)  # the next agent has not come yet
    return nothing


# Files


def path_in(bench: Bench) -> Path:
    return bench.run / f"engine_core-{bench._next()}-1.ring"


def file_of(content: Callable[[Bench], bytes]) -> Callable[[Bench], Undo]:
    def inject(bench: Bench) -> Undo:
        path = path_in(bench)
        partial = path.with_suffix(".part")
        partial.write_bytes(content(bench))
        partial.rename(path)
        return path.unlink

    return inject


def of_a_ring(bench: Bench) -> bytes:
    return bench.random.choice(bench.rings).read_bytes()


def larger_than_any(bench: Bench) -> Undo:
    """It says that it holds ten thousand million records, and takes no block of the disk."""
    path = path_in(bench)
    capacity = 10**10
    with path.with_suffix(".part").open("wb") as file:
        file.write(struct.pack("<8sIIQIIQ", b"LLMOBSR1", 1, 104, capacity, 1, 0, 1))
        file.truncate(65536 + capacity * 104)
    path.with_suffix(".part").rename(path)
    return path.unlink


def dead_ring(bench: Bench) -> bytes:
    """Of a process that is no more and had counted nothing, its slots full of noise."""
    info = b'{"roles": ["engine_core"], "models": ["deepseek-v4"], "engine": 0}'
    header = struct.pack("<8sIIQIIQ", b"LLMOBSR1", 1, 104, 100, 5_000_000, len(info), 1)
    return (header.ljust(64, b"\0") + info).ljust(65536, b"\0") + bench.random.randbytes(10_400)


def link(bench: Bench) -> Undo:
    path = path_in(bench)
    path.symlink_to(bench.random.choice([*bench.rings, "/dev/zero", "/nowhere", path]))
    return path.unlink


def pipe(bench: Bench) -> Undo:
    path = path_in(bench)
    os.mkfifo(path)
    return path.unlink


def subfolder(bench: Bench) -> Undo:
    path = path_in(bench)
    path.mkdir()
    return path.rmdir


def slots_damaged(bench: Bench) -> Undo:
    """Random bytes among the records of a ring that is being written."""
    ring = bench.random.choice(bench.rings)
    size = ring.stat().st_size
    with ring.open("r+b", buffering=0) as file:
        for _ in range(bench.random.choice([1, 20, 2000])):
            content = bench.random.randbytes(bench.random.randint(1, 120))
            file.seek(bench.random.randrange(65536, size - len(content)))
            file.write(content)
    return nothing


def header_damaged(bench: Bench) -> Undo:
    """What a ring says of its process: nonsense, until somebody puts it right."""
    ring = bench.random.choice(bench.rings)
    before = ring.read_bytes()[:16384]
    with ring.open("r+b", buffering=0) as file:
        file.write(bench.random.randbytes(bench.random.randint(1, 16384)))

    def undo() -> None:
        with ring.open("r+b", buffering=0) as file:
            file.write(before)

    return undo


def nonsense_in(name: str) -> Callable[[Bench], Undo]:
    """Another file of the folder is nonsense when the next agent comes."""

    def inject(bench: Bench) -> Undo:
        agent = bench.agent()
        backdate(bench)
        content = bench.random.choice([b"", b"[" * 100_000, b"\xff\x00" * 9, b'{"notices": 5}'])
        (bench.run / name).write_bytes(content)
        agent.kill()
        return nothing

    return inject


def future(bench: Bench) -> Undo:
    """The last start of an agent is yet to come, by the file's time."""
    agent = bench.agent()
    os.utime(bench.run / "agent.started", (time.time() + 86400,) * 2)
    agent.kill()
    return nothing


def unwritable(bench: Bench) -> Undo:
    """Nothing can be made in the run folder, when an agent is to be started."""
    agent = bench.agent()
    backdate(bench)
    bench.run.chmod(0o500)
    agent.kill()
    time.sleep(bench.random.choice([0, 1.5]))
    return lambda: bench.run.chmod(0o700)


def full(bench: Bench) -> Undo:
    """Not a byte is left on its disk, when an agent is to be started."""
    agent = bench.agent()
    backdate(bench)
    filler = bench.fill()
    agent.kill()
    time.sleep(bench.random.choice([0, 2.5]))
    return filler.unlink


# The clock


def clock_set(bench: Bench) -> Undo:
    """An hour or so to and fro; it stays there."""
    assert bench.clock is not None
    bench.clock.set(bench.random.choice([-86400, -3600, -7, 0, 7, 3600, 86400]))
    return nothing


# Probes


def raising(probe: str) -> Callable[[Bench], Undo]:
    def inject(bench: Bench) -> Undo:
        point = POINTS[probe]
        how = bench.random.choice(HOWS[1:])
        bench.board.set(point, how, bench.random.choice([1, 3, FOR_EVER]))
        return lambda: bench.board.set(point, "", 0)

    return inject


STARTING = ("async_engine", "sync_engine", "scheduler", "worker")
"""Probes that are reached once in a server's life, when it starts."""
DYING = ("engine_dead",)
TRAFFIC = {"beam_search": "beams", "abort": "left", "preempt": "storm"}

FAULTS = (
    Fault("agent killed (SIGKILL)", signalled(signal.SIGKILL), ends_agent=True),
    Fault("agent crashes (SIGSEGV)", signalled(signal.SIGSEGV), ends_agent=True),
    Fault("agent ended (SIGTERM)", signalled(signal.SIGTERM), ends_agent=True),
    Fault("agent stopped (SIGSTOP)", stopped),
    Fault("agent slow (runs a tenth of the time)", slow),
    Fault("agent without memory", limited(resource.RLIMIT_AS, lambda agent: 1), needs="ours"),
    Fault(
        "agent without descriptors", limited(resource.RLIMIT_NOFILE, lambda agent: 3), needs="ours"
    ),
    Fault(
        "agent cannot write a byte", limited(resource.RLIMIT_FSIZE, lambda agent: 0), needs="ours"
    ),
    Fault("page flooded with connections", flooded),
    Fault("agent's lock held by a stranger", lock_taken, ends_agent=True),
    Fault("agent's lock file removed", lock_removed, ends_agent=True),
    Fault("foreign file", file_of(lambda bench: bench.random.randbytes(200_000))),
    Fault("empty ring", file_of(lambda bench: b"")),
    Fault("ring cut short", file_of(lambda b: of_a_ring(b)[: b.random.randint(1, 300_000)])),
    Fault("ring of a dead process", file_of(dead_ring)),
    Fault("ring larger than any", larger_than_any),
    Fault("symbolic link", link),
    Fault("named pipe", pipe),
    Fault("folder in a ring's place", subfolder),
    Fault("live ring: records damaged", slots_damaged),
    Fault("live ring: header damaged, then mended", header_damaged),
    Fault("agent.json nonsense", nonsense_in("agent.json"), ends_agent=True),
    Fault("agent.starts nonsense", nonsense_in("agent.starts"), ends_agent=True),
    Fault("last start of an agent in the future", future, ends_agent=True),
    Fault("run folder unwritable", unwritable, ends_agent=True, needs="nobody"),
    Fault("disk full", full, ends_agent=True, needs="disk"),
    Fault("clock set", clock_set, needs="clock"),
    *(
        Fault(f"probe `{probe}` raises", raising(probe), False, traffic=TRAFFIC.get(probe, ""))
        for probe in POINTS
        if probe not in STARTING + DYING
    ),
)
