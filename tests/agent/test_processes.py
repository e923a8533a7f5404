"""CPU time and run-queue delay of the server's processes: sums that never fall."""

import os
import threading
import time
from pathlib import Path

import pytest

from llmobs.agent.processes import Account, Processes
from tests.agent.machine import MODEL, Machine

HERTZ = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.process(os.getpid(), cpu=(50, 25), waited={1: 3_000_000_000})
    return machine


def figures(processes: Processes) -> dict[tuple[str, str], tuple[int, int]]:
    processes.read()
    return {
        key: (sum(a.cpu for a in some), sum(a.delay for a in some if a.delay is not None))
        for key, some in processes.by_role().items()
    }


def test_all_threads_count(machine: Machine) -> None:
    machine.process(10, cpu=(700, 300), waited={10: 5, 11: 70, 12: 900})
    machine.ring("a", 10, "engine_core")
    processes = Processes(machine.run, machine.proc)
    assert figures(processes) == {(MODEL, "engine_core"): (1000, 975)}
    assert (processes.agent.cpu, processes.agent.delay) == (75, 3_000_000_000)


def test_a_thread_that_ends_takes_nothing_away(machine: Machine) -> None:
    machine.process(10, waited={10: 5, 11: 70, 12: 900})
    account = Account(machine.proc / "10", 77, whole=True)
    account.read()
    for file in ("task/11/schedstat", "task/12/schedstat"):
        (machine.proc / "10" / file).unlink()
    (machine.proc / "10/task/11").rmdir()  # 12 is still listed
    machine.process(10, waited={10: 25, 13: 1000})
    account.read()
    assert account.delay == 975 + 20 + 1000
    machine.process(10, waited={12: 600})  # the number of one that ended, given to another
    account.read()
    assert account.delay == 1995 + 600


def test_a_process_that_ends_leaves_its_sum(machine: Machine) -> None:
    for pid in (10, 20):
        machine.process(pid, cpu=(pid, 0), waited={pid: pid})
        machine.ring(f"ring {pid}", pid, "worker")
    processes = Processes(machine.run, machine.proc)
    assert figures(processes) == {(MODEL, "worker"): (30, 30)}
    for path in sorted((machine.proc / "20").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    machine.process(10, cpu=(15, 0), waited={10: 15})
    assert figures(processes) == {(MODEL, "worker"): (35, 35)}
    machine.process(20, started=78, cpu=(9000, 0), waited={20: 9000})  # another with its number
    assert figures(processes) == {(MODEL, "worker"): (35, 35)}
    assert processes.unreadable() is None


def test_a_process_with_two_roles_counts_once(machine: Machine) -> None:
    for pid in (10, 20):
        machine.process(pid, cpu=(1, 0), waited={pid: 7})
    machine.ring("a", 10, "worker", "engine_core")
    machine.ring("b", 20, "worker", "api_server")
    machine.ring("not described yet", 10)
    processes = Processes(machine.run, machine.proc)
    assert figures(processes) == {
        (MODEL, "engine_core"): (1, 7),
        (MODEL, "worker"): (1, 7),
    }


def test_servers_of_one_agent_are_told_apart_by_model(machine: Machine) -> None:
    """In containers they may all call themselves by one pid: here each has its own."""
    for pid, model in ((10, "a"), (20, "b"), (30, "b")):
        machine.process(pid, cpu=(pid, 0), waited={pid: pid})
        machine.ring(f"engine_core-1-{pid}", pid, "engine_core", model=model)
    machine.ring("of a dead one", None, "engine_core", model="c")
    assert figures(Processes(machine.run, machine.proc)) == {
        ("a", "engine_core"): (10, 10),
        ("b", "engine_core"): (50, 50),
    }


def test_after_a_restart_of_the_agent_the_delay_starts_from_0(machine: Machine) -> None:
    machine.process(10, cpu=(40, 0), waited={10: 500, 11: 60})
    machine.ring("a", 10, "api_server")
    machine.run.restarts = 1
    processes = Processes(machine.run, machine.proc)
    assert figures(processes) == {(MODEL, "api_server"): (40, 0)}
    machine.process(10, cpu=(40, 0), waited={10: 510, 12: 8})
    assert figures(processes) == {(MODEL, "api_server"): (40, 18)}


@pytest.mark.parametrize("kernel", ["without the file", "that counts nothing"])
def test_a_kernel_without_schedstat(tmp_path: Path, kernel: str) -> None:
    machine = Machine(tmp_path)
    for pid in (os.getpid(), 10):
        machine.process(pid, cpu=(3, 4), waited={pid: 0})
        file = machine.proc / f"{pid}/task/{pid}/schedstat"
        file.unlink() if kernel == "without the file" else file.write_text("0 0 0\n")
    machine.ring("a", 10, "engine_core")
    processes = Processes(machine.run, machine.proc)
    processes.read()
    (account,) = processes.by_role()[MODEL, "engine_core"]
    assert account.delay is None
    assert account.cpu == 7
    assert processes.unreadable() == "no_schedstat"


def test_what_is_not_text_is_not_believed(machine: Machine) -> None:
    machine.process(10, waited={10: 5})
    machine.ring("a", 10, "engine_core")
    processes = Processes(machine.run, machine.proc)
    assert figures(processes) == {(MODEL, "engine_core"): (0, 5)}
    machine.write("/proc/10/task/10/schedstat", "")
    machine.write("/proc/10/stat", "10 (x) S")
    assert figures(processes) == {(MODEL, "engine_core"): (0, 5)}


def test_a_real_process_with_threads_that_wait() -> None:
    """More threads than CPUs, beside the kernel's own account of each."""
    folder = Path(f"/proc/{os.getpid()}")

    def truth() -> int:
        files = (folder / "task").glob("*/schedstat")
        return sum(int(file.read_text().split()[1]) for file in files)

    account = Account(folder, None, whole=True)
    account.read()
    stop = threading.Event()

    def spin() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        stop.wait()

    threads = [threading.Thread(target=spin) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    before = truth()
    account.read()
    after = truth()
    assert account.delay is not None
    assert before <= account.delay <= after
    stop.set()
    for thread in threads:
        thread.join()
    counted = account.delay
    account.read()
    assert account.delay >= counted
    assert account.cpu / HERTZ <= time.process_time() + 0.02
    assert account.cpu / HERTZ >= 0.15
