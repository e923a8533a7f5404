"""GPU time of the worker's calls, by CUDA events: recorded beside them, read later, never waited
for."""

import random
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

DECODES = 8
"""Of the batches that only decode, one in so many is timed: four events cost the worker some
microseconds, and a decode step may take no more than two milliseconds. All others are timed."""
SETS = 16
"""So many batches may be on their way before one goes untimed."""

UNTIMED = -1
"""In place of a time: there was no such call."""


def cuda() -> Any:
    """`torch.cuda` where this process computes on such a GPU, else None. Initialises nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch.cuda


class GpuClock:
    """Brackets the forward pass and the sampling of a batch by events on the stream that they are
    put on.

    `cuda` is `torch.cuda`. `told` is given, some batches later, when the forward pass began on the
    host's clock, and the nanoseconds of forward and sampling on the GPU's: from when it had done
    all that was asked before, until it had done this. `skip` says how many decoding batches to
    leave out next.
    """

    def __init__(
        self,
        cuda: Any,
        told: Callable[[int, int, int], None],
        skip: Callable[[], int] = lambda: random.randrange(2 * DECODES - 1),
    ) -> None:
        self._cuda = cuda
        self._told = told
        # At random, for a load may have a rhythm; each has the same chance.
        self._draw = skip
        self._skip = skip()
        self._free: list[list[Any]] = []
        self._made = 0
        self._open: list[Any] | None = None
        """The events of the batch that is being computed."""
        self._marks = 0
        """How many of them are recorded."""
        self._began = 0
        self._pending: deque[tuple[int, list[Any], int]] = deque()

    def forward_starts(self, decodes: bool) -> None:
        """`decodes`: nothing of a prompt is in the batch."""
        if self._pending or self._open is not None:
            self._harvest()
        if decodes:
            self._skip -= 1
            if self._skip >= 0:
                return
            self._skip = self._draw()
        if self._cuda.is_current_stream_capturing():
            return
        if not self._free:
            if self._made == SETS:
                return
            self._made += 1
            event = self._cuda.Event
            self._free.append([event(enable_timing=True) for _ in range(4)])
        self._open, self._marks = self._free.pop(), 0
        self._mark()

    def forward_ends(self, began: int) -> None:
        """`began`: when the call did, on the host's clock; by that the batch is known."""
        if self._open is not None and self._marks == 1:
            self._began = began
            self._mark()

    def sampling_starts(self) -> None:
        if self._open is not None and self._marks == 2:
            self._mark()

    def sampling_ends(self) -> None:
        if self._open is not None and self._marks == 3:
            self._mark()

    def _mark(self) -> None:
        assert self._open is not None
        self._open[self._marks].record()
        self._marks += 1

    def _harvest(self) -> None:
        """Tell of the batches that the GPU is done with by now."""
        if self._open is not None:
            if self._marks >= 2:
                self._pending.append((self._began, self._open, self._marks))
            else:  # its forward pass failed
                self._free.append(self._open)
            self._open = None
        if self._cuda.is_current_stream_capturing():
            return
        while self._pending:
            began, events, marks = self._pending[0]
            if not events[marks - 1 if marks == 4 else 1].query():
                return
            self._pending.popleft()
            forward = int(events[0].elapsed_time(events[1]) * 1e6)
            sampling = int(events[2].elapsed_time(events[3]) * 1e6) if marks == 4 else UNTIMED
            self._free.append(events)
            self._told(began, forward, sampling)
