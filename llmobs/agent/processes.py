"""What the server's processes, and the agent, had of the CPUs, and how long they waited for one."""

import os
from pathlib import Path

from llmobs.agent.run import Run

ROLES = ("engine_core", "worker", "api_server")
"""A process with several roles counts as the first of these."""


def main_role(roles: list[str]) -> str | None:
    """None as long as a process has not said."""
    return next((role for role in ROLES if role in roles), None)


class Account:
    """One process. Neither figure ever falls.

    `cpu` is in clock ticks and holds the threads that ended. `delay`, in nanoseconds, is the sum of
    what the threads waited for a CPU while they were ready to run, None as long as that cannot be
    read. The kernel keeps it by thread only (/proc/PID/schedstat is the main thread's), so what a
    thread waited since the last look is lost when it ends. `whole` says whether what the threads
    waited before the first look counts.
    """

    def __init__(self, folder: Path, ticks: int | None, whole: bool) -> None:
        self.cpu = 0
        self.delay: int | None = None
        self.ended = False
        self.denied = False
        """Whether we may not read it."""
        self._folder, self._ticks, self._whole = str(folder), ticks, whole
        self._threads: dict[str, int] = {}

    def read(self) -> None:
        """Look again. `ended` is set when there is no such process any more."""
        self.denied = False
        try:
            with open(f"{self._folder}/stat", "rb", 0) as file:
                # The command, field 2, may hold spaces and brackets: count from the last bracket.
                fields = file.read().rpartition(b")")[2].split()
            if self._ticks is not None and int(fields[19]) != self._ticks:
                raise ProcessLookupError  # another process has its number now
            self.cpu = max(self.cpu, int(fields[11]) + int(fields[12]))
            self._read_threads()
        except (FileNotFoundError, ProcessLookupError):
            self.ended = True
            self._threads.clear()
        except (OSError, ValueError, IndexError) as error:
            self.denied = isinstance(error, PermissionError)

    def _read_threads(self) -> None:
        waited: dict[str, int] = {}
        runs = 0
        for thread in os.listdir(f"{self._folder}/task"):
            try:
                with open(f"{self._folder}/task/{thread}/schedstat", "rb", 0) as file:
                    _, delay, turns = file.read().split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
            waited[thread] = int(delay)
            runs += int(turns)
        if not runs:
            return  # a kernel that does not count says 0, or has no such file
        for thread, now in waited.items():
            before = self._threads.get(thread, 0 if self._whole else now)
            more = now - before if now >= before else now  # its number was given to a new one
            self.delay = (self.delay or 0) + more
        self._threads, self._whole = waited, True


class Processes:
    """The accounts of all processes that have a ring, and the agent's own."""

    def __init__(self, run: Run, proc: Path) -> None:
        self._run, self._proc = run, proc
        self.agent = Account(proc / str(os.getpid()), None, True)
        self._accounts: dict[str, Account] = {}
        """By ring."""

    def read(self) -> None:
        self.agent.read()
        for name, source in self._run.sources.items():
            pid = source.reader.process
            if name not in self._accounts and pid is not None:
                # An agent that was started again does not know of threads that ended before.
                # Without them the counter would have fallen, and Prometheus would take the whole of
                # it for new: so it starts from 0.
                self._accounts[name] = Account(
                    self._proc / str(pid), source.reader.ticks, whole=not self._run.restarts
                )
        for account in self._accounts.values():
            if not account.ended:
                account.read()

    def by_role(self) -> dict[tuple[str, str], list[Account]]:
        """By served model and role, those that ended too."""
        found: dict[tuple[str, str], list[Account]] = {}
        for name, account in self._accounts.items():
            source = self._run.sources[name]
            role = main_role(source.roles)
            if role is not None and source.models:
                found.setdefault((source.models[0], role), []).append(account)
        return found

    def unreadable(self) -> str | None:
        """Why there is no run-queue delay of the server's processes; None where there is."""
        if self.agent.delay is None:
            return "no_permission" if self.agent.denied else "no_schedstat"
        running = [account for account in self._accounts.values() if not account.ended]
        denied = running and all(account.denied for account in running)
        return "no_permission" if denied else None
