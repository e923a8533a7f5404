"""The breakdown as a person reads it, and as JSON."""

import json
import time
from dataclasses import asdict, dataclass
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from llmobs.diagnose.breakdown import Breakdown, Sample, Split, advice
from llmobs.metrics import PHASES

BAR = 16
FEW = 100
MARKS = dict(zip(PHASES, "·▒█▚▄░", strict=True))
"""One fill per phase, told apart without colour too."""
STYLES = dict(zip(PHASES, ("white", "yellow", "blue", "red", "green", "magenta"), strict=True))


def milliseconds(seconds: float | None) -> str:
    """As few digits as tell something."""
    if seconds is None:
        return "–"
    value = seconds * 1000
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def mebibytes(count: float | None) -> str:
    """As few digits as tell something."""
    if count is None:
        return "–"
    value = count / (1 << 20)
    return f"{value:,.0f} MiB" if value >= 10 else f"{value:.2f} MiB"


@dataclass(frozen=True)
class Scope:
    """What the figures are of: a page, its models, and a stretch of time (Unix, seconds)."""

    endpoint: str
    models: tuple[str, ...]
    requests: int
    first: float
    last: float


def show_json(
    scope: Scope, breakdowns: list[Breakdown], samples: dict[str, list[Sample]], out: TextIO
) -> None:
    """The scope, and one object per bucket."""
    content = [
        asdict(b)
        | {
            "missed": b.missed,
            "dominant": b.first_token.dominant if b.first_token is not None else b.whole.dominant,
            "next": advice(b, samples),
        }
        for b in breakdowns
    ]
    json.dump({**asdict(scope), "buckets": content}, out, indent=2)
    out.write("\n")


def show(
    scope: Scope, breakdowns: list[Breakdown], samples: dict[str, list[Sample]], out: TextIO
) -> None:
    """The targets, where the time went, a verdict per bucket, and what to do next."""
    console = Console(file=out, highlight=False, width=None if out.isatty() else 110)
    begin, end = (time.strftime("%H:%M:%S", time.localtime(t)) for t in (scope.first, scope.last))
    console.print(
        f"{scope.requests} requests of {', '.join(scope.models)}, ended {begin} to {end} "
        f"({scope.endpoint})\n"
    )
    console.print(_targets(breakdowns))
    if any(b.requests < FEW for b in breakdowns):
        console.print(
            f"(of fewer than {FEW} requests the P99 is about the slowest one)", style="dim"
        )
    console.print()
    first = [(b.bucket, b.first_token) for b in breakdowns if b.first_token is not None]
    before = tuple(phase for phase in PHASES if phase != "decode")
    console.print(_splits("Slowest to their first token: where that time went", first, before))
    console.print()
    whole = [(b.bucket, b.whole) for b in breakdowns]
    console.print(_splits("Slowest from end to end: where their time went", whole, PHASES))
    console.print()
    for b in breakdowns:
        console.print(_verdict(b))
    told: dict[str, list[str]] = {}
    for b in breakdowns:
        for line in advice(b, samples):
            told.setdefault(line, []).append(b.bucket)
    for line, buckets in told.items():
        console.print()
        console.print(Text(f"→ {', '.join(buckets)}", "bold"))
        console.print(Padding(Text(line), (0, 0, 0, 2)))


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("context", min_width=7)
    return table


def _targets(breakdowns: list[Breakdown]) -> Table:
    table = _table("First token and longest gap, by context length")
    columns = ("requests", "first P50", "first P99", "target", "gap P99", "target")
    for name in (*columns, "KV mean", "KV P99"):
        table.add_column(name, justify="right")
    for b in breakdowns:
        table.add_row(
            b.bucket,
            str(b.requests),
            milliseconds(b.first_token_p50),
            _judged(b.first_token_p99, b.first_token_target),
            milliseconds(b.first_token_target),
            _judged(b.gap_p99, b.gap_target),
            milliseconds(b.gap_target),
            mebibytes(b.kv_mean),
            mebibytes(b.kv_p99),
        )
    return table


def _splits(title: str, rows: list[tuple[str, Split]], phases: tuple[str, ...]) -> Table:
    table = _table(title)
    table.add_column("of", justify="right")
    for phase in phases:
        table.add_column(Text(f"{MARKS[phase]} {phase}", STYLES[phase]), justify="right")
    table.add_column("sum", justify="right")
    table.add_column("", min_width=BAR, no_wrap=True)
    for bucket, split in rows:
        values = [milliseconds(split.phases[phase]).removesuffix(" ms") for phase in phases]
        total = milliseconds(split.total)
        table.add_row(bucket, str(split.slowest), *values, total, _bar(split))
    return table


def _judged(value: float | None, target: float) -> Text:
    missed = value is not None and value > target
    return Text(milliseconds(value) + (" !" if missed else ""), "bold red" if missed else "")


def _bar(split: Split) -> Text:
    """The phases in proportion, in their own order."""
    bar = Text()
    done, total = 0.0, sum(split.phases.values()) or 1.0
    for phase in PHASES:
        start = round(BAR * done / total)
        done += split.phases[phase]
        bar.append(MARKS[phase] * (round(BAR * done / total) - start), STYLES[phase])
    return bar


def _verdict(b: Breakdown) -> Text:
    verdict = Text.assemble((b.bucket, "bold"))
    verdict.append(f" misses: {', '.join(b.missed)}" if b.missed else " is within its targets")
    split = b.first_token
    if split is not None and split.total:
        phase = split.dominant
        share = split.phases[phase] / split.total
        verdict.append(f"; {share:.0%} of the slowest first tokens' time is ")
        verdict.append(phase, f"bold {STYLES[phase]}")
    return verdict
