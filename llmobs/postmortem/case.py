"""Finding what a server left behind, and reading it: its rings, and the agent's flight record."""

import json
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmobs import schema
from llmobs.agent.flight import SUFFIX, VERSION
from llmobs.agent.scene import Ends, dead_scene
from llmobs.ring import SUFFIX as RING
from llmobs.ring import Reader, RingError, process_id
from llmobs.slo import BUCKET_LIMITS

ACCEPTED = (
    "accepted is a run folder (PID-TICKS, in /dev/shm/llmobs-UID), a flight record or the folder "
    "of some (LLMOBS_FLIGHT_DIR), or a folder that holds any"
)
STALE_SECONDS = 10.0
WALLS = [schema.PROCESS_CELL[name] for name in ("alive_wall_ns", "last_step_wall_ns")]


class CaseError(Exception):
    """There is nothing to tell; the text says why and what is accepted, in one line."""


@dataclass
class Remains:
    """What was found of one server. `last` is its last sign of life (Unix seconds)."""

    server: str
    last: float = 0.0
    rings: Path | None = None
    records: list[tuple[float, Path, dict[str, Any]]] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """All that is known of the end of one server. `scene` is as scene.py tells it; `agent` is None
    without a flight record."""

    server: str
    scene: dict[str, Any]
    samples: list[dict[str, Any]]
    agent: dict[str, Any] | None
    host: str | None
    read: tuple[str, ...]
    """What it was read from."""
    others: tuple[str, ...]
    """Servers that something is left of, too."""


def open_case(path: Path) -> Case:
    """The newest server of which something lies in a folder, or the one that a file is of. Raises
    CaseError."""
    if not path.exists():
        raise CaseError(f"{path} does not exist; {ACCEPTED}")
    found: dict[str, Remains] = {}
    try:
        for remains in _found(path):
            _join(found.setdefault(remains.server, remains), remains)
    except OSError as error:
        raise CaseError(f"{error.filename or path}: {error.strerror}; {ACCEPTED}") from error
    if not found:
        what = "holds neither rings nor flight records" if path.is_dir() else "is no flight record"
        raise CaseError(f"{path} {what}; {ACCEPTED}")
    newest = max(found.values(), key=lambda remains: remains.last)
    return _read(newest, tuple(sorted(found.keys() - {newest.server})))


def _found(path: Path) -> Iterator[Remains]:
    if path.is_dir():
        for folder in (path, *sorted(p for p in path.iterdir() if p.is_dir())):
            yield from _rings(folder)
            for record in sorted(folder.glob(f"*{SUFFIX}")):
                yield from _recorded(record)
    else:
        yield from _recorded(path)


def _join(known: Remains, more: Remains) -> None:
    known.last = max(known.last, more.last)
    known.rings = known.rings or more.rings
    if more is not known:
        known.records += more.records


def _rings(folder: Path) -> Iterator[Remains]:
    for path in sorted(folder.glob(f"*{RING}")):
        try:
            reader = Reader(path)
        except RingError:
            continue
        try:
            info, cells = reader.info(), reader.totals()
            last = max(cells[wall] for wall in WALLS) / 1e9
            if info.get("buckets", BUCKET_LIMITS) != BUCKET_LIMITS:
                last = float(info.get("began", 0.0))  # its totals stand elsewhere
            yield Remains(str(info.get("server") or folder.name), last, folder)
        except RingError:
            pass
        finally:
            reader.close()


def _recorded(path: Path) -> Iterator[Remains]:
    record = _record(path)
    if record is not None:
        written = float(record["written"])
        remains = Remains(str(record["server"]), written, records=[(written, path, record)])
        for rings in _rings(Path(record["run_folder"])):  # more truth than was copied, if there
            if rings.server == remains.server:
                remains.rings = rings.rings
        yield remains


def _record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text())
        if record["version"] == VERSION and record["scene"] and float(record["written"]):
            str(record["server"]), str(record["run_folder"]), list(record["samples"])
            [(int(code), float(at)) for code, at in record["ends"].values()]
            return dict(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return None


def _read(remains: Remains, others: tuple[str, ...]) -> Case:
    written, path, record = max(remains.records, default=(0.0, None, {}), key=lambda r: r[0])
    ends: Ends = {pid: (int(code), at) for pid, (code, at) in record.get("ends", {}).items()}
    scene: dict[str, Any] | None = None
    read = []
    if remains.rings is not None:
        try:
            scene = dead_scene(remains.rings, remains.server, ends)
            read.append(f"the rings in {remains.rings}")
        except (LookupError, OSError, ValueError) as error:
            if not record:
                raise CaseError(
                    f"{remains.rings}: its rings cannot be read ({error}); if the server went by a "
                    "LLMOBS_SLO_FILE of its own, name the same one here"
                ) from error
    if record:
        read.append(f"the flight record {path}")
        scene = _truer(scene, record["scene"]) if scene is not None else _as_of_now(record)
    if scene is None:
        raise CaseError(f"nothing of the server {remains.server} can be read; {ACCEPTED}")
    if record:
        scene = scene | {"processes": _ended(scene["processes"], ends)}
    agent = {**record["agent"], "written": written} if record else None
    return Case(
        server=remains.server,
        scene=scene,
        samples=list(record.get("samples", ())),
        agent=agent,
        host=record.get("host"),
        read=tuple(read),
        others=others,
    )


def _ended(processes: list[dict[str, Any]], ends: Ends) -> list[dict[str, Any]]:
    """With what the agent saw of their ends, where no parent did."""
    told = []
    for process in processes:
        end = ends.get(str(process["pid"]))
        if end is not None and process["exit"] is None and not process["alive"]:
            seen = {"exit": end[0], "exit_seen": end[1], "exit_seen_by": "agent"}
            process = process | seen
        told.append(process)
    return told


def _as_of_now(record: dict[str, Any]) -> dict[str, Any]:
    """The scene of a record. Whom it calls alive was so when it was written last."""
    scene: dict[str, Any] = record["scene"]
    written = float(record["written"])
    fresh = abs(time.time() - written) < STALE_SECONDS
    here = record["host"] == platform.node()
    processes = []
    for p in scene["processes"]:
        # It is written every second. On another host nobody can tell more.
        runs = fresh and not (here and process_id(p["pid"], p["ticks"]) is None)
        if p["alive"] and not runs:
            p = p | {"alive": False, "last_sign": max(p["last_sign"] or 0.0, written)}
        processes.append(p)
    return scene | {"processes": processes}


def _truer(rings: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """The rings go to the very last moment, but may not go back far enough; the agent had seen what
    was overwritten since."""
    scene = dict(rings)
    if rings["lost"]:
        if sum(s["steps"] for s in record["trend"]) > sum(s["steps"] for s in rings["trend"]):
            scene["trend"] = record["trend"]
        if _count(record) > _count(rings):
            for name in ("in_flight", "requests", "waiting"):
                scene[name] = record[name]
    return scene


def _count(scene: dict[str, Any]) -> int:
    return sum(n for phases in scene["in_flight"].values() for n in phases.values())
