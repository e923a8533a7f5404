"""Why a server ended: what is likely by the evidence, and the evidence."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from llmobs.agent.scene import BY_SERVER
from llmobs.postmortem.case import Case

STILL_SECONDS = 10.0
"""A process says every second that it lives."""
TOGETHER_SECONDS = 2.5
"""Last signs of life that lie within this are of one moment: they come every second."""
FULL = 0.95
NAMES = {"api_server": "API server", "engine_core": "EngineCore", "worker": "Worker"}
MEMORY = "OutOfMemoryError"
"""torch.OutOfMemoryError, by whichever module's name it goes in a release."""


@dataclass(frozen=True)
class Cause:
    """`kind` is one word or two for machines; `certain` only where the server itself said so."""

    kind: str
    what: str
    evidence: tuple[str, ...]
    certain: bool = False
    good: bool = False
    """Whether that is no failure."""


def cause_of(case: Case) -> Cause:
    """The first of the rules that fits, the best evidence first."""
    facts = Facts(case)
    for rule in RULES:
        found = rule(facts)
        if found is not None:
            return found
    return Cause("unknown", "unknown: nothing that is left says why", facts.last_signs())


def clock(at: float | None) -> str:
    """A time of day as a person reads it."""
    if at is None:
        return "never"
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"


def name(process: dict[str, Any]) -> str:
    """How a person calls a process."""
    rank = f" {process['rank']}" if process["rank"] else ""
    return f"{NAMES.get(process['role'], process['role'])}{rank} (pid {process['pid']})"


def ending(code: int) -> str:
    """An exit code, or minus a signal, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


class Facts:
    """What the rules look at."""

    def __init__(self, case: Case) -> None:
        self.scene = case.scene
        self.samples = case.samples
        self.processes: list[dict[str, Any]] = case.scene["processes"]
        self.end: float = max((p["last_sign"] or 0.0 for p in self.processes), default=0.0)
        self.alive = [p for p in self.processes if p["alive"]]
        self.raised = sorted(
            ((raised, p) for p in self.processes for raised in p["raised"]),
            key=lambda pair: float(pair[0]["at"] or 0.0),
        )
        front = [p for p in self.processes if p["role"] == "api_server"]
        self.orderly = bool(front) and all(p["ended_itself"] for p in front)
        engine_lost = any(p["engine_lost"] for p in self.processes)
        self.failed = sorted(
            (
                p
                for p in self.processes
                if p["exit"]
                and (engine_lost or self.raised or p["exit"] not in BY_SERVER or not self.orderly)
            ),
            # The agent looks a few times a second: then who was silent first, was first.
            key=lambda p: (float(p["exit_seen"] or 0.0), float(p["last_sign"] or 0.0)),
        )
        """Those whose bad end was seen, in order."""
        self.good = self.orderly and not self.failed and not self.raised and not engine_lost

    def last_signs(self) -> tuple[str, ...]:
        return tuple(
            f"{name(p)}: last sign of life at {clock(p['last_sign'])}, exit code unknown"
            for p in self.processes
            if p["exit"] is None
        )

    def how_it_ended(self, process: dict[str, Any]) -> str:
        by = next((p for p in self.processes if p["pid"] == process["exit_seen_by"]), None)
        parent = f"its parent, {name(by)}," if by is not None else "its parent"
        if process["exit_seen_by"] == "agent":
            parent = "the agent"
        return (
            f"{parent} saw {name(process)} end by {ending(process['exit'])} at "
            f"{clock(process['exit_seen'])}"
        )

    def stood_still(self) -> list[str]:
        """Of processes, or an engine's steps, that had stood still for long before the end."""
        told = []
        for p in self.processes:
            over = p["exit_seen"] or self.end
            still = over - (p["last_sign"] or over)
            if still > STILL_SECONDS:
                told.append(
                    f"{name(p)} gave no sign of life for {still:.0f} s before "
                    f"{'it ended' if p['exit_seen'] else 'the others ended'}"
                )
        steps = self.scene["steps"]
        running = sum(
            count
            for phases in self.scene["in_flight"].values()
            for phase, count in phases.items()
            if phase in ("prefill", "decode")
        )
        if steps and running:
            still = self.scene["at"] - steps[-1]["at"]
            if still > STILL_SECONDS:
                told.append(f"{running} requests were running, and no step ended for {still:.0f} s")
        return told

    def oom_kills(self) -> list[str]:
        """Memory cgroups in which processes were killed for memory while they were watched."""
        told = []
        for folder, seen in self._cgroups().items():
            counts = [c["oom_kills"] for c in seen if "oom_kills" in c]
            for before, after in pairwise(counts):
                if after > before:
                    told.append(f"{folder}: oom_kill went from {counts[0]} to {counts[-1]}")
                    break
        return told

    def memory_full(self) -> list[str]:
        """Memory cgroups that were full when they were last looked at."""
        told = []
        for folder, seen in self._cgroups().items():
            last = seen[-1]
            if "limit" in last and last.get("used", 0) > FULL * last["limit"]:
                share = last["used"] / last["limit"]
                told.append(
                    f"{folder}: {share:.0%} of {size(last['limit'])} in use at the last look"
                )
        return told

    def _cgroups(self) -> dict[str, list[dict[str, int]]]:
        seen: dict[str, list[dict[str, int]]] = {}
        for sample in self.samples:
            for folder, figures in sample["cgroups"].items():
                seen.setdefault(folder, []).append(figures)
        return seen


def size(count: float) -> str:
    """Bytes, for a person."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if count >= 100 or unit == "B" else f"{count:,.1f} {unit}"


# The rules. A rule says nothing where its evidence is not there.


def lives(facts: Facts) -> Cause | None:
    if len(facts.alive) < len(facts.processes) or not facts.processes or facts.raised:
        return None
    return Cause("alive", "nothing ended: all of its processes run", (), True, True)


def out_of_device_memory(facts: Facts) -> Cause | None:
    for raised, process in facts.raised:
        if raised["name"].rpartition(".")[2] in (MEMORY, "MemoryError"):
            device = raised["name"].rpartition(".")[2] == MEMORY
            what = "the GPU's memory ran out" if device else "there was no memory left"
            evidence = (_raised(raised, process), *facts.stood_still())
            kind = "device_out_of_memory" if device else "out_of_memory"
            return Cause(kind, f"{what} in {name(process)}", evidence)
    return None


def out_of_memory_kill(facts: Facts) -> Cause | None:
    kills = facts.oom_kills()
    if not kills or facts.good:
        return None
    killed = [p for p in facts.failed if p["exit"] == -signal.SIGKILL]
    who = name(killed[0]) if killed else "a process of its cgroup"
    seen = [facts.how_it_ended(p) for p in killed[:1]]
    return Cause(
        "out_of_memory_kill",
        f"the kernel killed {who} because the cgroup's memory had run out",
        (*kills, *facts.memory_full(), *seen, *facts.stood_still()),
    )


def all_killed(facts: Facts) -> Cause | None:
    seen = [p["exit_seen"] for p in facts.processes if p["exit"] == -signal.SIGKILL]
    if len(seen) < len(facts.processes) or max(seen) - min(seen) > TOGETHER_SECONDS:
        return None
    full = facts.memory_full()
    what = "all of its processes were killed together by SIGKILL, from outside"
    if full:
        what += ", maybe because the cgroup's memory had run out"
    evidence = (*map(facts.how_it_ended, facts.failed), *full, *facts.stood_still())
    return Cause("killed_together", what, evidence)


def killed_by_signal(facts: Facts) -> Cause | None:
    # Who raised ended by that, and the others by its end.
    if not facts.failed or facts.failed[0]["exit"] > 0 or facts.raised:
        return None
    first = facts.failed[0]
    code = first["exit"]
    full = facts.memory_full()
    others = [p for p in facts.processes if p is not first and p["last_sign"]]
    outlived = [p for p in others if p["last_sign"] >= (first["last_sign"] or 0.0)]
    evidence = [facts.how_it_ended(first)]
    if outlived:
        evidence.append(f"{', '.join(map(name, outlived))} outlived it")
    evidence += [facts.how_it_ended(p) + ", after that" for p in facts.failed[1:]]
    what = f"{name(first)} was ended by {ending(code)}"
    if code == -signal.SIGKILL:
        if full:
            return Cause(
                "out_of_memory_kill",
                f"{what}, maybe by the kernel because the cgroup's memory had run out",
                (*evidence, *full, *facts.stood_still()),
            )
        what += ", from outside: kill -9, a supervisor, or the machine's out-of-memory killer"
    elif code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE, -signal.SIGABRT):
        what += ": native code crashed"
    kind = "killed" if code == -signal.SIGKILL else "signal"
    return Cause(kind, what, (*evidence, *facts.stood_still()))


def exception(facts: Facts) -> Cause | None:
    if not facts.raised:
        return None
    raised, process = facts.raised[0]
    evidence = [_raised(r, p) for r, p in facts.raised[:5]]
    evidence += [facts.how_it_ended(p) for p in facts.failed[:1]]
    return Cause("exception", f"{raised['name']} in {name(process)}", tuple(evidence))


def _raised(raised: dict[str, Any], process: dict[str, Any]) -> str:
    return (
        f"{name(process)} raised {raised['name']} at {clock(raised['at'])} (seen by the probe "
        f"`{raised['probe']}`; what it said is in the server's log)"
    )


def exit_code(facts: Facts) -> Cause | None:
    if not facts.failed:
        return None
    first = facts.failed[0]
    return Cause(
        "exit_code",
        f"{name(first)} ended by itself with {ending(first['exit'])}; why is in the server's log",
        (*map(facts.how_it_ended, facts.failed), *facts.stood_still()),
    )


def good_order(facts: Facts) -> Cause | None:
    if not facts.good:
        return None
    front = next(p for p in facts.processes if p["role"] == "api_server")
    evidence = f"{name(front)} came to its own end at {clock(front['ended_itself'])}"
    return Cause(
        "shut_down", "it was shut down in good order", (evidence, *facts.stood_still()), True, True
    )


def frozen(facts: Facts) -> Cause | None:
    still = facts.stood_still()
    if not still:
        return None
    return Cause("frozen", "a part of it stood still", (*still, *facts.last_signs()))


def all_together(facts: Facts) -> Cause | None:
    signs = [p["last_sign"] for p in facts.processes if p["last_sign"]]
    nobody = all(p["exit"] is None and not p["ended_itself"] for p in facts.processes)
    if facts.alive or not signs or max(signs) - min(signs) > TOGETHER_SECONDS or not nobody:
        return None
    full = facts.memory_full()
    what = "all of its processes were killed together, from outside: the process group, the "
    what += "container or the machine"
    if full:
        what += ", maybe because the cgroup's memory had run out"
    spread = max(signs) - min(signs)
    evidence = f"their last signs of life lie within {spread:.1f} s, and none of them said good-bye"
    return Cause("killed_together", what, (evidence, *full, *facts.last_signs()))


def front_end_first(facts: Facts) -> Cause | None:
    front = [p for p in facts.processes if p["role"] == "api_server" and not p["ended_itself"]]
    later = [p for p in facts.processes if p["role"] != "api_server" and not p["alive"]]
    if not front or not later or any(p["alive"] or p["exit"] is not None for p in front):
        return None
    last = max(p["last_sign"] or 0.0 for p in front)
    if any((p["last_sign"] or 0.0) < last - TOGETHER_SECONDS for p in later):
        return None
    return Cause(
        "front_end_ended",
        f"{name(front[0])} ended first, without a good-bye: killed or crashed",
        facts.last_signs(),
    )


RULES: tuple[Callable[[Facts], Cause | None], ...] = (
    lives,
    out_of_device_memory,
    out_of_memory_kill,
    all_killed,
    killed_by_signal,
    exception,
    exit_code,
    good_order,
    frozen,
    all_together,
    front_end_first,
)
