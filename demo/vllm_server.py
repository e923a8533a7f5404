"""Start and stop a real vLLM server, for the demo and the tests."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

ROOT = Path(__file__).resolve().parents[1]
MODULE = ("-m", "vllm.entrypoints.openai.api_server")
SCRIPT = (str(ROOT / "demo" / "server.py"),)

# Of two equal options the later one counts, so `args` override these.
DEFAULT_ARGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--load-format=dummy",
    "--served-model-name=deepseek-v4",
    "--max-model-len=33000",
)
DEFAULT_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
START_S = 300.0  # start-up takes 20-75 s, more on a loaded machine
GROUP_S = 10.0  # for its other processes, once the server itself is gone
TAIL_LINES = 60

# What vLLM calls its processes, `VLLM::EngineCore_DP0` for example, as far as it names them.
ROLES = {
    "APIServer": "api_server",
    "EngineCore": "engine_core",
    "Worker": "worker",
    "DPCoordinator": "coordinator",
}


@dataclass(frozen=True)
class ServerProcess:
    """One live process of the server; `role` is a value of `ROLES` or `other`."""

    pid: int
    role: str
    title: str


class VllmServer:
    """A real vLLM server in a process group of its own, as a context manager.

    `args` are added to the default arguments and override them, `env` likewise (None removes a
    variable). `entry` is what Python runs (`MODULE` or `SCRIPT`), `prefix` goes before Python,
    such as `["opentelemetry-instrument"]`. The log holds stdout and stderr. Without `port`, a free
    one. Entering raises RuntimeError with the log's tail if the process exits or is not healthy in
    `start_s` seconds.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str | None] | None = None,
        prefix: Sequence[str] = (),
        entry: Sequence[str] = MODULE,
        port: int | None = None,
        python: str = sys.executable,
        start_s: float = START_S,
    ) -> None:
        self.log = log
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.startup_s: float | None = None  # from the fork to the first healthy answer
        self._start_s = start_s
        self._command = [*prefix, python, *entry, f"--model={model}", "--host=127.0.0.1"]
        self._command += [f"--port={self.port}", *DEFAULT_ARGS, *args]
        merged = {**os.environ, **DEFAULT_ENV, **(env or {})}
        self._env = {name: value for name, value in merged.items() if value is not None}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the process started; a prefix that only execs Python keeps it. Once it has started."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative where a signal ended it."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start and wait for /health to be 200. Raises RuntimeError, having stopped what ran."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                # A group of its own to kill, but no session: under Linux's autogroups a session is
                # also a scheduling group, and on 2 cores the client outside of it was kept from
                # running for up to 2 s while the server decoded (seen on Linux 6.18).
                process_group=0,
            )
        try:
            while not self.healthy():
                if self.returncode is not None:
                    raise RuntimeError(f"vLLM exited with {self.returncode}:\n{self._tail()}")
                if time.monotonic() - began > self._start_s:
                    raise RuntimeError(f"vLLM not up in {self._start_s:.0f} s:\n{self._tail()}")
                time.sleep(0.25)
        except BaseException:  # an interrupted test must not leave a server behind either
            self.stop()
            raise
        self.startup_s = time.monotonic() - began

    def healthy(self) -> bool:
        """Whether /health answers 200 within 5 s."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def log_text(self) -> str:
        """All of stdout and stderr so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[ServerProcess]:
        """The started process and all its live descendants, by pid.

        vLLM names the processes that it makes, not the one it is started in: where none is called
        APIServer, that one is the API server.
        """
        try:
            root = psutil.Process(self.pid)
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        found = []
        for process in family:
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                title = " ".join(process.cmdline()).strip()
            except psutil.Error:  # it ended meanwhile (a zombie has no command)
                continue
            found.append(ServerProcess(process.pid, _role(title), title))
        if not any(process.role == "api_server" for process in found):
            found = [
                ServerProcess(p.pid, "api_server", p.title) if p.pid == self.pid else p
                for p in found
            ]
        return sorted(found, key=lambda process: process.pid)

    def pids(self, role: str) -> list[int]:
        """Pids of the processes of one role."""
        return [process.pid for process in self.processes() if process.role == role]

    def stop(self, timeout_s: float = 30.0) -> None:
        """SIGTERM to the server, then SIGKILL to all of its process group still alive.

        The server has `timeout_s` to end, the rest of the group then `GROUP_S`. Processes that
        left the group are not touched. Stopping twice does nothing.
        """
        if self._process is None:
            return
        group = self._group()
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        psutil.wait_procs(group, GROUP_S if self._process.poll() is not None else 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        psutil.wait_procs(group, GROUP_S)

    def _group(self) -> list[psutil.Process]:
        """The other members of the server's process group."""
        members = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError):
                if process.pid != self.pid and os.getpgid(process.pid) == self.pid:
                    members.append(process)
        return members

    def _tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-TAIL_LINES:])


def _role(title: str) -> str:
    if "VLLM::" not in title:
        return "other"
    name = title.split("VLLM::", 1)[1]
    return next((role for start, role in ROLES.items() if name.startswith(start)), "other")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
