"""What came of the faults, added up over several runs, and the table in docs/reliability.md."""

import json
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.reliability import write_section

WAITED_S = 32.0  # for a server to end: what is left of it then is killed
FOLDER = Path(".chaos")
HEADER = (
    *("fault", "injected", "failed requests", "counters exact", "orphans"),
    *("server's end, s", "agent's end after it, s"),
)


@dataclass
class Result:
    """One injection. `inexact` says what differed; the ends are None where the server ran on."""

    fault: str
    failed: int = 0
    inexact: str = ""
    orphans: int | None = None
    server_s: float | None = None
    agent_s: float | None = None
    unmeasured: bool = False
    """Whether there are no counters to look at: llmobs was off."""

    @property
    def good(self) -> bool:
        return not (self.failed or self.inexact or self.orphans)


def load() -> list[Result]:
    """Of all runs so far."""
    contents = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    return [Result(**result) for content in contents for result in content]


def save(results: Iterable[Result]) -> None:
    """Those of one run."""
    FOLDER.mkdir(exist_ok=True)
    content = json.dumps([asdict(result) for result in results])
    path = FOLDER / f"{time.time_ns()}.part"
    path.write_text(content)
    path.rename(path.with_suffix(".json"))


def forget() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)


def rows(results: Iterable[Result], order: list[str]) -> list[list[object]]:
    """A row for each fault, in this order, and one for all."""
    groups: dict[str, list[Result]] = {name: [] for name in order}
    for result in results:
        groups.setdefault(result.fault, []).append(result)
    groups = {name: group for name, group in groups.items() if group}
    everything = [result for group in groups.values() for result in group]
    return [*(_row(name, group) for name, group in groups.items()), _row("all", everything)]


def _row(name: str, group: list[Result]) -> list[object]:
    looked = [result for result in group if not result.unmeasured]
    exact = f"{sum(not result.inexact for result in looked)} of {len(looked)}" if looked else "off"
    orphans = [result.orphans for result in group if result.orphans is not None]
    return [
        *(name, len(group), sum(result.failed for result in group), exact),
        sum(orphans) if orphans else "",
        _seconds([r.server_s for r in group if r.server_s is not None]),
        _seconds([r.agent_s for r in group if r.agent_s is not None]),
    ]


def _seconds(values: list[float]) -> str:
    if not values:
        return ""
    low, high = (f"{v:.1f}" if v < WAITED_S else "never" for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def write(table: list[list[object]], intro: str) -> None:
    write_section("Faults", HEADER, table, intro)
