"""The agent's life: from the first ring to a little after the last process of the server."""

import contextlib
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from llmobs.agent.collect import RunCollector
from llmobs.agent.flight import Flight
from llmobs.agent.gpu.signal import Gpus
from llmobs.agent.host import Host
from llmobs.agent.owner import owner_of
from llmobs.agent.page import serve
from llmobs.agent.run import Run
from llmobs.agent.state import State, write_json
from llmobs.agent.traces import Traces
from llmobs.process import AGENT_LOCK, agent_runs
from llmobs.ring import start_ticks
from llmobs.settings import Settings, read_settings

if TYPE_CHECKING:
    from llmobs.agent.otlp_metrics import OtlpMetrics

INSTALL = "pip install opentelemetry-exporter-otlp"
POLL_SECONDS = 0.2
LINGER_SECONDS = 1.0
"""How long the page still stands after the last process of the server ended."""
NOBODY_SECONDS = 60.0
"""How long to wait for a first ring."""
RUNS_KEPT = 3
"""Run folders of dead servers that are left for a post-mortem."""

log = logging.getLogger("llmobs.agent")


def watch(folder: Path, lock: int, stay: bool = False) -> int:
    """Tail the rings and serve the page. `lock` is the folder's, held."""
    # A batch thread takes no CPU from a running one when it wakes up: the engine comes first. The
    # threads that follow, of the page and the exporters, are of the same class.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    settings = read_settings()
    # No Event: to set one takes a lock, and the thread that the signal interrupts may have it; it
    # would wait for itself, for ever.
    told_to_end: list[int] = []

    def ended(signum: int, frame: FrameType | None) -> None:
        told_to_end.append(signum)

    signal.signal(signal.SIGTERM, ended)
    signal.signal(signal.SIGINT, ended)

    run = Run(folder)
    state = State(folder)
    run.say = state.say
    run.requests.traces = start_traces(settings, run.lock, state.say)
    run.restarts = _count_start(folder)
    if run.restarts:
        run.skip_to_newest()
    run.signals.append(Host(run))
    run.signals.append(Gpus(run, settings.gpu_seconds, state.say))
    run.poll()
    run.signals.append(Flight(run, settings.flight, state.say))
    registry = CollectorRegistry()
    registry.register(RunCollector(run))
    if settings.page:
        publish(run, state, registry, settings.host, settings.port)
    metrics = start_metrics(settings, run, state.say)
    if not stay:
        prune(folder)

    began = time.monotonic()
    gone_since: float | None = None
    failing = False
    while not told_to_end:
        try:
            busy = run.poll()
            failing = False
        except Exception:
            if not failing:  # once in a row: the log is in memory, and for ever
                log.exception("reading failed")
            failing = True
            busy = 0
        state.retry()
        now = time.monotonic()
        if stay:
            prune_rings(run)
        elif run.sources and not run.alive():
            gone_since = gone_since or now
            if now - gone_since > LINGER_SECONDS:
                break
        else:
            gone_since = None
            # A folder that was removed is no end: its rings are still written and read.
            if not run.sources and (not folder.exists() or now - began > NOBODY_SECONDS):
                break
        if superseded(lock, folder / AGENT_LOCK):
            break
        time.sleep(POLL_SECONDS if busy < 4096 else 0.001)
    if metrics is not None:
        metrics.close()
    if run.requests.traces is not None:
        run.requests.traces.close()
    for source in run.signals:
        source.close()
    with contextlib.suppress(OSError):
        target_file(folder).unlink(missing_ok=True)
    return 0


def superseded(lock: int, path: Path) -> bool:
    """Whether the lock's file was replaced: another agent may hold the new one."""
    try:
        return os.stat(path).st_ino != os.fstat(lock).st_ino
    except OSError:
        return False


def start_traces(
    settings: Settings, lock: AbstractContextManager[object], say: Callable[[str], None]
) -> Traces | None:
    """The traces, where the settings want some and the packages are there."""
    if settings.trace_share is None or settings.traces_exporter == "none":
        return None
    try:
        from llmobs.agent.otlp import OtlpSink

        sink = OtlpSink(say)
    except ImportError as error:
        say(f"llmobs: no traces, {error.name} is not installed: {INSTALL}")
        return None
    except ValueError as error:
        say(f"llmobs: no traces, {error}")
        return None
    traces = Traces(settings.trace_share, lock, sink)
    traces.start()
    return traces


def start_metrics(settings: Settings, run: Run, say: Callable[[str], None]) -> "OtlpMetrics | None":
    """Metrics over OTLP, where OTEL_METRICS_EXPORTER asks for them."""
    if not settings.metrics_otlp:
        return None
    try:
        from llmobs.agent.otlp_metrics import OtlpMetrics

        metrics = OtlpMetrics(run, say)
    except ImportError as error:
        say(f"llmobs: no OTLP metrics, {error.name} is not installed: {INSTALL}")
        return None
    except ValueError as error:
        say(f"llmobs: no OTLP metrics, {error}")
        return None
    metrics.start()
    return metrics


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


def publish(run: Run, state: State, registry: CollectorRegistry, host: str, port: int) -> None:
    """Open the page and say where it is: in the state file, and for Prometheus' file_sd."""
    held_by = owner_of(port)
    family = {source.reader.pid for source in run.sources.values()}
    roots = (str(source.info.get("server")).partition("-")[0] for source in run.sources.values())
    family |= {int(root) for root in roots if root.isdigit()}
    ours = held_by is not None and held_by.pid in family
    try:
        # In a port of the server's own process OpenTelemetry's Prometheus exporter serves our
        # families too (see proxy.py): our own page is for it alone then.
        address, bound = serve(run, registry, "127.0.0.1" if ours else host, 0 if ours else port)
    except (OSError, ValueError) as error:  # an impossible name is no OSError
        state.say(
            f"llmobs: no metrics page, {error}; OTEL_EXPORTER_PROMETHEUS_HOST={host!r} must be an "
            "address of this machine"
        )
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
    page = f"http://{f'[{address}]' if ':' in address else address}:{bound}"
    state.update(page=page, joined=ours)
    state.say(notice)
    target = [{"targets": [f"{shown}:{public}"], "labels": {"run": run.folder.name}}]
    with contextlib.suppress(OSError):
        target_file(run.folder).parent.mkdir(mode=0o700, exist_ok=True)
        write_json(target_file(run.folder), target)


def target_file(folder: Path) -> Path:
    """This server's entry in the folder that Prometheus' file_sd may watch."""
    return folder.parent / "file_sd" / f"{folder.name}.json"


def prune_rings(run: Run) -> None:
    """In a folder that outlives its servers, remove the rings of dead processes but for the last;
    what they counted is kept here."""
    with run.lock:
        dead = [source for source in run.sources.values() if source.drained]
    for source in dead[: -RUNS_KEPT * 3]:
        with contextlib.suppress(OSError):
            source.reader.path.unlink()


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
