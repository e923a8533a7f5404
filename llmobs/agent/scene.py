"""What a server was doing at one moment and in the minute before, as plain data.

The agent writes it down every second (flight.py); a post-mortem makes it anew from the rings of a
dead server. Times are Unix seconds where they are `at`, durations seconds. There is no text of any
request in it, for there is none in the rings.
"""

import signal
import time
from collections import Counter
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from llmobs import schema
from llmobs.agent.collect import RunCollector
from llmobs.agent.request import Request
from llmobs.agent.run import Run, Source
from llmobs.agent.steps import SECOND, EngineView, Sequence
from llmobs.metrics import BY_NAME
from llmobs.probes import NUMBERS
from llmobs.schema import BatchKind, SequenceState, Wait
from llmobs.slo import BUCKET_NAMES, UNKNOWN

TREND_SECONDS = 60
REQUESTS_TOLD = 500
"""So many are told one by one, the oldest first; all are counted."""
STEPS_TOLD = 10
RUIN_NS = 120_000_000_000
"""What failed longer before the end than this was not the end's cause."""
BY_SERVER = (-signal.SIGTERM, -signal.SIGKILL)
"""How vLLM ends its own children, the second if they take too long."""
GAUGES = (
    *("llmobs_kv_blocks", "llmobs_kv_cache_bytes", "llmobs_waiting_tokens"),
    *("llmobs_gpu_memory_bytes", "llmobs_gpu_memory_pressure_ratio"),
    *("llmobs_torch_memory_bytes", "llmobs_torch_memory_events_total"),
    *("llmobs_cpu_seconds_total", "llmobs_process_run_queue_seconds_total"),
    "llmobs_cgroup_cpu_throttled_seconds_total",
)
"""Figures that go with it, as far as this server has them."""
PHASES = {
    SequenceState.DECODE: "decode",
    SequenceState.PREFILL: "prefill",
    SequenceState.PREEMPTED: "preempted",
    SequenceState.WAITING: "queue",
}
"""Of several sequences of one request the first in this order counts."""
ALIVE_WALL = schema.PROCESS_CELL["alive_wall_ns"]
ALIVE = schema.PROCESS_CELL["alive_ns"]
LAST_STEP_WALL = schema.PROCESS_CELL["last_step_wall_ns"]
PROBES = {number: name for name, number in NUMBERS.items()}


def servers(run: Run) -> list[str]:
    """The servers whose rings are in a run folder: mostly one."""
    return sorted({server_of(run, s) for s in run.sources.values() if s.info})


def server_of(run: Run, source: Source) -> str:
    """The server that a ring belongs to."""
    return str(source.info.get("server") or run.folder.name)


def sources_of(run: Run, server: str) -> list[Source]:
    """The rings of a server."""
    return [s for s in run.sources.values() if s.info and server_of(run, s) == server]


Ends = dict[str, tuple[int, float]]
"""By pid: the exit code or minus the signal, and when the agent saw it (Unix seconds)."""


def dead_scene(folder: Path, server: str, ends: Ends) -> dict[str, Any]:
    """The scene at the end of a server, from its rings: as of the moment when the first of its
    processes is known to have failed, by them or by the agent, else of the last sign of life.

    Raises LookupError if there are no rings of it.
    """
    run = Run(folder, autopsy=True)
    run.read_dead()
    if not sources_of(run, server):
        raise LookupError(f"no ring of the server {server}")
    failed = first_failure(run, server, ends)
    told = run
    if failed is not None:
        told = Run(
            folder, autopsy=True, until=failed
        )  # what came after it is only the ruin's settling
        told.read_dead()
    scene = scene_of(told, server, failed)
    scene["processes"] = processes(run, server)
    scene["gauges"] = gauges(told)
    return scene


def first_failure(run: Run, server: str, ends: Ends) -> int | None:
    """When (monotonic) the first sign was seen that the server came to no good end."""
    sources = sources_of(run, server)
    moments = [raised.time for source in sources for raised in source.fate.raised]
    moments += [source.fate.broken for source in sources if source.fate.broken]
    broken = bool(moments)
    for source in sources:
        for at, code in source.fate.children.values():
            # vLLM itself ends its children by these, and kills those that take too long.
            by_server = code in BY_SERVER and source.fate.ends
            if code and (broken or not by_server):
                moments.append(at)
    offset = wall_offset(run, sources)
    for source in sources:
        code, seen = ends.get(str(source.reader.pid), (0, 0.0))
        by_server = code in BY_SERVER and "api_server" not in source.roles
        if code and not source.fate.ends and (broken or not by_server):
            moments.append(round(seen * SECOND) - offset)
    end = max((_last_sign(source) for source in sources), default=0)
    # A script may have lost an engine before, and made another.
    return min((at for at in moments if at > end - RUIN_NS), default=None)


def scene_of(run: Run, server: str, at: int | None = None) -> dict[str, Any]:
    """The scene at a moment (monotonic; by default now, or the last sign of life where all are
    dead). The run's lock is held."""
    sources = sources_of(run, server)
    alive = [source for source in sources if source.reader.alive()]
    offset = wall_offset(run, sources)
    if at is None:
        signs = [_last_sign(source) for source in sources]
        at = time.monotonic_ns() if alive else max(signs, default=0)
    engines = list({id(s.engine): s.engine for s in sources if s.engine is not None}.values())
    requests = _requests(run, {s.number for s in sources}, engines, at)
    infos = [source.info for source in sources]
    return {
        "at": (at + offset) / SECOND,
        "server": server,
        "models": sorted({m for s in sources for m in s.models[:1]}),
        "llmobs": next((str(i["llmobs"]) for i in infos if "llmobs" in i), "unknown"),
        "vllm": next((str(i["vllm"]) for i in infos if "vllm" in i), "unknown"),
        "began": min((float(i["began"]) for i in infos if "began" in i), default=None),
        "processes": processes(run, server),
        "lost": sum(source.lost for source in sources),
        "in_flight": _counts(requests),
        "requests": requests[:REQUESTS_TOLD],
        "waiting": _waiting(sources, engines),
        "trend": _trend(engines, at),
        "steps": _last_steps(engines, offset, at),
    }


def _last_sign(source: Source) -> int:
    return max(source.newest, source.cells[ALIVE])


def wall_offset(run: Run, sources: list[Source]) -> int:
    """What to add to a monotonic time for the wall clock, in nanoseconds. By the newest pair that
    one of the processes wrote down."""
    pairs = [(s.cells[ALIVE], s.cells[ALIVE_WALL]) for s in sources if s.cells[ALIVE]]
    if pairs:
        monotonic, wall = max(pairs)
        return wall - monotonic
    for source in sources:  # dead within its first second
        if source.engine is not None and source.engine.last_end and source.cells[LAST_STEP_WALL]:
            return source.cells[LAST_STEP_WALL] - source.engine.last_end
    return time.time_ns() - time.monotonic_ns()


# Processes


def processes(run: Run, server: str) -> list[dict[str, Any]]:
    """Each process of the server that has a ring, and what is known of its end."""
    sources = sources_of(run, server)
    offset = wall_offset(run, sources)
    exits = {
        pid: (seen, code, source.reader.pid)
        for source in sources
        for pid, (seen, code) in source.fate.children.items()
    }

    def wall(monotonic: int) -> float | None:
        return (monotonic + offset) / SECOND if monotonic else None

    told = []
    for source in sources:
        fate, pid = source.fate, source.reader.pid
        seen, code, parent = exits.get(pid, (0, None, None))
        told.append(
            {
                "role": source.roles[0],
                "roles": source.roles,
                "pid": pid,
                "ticks": source.reader.ticks,
                "engine": source.info.get("engine"),
                "rank": source.info.get("rank"),
                "alive": source.reader.alive(),
                "last_sign": wall(_last_sign(source)),
                "heartbeat": wall(source.cells[ALIVE]),
                "exit": code,
                "exit_seen": wall(seen),
                "exit_seen_by": parent,
                "ended_itself": wall(fate.ends),
                "engine_lost": wall(fate.broken),
                "raised": [
                    {"at": wall(r.time), "name": r.name, "probe": PROBES.get(r.probe, "")}
                    for r in fate.raised
                ],
                "records_lost": source.lost,
                "damaged": source.damaged,
            }
        )
    return sorted(told, key=lambda p: (_place(p["role"]), p["pid"]))


def _place(role: str) -> int:
    """Front ends first, as a request goes."""
    return ("api_server", "engine_core", "worker").index(role)


# Requests


def _requests(
    run: Run, rings: set[int], engines: list[EngineView], at: int
) -> list[dict[str, Any]]:
    """What was in flight, oldest first."""
    view = run.requests
    told: list[dict[str, Any]] = []
    claimed: set[int] = set()
    for (ring, _), request in view.requests.items():
        claimed.update(request.admissions)
        if ring in rings and not request.end:
            told.append(
                _of_request(request, view.model(ring, max(request.cell, 0) // schema.BUCKETS), at)
            )
    for engine in engines:
        told += [
            _of_sequence(engine, sequence, at)
            for sequence in engine.sequences.values()
            if sequence.key not in claimed
        ]
    return sorted(told, key=lambda request: -request["age"])


def _of_request(request: Request, model: str, at: int) -> dict[str, Any]:
    admissions = list(request.admissions.values())
    known = [(a.engine, a.sequence) for a in admissions if a.engine and a.sequence]
    states = [s.state for _, s in known if not s.left]
    if not admissions:
        phase = "preprocess"
    elif known and not states and len(known) == len(admissions):
        phase = "deliver"
    else:
        phase = next((name for state, name in PHASES.items() if state in states), "queue")
    return {
        "model": model,
        "bucket": BUCKET_NAMES[request.cell % schema.BUCKETS] if request.cell >= 0 else UNKNOWN,
        "phase": phase,
        "age": max(at - request.arrival, 0) / SECOND,
        "prompt_tokens": sum(a.prompt for a in admissions),
        "output_tokens": sum(_tokens(e, s, a.tokens) for e, s, a in _known(admissions)),
        "at_least": any(e.summed or not s.complete for e, s in known),
        "max_tokens": max((a.max_tokens for a in admissions), default=0),
        "preemptions": sum(len(s.preemptions) for _, s in known),
    }


def _known(admissions: list[Any]) -> list[tuple[EngineView, Sequence, Any]]:
    return [(a.engine, a.sequence, a) for a in admissions if a.engine and a.sequence]


def _tokens(engine: EngineView, sequence: Sequence, ended: int) -> int:
    """Tokens of a sequence so far; `ended`: what the front end said at its end, if it did."""
    return ended if ended >= 0 else engine.tokens_of(sequence)


def _of_sequence(engine: EngineView, sequence: Sequence, at: int) -> dict[str, Any]:
    """One that no front end spoke of: a foreign one, or its records are gone."""
    began = sequence.joined or sequence.started or sequence.first
    return {
        "model": engine.model(sequence.cell),
        "bucket": BUCKET_NAMES[sequence.cell % schema.BUCKETS],
        "phase": PHASES[sequence.state],
        "age": max(at - began, 0) / SECOND if began else 0.0,
        "prompt_tokens": sequence.prompt,
        "output_tokens": engine.tokens_of(sequence),
        "at_least": engine.summed or not sequence.complete,
        "max_tokens": 0,
        "preemptions": len(sequence.preemptions),
    }


def _counts(requests: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """By bucket and phase."""
    counts = Counter((r["bucket"], r["phase"]) for r in requests)
    told: dict[str, dict[str, int]] = {}
    for bucket in (*BUCKET_NAMES, UNKNOWN):
        phases = {phase: n for (b, phase), n in counts.items() if b == bucket}
        if phases:
            told[bucket] = phases
    return told


def _waiting(sources: list[Source], engines: list[EngineView]) -> dict[str, Any]:
    """Sequences that the engines had and did not run, their prompt tokens, and why."""
    waiting = [
        sequence
        for engine in engines
        for sequence in engine.sequences.values()
        if sequence.state in (SequenceState.WAITING, SequenceState.PREEMPTED)
    ]
    reasons = Counter(
        _word(Wait, step["wait"])
        for engine in engines
        for step in _newest(engine, 1)
        if step["waiting"]
    )
    return {
        "sequences": len(waiting),
        "prompt_tokens": sum(sequence.prompt for sequence in waiting),
        "reason": reasons.most_common(1)[0][0] if waiting and reasons else None,
    }


# Steps


def _newest(engine: EngineView, most: int) -> list[Any]:
    first = max(engine.steps - most, 0)
    return [engine.log[index % len(engine.log)] for index in range(first, engine.steps)]


def _word(vocabulary: type[IntEnum], number: Any) -> str:
    """A name for what may be damaged."""
    try:
        return vocabulary(int(number)).name.lower()
    except ValueError:
        return "unknown"


def _trend(engines: list[EngineView], at: int) -> list[dict[str, Any]]:
    """Second by second, the oldest first; the last one ends at the moment itself. Seconds without a
    step are there too. `running` is summed over the steps, as are `seconds`."""
    count = TREND_SECONDS
    columns = {name: np.zeros(count) for name in TREND_SUMS}
    worst, waiting = np.zeros(count), np.zeros(count, np.int64)
    for engine in engines:
        start = at - count * 1_000_000_000
        steps = engine.steps_between(start, at)
        if len(steps):
            ends, starts = steps["end"], steps["start"].copy()
            starts[1:] = np.maximum(starts[1:], ends[:-1])
            seconds = (ends - starts) / SECOND
            place = np.clip((ends - start - 1) // 1_000_000_000, 0, count - 1)
            sums = {
                "steps": np.ones(len(steps)),
                "seconds": seconds,
                "running": steps["sequences"],
                "tokens": steps["out"],
            }
            for name, values in sums.items():
                columns[name] += np.bincount(place, values, count)
            np.maximum.at(worst, place, seconds)
            np.maximum.at(waiting, place, steps["waiting"])
        lost = np.array([t for t in engine.preempted if start < t <= at], np.int64)
        if len(lost):
            columns["preemptions"] += np.bincount((lost - start - 1) // 1_000_000_000, None, count)
    return [
        {
            **{name: round(float(values[i]), 6) for name, values in columns.items()},
            "worst": round(float(worst[i]), 6),
            "waiting": int(waiting[i]),
        }
        for i in range(count)
    ]


TREND_SUMS = ("steps", "seconds", "running", "tokens", "preemptions")


def _last_steps(engines: list[EngineView], offset: int, at: int) -> list[dict[str, Any]]:
    """The newest steps of all engines, the newest last."""
    told: list[dict[str, Any]] = [
        {
            "engine": engine.name,
            "at": (int(step["end"]) + offset) / SECOND,
            "seconds": int(step["end"] - step["start"]) / SECOND,
            "kind": _word(BatchKind, step["kind"]),
            "sequences": int(step["sequences"]),
            "tokens_computed": int(step["tokens"]),
            "tokens_out": int(step["out"]),
            "waiting": int(step["waiting"]),
            "longest_context": int(step["longest"]),
        }
        for engine in engines
        for step in _newest(engine, STEPS_TOLD)
        if step["end"] <= at
    ]
    return sorted(told, key=lambda step: float(step["at"]))[-STEPS_TOLD:]


# Figures


def gauges(run: Run) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The figures of GAUGES that this server has: by name, labels and value. The run's lock is
    held."""
    collector = RunCollector(run)
    told = {}
    for name in GAUGES:
        metric = BY_NAME.get(name)
        samples = collector.samples(metric) if metric is not None else {}
        if metric is not None and samples:
            labels = list(metric.labels)
            told[name] = [(dict(zip(labels, key, strict=True)), v) for key, v in samples.items()]
    return told
