"""Ring files for the tests: written here, or by a process of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from llmobs.ring import Reader, Writer, start_ticks

SLOT = 104
SLOTS_AT = 65536
ENGINE = {"roles": ["engine_core"], "models": ["deepseek-v4"], "engine": 0, "vllm": "0.32.0"}
FRONT = {"roles": ["api_server"], "models": ["deepseek-v4"], "vllm": "0.32.0"}

WORKER = {"roles": ["worker"], "models": ["deepseek-v4"], "engine": 0, "rank": 0, "vllm": "0.32.0"}


def name(role: str, pid: int | None = None) -> str:
    pid = pid or os.getpid()
    return f"{role}-{pid}-{start_ticks(pid)}.ring"


def new_ring(folder: Path, info: dict[str, Any], capacity: int = 256) -> Writer:
    """A ring of this very process, named as the server's processes name theirs."""
    return Writer(folder / name(info["roles"][0]), capacity, info)


def read_all(reader: Reader) -> tuple[list[tuple[Any, ...]], int]:
    """All that can be read by now, as tuples, and how many were lost."""
    records: list[tuple[Any, ...]] = []
    lost = 0
    while True:
        batch = reader.read()
        lost += batch.lost
        if not len(batch.records):
            return records, lost
        records += batch.rows()


def python(code: str, *args: object, **options: Any) -> "subprocess.Popen[str]":
    """Another Python process."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
