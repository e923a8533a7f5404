"""Gives the engine its core back between two pieces of the agent's work."""

import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

WORK_NS = 2_000_000
"""CPU time in one go: what wakes up on the same core waits for that long at most. Shorter pieces
cost more than they help."""
REST_SECONDS = 0.005
ITEMS = 32
"""Between two looks at the clock."""

Item = TypeVar("Item")


class Pace:
    """Of all threads that work for one run. Where much has to be caught up on, none rests."""

    def __init__(self) -> None:
        self.hurry = False
        self._thread = threading.local()

    def breathe(self) -> None:
        """Rest a little, if this thread has worked for long enough."""
        if self.hurry:
            return
        if time.thread_time_ns() - getattr(self._thread, "rested", 0) > WORK_NS:
            time.sleep(REST_SECONDS)
            self._thread.rested = time.thread_time_ns()

    def over(self, items: Iterable[Item], number: int = ITEMS) -> Iterator[Item]:
        """The items, with a breath before each so many."""
        for place, item in enumerate(items):
            if place % number == 0:
                self.breathe()
            yield item


class Paced(list[Item]):
    """A list whose reader breathes now and then."""

    def __init__(self, items: Iterable[Item], pace: Pace) -> None:
        super().__init__(items)
        self.pace = pace

    def __iter__(self) -> Iterator[Item]:
        return self.pace.over(super().__iter__())
