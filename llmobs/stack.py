"""`llmobs stack`: Prometheus, Alertmanager and the blackbox exporter on this machine.

The same files as the docker stack's, and only what is installed: for development, for the tests,
and for machines without docker. `--configure` only writes Alertmanager's receivers, from the
environment.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from llmobs.generate import alertmanager, files, prometheus, rules
from llmobs.slo import SLO

COMMANDS = {
    "prometheus": ("prometheus",),
    "alertmanager": ("alertmanager", "prometheus-alertmanager"),
    "blackbox": ("blackbox_exporter", "prometheus-blackbox-exporter"),
}
"""By server: what it is called upstream, and by Debian."""
READY = {"prometheus": "/-/ready", "alertmanager": "/-/ready", "blackbox": "/-/healthy"}
READY_SECONDS = 60.0
RETENTION = "35d"
"""A budget of 30 days wants 30 days of figures."""


class StackError(ValueError):
    """One line: what is wrong, and what is accepted."""


def configure(folder: Path, environ: Mapping[str, str]) -> Path:
    """Alertmanager's configuration with its receivers; it holds secrets, so none but us (and in a
    container its group) may read it. Raises StackError and OSError."""
    try:
        content = alertmanager.with_receivers(environ)
    except alertmanager.ReceiverError as error:
        raise StackError(str(error)) from None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "alertmanager.local.yml"
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o640)
    with open(descriptor, "w") as file:
        file.write(rules.dump(content))
    return path


def run(options: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Until it is interrupted. Exit codes: 0, 1 where a server ended by itself, 2 bad input."""
    try:
        if options.configure:
            print(configure(Path(options.configure), os.environ), file=out)
            return 0
        return _Stack(options, out, err).run()
    except StackError as error:
        print(f"llmobs stack: {error}", file=err)
    except OSError as error:
        print(f"llmobs stack: {error.filename or options.dir}: {error.strerror}", file=err)
    return 2


class _Stack:
    def __init__(self, options: argparse.Namespace, out: TextIO, err: TextIO) -> None:
        self.out, self.err = out, err
        self.folder = Path(options.dir).absolute()
        self.host = options.host
        ports = (options.prometheus_port, options.alertmanager_port, options.blackbox_port)
        self.ports = dict(zip(COMMANDS, ports, strict=True))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> int:
        programs = {name: _program(names) for name, names in COMMANDS.items()}
        for name in ("prometheus", "alertmanager"):
            if programs[name] is None:
                raise StackError(
                    f"{name} is not installed; accepted is the Debian package "
                    f"{COMMANDS[name][-1]}, or {COMMANDS[name][0]} in PATH"
                )
        if programs["blackbox"] is None:
            print("llmobs stack: no blackbox exporter, so /health is not checked", file=self.err)
        commands = self._commands()
        stop = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, stop)
        try:
            for name, program in programs.items():
                if program is not None:
                    self._start(name, [program, *commands[name]])
            for name in self.processes:
                self._wait_ready(name)
            print(f"Prometheus {self._url('prometheus')}", file=self.out)
            print(f"Alertmanager {self._url('alertmanager')}", file=self.out, flush=True)
            while signal.sigtimedwait(stop, 0.5) is None:
                for name, process in self.processes.items():
                    if process.poll() is not None:
                        print(f"llmobs stack: {name} ended; {self._log(name)}", file=self.err)
                        return 1
            return 0
        finally:
            for process in self.processes.values():
                process.terminate()
            for process in self.processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, stop)

    def _url(self, name: str) -> str:
        return f"http://{self.host}:{self.ports[name]}"

    def _log(self, name: str) -> Path:
        return self.folder / "data" / f"{name}.log"

    def _commands(self) -> dict[str, list[str]]:
        """Write what they read, and say how each is started."""
        files.write(self.folder, files.files(SLO), files.targets())
        alerts, data = self.folder / "alerts", self.folder / "data"
        data.mkdir(exist_ok=True)
        here = {name: f"127.0.0.1:{port}" for name, port in self.ports.items()}
        local = alerts / "prometheus.local.yml"
        content = prometheus.content(here["alertmanager"], here["blackbox"])
        local.write_text(files.HEAD + rules.dump(content))
        receivers = configure(alerts, os.environ)
        return {
            "prometheus": [
                f"--config.file={local}",
                f"--storage.tsdb.path={data / 'prometheus'}",
                f"--storage.tsdb.retention.time={RETENTION}",
                f"--web.listen-address={here['prometheus']}",
                f"--web.external-url={self._url('prometheus')}",
                f"--web.console.templates={alerts / 'consoles'}",
                f"--web.console.libraries={alerts / 'consoles'}",
                "--enable-feature=exemplar-storage",
            ],
            "alertmanager": [
                f"--config.file={receivers}",
                f"--storage.path={data / 'alertmanager'}",
                f"--web.listen-address={here['alertmanager']}",
                f"--web.external-url={self._url('alertmanager')}",
                "--cluster.listen-address=",
            ],
            "blackbox": [
                f"--config.file={alerts / 'blackbox.yml'}",
                f"--web.listen-address={here['blackbox']}",
            ],
        }

    def _start(self, name: str, command: list[str]) -> None:
        with self._log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # These are ended by us, in our time, not by the terminal.
                process_group=0,
            )

    def _wait_ready(self, name: str) -> None:
        url = f"http://127.0.0.1:{self.ports[name]}{READY[name]}"
        end = time.monotonic() + READY_SECONDS
        while True:
            if self.processes[name].poll() is not None or time.monotonic() > end:
                raise StackError(f"{name} does not start; why is in {self._log(name)}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(url, timeout=5).close()
                return
            time.sleep(0.1)


def _program(names: tuple[str, ...]) -> str | None:
    return next((path for path in map(shutil.which, names) if path), None)
