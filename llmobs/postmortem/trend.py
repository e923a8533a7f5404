"""The minute before the end, in stretches of five seconds: only the columns that there are figures
for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STRETCH = 5
NOTHING = "–"

Figures = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A title, and the values from the oldest stretch to the newest."""

    title: str
    values: list[str]


def columns(scene: Figures, samples: list[Figures]) -> list[Column]:
    """Of the steps, and of what the agent sampled; without any step or sample there is none."""
    seconds: list[Figures] = scene["trend"]
    stretches = [seconds[i : i + STRETCH] for i in range(0, len(seconds), STRETCH)]
    if not samples and not any(second["steps"] for second in seconds):
        return []
    count = len(stretches)
    begins = [(i - count) * STRETCH for i in range(count)]
    found = [Column("from s", [str(begin) for begin in begins])]
    found += [Column(title, [cell(s) for s in stretches]) for title, cell in STEPS.items()]
    if not any(second["preemptions"] for second in seconds):
        found = [column for column in found if column.title != "preempted"]
    placed: list[list[Figures]] = [[] for _ in stretches]
    for sample in samples:
        place = count + int((sample["at"] - scene["at"]) // STRETCH)
        if 0 <= place < count:
            placed[place].append(sample)
    for title, of in SAMPLED.items():
        values = [next((t for s in reversed(p) if (t := of(s)) is not None), None) for p in placed]
        if any(value is not None for value in values):
            found.append(Column(title, [value or NOTHING for value in values]))
    for title, name, labels in GROWING:
        totals = [[v for s in p if (v := _figure(s, name, **labels)) is not None] for p in placed]
        if any(totals):
            found.append(Column(title, _growth(totals)))
    return _since_the_first(found)


def _since_the_first(found: list[Column]) -> list[Column]:
    """Without the stretches before there was anything."""
    empty = {NOTHING, "0"}
    rows = list(zip(*(column.values for column in found[1:]), strict=True))
    first = next((i for i, row in enumerate(rows) if set(row) - empty), len(rows) - 1)
    return [Column(column.title, column.values[first:]) for column in found]


def _sum(stretch: list[Figures], name: str) -> float:
    return sum(float(second[name]) for second in stretch)


def _per_step(stretch: list[Figures], name: str) -> float | None:
    steps = _sum(stretch, "steps")
    return _sum(stretch, name) / steps if steps else None


def _number(value: float | None, form: str = "{:,.1f}") -> str:
    return NOTHING if value is None else form.format(value)


def _mean_ms(stretch: list[Figures]) -> str:
    mean = _per_step(stretch, "seconds")
    return _number(None if mean is None else mean * 1000)


def _worst_ms(stretch: list[Figures]) -> str:
    worst = max(float(second["worst"]) for second in stretch)
    return _number(worst * 1000 or None)


STEPS: dict[str, Callable[[list[Figures]], str]] = {
    "steps": lambda s: _number(_sum(s, "steps"), "{:,.0f}"),
    "mean ms": _mean_ms,
    "worst ms": _worst_ms,
    "running": lambda s: _number(_per_step(s, "running")),
    "waiting": lambda s: str(max(int(second["waiting"]) for second in s)),
    "tokens/s": lambda s: _number(_sum(s, "tokens") / STRETCH, "{:,.0f}"),
    "preempted": lambda s: _number(_sum(s, "preemptions"), "{:,.0f}"),
}


def _figure(sample: Figures, name: str, **labels: str) -> float | None:
    """The sum of the series with these labels, as far as they were sampled."""
    values = [
        float(value)
        for found, value in sample.get("gauges", {}).get(name, ())
        if labels.items() <= found.items()
    ]
    return sum(values) if values else None


def _share(part: float | None, rest: float | None) -> str | None:
    if part is None or rest is None or not part + rest:
        return None
    return f"{part / (part + rest):.0%}"


def _gib(value: float | None) -> str | None:
    return None if value is None else f"{value / (1 << 30):.2f}"


def _kv(sample: Figures) -> str | None:
    name = "llmobs_kv_blocks"
    return _share(_figure(sample, name, state="used"), _figure(sample, name, state="free"))


def _resident(sample: Figures) -> str | None:
    return _gib(sum(sample["resident"].values()) or None)


def _cgroup(sample: Figures) -> str | None:
    shares = [c["used"] / c["limit"] for c in sample["cgroups"].values() if c.get("limit")]
    return f"{max(shares):.0%}" if shares else None


SAMPLED: dict[str, Callable[[Figures], str | None]] = {
    "KV used": _kv,
    "GPU GiB": lambda s: _gib(_figure(s, "llmobs_gpu_memory_bytes", kind="used")),
    "torch GiB": lambda s: _gib(_figure(s, "llmobs_torch_memory_bytes", kind="reserved")),
    "resident GiB": _resident,
    "cgroup": _cgroup,
}

GROWING: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("throttled s", "llmobs_cgroup_cpu_throttled_seconds_total", {}),
    ("run queue s", "llmobs_process_run_queue_seconds_total", {}),
    ("steal s", "llmobs_cpu_seconds_total", {"mode": "steal"}),
)
"""Counters: what came on top in each stretch."""


def _growth(totals: list[list[float]]) -> list[str]:
    told, before = [], None
    for values in totals:
        known = before is not None and bool(values)
        told.append(f"{max(values[-1] - (before or 0.0), 0):.2f}" if known else NOTHING)
        before = values[-1] if values else before
    return told
