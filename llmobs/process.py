"""What the probes of one process share: the ring, the model names, the agent."""

import atexit
import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from llmobs import __version__, pauses, schema
from llmobs.children import Children
from llmobs.features import MEANING
from llmobs.guard import GUARD
from llmobs.proxy import join_exporter
from llmobs.ring import SUFFIX, Reader, RingError, Writer, start_ticks
from llmobs.settings import SERVER_ENVIRON, SERVER_RUN, SLO_FILE, Settings, read_settings, slo_file
from llmobs.slo import BUCKET_LIMITS, PROBLEM, STEP_SECONDS

log = logging.getLogger("llmobs")

AGENT_LOCK = "agent.lock"
AGENT_STATE = "agent.json"
MISSING = "missing-"
"""Followed by the server and the probe: an empty file, by which the agent knows it too."""
WATCH_SECONDS = 1.0
STARTS_UNSAID = 2
ALIVE_WALL = schema.PROCESS_CELL["alive_wall_ns"]
ALIVE = schema.PROCESS_CELL["alive_ns"]
RAISED_KEPT = 20
"""Exceptions of vLLM's that are recorded: one is enough to end it."""
NAME_BYTES = 72
SPAWN_GRACE_SECONDS = 10.0
"""How long a started agent may take to the lock before another process starts one."""


class Process:
    """The state of one process; made anew in a forked child.

    `ring` is None until the process has a role (and stays so when the run folder cannot be used):
    every probe looks at it first.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.began = time.time()
        self.raises = 0
        self.ring: Writer | None = None
        self.models: list[str] = []
        self.roles: list[str] = []
        self.probes: dict[str, int] = {}
        self.missing: dict[str, str] = {}
        """What to say of the probes that this vLLM has no place for."""
        self.extra: dict[str, Any] = {}
        self.lacking: dict[str, str] = {}
        """Features that this process knows to be unavailable, with the reason."""
        self.vllm_traces = False
        """Whether vLLM's own tracing is on."""
        self.probe_numbers: dict[str, int] = {}
        self._lock = threading.Lock()
        self._gave_up = False
        GUARD.on_failure = self._count_failure

    def open(self, role: str, model: str, **extra: Any) -> None:
        """Give the process a role: api_server, engine_core or worker. The first opens the ring.

        `extra` goes into the header: the engine's index, the worker's rank.
        """
        with self._lock:
            if self._gave_up:
                return
            self.roles += [role] if role not in self.roles else []
            self.extra |= extra
            self.models = self.models or [model]
            if self.ring is not None:
                self.write_info()
                return
            try:
                folder = self._run_folder()
                path = folder / f"{role}-{os.getpid()}-{start_ticks(os.getpid())}{SUFFIX}"
                capacity = max(16, self.settings.ring_bytes // schema.SLOT_SIZE)
                self.ring = Writer(path, capacity, self._info())
            except (OSError, ValueError) as error:
                self._gave_up = True
                log.warning(
                    "llmobs: off in this process, cannot write to the run folder %s (%s); set "
                    "%s to a folder that this user owns, with %d bytes free",
                    getattr(error, "filename", None) or self.settings.run_base,
                    getattr(error, "strerror", None) or error,
                    "LLMOBS_RUN_DIR" if self.settings.agent is None else "LLMOBS_AGENT",
                    self.settings.ring_bytes,
                )
                return
            for probe, failures in GUARD.failures.items():
                self._count_failure(probe, failures)
            for probe in self.missing:
                self._say_missing(probe)
            atexit.register(self._ends)
            pauses.watch(self.ring)
            watch = threading.Thread(
                target=_watch, args=(self, folder), name="llmobs-watch", daemon=True
            )
            watch.start()

    def _ends(self) -> None:
        """Python ends this process in good order: it was neither killed, nor did it crash."""
        if self.ring is not None and self is current():
            self.ring.put(schema.Kind.EXIT, time.monotonic_ns(), 0, 1)

    def _run_folder(self) -> Path:
        if self.settings.agent is not None:
            return self.settings.agent
        base = self.settings.run_base
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = base.stat()
        if owner.st_uid != os.geteuid():
            raise PermissionError(1, f"owned by another user (uid {owner.st_uid})", str(base))
        folder = Path(os.environ[SERVER_RUN])
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _info(self) -> dict[str, Any]:
        return {
            "llmobs": __version__,
            # Whatever it says (a nightly's name, `dev`) or does not: nothing is decided by it.
            "vllm": str(getattr(sys.modules.get("vllm"), "__version__", None) or "unknown"),
            "server": Path(os.environ.get(SERVER_RUN, "")).name,
            "resource": self.settings.resource,
            "began": self.began,
            "roles": self.roles,
            "models": self.models,
            "probes": self.probes,
            "probe_numbers": self.probe_numbers,
            "lacking": self.lacking,
            "buckets": BUCKET_LIMITS,
            "step_seconds": STEP_SECONDS,
            **self.extra,
        }

    def write_info(self) -> None:
        """Bring the header up to date. Called where something in it changed, never per request."""
        if self.ring is not None:
            self.ring.write_info(self._info())

    def miss(self, probe: str, said: str, at_once: bool) -> None:
        """This vLLM has no place for a probe. It is said once this is known to be a server, unless
        nothing may come after that tells so."""
        self.probes[probe] = 0
        self.missing[probe] = said
        self.write_info()
        if at_once:
            with contextlib.suppress(OSError):
                self._run_folder()
        if at_once or (SERVER_RUN in os.environ and self._notes().is_dir()):
            self._say_missing(probe)

    def _notes(self) -> Path:
        """Where the server's processes leave notes for each other and the agent."""
        return self.settings.agent or Path(os.environ[SERVER_RUN])

    def _say_missing(self, probe: str) -> None:
        """Log it, in the first process of the server that gets to it."""
        server = Path(os.environ[SERVER_RUN]).name
        try:
            (self._notes() / f"{MISSING}{server}-{probe}").touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:
            pass  # better said twice than not at all
        log.warning("%s", self.missing[probe])

    def lacks(self, reason: str, *features: str, said: bool = True) -> None:
        """Say, here (unless it is no surprise) and on the page, that something cannot be told of
        this server."""
        if features[0] not in self.lacking:
            self.lacking |= dict.fromkeys(features, reason)
            if said:
                log.warning("llmobs: no %s here: %s", " and ".join(features), MEANING[reason])
            self.write_info()

    def sees(self, role: str) -> bool:
        """Whether some process of this server with that role is observed, by its ring."""
        if self.ring is None or role in self.roles:
            return True
        mine = self._info()["server"]
        for path in self.ring.path.parent.glob(f"{role}-*{SUFFIX}"):
            try:
                reader = Reader(path)
            except RingError:
                continue
            server = reader.info().get("server", mine)  # missing while it is being rewritten
            reader.close()
            if server == mine:
                return True
        return False

    def model(self, adapter: str | None) -> int:
        """The block of cells for an adapter (None: the served model itself)."""
        if adapter is None:
            return 0
        try:
            return self.models.index(adapter)
        except ValueError:
            if len(self.models) >= schema.MODEL_SLOTS - 1:
                return schema.MODEL_SLOTS - 1
            self.models.append(adapter)
            self.write_info()
            return len(self.models) - 1

    def _count_failure(self, probe: str, failures: int = 1) -> None:
        number = self.probe_numbers.get(probe)
        if self.ring is not None and number is not None:
            self.ring.cells[schema.GUARD_CELL + number] += failures


def missing_probes(folder: Path) -> list[tuple[str, str]]:
    """The probes that have no place, each with its server."""
    notes = (path.name.removeprefix(MISSING).rpartition("-") for path in folder.glob(f"{MISSING}*"))
    return [(server, probe) for server, _, probe in notes]


def is_first() -> bool:
    """Whether this process is the first of its server, as far as it knows."""
    return Path(os.environ.get(SERVER_RUN, "")).name.partition("-")[0] == str(os.getpid())


def mark_server() -> None:
    """Make this process and all that it starts one server. The first call in a family wins."""
    if SERVER_RUN not in os.environ:
        pid = os.getpid()
        settings = current().settings
        folder = settings.run_base / f"{pid}-{start_ticks(pid)}"
        os.environ[SERVER_RUN] = str(folder)
        if path := slo_file():  # absolute: found by all, wherever they run
            os.environ[SLO_FILE] = str(path)
        mine = {k: v for k, v in os.environ.items() if k.startswith(("OTEL_", "LLMOBS_"))}
        os.environ[SERVER_ENVIRON] = json.dumps(mine)
        join_exporter(settings.agent or folder, settings.port)


def agent_runs(folder: Path) -> bool:
    """Whether some agent holds the folder's lock."""
    try:
        descriptor = os.open(folder / AGENT_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return True  # the folder is gone or not ours: nothing to start an agent for
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def spawn_agent(folder: Path) -> None:
    """Start an agent that belongs to nobody: vLLM kills all its descendants when it ends."""
    mine = json.loads(os.environ.get(SERVER_ENVIRON, "null"))
    environ = dict(os.environ)
    if isinstance(mine, dict):
        environ = {k: v for k, v in environ.items() if not k.startswith(("OTEL_", "LLMOBS_"))}
        environ |= mine
    # The agent must not instrument itself.
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [p for p in paths if p and "auto_instrumentation" not in p]
    environ.pop("PYTHONPATH", None)
    if paths:
        environ["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-P", "-m", "llmobs.agent", "--detach", str(folder)]
    with open(folder / "agent.log", "ab") as output:
        starter = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )
    starter.wait()  # it forks at once and ends, so that nobody has to reap the agent


def raised(probe: str, error: Exception) -> None:
    """A method of vLLM's raised: most often the last thing that its process does."""
    state = current()
    if state.ring is not None and state.raises < RAISED_KEPT:
        state.raises += 1
        kind = type(error)
        # The class alone: what the exception says may quote a prompt.
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        number = state.probe_numbers.get(probe, 0)
        text = name.encode()[:NAME_BYTES]
        state.ring.put_text(schema.Kind.RAISED, time.monotonic_ns(), text, number)


def _watch(process: Process, folder: Path) -> None:
    """As long as this process lives: say so, notice when it stood still, and see how its children
    end; keep an agent alive, and say once where the metrics are."""
    said: list[str] = []
    stamp = folder / "agent.started"
    starts = 0  # since an agent was last seen to run
    children = Children()
    while process is current() and process.ring is not None:
        if process.settings.agent is not None:
            _look_round(process.ring, children, WATCH_SECONDS)
            continue
        speaker = process.roles[0] == "api_server" or "front_end" in process.lacking
        try:
            if not process.ring.path.exists():
                log.warning(
                    "llmobs: its file in the run folder %s was removed; an agent that runs "
                    "reads on, but none is started again from this process",
                    folder,
                )
                return
            if process.settings.agent is not None or agent_runs(folder):
                starts = 0
            else:
                started = stamp.stat().st_mtime if stamp.exists() else 0.0
                if abs(time.time() - started) > SPAWN_GRACE_SECONDS * min(2**starts, 64):
                    starts += 1
                    if starts == STARTS_UNSAID + 1 and speaker:
                        log.warning(
                            "llmobs: its agent does not stay up, so there is no page; why is in %s",
                            folder / "agent.log",
                        )
                    stamp.touch()
                    spawn_agent(folder)
            if speaker and process.settings.agent is None:
                said = _say(folder, said)
        except FileNotFoundError:
            pass  # removed at this very moment, see above
        except Exception:
            GUARD.failed("watch")
        _look_round(process.ring, children, WATCH_SECONDS)


def _look_round(ring: Writer, children: Children, seconds: float) -> None:
    """Say that this process lives, then wait: so long, or until a child ends."""
    try:
        ring.cells[ALIVE_WALL], ring.cells[ALIVE] = time.time_ns(), time.monotonic_ns()
        with pauses.waiting(ring, seconds):
            ended = children.wait(seconds)
        for pid, code in ended.items():
            ring.put(schema.Kind.EXIT, time.monotonic_ns(), 0, 0, 0, pid, code)
    except Exception:
        GUARD.failed("watch")
        time.sleep(seconds)


def _say(folder: Path, said: list[str]) -> list[str]:
    """Log what the agent has to tell the person who reads the server's log, if it is new."""
    try:
        notices = list(json.loads((folder / AGENT_STATE).read_text())["notices"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return said
    before = len(said) if notices[: len(said)] == said else 0  # another agent begins anew
    for notice in notices[before:]:
        log.warning("%s", notice)
    return notices


_current: Process | None = None


def current() -> Process:
    """This process's state."""
    global _current
    if _current is None:
        if log.level == logging.NOTSET:
            # Some of what vLLM imports sets the root logger to ERROR (seen on 0.32): what we have
            # to say is little, and meant to be read.
            log.setLevel(logging.WARNING)
        _current = Process(read_settings())
        if PROBLEM and SERVER_RUN not in os.environ:  # else the server's first process has said so
            log.warning("llmobs: %s; going by the default SLO", PROBLEM)
    return _current


def _forked() -> None:
    # The parent's ring is the parent's: a child that turns out to be an engine opens its own.
    global _current
    if _current is not None:
        parent, _current = _current, Process(_current.settings)
        _current.probes = dict(parent.probes)
        _current.missing = dict(parent.missing)
        _current.probe_numbers = parent.probe_numbers


os.register_at_fork(after_in_child=_forked)
