"""The layout of a ring file: what a record, a cumulative total and the header mean.

One ring file is written by one process of the server and read by the agent, also after both are
dead. All integers are little-endian. Times are CLOCK_MONOTONIC in nanoseconds unless a name says
`wall`; monotonic clocks agree between the processes of one host.

    0       fixed header (HEADER)
    64      info: JSON about the process, rewritten as a whole when it changes
    16384   totals: 8-byte cells, see CELLS
    65536   slots of 104 bytes, see SLOT

Slot `sequence % capacity` holds record `sequence` (the first is 1), the number at both ends: the
writer sets the first before and the last after the rest, so a slot that is torn, overwritten or not
yet there is told apart from a whole one.
"""

import struct
from enum import IntEnum

import numpy as np

from llmobs.slo import BUCKET_NAMES, SLO, UNKNOWN

MAGIC = b"LLMOBSR1"
VERSION = 2
INFO_OFFSET = 64
TOTALS_OFFSET = 16384
SLOTS_OFFSET = 65536

HEADER = struct.Struct("<8sIIQIIQ")
"""magic, version, slot size, capacity in slots, pid, length of info, start ticks of the process.

Start ticks (field 22 of /proc/PID/stat) tell a process from a later one with the same pid."""
INFO_LENGTH = struct.Struct("<I")
INFO_LENGTH_OFFSET = 28

COLUMNS = 9
RECORD = struct.Struct("<QBBHI9qqQ")
"""sequence, kind, x, y, z, nine columns, time, sequence."""
PAIRS = struct.Struct("<QBBHI18IqQ")
"""As RECORD, with eighteen unsigned 32-bit numbers in place of the columns."""
TEXT = struct.Struct("<QBBHI72sqQ")
"""As RECORD, with 72 bytes of text in place of the columns."""
SLOT = np.dtype(
    [
        ("head", "<u8"),
        ("kind", "u1"),
        ("x", "u1"),
        ("y", "<u2"),
        ("z", "<u4"),
        ("columns", "<i8", (COLUMNS,)),
        ("time", "<i8"),
        ("tail", "<u8"),
    ]
)
SLOT_SIZE = SLOT.itemsize
assert RECORD.size == PAIRS.size == TEXT.size == SLOT_SIZE


class Kind(IntEnum):
    """What a record tells. `z` names whom: an edge (front end) or a sequence (engine), by a number
    that is unique within the process. Columns are listed in order."""

    # front end: one HTTP request or, without HTTP, one item is an `edge`
    ARRIVE = 1
    """x: Route; y: flags of the trace context (bit 0 sampled, bit 8 present);
    trace id (two halves), parent span id, wall clock."""
    ADMIT = 2
    """A sequence is handed to the engine. x: Flag; y: cell; key, prompt tokens, max tokens,
    index among the sequences of its prompt, wall-clock arrival when there is no HTTP, else 0,
    then the active server span if there is one: trace id (two halves), span id, flags (bit 0
    sampled, bit 8 present)."""
    FIRST = 3
    """The first chunk that carries a token is handed to the HTTP server."""
    SEQUENCE_END = 4
    """The front end is done with a sequence. x: Finish; key, output tokens, cached prompt tokens
    (-1: the prefill was never done)."""
    END = 5
    """x: Outcome; y: HTTP status (0: none); bucket, output tokens, arrival,
    1 if the response was streamed, cell."""
    BEAMS = 6
    """Beam search returned: a list of its sequences' lengths in tokens."""
    CONTEXT = 7
    """The ids that the request's span must have, since vLLM's own tracing was told them: trace id
    (two halves), span id."""
    TRACE_STATE = 8
    """Up to 72 bytes of the incoming tracestate in place of the columns. x: how many; y: which
    part."""

    # engine core: a `sequence` is one request of the engine
    JOIN = 16
    """x: Flag; y: cell; key, prompt tokens, waiting sequences and prompt tokens ahead."""
    CHUNK = 17
    """Part of a prefill, or of a recompute, is scheduled. x: Entry; tokens scheduled, tokens
    computed before, step, key, KV-cache blocks that it holds now, places in its block tables,
    blocks left to all, attempts to allocate that failed while it waited."""
    PREEMPT = 18
    """x: 1 if for want of blocks (0: the prefix cache was reset); computed tokens lost, output
    tokens so far, key, KV usage in millionths, then as of before: KV-cache blocks held, places in
    its block tables, blocks left."""
    TOKENS = 19
    """A list of pairs (sequence, tokens) of what came out beside the implied."""
    SKIP = 20
    """A list of decoding sequences that yielded nothing in the step that follows."""
    STEP = 21
    """The end of an engine step; each decoding sequence yielded one token unless TOKENS or SKIP
    before it said otherwise. x: BatchKind; y: Wait of those left waiting; z: step;
    schedule start, schedule end, update start, sequences, tokens scheduled, tokens out,
    waiting sequences, waiting prompt tokens, schedule start or end of the step before (later)."""
    LEAVE = 22
    """The engine is done with a sequence. Output tokens, key, then as of before: KV-cache blocks
    held, places in its block tables, blocks left, attempts that failed while it waited."""
    SNAPSHOT = 23
    """Begins (x=1) or ends (x=0) the list, written every second, of the sequences that run or were
    preempted: what a reader needs after a gap."""
    SNAPSHOT_ENTRY = 24
    """x: SequenceState; y: cell; key, prompt tokens, Flag."""
    MORE = 25
    """A list of pairs (cell, tokens), x numbers: what the decoding sequences of a cell together
    yielded in the step that follows, beyond one each. Those with Flag.CUT are in TOKENS instead."""

    KV_STARVED = 26
    """The first attempt that failed for want of KV-cache blocks since a sequence waits, when it was
    first in line. y: cell; key, blocks that were left."""

    # worker
    FORWARD = 32
    """Worker.execute_model returned; start, sequences, tokens."""
    SAMPLE = 33
    """Worker.sample_tokens returned; start."""
    GPU = 34
    """The GPU's own time for a batch; when Worker.execute_model began, forward, sampling (-1: there
    was none). Written some batches later."""

    # any process
    COLLECTION = 40
    """A long pause by Python's garbage collector. x: generation; start."""
    LAG = 41
    """The event loop came late to a timer. When that was due."""
    FROZEN = 42
    """No thread of the process ran. Since when, at the latest."""

    # any process, about processes
    EXIT = 43
    """x=0: a child of this process ended: its pid, and its exit code, or minus the number of the
    signal. x=1: this process itself comes to an end of its own will."""
    RAISED = 44
    """A method of vLLM's raised. The name of the exception's class in place of the columns, x bytes
    of it; y: which part; z: the probe's number."""
    BROKEN = 45
    """The front end learned that its engine is dead; the ends of its requests follow."""


class Route(IntEnum):
    """What sort of endpoint a request came by."""

    OTHER = 0
    CHAT = 1
    COMPLETION = 2
    RESPONSES = 3
    MESSAGES = 4
    POOLING = 5
    AUDIO = 6
    LIBRARY = 7
    """No HTTP: AsyncLLM or LLM called from Python."""


class Flag(IntEnum):
    """Bits about a sequence."""

    CUT = 1
    """Its end, and so its number of tokens, is decided by the front end: stop strings, beams."""
    POOLING = 2
    BEAM = 4
    HTTP = 8


class Finish(IntEnum):
    """How the front end saw a sequence end; the first five are vLLM's FinishReason."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4
    OTHER = 5


class Outcome(IntEnum):
    """How a request ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REJECTED = 4


class BatchKind(IntEnum):
    """What an engine step computed."""

    PREFILL = 0
    DECODE = 1
    MIXED = 2


class Entry(IntEnum):
    """How a sequence came to be scheduled."""

    CONTINUED = 0
    NEW = 1
    RESUMED = 2


class SequenceState(IntEnum):
    WAITING = 0
    PREFILL = 1
    DECODE = 2
    PREEMPTED = 3


class Wait(IntEnum):
    """Why admitted sequences were not running."""

    ENGINE_BUSY = 0
    """Handed over, but the engine is inside a step or has not scheduled since."""
    MAX_NUM_SEQS = 1
    TOKEN_BUDGET = 2
    KV_CACHE = 3
    GRAMMAR = 4
    REMOTE_KV = 5
    INPUT = 6
    ADAPTER = 7
    PAUSED = 8


def names(vocabulary: type[IntEnum]) -> tuple[str, ...]:
    """The label values of a vocabulary, in order."""
    return tuple(member.name.lower() for member in vocabulary)


REJECTION_CODES = ("400", "401", "404", "413", "422", "429", "500", "503", "other")
SOURCES = ("computed", "cached")
LABELS: dict[str, tuple[str, ...]] = {
    "context_bucket": BUCKET_NAMES,
    "context_bucket_or_unknown": (*BUCKET_NAMES, UNKNOWN),
    "outcome": names(Outcome),
    "batch_kind": names(BatchKind),
    "reason": names(Wait),
    "code": REJECTION_CODES,
    "source": SOURCES,
    "kind": ("draft", "accepted"),
    "power": ("0", "1", "2", "3", "4"),
    "state": ("waiting", "running"),
    "torch_memory": ("allocated", "reserved", "peak"),
    "torch_event": ("alloc_retry", "oom"),
    "step_le": (*(str(float(bound)) for bound in SLO.step_seconds), "+Inf"),
    "event": ("allocate", "free", "evict"),
}

MODEL_SLOTS = 22
"""Cell block 0 is the served model, 1 to 20 are adapters in order of first use, 21 is `other`."""
BUCKETS = len(BUCKET_NAMES)
PROBE_CELLS = 64

PER_MODEL: dict[str, tuple[str, ...]] = {
    "received": ("context_bucket_or_unknown",),
    "ended": ("context_bucket_or_unknown", "outcome"),
    "ended_ns": ("context_bucket_or_unknown", "outcome"),
    "rejections": ("code",),
    "prompt_tokens": ("context_bucket", "source"),
    "generated_tokens": ("context_bucket",),
    "preemptions": ("context_bucket",),
    "requests": ("state", "context_bucket"),
}
PER_PROCESS: dict[str, tuple[str, ...]] = {
    "waiting_tokens": (),
    "wait_ns": ("reason",),
    "batch_squares": ("batch_kind",),
    "log_moment": ("power",),
    "spec_tokens": ("kind",),
    "last_step_wall_ns": (),
    "edges_ended": (),
    "gc_pause": ("step_le",),
    "gc_pause_ns": (),
    "loop_lag": ("step_le",),
    "loop_lag_ns": (),
    "alive_wall_ns": (),
    "alive_ns": (),
    "torch_memory": ("torch_memory",),
    "torch_events": ("torch_event",),
    "torch_reads": (),
    "kv_block_events": ("event",),
    "kv_allocation_failures": (),
    "kv_pool_blocks": (),
    "kv_cache_bytes": (),
}
FLOAT_TOTALS = frozenset({"log_moment"})
"""These cells are doubles; all others are integers."""


def size(dimensions: tuple[str, ...]) -> int:
    """How many cells a total with these label dimensions takes."""
    cells = 1
    for dimension in dimensions:
        cells *= len(LABELS[dimension])
    return cells


def _layout(table: dict[str, tuple[str, ...]], start: int) -> tuple[dict[str, int], int]:
    offsets = {}
    for name, dimensions in table.items():
        offsets[name] = start
        start += size(dimensions)
    return offsets, start


MODEL_CELL, MODEL_BLOCK = _layout(PER_MODEL, 0)
PROCESS_CELL, _end = _layout(PER_PROCESS, MODEL_BLOCK * MODEL_SLOTS)
GUARD_CELL = _end
"""Cell GUARD_CELL + i counts the failures of probe i of the table of probes."""
CELLS = GUARD_CELL + PROBE_CELLS
assert TOTALS_OFFSET + 8 * CELLS <= SLOTS_OFFSET


def model_cell(name: str, model: int) -> int:
    """The first cell of a per-model total."""
    return model * MODEL_BLOCK + MODEL_CELL[name]
