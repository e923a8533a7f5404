"""Why requests wait, as each vLLM keeps those that it has put aside."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from llmobs.engine import Engine

RUNNING = {"running": [1], "max_num_running_reqs": 2, "max_num_scheduled_tokens": 100}
REASONS = [
    ("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "GRAMMAR"),
    ("WAITING_FOR_REMOTE_KVS", "REMOTE_KV"),
    ("WAITING_FOR_STREAMING_REQ", "INPUT"),
    ("WAITING", "ADAPTER"),
]


def why(scheduler: dict[str, Any], waiting: int = 3, tokens: int = 0) -> str:
    engine = Engine(None, False)  # type: ignore[arg-type]
    engine.waiting = waiting
    return engine._why_waiting(SimpleNamespace(**RUNNING | scheduler), tokens).name


def aside(status: str, count: int) -> list[Any]:
    return [SimpleNamespace(status=SimpleNamespace(name=status)) for _ in range(count)]


@pytest.mark.parametrize(("status", "reason"), REASONS)
@pytest.mark.parametrize("kept", ["deferred_waiting", "skipped_waiting"])
def test_most_are_put_aside(status: str, reason: str, kept: str) -> None:
    """A set since vLLM 0.31, a queue before."""
    for container in (tuple, deque):
        assert why({kept: container(aside(status, 2))}) == reason
        assert why({kept: container(aside(status, 1))}) == "KV_CACHE"


def test_what_is_full() -> None:
    assert why({"deferred_waiting": set()}) == "KV_CACHE"
    assert why({}) == "KV_CACHE"
    assert why({"deferred_waiting": set()}, tokens=100) == "TOKEN_BUDGET"
    assert why({"deferred_waiting": set(), "running": [1, 2]}) == "MAX_NUM_SEQS"
    paused = SimpleNamespace(name="PAUSED_NEW")
    assert why({"running": [1, 2], "_pause_state": paused}) == "PAUSED"
    assert why({"_pause_state": SimpleNamespace(name="UNPAUSED")}) == "KV_CACHE"
