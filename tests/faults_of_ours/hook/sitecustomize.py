"""Loaded by each Python process that has this folder in PYTHONPATH: lets llmobs' observers fail
when the test says so."""

import os
import sys
from pathlib import Path
from typing import Any

from fault_board import VARIABLE, Board

INNER = {"http_edge": "arrive", "beam_search": "_count_beams", "refuse": "_refused"}
"""What a probe only wraps around vLLM's call runs later: the function of frontend.py that does."""


def fails(board: Board, point: int, function: Any) -> Any:
    def failing(*args: Any, **kwargs: Any) -> Any:
        how = board.failing(point)
        if how and how != "afterwards":
            board.fail(point, how)
        result = function(*args, **kwargs)
        if how:
            board.fail(point, how)
        return result

    return failing if function is not None else None


def patch(probes: Any) -> None:
    """Put failing observers into the table, before anything is attached."""
    from dataclasses import replace

    board = Board(Path(os.environ[VARIABLE]))
    probes.PROBES = tuple(
        replace(
            probe,
            before=fails(board, number, probe.before),
            after=fails(board, number, probe.after),
            transform=fails(board, number, probe.transform),
        )
        for number, probe in enumerate(probes.PROBES)
    )
    for number, probe in enumerate(probes.PROBES):
        if probe.name in INNER:
            name = INNER[probe.name]
            inner = fails(board, number, getattr(probes.frontend, name))
            setattr(probes.frontend, name, inner)


if VARIABLE in os.environ and "llmobs.agent" not in sys.orig_argv:
    import wrapt

    wrapt.register_post_import_hook(patch, "llmobs.probes")
