"""The end of a server as a person reads it, in a page; and as JSON."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmobs.postmortem.case import Case
from llmobs.postmortem.cause import NAMES, Cause, clock, ending, name, size
from llmobs.postmortem.trend import STRETCH, Column, columns

WIDTH = 120
LISTED = 8
"""So many requests are shown one by one."""


def show_json(case: Case, cause: Cause, out: TextIO) -> None:
    """The case as it is known, the cause first."""
    content = {"cause": asdict(cause), **asdict(case)}
    json.dump(content, out, indent=2)
    out.write("\n")


def show(case: Case, cause: Cause, out: TextIO, terminal: bool = False) -> None:
    """Who it was, why it ended, what it was doing, and how it had been in the minute before."""
    width = None if terminal else WIDTH
    console = Console(file=out, highlight=False, width=width, force_terminal=terminal or None)
    scene = case.scene
    _head(console, case)
    certainty = "Cause" if cause.certain else "Likely cause"
    if cause.kind in ("alive", "unknown"):
        certainty = "Cause"
    console.print(Text.assemble((f"{certainty}: ", "bold"), cause.what))
    for line in cause.evidence:
        console.print(Text(f"  - {line}"))
    console.print()
    console.print(_processes(scene))
    console.print()
    _requests(console, scene)
    _last_step(console, scene)
    _trend(console, case)
    _memory(console, case)


def _head(console: Console, case: Case) -> None:
    scene = case.scene
    models = ", ".join(scene["models"]) or "unknown model"
    where = f" on {case.host}" if case.host else ""
    console.print(
        Text(f"Post-mortem of {models}, server {case.server}{where}", "bold"), soft_wrap=True
    )
    console.print(f"vLLM {scene['vllm']}, llmobs {scene['llmobs']}")
    for source in case.read:
        console.print(f"read from {source}", soft_wrap=True)
    if case.others:
        console.print(f"(older ones there: {', '.join(case.others)})", soft_wrap=True)
    last = max((p["last_sign"] or 0.0 for p in scene["processes"]), default=scene["at"])
    began = scene["began"]
    day = time.strftime("%Y-%m-%d", time.localtime(last))
    zone = time.strftime("%Z", time.localtime(last))
    lasted = f", for {duration(last - began)}" if began else ""
    console.print(f"{day}: it ran from {clock(began)} to {clock(last)} {zone}{lasted}")
    agent = case.agent
    if agent is None:
        console.print("There is no flight record: memory over time is not known.")
    elif last - agent["written"] > 5:
        ago = last - agent["written"]
        console.print(f"Its agent ended {duration(ago)} before it; what it samples ends there.")
    if agent is not None and agent["restarts"]:
        times = agent["restarts"]
        console.print(
            f"Its agent had been started again {'once' if times == 1 else f'{times} times'}."
        )
    console.print()


def duration(seconds: float) -> str:
    """Not more digits than a person wants."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _table(title: str, *names: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, column in enumerate(names):
        table.add_column(column, justify="left" if place < left else "right")
    return table


def _processes(scene: dict[str, Any]) -> Table:
    table = _table("Processes", "", "pid", "last sign of life", "how it ended", left=4)
    for p in scene["processes"]:
        rank = f" {p['rank']}" if p["rank"] is not None and p["role"] == "worker" else ""
        table.add_row(
            NAMES.get(p["role"], p["role"]) + rank, str(p["pid"]), clock(p["last_sign"]), _end(p)
        )
    return table


def _end(p: dict[str, Any]) -> str:
    if p["alive"]:
        return "alive"
    if p["exit"] is not None:
        by = p["exit_seen_by"]
        who = "the agent" if by == "agent" else f"pid {by}"
        return f"{ending(p['exit'])}, seen by {who} at {clock(p['exit_seen'])}"
    if p["ended_itself"]:
        return f"came to its own end at {clock(p['ended_itself'])}; exit code unknown"
    return "unknown"


PHASES = ("preprocess", "queue", "prefill", "preempted", "decode", "deliver")


def _requests(console: Console, scene: dict[str, Any]) -> None:
    in_flight = scene["in_flight"]
    count = sum(n for phases in in_flight.values() for n in phases.values())
    if not count:
        console.print(Text(f"In flight at {clock(scene['at'])}: no requests", "bold"))
        console.print()
        return
    shown = [phase for phase in PHASES if any(phase in b for b in in_flight.values())]
    title = f"In flight at {clock(scene['at'])}: {count} request{'s' * (count != 1)}"
    table = _table(
        title, "context", "requests", *shown, "longest prompt", "tokens so far", "oldest"
    )
    for bucket, phases in in_flight.items():
        here = [r for r in scene["requests"] if r["bucket"] == bucket]
        least = "≥ " if any(r["at_least"] for r in here) else ""
        table.add_row(
            bucket,
            str(sum(phases.values())),
            *(str(phases.get(phase, 0)) for phase in shown),
            f"{max((r['prompt_tokens'] for r in here), default=0):,}",
            f"{least}{sum(r['output_tokens'] for r in here):,}",
            duration(max((r["age"] for r in here), default=0.0)),
        )
    console.print(table)
    listed = scene["requests"][:LISTED]
    table = _table("", "context", "phase", "prompt", "tokens so far", "of at most", "age", left=2)
    for r in listed:
        least = "≥ " if r["at_least"] else ""
        most = f"{r['max_tokens']:,}" if r["max_tokens"] else "–"
        row = (f"{r['prompt_tokens']:,}", f"{least}{r['output_tokens']:,}", most)
        table.add_row(r["bucket"], r["phase"], *row, duration(r["age"]))
    console.print(table)
    if count > len(listed):
        console.print(f"(the {len(listed)} oldest; all are in --json, 500 at most)")
    waiting = scene["waiting"]
    if waiting["sequences"]:
        why = f", because of {waiting['reason']}" if waiting["reason"] else ""
        console.print(
            f"Of their sequences {waiting['sequences']} were waiting, with "
            f"{waiting['prompt_tokens']:,} prompt tokens{why}"
        )
    console.print()


def _last_step(console: Console, scene: dict[str, Any]) -> None:
    if not scene["steps"]:
        console.print(Text("Last step: none is known", "bold"))
        console.print()
        return
    last = scene["steps"][-1]
    console.print(
        Text.assemble(
            (f"Last step: ended at {clock(last['at'])}", "bold"),
            f", {scene['at'] - last['at']:.1f} s before; {last['kind']} of {last['sequences']} "
            f"sequences, {last['seconds'] * 1000:,.0f} ms, {last['tokens_out']} tokens out, "
            f"{last['waiting']} waiting",
        )
    )
    console.print()


def _trend(console: Console, case: Case) -> None:
    shown: list[Column] = columns(case.scene, case.samples)
    if not shown:
        return
    last = len(shown[0].values) * STRETCH
    title = f"The last {last} s, by {STRETCH} s, until {clock(case.scene['at'])}"
    table = _table(title, *(column.title for column in shown), left=1)
    for row in zip(*(column.values for column in shown), strict=True):
        table.add_row(*row)
    console.print(table)
    console.print()


def _memory(console: Console, case: Case) -> None:
    """Resident memory of each process, until the end."""
    samples = [s for s in case.samples if s["at"] <= case.scene["at"]]
    if not samples:
        return
    pids = {str(p["pid"]): name(p) for p in case.scene["processes"]}
    first, last = samples[0], samples[-1]
    table = _table("Resident memory", "", "first look", "largest", "last look")
    for pid, who in pids.items():
        seen = [s["resident"][pid] for s in samples if pid in s["resident"]]
        if seen:
            table.add_row(who, size(seen[0]), size(max(seen)), size(seen[-1]))
    for folder in last["cgroups"]:
        seen = [s["cgroups"][folder] for s in samples if folder in s["cgroups"]]
        used = [c["used"] for c in seen if "used" in c]
        if used:
            limit = seen[-1].get("limit")
            of = f" (limit {size(limit)})" if limit else ""
            table.add_row(
                f"cgroup {Path(folder).name}{of}", size(used[0]), size(max(used)), size(used[-1])
            )
    if table.row_count:
        console.print(table)
        console.print(f"(looked at from {clock(first['at'])} to {clock(last['at'])})")
