"""Probes of the engine's KV cache: blocks handed out, returned and evicted, requests left without.

vLLM takes blocks for every request at every step, so nothing of ours runs there. The length of the
free queue is looked at once per step, and around what makes it longer, which is rare: what is
missing since the last look was handed out, whatever the way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llmobs import process, schema
from llmobs.guard import GUARD
from llmobs.ring import Writer

ALLOCATED = schema.PROCESS_CELL["kv_block_events"]
FREED, EVICTED = ALLOCATED + 1, ALLOCATED + 2
FAILURES = schema.PROCESS_CELL["kv_allocation_failures"]
BLOCKS = schema.PROCESS_CELL["kv_pool_blocks"]
BYTES = schema.PROCESS_CELL["kv_cache_bytes"]
NEEDED = {"kv_free", "kv_unpin", "kv_evict", "kv_attempt", "preempt"}


class Held(NamedTuple):
    """What one request has of the cache, all its KV groups together, in blocks: how many it holds,
    how many places its tables have (one that slid out of its window has its place still), and how
    many are left to all."""

    blocks: int = 0
    places: int = 0
    left: int = 0


class Pool:
    """Follows one scheduler's pool of blocks; vLLM's null block counts nowhere."""

    def __init__(self, ring: Writer, scheduler: Any) -> None:
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool
        self.ring = ring
        self.pool = pool
        self.queue: Any = pool.free_block_queue
        self.managers: list[Any] = [
            group for group in manager.coordinator.single_type_managers if group.block_pool is pool
        ]
        self.blocks = pool.num_gpu_blocks - 1
        self.free = self.blocks
        """Blocks in the free queue at the last look."""
        self.watched: Any = None
        """The manager whose attempts to allocate are watched, while they are; `before` it had these
        of its own."""
        self.before: dict[str, Any] = {}
        self.size = _size(manager.kv_cache_config)

    def look(self) -> None:
        """Book how the free queue has changed. Each cell only ever rises, so whoever reads between
        two of them still finds as many blocks in use as `allocate` is ahead of `free`."""
        free = self.queue.num_free_blocks
        change = free - self.free
        if change < 0:
            self.ring.cells[ALLOCATED] -= change
        elif change:
            self.ring.cells[FREED] += change
        self.free = free

    def held(self, request: Any) -> Held:
        """Asked at changes only: it takes the longer the more groups there are."""
        name = request.request_id
        blocks = places = 0
        for manager in self.managers:
            table = manager.req_to_blocks.get(name, ())
            places += len(table)
            blocks += len(table)
            if manager.get_num_skipped_tokens(request.num_computed_tokens) > 0:
                blocks -= sum(block.is_null for block in table)
        return Held(blocks, places, self.queue.num_free_blocks)

    # Attempts that fail. A running request's ends in a preemption. A waiting one's is seen by
    # watching the attempts, from the first one in a step's queue to the end of its scheduling: by
    # then those of the running ones are done.

    def watch(self, manager: Any, starved: Callable[[Any], None]) -> None:
        if self.watched is not None:
            return
        attempts = {"allocate_slots": manager.allocate_slots}
        # In 0.20 a waiting prompt that does not fit as a whole is found out beforehand.
        fits = getattr(manager, "can_fit_full_sequence", None)
        if fits is not None:
            attempts["can_fit_full_sequence"] = fits
        self.before = {name: vars(manager)[name] for name in attempts if name in vars(manager)}
        self.watched = manager
        for name, original in attempts.items():
            setattr(manager, name, self._watching(original, starved))

    def unwatch(self) -> None:
        manager, self.watched = self.watched, None
        for name in ("allocate_slots", "can_fit_full_sequence"):
            vars(manager).pop(name, None)
        vars(manager).update(self.before)

    def _watching(
        self, original: Callable[..., Any], starved: Callable[[Any], None]
    ) -> Callable[..., Any]:
        def attempt(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if result is None or result is False:
                try:
                    self.ring.cells[FAILURES] += 1
                    starved(args[0] if args else kwargs["request"])
                except Exception:
                    GUARD.failed("kv_attempt")
            return result

        return attempt


def _size(config: Any) -> int:
    """The bytes of one worker's cache, 0 where that is not known. From 0.30 on, and before where a
    layout is packed, all layers lie in one allocation and each names the size of that."""
    total = largest = 0
    for tensor in config.kv_cache_tensors:
        if getattr(tensor, "host_resident", False):
            continue
        if getattr(tensor, "block_stride", 0):
            largest = max(largest, tensor.size)
        else:
            total += tensor.size
    return int(total + largest)


POOL: Pool | None = None


def forget(ring: Writer | None) -> None:
    """A scheduler begins: what one before it in this process had is all returned."""
    global POOL
    POOL = None
    if ring is not None:
        cells = ring.cells
        cells[FREED] = cells[ALLOCATED]
        cells[BLOCKS] = cells[BYTES] = 0


def found(ring: Writer, scheduler: Any) -> None:
    """After Scheduler.__init__: its pool is there now."""
    global POOL
    state = process.current()
    try:
        pool = Pool(ring, scheduler)
    except AttributeError:
        pool = None
    # A model without attention has the null block alone. Figures that want a probe are none.
    if pool is None or pool.blocks < 1 or NEEDED & state.missing.keys():
        state.lacks("no_kv_pool", "kv_cache")
        return
    ring.cells[BLOCKS], ring.cells[BYTES] = pool.blocks, pool.size
    pool.look()
    POOL = pool


def returning(pool: Any) -> None:
    """Before blocks may return to the queue: book those that left it until now."""
    if POOL is not None and pool is POOL.pool:
        POOL.look()


def returned(token: Any, result: Any, pool: Any) -> None:
    if POOL is not None and pool is POOL.pool:
        POOL.look()


def evicted(pool: Any) -> None:
    """A block lost what the prefix cache had in it."""
    if POOL is not None and pool is POOL.pool:
        POOL.ring.cells[EVICTED] += 1
