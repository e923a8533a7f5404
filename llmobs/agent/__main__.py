"""The agent: watches the servers of one run folder, and ends with the last of them."""

import argparse
import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from llmobs.agent.run import Run

POLL_SECONDS = 0.1
LINGER_SECONDS = 1.0
"""How long the page still stands after the last process of the server ended."""
NOBODY_SECONDS = 60.0
"""How long to wait for a first ring."""
RUNS_KEPT = 3
"""Run folders of dead servers that are left for a post-mortem."""

log = logging.getLogger("llmobs.agent")


def detach() -> None:
    """Become nobody's child, so that the server's recursive kill at its end misses us."""
    if os.fork():
        os._exit(0)
    # A process group of its own, so that the terminal's signals miss us, but no session: under
    # Linux's autogroups a session is also a scheduling group, and on 2 busy cores the page then
    # took up to 11 s (seen on Linux 6.18), just when it is wanted.
    os.setpgid(0, 0)


def main(argv: list[str] | None = None) -> int:
    """Run until the servers are gone. Exit codes: 0 done, or another agent is there already; 2 bad
    input."""
    parser = argparse.ArgumentParser(prog="llmobs agent", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The agent's command line, shared with `llmobs agent`."""
    parser.add_argument("folder", type=Path, help="the run folder, made if it is not there")
    parser.add_argument("--detach", action="store_true", help="go to the background")
    parser.add_argument(
        "--stay", action="store_true", help="wait for servers to come, and outlive them"
    )


def run(options: argparse.Namespace) -> int:
    """Take the folder's lock and watch, in the background if asked to."""
    if options.detach:
        detach()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        if options.stay:
            options.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(options.folder / "agent.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    except OSError as error:
        print(f"llmobs agent: {options.folder}: {error.strerror}", file=sys.stderr)
        return 2
    return watch(options.folder, options.stay)


def watch(folder: Path, stay: bool = False) -> int:
    """Tail the rings and serve the page. The lock is held by the caller."""
    # Imported late: detaching must not wait for numpy.
    from prometheus_client import CollectorRegistry

    from llmobs.agent.collect import RunCollector
    from llmobs.agent.run import Run
    from llmobs.settings import read_settings

    settings = read_settings()
    stop = threading.Event()

    def ended(signum: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, ended)
    signal.signal(signal.SIGINT, ended)

    run = Run(folder)
    run.restarts = _count_start(folder)
    if run.restarts:
        run.skip_to_newest()
    run.poll()
    registry = CollectorRegistry()
    registry.register(RunCollector(run))
    if settings.page:
        publish(run, registry, settings.host, settings.port)
    if not stay:
        prune(folder)

    began = time.monotonic()
    gone_since: float | None = None
    while not stop.is_set():
        try:
            busy = run.poll()
        except Exception:
            log.exception("reading failed")
            busy = 0
        now = time.monotonic()
        if stay:
            pass
        elif run.sources and not run.alive():
            gone_since = gone_since or now
            if now - gone_since > LINGER_SECONDS:
                break
        else:
            gone_since = None
            if not folder.exists() or (not run.sources and now - began > NOBODY_SECONDS):
                break
        stop.wait(POLL_SECONDS if busy < 4096 else 0.001)
    with contextlib.suppress(OSError):
        target_file(folder).unlink(missing_ok=True)
    return 0


def _count_start(folder: Path) -> int:
    """How often an agent ran here before."""
    path = folder / "agent.starts"
    try:
        before = int(path.read_text())
    except (OSError, ValueError):
        before = 0
    with contextlib.suppress(OSError):
        path.write_text(str(before + 1))
    return before


def publish(run: "Run", registry: "CollectorRegistry", host: str, port: int) -> None:
    """Open the page and say where it is: in the state file, and for Prometheus' file_sd."""
    from llmobs.agent.owner import owner_of
    from llmobs.agent.page import serve

    held_by = owner_of(port)
    family = {source.reader.pid for source in run.sources.values()}
    roots = (str(source.info.get("server")).partition("-")[0] for source in run.sources.values())
    family |= {int(root) for root in roots if root.isdigit()}
    ours = held_by is not None and held_by.pid in family
    try:
        # In a port of the server's own process OpenTelemetry's Prometheus exporter serves our
        # families too (see proxy.py): our own page is for it alone then.
        address, bound = serve(run, registry, "127.0.0.1" if ours else host, 0 if ours else port)
    except OSError as error:
        log.warning("no page: %s", error)
        _write(run.folder / "agent.json", {"notice": f"llmobs: no metrics page: {error}"})
        return
    shown = "localhost" if address in ("127.0.0.1", "::1") else address
    public = port if ours else bound
    notice = f"llmobs: metrics on http://{shown}:{public}/metrics"
    if ours:
        notice += ", with OpenTelemetry's own"
    elif bound != port:
        who = f" by {held_by.name} (pid {held_by.pid})" if held_by else ""
        notice += (
            f"; port {port} is taken{who}, set OTEL_EXPORTER_PROMETHEUS_PORT to choose another"
        )
    log.info("%s", notice)
    page = f"http://{f'[{address}]' if ':' in address else address}:{bound}"
    state = {"pid": os.getpid(), "page": page, "joined": ours, "notice": notice}
    _write(run.folder / "agent.json", state)
    target = [{"targets": [f"{shown}:{public}"], "labels": {"run": run.folder.name}}]
    with contextlib.suppress(OSError):
        target_file(run.folder).parent.mkdir(mode=0o700, exist_ok=True)
        _write(target_file(run.folder), target)


def target_file(folder: Path) -> Path:
    """This server's entry in the folder that Prometheus' file_sd may watch."""
    return folder.parent / "file_sd" / f"{folder.name}.json"


def _write(path: Path, content: object) -> None:
    """Replace a file as a whole: its readers never see half of it."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as partial:
        json.dump(content, partial)
    os.replace(partial.name, path)


def prune(folder: Path) -> None:
    """Remove the run folders of all but the last few dead servers."""
    try:
        others = [other for other in folder.parent.iterdir() if other != folder]
    except OSError:
        return
    dead = [(when, other) for other in others if (when := _died(other)) is not None]
    for _, other in sorted(dead)[:-RUNS_KEPT]:
        shutil.rmtree(other, ignore_errors=True)
        with contextlib.suppress(OSError):
            target_file(other).unlink(missing_ok=True)


def _died(folder: Path) -> float | None:
    """When a ring of a dead server's run folder was last written; None if it is no run folder, or
    its server lives."""
    from llmobs.process import agent_runs
    from llmobs.ring import start_ticks

    rings = [path.stem.split("-")[-2:] for path in folder.glob("*.ring")]
    names = [name for name in (folder.name.split("-"), *rings) if len(name) == 2]
    processes = [(p, t) for p, t in names if p.isdecimal() and t.isdecimal()]
    if not rings or not re.fullmatch("[0-9]+-[0-9]+", folder.name):
        return None
    # In a container that shares /dev/shm the pids are others, but a lock is a lock.
    if any(start_ticks(int(p)) == int(t) for p, t in processes) or agent_runs(folder):
        return None
    try:
        return max(path.stat().st_mtime for path in folder.glob("*.ring"))
    except (OSError, ValueError):
        return None  # another agent was faster


if __name__ == "__main__":
    sys.exit(main())
