"""The last requests that ended, kept in little memory."""

import marshal
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple


class Finished(NamedTuple):
    """What is kept of a request that ended; no text. Times in seconds."""

    ended: float
    """Unix time."""
    model: str
    context_bucket: str
    outcome: str
    status: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    first_token: float | None
    longest_gap: float | None
    preemptions: int
    phases: tuple[float, ...]
    """In the order of PHASES, they sum to `seconds`; the first only if it was never admitted."""
    first_token_phases: tuple[float, ...]
    """The same until the first token, they sum to `first_token`; empty if there was none."""
    predicted_prefill: float | None
    """What the fit from before it said of its phase `prefill`; None: nothing."""
    cold_start: bool
    kv_bytes: float | None
    """The most that its sequences held of the KV cache, in one worker; None if not known."""


class FinishedRequests:
    """The newest so many, oldest first. Each is kept as bytes: as objects 20,000 of them would be
    17 MB of the agent's memory, and work for the garbage collector."""

    def __init__(self, most: int) -> None:
        self._kept: deque[bytes] = deque(maxlen=most)

    def append(self, request: Finished) -> None:
        self._kept.append(marshal.dumps(tuple(request)))

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Finished]:
        return (Finished(*marshal.loads(kept)) for kept in self._kept)
