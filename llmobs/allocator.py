"""PyTorch's allocator on a worker's GPU, as totals in the worker's ring."""

import os
import sys
from typing import Any

from llmobs import process, schema
from llmobs.ring import Writer

EVERY_NS = 1_000_000_000
NEVER = sys.maxsize
MEMORY = schema.PROCESS_CELL["torch_memory"]
EVENTS = schema.PROCESS_CELL["torch_events"]
READS = schema.PROCESS_CELL["torch_reads"]


class Allocator:
    """Looked at after a step, at most once a second; `due` says when next.

    By the worker's own thread, not by one of ours: the figures are behind the allocator's lock,
    which is free between two steps. Another thread could find it taken, by an allocation that
    waits for the driver, and would keep Python's global lock all the while. Nothing is launched,
    and nothing waits for the GPU.
    """

    def __init__(self, torch: Any, device: Any) -> None:
        self.device = device
        self.due = 0
        # In itself it initialises nothing; as one dictionary in place of a hundred flat names it
        # takes a fraction of the time of `memory_stats`.
        self.stats = torch.cuda.memory_stats_as_nested_dict

    def look(self, ring: Writer, time_now: int) -> None:
        self.due = time_now + EVERY_NS
        try:
            stats = self.stats(self.device)
            if not stats:
                return  # CUDA is not initialised
            allocated = stats["allocated_bytes"]["all"]
            memory = (
                allocated["current"],
                stats["reserved_bytes"]["all"]["current"],
                allocated["peak"],
            )
            cells = ring.cells
            cells[MEMORY], cells[MEMORY + 1], cells[MEMORY + 2] = memory
            cells[EVENTS], cells[EVENTS + 1] = stats["num_alloc_retries"], stats["num_ooms"]
            cells[READS] += 1
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):
            # Another backend's allocator.
            self.due = NEVER
            process.current().lacks("not_supported", "torch_memory")


def place(torch: Any, device: Any) -> dict[str, Any]:
    """What the agent needs to find this process's GPU among the machine's."""
    try:
        uuid = torch.cuda.get_device_properties(device).uuid
    except (AttributeError, RuntimeError):  # before PyTorch 2.4
        uuid = None
    return {
        "type": "cuda",
        "index": device.index,
        "uuid": None if uuid is None else str(uuid),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "order": os.environ.get("CUDA_DEVICE_ORDER"),
    }
