"""What the engines count of their KV caches' blocks, as samples; without a pool there are none."""

from collections.abc import Iterator

from llmobs import schema
from llmobs.agent.run import Run, Source
from llmobs.agent.signals import Samples

EVENTS = schema.LABELS["event"]
EVENT_CELL = schema.PROCESS_CELL["kv_block_events"]
FAILURE_CELL = schema.PROCESS_CELL["kv_allocation_failures"]
BYTES_CELL = schema.PROCESS_CELL["kv_cache_bytes"]


def _pools(run: Run) -> Iterator[tuple[tuple[str, str], Source]]:
    """The engine cores whose pool is known, with the labels of the engine."""
    for source in run.sources.values():
        if source.kv_blocks and source.models and "engine_core" in source.roles:
            yield (source.models[0], str(source.info.get("engine", "0"))), source


def _add(samples: Samples, key: tuple[str, ...], value: float) -> None:
    samples[key] = samples.get(key, 0) + value


def blocks(run: Run) -> Samples:
    """Made of the very counters, so that at any moment these and the gauge say the same."""
    samples: Samples = {}
    for engine, source in _pools(run):
        if source.alive:
            used = source.cells[EVENT_CELL] - source.cells[EVENT_CELL + 1]
            _add(samples, (*engine, "used"), used)
            _add(samples, (*engine, "free"), source.kv_blocks - used)
    return samples


def events(run: Run) -> Samples:
    samples: Samples = {}
    for engine, source in _pools(run):
        for place, event in enumerate(EVENTS):
            _add(samples, (*engine, event), source.cells[EVENT_CELL + place])
    return samples


def failures(run: Run) -> Samples:
    samples: Samples = {}
    for engine, source in _pools(run):
        _add(samples, engine, source.cells[FAILURE_CELL])
    return samples


def size(run: Run) -> Samples:
    samples: Samples = {}
    for engine, source in _pools(run):
        if source.alive and source.cells[BYTES_CELL]:
            _add(samples, engine, source.cells[BYTES_CELL])
    return samples
