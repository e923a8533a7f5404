"""What the agent measures itself, beside what the rings tell: the machine, its GPUs."""

from typing import Protocol

Samples = dict[tuple[str, ...], float]
"""A value by its labels, in the order of the table of metrics."""


class Signal(Protocol):
    """One source of such figures. All is called under the run's lock, so nothing may wait: what can
    block (a driver, a library) is done by a thread of the signal's own."""

    def poll(self) -> None:
        """At each look at the rings, a few times a second."""

    def samples(self) -> dict[str, Samples]:
        """By name of the metric, without the label `model_name` (it becomes the served name) or, of
        a signal that knows several servers apart, with it. What is not known is left out: an absent
        series, never a 0."""

    def lacking(self) -> dict[str, str]:
        """Features that are unavailable, with the reason (features.py)."""

    def close(self) -> None:
        """The agent ends."""
