"""A neighbour and a quota that take the CPU from a server are told apart, and neither is steal."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from demo.client import completion
from demo.model import prompt_ids
from tests.e2e.conftest import Served, Start
from tests.e2e.page import Figures, eventually
from tests.e2e.traffic import play
from tests.quota import quota, throttled

pytestmark = pytest.mark.e2e
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

SECONDS = 6.0
STREAMS = 4
STALE_S = 2.0  # the agent looks once a second, or a little less often where that costs much
QUOTA = 0.3
PERIODS = "llmobs_cgroup_cpu_periods_total"
THROTTLED = "llmobs_cgroup_cpu_throttled_periods_total"
THROTTLED_S = "llmobs_cgroup_cpu_throttled_seconds_total"
RUN_QUEUE = "llmobs_process_run_queue_seconds_total"
CPU = "llmobs_process_cpu_seconds_total"
ROLES = ("api_server", "engine_core", "worker")
HERTZ = os.sysconf("SC_CLK_TCK")


def waited(pids: list[int]) -> float:
    """Seconds that the threads of these processes waited for a CPU, by the kernel's account."""
    files = (file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[1]) for file in files) / 1e9


def used(pids: list[int]) -> float:
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(f[11]) + int(f[12]) for f in fields) / HERTZ


def stolen() -> float:
    with open("/proc/stat") as file:
        return int(file.readline().split()[8]) / HERTZ


Truth = dict[str, float]


@dataclass(frozen=True, eq=False)
class Phase:
    """What changed on the page while traffic ran, and what may have changed by the kernel's own
    account: the agent's figures are a little old."""

    page: Figures
    seconds: float
    least: Truth
    most: Truth
    last: Figures

    def rate(self, name: str, **labels: str) -> float:
        return self.page.total(name, **labels) / self.seconds

    def wait(self, role: str) -> float:
        """Seconds on the run queue for each second on a CPU."""
        return self.page.total(RUN_QUEUE, process=role) / self.page.total(CPU, process=role)


def observe(served: Served, group: Path | None = None) -> Phase:
    def truth() -> Truth:
        found = {"steal": stolen()}
        for role in ROLES:
            pids = served.server.pids(role)
            found[f"{role} waited"], found[f"{role} used"] = waited(pids), used(pids)
        if group is not None:
            found |= zip((PERIODS, THROTTLED, THROTTLED_S), throttled(group), strict=True)
        return found

    def look() -> tuple[Truth, Figures, Truth, float]:
        before = truth()
        time.sleep(STALE_S)
        moment = time.monotonic()
        return before, served.page.figures(), truth(), moment

    before, first, after, began = look()
    play(lambda session: traffic(session, served))
    later, last, latest, ended = look()
    return Phase(
        last - first,
        ended - began,
        {name: later[name] - after[name] for name in before},
        {name: latest[name] - before[name] for name in before},
        last,
    )


async def traffic(session: aiohttp.ClientSession, served: Served) -> None:
    """Streams for a while; those that run then come to their end."""
    end = time.monotonic() + SECONDS

    async def stream(seed: int) -> None:
        while time.monotonic() < end:
            answer = await completion(
                session, served.url, prompt_ids(30, seed), max_tokens=16, stream=True
            )
            assert answer.ok

    await asyncio.gather(*(stream(seed) for seed in range(STREAMS)))


@contextmanager
def neighbours(cpus: set[int]) -> Iterator[None]:
    """Four busy loops on each of these CPUs, in the server's own session (see VllmServer)."""
    code = "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1:]))\nwhile True: pass"
    command = [sys.executable, "-c", code, *map(str, cpus)]
    loops = [subprocess.Popen(command) for _ in range(4 * len(cpus))]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.fixture(scope="module")
def served(start: Start) -> Served:
    return start()


@pytest.fixture(scope="module")
def quiet(served: Served) -> Phase:
    return observe(served)


@pytest.fixture(scope="module")
def crowded(served: Served, quiet: Phase) -> Phase:
    (engine,) = served.server.pids("engine_core")
    with neighbours(os.sched_getaffinity(engine)):
        return observe(served)


@pytest.fixture(scope="module")
def limited(served: Served, quiet: Phase, crowded: Phase) -> Phase:
    with quota(served.server, QUOTA) as group:
        return observe(served, group)


def check_against_the_kernel(phase: Phase) -> None:
    """The agent's figures are within what the kernel itself counted meanwhile."""
    found = {"steal": phase.page.total("llmobs_cpu_seconds_total", mode="steal")}
    for role in ROLES:
        found[f"{role} waited"] = phase.page.total(RUN_QUEUE, process=role)
        found[f"{role} used"] = phase.page.total(CPU, process=role)
    found |= {name: phase.page.total(name) for name in phase.least if name.startswith("llmobs_")}
    for name, value in found.items():
        least, most = phase.least[name] - 0.011, phase.most[name] + 0.011  # a tick of 10 ms
        assert least <= value <= most, (name, least, value, most)


def test_the_quiet_server(served: Served, quiet: Phase) -> None:
    check_against_the_kernel(quiet)
    (engine,) = served.server.pids("engine_core")
    assert quiet.last.total("llmobs_cpus") == len(os.sched_getaffinity(engine))
    assert quiet.page.total(CPU, process="agent") > 0
    features = quiet.last.by("feature", "llmobs_feature_available")
    assert features["host_cpu"] == features["run_queue"] == 1


def test_a_neighbour_shows_as_run_queue_delay_without_steal(quiet: Phase, crowded: Phase) -> None:
    check_against_the_kernel(crowded)
    # This machine may have been busy before, but not as busy: for each second of CPU that the
    # engine core gets it now waits several times as long.
    assert crowded.wait("engine_core") > 3 * quiet.wait("engine_core")
    waited = {p: sum(p.rate(RUN_QUEUE, process=role) for role in ROLES) for p in (quiet, crowded)}
    more = waited[crowded] - waited[quiet]
    assert more > 0.3
    # The hypervisor has its own moods, but they are not those of our neighbour.
    steal = {p: p.rate("llmobs_cpu_seconds_total", mode="steal") for p in (quiet, crowded)}
    assert steal[crowded] - steal[quiet] < 0.2 * more
    # In the topmost cgroup of version 2 there is no such series.
    assert not any(v for (name, _), v in crowded.page.samples.items() if name == THROTTLED_S)


@ROOT
def test_a_quota_shows_as_throttling_without_steal(quiet: Phase, limited: Phase) -> None:
    """The agent is not in the server's cgroup: it left the family before the server was moved."""
    check_against_the_kernel(limited)
    assert limited.last.total("llmobs_cpus") == QUOTA
    assert limited.page.total(THROTTLED) > 0.25 * limited.page.total(PERIODS) > 0
    throttled_s = limited.page.total(THROTTLED_S)
    assert throttled_s > 1
    assert limited.page.total("llmobs_cpu_seconds_total", mode="steal") < 0.2 * throttled_s
    used = sum(limited.page.total(CPU, process=role) for role in ROLES)
    assert used < 1.3 * QUOTA * limited.seconds + 0.3, "the quota did hold"


@ROOT
def test_after_the_quota_nothing_falls(served: Served, quiet: Phase, limited: Phase) -> None:
    def free() -> Figures | None:
        now = served.page.figures()
        return now if now.total("llmobs_cpus") == quiet.last.total("llmobs_cpus") else None

    change = eventually("all CPUs again", free) - limited.last
    for name in (PERIODS, THROTTLED, THROTTLED_S):
        assert change.total(name) >= 0
