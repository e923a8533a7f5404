"""Keeps the generated sections of docs/reliability.md, each written by the run that measured it."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

PATH = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"
TITLE = "# Reliability\n\nEach section is written by the run that it names; do not edit.\n"


def write_section(
    name: str, header: Sequence[str], rows: Iterable[Sequence[object]], intro: str = ""
) -> None:
    """Replace the section of that name by a table; a new one comes last. Other sections stay.

    `intro` stands before the table: how it was made, on what. Cells are text on one line."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    lines = [header, ["---"] * len(header), *rows]
    table = "".join(f"| {' | '.join(_cell(value) for value in line)} |\n" for line in lines)
    section = "\n\n".join(part for part in (f"{begin}\n## {name}", intro.strip(), table) if part)
    section += f"{end}\n"
    old = PATH.read_text(encoding="utf-8") if PATH.exists() else TITLE
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}\n", re.DOTALL)
    new, found = pattern.subn(lambda _: section, old, count=1)
    PATH.write_text(new if found else f"{old}\n{section}", encoding="utf-8")


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
