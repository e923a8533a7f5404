"""Tail sampling: kept requests wait here, slowest first, until their spans are exported."""

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from llmobs.agent.request import Request
from llmobs.agent.spans import Span, span_tree
from llmobs.metrics import DROP_REASONS

log = logging.getLogger("llmobs.agent")

REQUESTS_PER_SECOND = 50.0
QUEUE_LIMIT = 1000
"""Requests that may wait; the fastest of them give way first."""
SETTLE_SECONDS = 0.5
"""A worker's last records may come after the end of a request."""
BATCH_REQUESTS = 25
TICK_SECONDS = 0.25
LAST_SECONDS = 2.0
"""How long the queue may still be exported once the server is gone."""


class Sink(Protocol):
    """Where span trees go. `export` says whether they arrived; it may block for its own timeout."""

    def export(self, kept: list["Kept"]) -> bool: ...

    def close(self) -> None: ...


@dataclass(order=True)
class Kept:
    """A request to export; the order is that of giving way: pinned ones last, then the slowest."""

    rank: tuple[bool, float, int]
    tree: Span = field(compare=False)
    request: Request = field(compare=False)
    resource: dict[str, str] = field(compare=False)


class Traces:
    """A bounded queue between the agent's thread, which offers, and the exporting one.

    `share` is that of the requests in order that are kept too. `lock` is the run's.
    """

    def __init__(self, share: float, lock: AbstractContextManager[object], sink: Sink) -> None:
        self.share = share
        self.lock = lock
        self.sink = sink
        self.dropped = dict.fromkeys(DROP_REASONS, 0)
        self._settling: deque[tuple[float, Request, str, dict[str, str], tuple[str, ...]]] = deque()
        self._heap: list[Kept] = []
        self._count = itertools.count()
        self._allowance = REQUESTS_PER_SECOND
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(
        self, request: Request, model: str, resource: dict[str, str], reasons: tuple[str, ...]
    ) -> None:
        """Keep a request that ended. Called with the lock held."""
        self._settling.append((time.monotonic(), request, model, resource, reasons))
        if len(self._settling) > QUEUE_LIMIT:
            self._settle(len(self._settling))

    def _settle(self, at_least: int = 0) -> None:
        """Make trees of what has settled, and let the fastest go where there are too many."""
        now = time.monotonic()
        while self._settling and (at_least > 0 or now - self._settling[0][0] >= SETTLE_SECONDS):
            at_least -= 1
            _, request, model, resource, reasons = self._settling.popleft()
            try:
                request.trace.identify()
                tree = span_tree(request, model, reasons)
            except Exception:
                log.exception("a request's spans could not be made")
                self.dropped["export_failed"] += 1
                continue
            seconds = (request.end - request.arrival) / 1e9
            kept = Kept((request.pinned, seconds, next(self._count)), tree, request, resource)
            heapq.heappush(self._heap, kept)
            if len(self._heap) > QUEUE_LIMIT:
                self.dropped["queue_full"] += len(heapq.heappop(self._heap).tree)

    def _take(self, most: int) -> list[Kept]:
        """The slowest of what waits."""
        taken = heapq.nlargest(most, self._heap)
        if len(taken) == len(self._heap):
            self._heap.clear()
        else:
            chosen = set(map(id, taken))
            self._heap = [kept for kept in self._heap if id(kept) not in chosen]
            heapq.heapify(self._heap)
        return taken

    def _work(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(TICK_SECONDS):
            now = time.monotonic()
            self._allowance = min(
                self._allowance + (now - last) * REQUESTS_PER_SECOND, REQUESTS_PER_SECOND
            )
            last = now
            while self._allowance >= 1 and not self._stop.is_set():
                most = min(int(self._allowance), BATCH_REQUESTS)
                with self.lock:
                    self._settle()
                    taken = self._take(most)
                if not taken:
                    break
                self._allowance -= len(taken)
                self._export(taken)

    def _export(self, taken: list[Kept]) -> None:
        spans = sum(len(kept.tree) for kept in taken)
        try:
            arrived = self.sink.export(taken)
        except Exception:
            log.exception("spans could not be exported")
            arrived = False
        with self.lock:
            self.dropped["export_failed"] += 0 if arrived else spans

    def close(self) -> None:
        """The server is gone: export what waits, as far as the time goes; the rest is counted."""
        end = time.monotonic() + LAST_SECONDS
        self._stop.set()
        self._thread.join(LAST_SECONDS)
        last = threading.Thread(target=self._drain, args=(end,), daemon=True)
        last.start()
        last.join(max(end - time.monotonic(), 0.1))
        with self.lock:
            for kept in self._heap:
                self.dropped["shutdown"] += len(kept.tree)
            self._heap.clear()

    def _drain(self, end: float) -> None:
        if self._thread.is_alive():
            return  # still inside an export that hangs
        while time.monotonic() < end:
            with self.lock:
                self._settle(len(self._settling))
                taken = self._take(BATCH_REQUESTS)
            if not taken:
                self.sink.close()
                return
            self._export(taken)
