"""How a process ended that is not our child: known from Linux 6.15 on."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from llmobs.agent import endings
from llmobs.agent.endings import Endings
from llmobs.agent.run import Run
from tests.agent.test_flight import DIES, TELLS
from tests.rings import python

pytestmark = pytest.mark.timeout(60)


def dying(folder: Path, role: str) -> "subprocess.Popen[str]":
    process = python(DIES, folder, role, stdin=-1)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_exit_codes_and_signals(tmp_path: Path) -> None:
    killed, left = dying(tmp_path, "worker"), dying(tmp_path, "api_server")
    run = Run(tmp_path)
    run.poll()
    found = Endings()
    found.look(run)
    assert found.told == {}
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    left.communicate("\n")
    found.look(run)
    expected = {killed.pid: -9, left.pid: 0} if TELLS else {}
    assert {pid: code for pid, (code, _) in found.told.items()} == expected
    assert all(abs(at - time.time()) < 30 for _, at in found.told.values())
    assert not found._held


def test_the_moment_is_that_of_its_death_not_of_whoever_reaps_it(tmp_path: Path) -> None:
    process = dying(tmp_path, "worker")
    run = Run(tmp_path)
    run.poll()
    found = Endings()
    found.look(run)
    process.kill()
    killed_at = time.time()
    while next(iter(run.sources.values())).alive:
        run.poll()
        time.sleep(0.01)
    found.look(run)
    seen_at = time.time()
    assert found.told == {}
    time.sleep(0.2)
    process.wait()
    found.look(run)
    assert bool(found.told) == TELLS
    assert all(killed_at <= at <= seen_at for _, at in found.told.values())


def test_a_kernel_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = dying(tmp_path, "worker")
    run = Run(tmp_path)
    run.poll()
    monkeypatch.setattr(endings, "GET_INFO", 3 << 30 | 64 << 16 | 0xFF << 8 | 99)
    found = Endings()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        found.look(run)
    assert found.told == {}
    assert set(os.listdir("/proc/self/fd")) == before
    process.kill()
    process.wait()


def test_what_is_held_is_let_go_at_the_end(tmp_path: Path) -> None:
    process = dying(tmp_path, "worker")
    run = Run(tmp_path)
    run.poll()
    found = Endings()
    before = set(os.listdir("/proc/self/fd"))
    found.look(run)
    found.close()
    assert set(os.listdir("/proc/self/fd")) == before
    process.kill()
    process.wait()
