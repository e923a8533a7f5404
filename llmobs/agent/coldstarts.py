"""Which prefill is the first of its context bucket since the engine began, or began again."""

from llmobs import schema
from llmobs.slo import SLO


class ColdStarts:
    """The buckets of one engine that are warm.

    All are cold at the start, and again when the engine made no step for a while. It is the whole
    engine that has to idle: what cools off then (clocks, caches, memory that was swapped out) stays
    warm while it computes anything at all. Went it by each bucket's own last prefill, a bucket that
    is used every quarter of an hour would be all cold starts.
    """

    def __init__(self) -> None:
        self._begun: set[int] = set()
        self._warm: set[int] = set()

    def unknown(self) -> None:
        """Records were lost: any bucket may have had its first prefill there."""
        self._begun = set(range(schema.BUCKETS))
        self._warm = set(range(schema.BUCKETS))

    def begins(self, bucket: int, idle: float) -> bool:
        """A prefill begins, so many seconds after the engine's last step: is it a cold start?"""
        if idle >= SLO.cold_after_seconds:
            self._begun.clear()
            self._warm.clear()
        if bucket in self._begun:
            return False
        self._begun.add(bucket)
        return True

    def ends(self, bucket: int) -> None:
        """A prefill is done: its bucket is warm."""
        self._begun.add(bucket)
        self._warm.add(bucket)

    def gives_up(self, bucket: int) -> None:
        """A cold start ended without a token: unless another was faster, the next one is it."""
        if bucket not in self._warm:
            self._begun.discard(bucket)
