"""The flight record: what a post-mortem needs beside the rings, and all that it needs without them.

A file in the run folder, replaced as a whole every second; the same on LLMOBS_FLIGHT_DIR, which is
meant for a volume that outlives the container. Rings would not do there: a mapped file on a disk
makes its writer wait for the write-back.
"""

import contextlib
import json
import logging
import os
import platform
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmobs.agent.endings import Endings
from llmobs.agent.run import Run
from llmobs.agent.scene import Ends, dead_scene, gauges, scene_of, servers, sources_of
from llmobs.agent.signals import Samples
from llmobs.agent.vitals import Vitals

SECONDS = 1.0
GAUGES_EVERY = 5
SAMPLES_KEPT = 90
SUFFIX = ".flight.json"
VERSION = 1
RECORDS_KEPT = 20
DAYS_KEPT = 30
NONSENSE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What may come of reading a damaged record."""
FRESH_SECONDS = 60.0
"""What was written so lately may be of a server that runs."""

log = logging.getLogger("llmobs.agent")


class Flight:
    """A signal (signals.py): samples and describes the server, and lets a thread of its own write,
    for a volume may be slow."""

    def __init__(self, run: Run, volume: Path | None, say: Callable[[str], None]) -> None:
        self.run = run
        self.volume = volume
        self.say = say
        self._vitals = Vitals()
        self._endings = Endings()
        self._servers: dict[str, Record] = {}
        self._next = 0.0
        self._turn = 0
        self._wanted = threading.Event()
        self._closed = False
        self._failed = False
        self._complained = ""
        if volume is not None:
            prune(volume)
        self._thread = threading.Thread(target=self._write_all, name="llmobs-flight", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        now = time.monotonic()
        try:
            self._endings.look(self.run)  # at each poll, for the moment counts
            if now >= self._next:
                self._next = now + SECONDS
                self._look()
        except Exception:  # whatever a damaged ring said
            if not self._failed:
                log.exception("no flight record")
            self._failed = True

    def _look(self) -> None:
        figures = gauges(self.run) if self._turn % GAUGES_EVERY == 0 else None
        self._turn += 1
        for server in servers(self.run):
            record = self._servers.get(server)
            if record is None:
                record = self._servers[server] = Record(server, self.run)
            record.look(self._vitals, figures, self._endings)
        self._wanted.set()

    def samples(self) -> dict[str, Samples]:
        return {}

    def lacking(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        """The agent ends."""
        self._closed = True
        self._next = 0.0
        with self.run.lock:
            self.poll()
        self._wanted.set()
        self._thread.join(CLOSE_SECONDS)
        self._endings.close()

    # The thread that writes

    def _write_all(self) -> None:
        closed = False
        while not closed:
            self._wanted.wait()
            self._wanted.clear()
            closed = self._closed
            for record in list(self._servers.values()):
                if record.done:
                    continue
                record.done = record.ended  # what is looked at from now on is written, too
                text = record.text()
                with contextlib.suppress(OSError):  # a full disk: others say so
                    replace(self.run.folder / (record.server + SUFFIX), text)
                if self.volume is not None:
                    self._to_volume(self.volume, record.server, text)

    def _to_volume(self, volume: Path, server: str, text: str) -> None:
        try:
            volume.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace(volume / record_name(server), text, lasting=True)
        except OSError as error:
            why = error.strerror or str(error)
            if why != self._complained:
                self._complained = why
                self.say(
                    f"llmobs: no flight record in {volume} ({why}); LLMOBS_FLIGHT_DIR must be a "
                    "folder that this server's user can write to"
                )


class Record:
    """What is written of one server."""

    def __init__(self, server: str, run: Run) -> None:
        self.server = server
        self.run = run
        self.ended = False
        """Whether all of its processes are dead; `done` when that was written down too."""
        self.done = False
        self._scene: dict[str, Any] = {}
        self._samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES_KEPT)
        self._ends: Ends = {}
        self._living = 0
        self._thawed_at = 0.0
        # Another agent may have been here before us, and seen how it was when something broke.
        with contextlib.suppress(*NONSENSE):
            before = json.loads((run.folder / (server + SUFFIX)).read_text())
            ends = {pid: (int(code), float(at)) for pid, (code, at) in before["ends"].items()}
            if before["version"] == VERSION and before["scene"] and before["samples"]:
                self._scene, self._ends = dict(before["scene"]), ends
                self._samples.extend(before["samples"])

    def look(self, vitals: Vitals, figures: Any, endings: Endings) -> None:
        """Under the run's lock."""
        now = time.monotonic()
        sources = sources_of(self.run, self.server)
        living = sum(source.alive for source in sources)
        for source in sources:
            if (end := endings.told.get(source.reader.pid)) is not None:
                if str(source.reader.pid) not in self._ends:
                    self.done = False
                self._ends[str(source.reader.pid)] = end
        if self.ended and not living:
            return
        self.ended, self.done = not living, False
        if living < self._living:
            # One died, and maybe the others fall too: how it was before is what matters.
            self._thawed_at = now + FROZEN_SECONDS
        self._living = living
        if not self._scene or (now >= self._thawed_at and living):
            self._scene = scene_of(self.run, self.server)
        pids = {source.reader.pid: source.reader.process for source in sources}
        memory = vitals.memory(pids)
        sample = {"at": round(time.time(), 3), **memory}
        if figures is not None:
            sample["gauges"] = figures
        self._samples.append(sample)

    def text(self) -> str:
        """As it is written. Of a server that ended, its end as the rings have it."""
        if self.ended:
            try:
                self._scene = dead_scene(self.run.folder, self.server, self._ends)
            except Exception as error:  # removed, or damaged: what there was stays
                log.info("the end of %s is not told by its rings: %r", self.server, error)
        return json.dumps(
            {
                "version": VERSION,
                "server": self.server,
                "written": time.time(),
                "host": platform.node(),
                "run_folder": str(self.run.folder),
                "agent": {"pid": os.getpid(), "restarts": self.run.restarts},
                "ends": self._ends,
                "scene": self._scene,
                "samples": list(self._samples),
            }
        )


CLOSE_SECONDS = 3.0
"""So long a slow volume may keep the agent from ending."""
FROZEN_SECONDS = 60.0
"""So long a server may take to end after one of its processes did."""


def record_name(server: str) -> str:
    """Pods that share a volume know themselves by the same pids: the host's name tells."""
    return re.sub("[^A-Za-z0-9._-]", "_", platform.node() or "host") + f"-{server}{SUFFIX}"


def replace(path: Path, text: str, lasting: bool = False) -> None:
    """Replace a file as a whole: a reader, or whoever comes after a crash, never sees half of it.
    `lasting`: also if the machine goes down. Only one writes there: the agent."""
    partial = path.with_name(path.name + ".new")
    descriptor = os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)
        if lasting:
            file.flush()
            os.fsync(descriptor)
    os.replace(partial, path)


def prune(volume: Path) -> None:
    """Leave the newest records only."""
    now = time.time()
    found = []
    with contextlib.suppress(OSError):
        for path in volume.iterdir():
            if path.name.endswith((SUFFIX, SUFFIX + ".new")):
                with contextlib.suppress(OSError):
                    found.append((path.stat().st_mtime, path))
    found.sort(reverse=True)
    for place, (written, path) in enumerate(found):
        age = now - written
        if age > FRESH_SECONDS and (place >= RECORDS_KEPT - 1 or age > DAYS_KEPT * 86400):
            with contextlib.suppress(OSError):
                path.unlink()
