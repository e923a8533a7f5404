"""Probes of the engine core: queue, steps, tokens, preemptions.

Everything here is O(changes) per step: in steady decode a step is one record, whatever the batch.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Sized
from typing import Any

from llmobs import kv_cache, process, schema
from llmobs.frontend import is_cut, sequence_key
from llmobs.guard import GUARD
from llmobs.ring import Writer
from llmobs.schema import BatchKind, Entry, Flag, Kind, SequenceState, Wait
from llmobs.slo import SLO

now = time.monotonic_ns
# Bound once: an enumeration takes ten times as long to say its member (Python 3.11).
WAITING, PREFILL, DECODE, PREEMPTED = SequenceState
STEP, MORE = int(Kind.STEP), int(Kind.MORE)
ALL_DECODE = BatchKind.DECODE
SNAPSHOT_NS = 1_000_000_000
STEPS_KEPT = 256
_number = itertools.count(1).__next__
MOMENT = schema.PROCESS_CELL["log_moment"]
SQUARES = schema.PROCESS_CELL["batch_squares"]
WAIT_NS = schema.PROCESS_CELL["wait_ns"]
WAITING_TOKENS = schema.PROCESS_CELL["waiting_tokens"]
LAST_STEP = schema.PROCESS_CELL["last_step_wall_ns"]
DRAFT = schema.PROCESS_CELL["spec_tokens"]
GENERATED = tuple(
    schema.model_cell("generated_tokens", model) + bucket
    for model in range(schema.MODEL_SLOTS)
    for bucket in range(schema.BUCKETS)
)
"""Where the tokens of a cell (a model and a bucket) are counted."""

# vLLM's RequestStatus by name: its numbers move between releases.
BLOCKED = {
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": Wait.GRAMMAR,
    "WAITING_FOR_REMOTE_KVS": Wait.REMOTE_KV,
    "WAITING_FOR_STREAMING_REQ": Wait.INPUT,
}

NOTHING = kv_cache.Held()
ENDS_WITH_TOKEN = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"}


class Sequence:
    """One request of the engine, between its arrival there and its end."""

    __slots__ = (
        "cell",
        "entry",
        "flags",
        "gauge",
        "had",
        "key",
        "number",
        "prompt",
        "resumable",
        "starved",
        "state",
        "step",
        "yielded",
    )

    def __init__(self, number: int, key: int, prompt: int, model: int, flags: int) -> None:
        bucket = SLO.bucket_index(prompt)
        self.number = number
        self.key = key
        self.prompt = prompt
        self.flags = flags
        self.cell = model * schema.BUCKETS + bucket
        self.gauge = schema.model_cell("requests", model) + bucket
        self.resumable = False
        self.state = WAITING
        self.entry = Entry.NEW
        self.step = 0
        self.yielded: Sized = ()
        """vLLM's own list of its tokens, where a step may yield several."""
        self.had = 0
        """How many these were after the last step (kept of those that are cut)."""
        self.starved = 0


class Group:
    """The decoding sequences of one cell whose tokens count as they come out."""

    __slots__ = ("had", "lists")

    def __init__(self) -> None:
        self.lists: dict[str, Sized] = {}
        """What each has yielded so far."""
        self.had = 0
        """How many tokens these were in all after the last step."""


class Step:
    """A batch between its scheduling and its output."""

    __slots__ = ("identity", "kind", "number", "scheduled", "sequences", "started", "tokens")

    def __init__(self, identity: int, number: int, started: int, scheduled: int) -> None:
        self.identity = identity
        self.number = number
        self.started = started
        self.scheduled = scheduled
        self.sequences = 0
        self.tokens = 0
        self.kind = ALL_DECODE


class Engine:
    """Follows one scheduler. Each sequence is in exactly one of four states: it waits, it runs but
    owes its first token since it was (re)started, it decodes, or it was preempted."""

    def __init__(self, ring: Writer, several_tokens: bool) -> None:
        self.ring = ring
        self.front_end: bool | None = None
        """Whether an observed front end sends the requests; None until the first one came."""
        self.several_tokens = several_tokens
        self.sequences: dict[str, Sequence] = {}
        self.decoding: dict[str, Sequence] = {}
        self.prefilling: dict[str, Sequence] = {}
        self.preempted: dict[str, Sequence] = {}
        self.groups: dict[int, Group] = {}
        self.cut: dict[str, Sequence] = {}
        """The decoding ones that the front end may cut short."""
        self.resumable = 0
        self.waiting = 0
        # A few are on their way at most: more only if the probe that takes them out fails.
        self.steps: deque[Step] = deque(maxlen=STEPS_KEPT)
        self.swept = 0
        """How many failures of ours there had been when `sequences` was last looked through."""
        self.step_number = 0
        self.updating = False
        self.leaving: list[tuple[str, int, kv_cache.Held]] = []
        self.left_empty = False
        self.pool: kv_cache.Pool | None = None
        self.scheduling = False
        self.reason = Wait.ENGINE_BUSY
        self.reason_since = now()
        self.last_end = 0
        self.next_snapshot = 0

    # Waiting

    def _integrate_waiting(self, until: int) -> None:
        """Book the time that the waiting ones have spent since the last change of their number."""
        if self.waiting:
            self.ring.cells[WAIT_NS + self.reason] += self.waiting * (until - self.reason_since)
        self.reason_since = until

    def _count(self, sequence: Sequence, change: int) -> None:
        """Keep the gauges of waiting and running sequences."""
        cells = self.ring.cells
        if sequence.state in (WAITING, PREEMPTED):
            cells[sequence.gauge] += change
            cells[WAITING_TOKENS] += change * sequence.prompt
        else:
            cells[sequence.gauge + schema.BUCKETS] += change

    def _enter(self, request_id: str, sequence: Sequence, state: SequenceState) -> None:
        """Move a sequence to another state."""
        self._leave_state(request_id, sequence)
        sequence.state = state
        self._count(sequence, 1)
        if state is PREFILL:
            self.prefilling[request_id] = sequence
        elif state is PREEMPTED:
            self.preempted[request_id] = sequence
        elif state is DECODE:
            self.decoding[request_id] = sequence
            sequence.had = len(sequence.yielded)
            if sequence.flags & Flag.CUT:
                self.cut[request_id] = sequence
            else:
                group = self.groups.get(sequence.cell)
                if group is None:
                    group = self.groups[sequence.cell] = Group()
                group.lists[request_id] = sequence.yielded
                group.had += sequence.had

    def _leave_state(self, request_id: str, sequence: Sequence) -> None:
        self._count(sequence, -1)
        state = sequence.state
        if state is WAITING:
            self.waiting -= 1
        elif state is PREFILL:
            del self.prefilling[request_id]
        elif state is PREEMPTED:
            del self.preempted[request_id]
        else:
            del self.decoding[request_id]
            if sequence.flags & Flag.CUT:
                del self.cut[request_id]
            else:
                group = self.groups[sequence.cell]
                del group.lists[request_id]
                group.had -= len(sequence.yielded)

    def join(self, request: Any) -> None:
        request_id = request.request_id
        if request_id in self.sequences:  # one more chunk of a streamed input
            return
        time_now = now()
        self._integrate_waiting(time_now)
        params = request.sampling_params
        flags = 0
        if params is None:
            flags = Flag.POOLING
        elif is_cut(params) and self.front_end is not False:
            flags = Flag.CUT
        lora = request.lora_request
        model = process.current().model(lora.lora_name if lora is not None else None)
        prompt = request.num_prompt_tokens
        sequence = Sequence(_number() & 0xFFFFFFFF, sequence_key(request_id), prompt, model, flags)
        if self.several_tokens:
            tokens = getattr(request, "_output_token_ids", None)  # the list within the next one
            sequence.yielded = request.output_token_ids if tokens is None else tokens
            # It is emptied if one more chunk of the input comes, maybe after the sequence stopped.
            sequence.resumable = getattr(request, "resumable", False)
            self.resumable += sequence.resumable
        cells = self.ring.cells
        self.ring.put(
            Kind.JOIN,
            time_now,
            sequence.number,
            flags,
            sequence.cell,
            sequence.key,
            prompt,
            self.waiting + len(self.preempted),
            cells[WAITING_TOKENS],
        )
        self.sequences[request_id] = sequence
        if not self.waiting:
            self.reason = Wait.ENGINE_BUSY
        self.waiting += 1
        self._count(sequence, 1)

    def sweep(self, known: dict[str, Any]) -> None:
        """One of our probes failed since the last look: forget what the scheduler has forgotten, or
        it would be counted for ever."""
        self.swept = GUARD.total
        time_now = now()
        for request_id in self.sequences.keys() - known.keys():
            self._remove(request_id, time_now, 0, NOTHING)
        self.leaving.clear()
        self.recount()

    # Steps

    def scheduled(self, scheduler: Any, output: Any, started: int) -> None:
        time_now = now()
        self.scheduling = False
        pool = self.pool
        if pool is not None:
            if pool.watched is not None:
                pool.unwatch()
            if pool.queue.num_free_blocks != pool.free:
                pool.look()
        total = output.total_num_scheduled_tokens
        self.step_number += 1
        step = Step(id(output), self.step_number, started, time_now)
        self.steps.append(step)
        if self.waiting:
            self._integrate_waiting(started)
        if total:
            step.tokens = total
            step.sequences = len(output.num_scheduled_tokens)
            for entry in output.scheduled_new_reqs:
                sequence = self.sequences.get(entry.req_id)
                if sequence is not None and sequence.state is WAITING:
                    self._enter(entry.req_id, sequence, PREFILL)
            if self.preempted:
                for request_id in [r for r in self.preempted if r in output.num_scheduled_tokens]:
                    sequence = self.preempted[request_id]
                    sequence.entry = Entry.RESUMED
                    self._enter(request_id, sequence, PREFILL)
            if self.prefilling:
                step.kind = self._chunks(scheduler, output.num_scheduled_tokens, step)
        if self.waiting:
            self.reason = self._why_waiting(scheduler, total)

    def _chunks(self, scheduler: Any, scheduled: dict[str, int], step: Step) -> BatchKind:
        """Record the parts of prefills in this step; tells what kind of batch it is."""
        prefills = 0
        requests = scheduler.requests
        for request_id, sequence in self.prefilling.items():
            tokens = scheduled.get(request_id)
            if tokens is None:
                continue
            request = requests[request_id]
            before = request.num_computed_tokens - tokens
            entry, sequence.entry = sequence.entry, Entry.CONTINUED
            if before >= request.num_tokens and entry is Entry.CONTINUED:
                continue  # async scheduling: decoding already, its first token is on the way
            prefills += 1
            held = NOTHING if self.pool is None else self.pool.held(request)
            starved, sequence.starved = sequence.starved, 0
            self.ring.put(
                Kind.CHUNK,
                step.started,
                sequence.number,
                entry,
                sequence.cell,
                tokens,
                before,
                step.number,
                sequence.key,
                *held,
                starved,
            )
        if not prefills:
            return BatchKind.DECODE
        return BatchKind.PREFILL if prefills == step.sequences else BatchKind.MIXED

    def _why_waiting(self, scheduler: Any, scheduled_tokens: int) -> Wait:
        """What keeps the waiting ones from running, for most of them."""
        pause = getattr(scheduler, "_pause_state", None)
        if pause is not None and pause.name != "UNPAUSED":
            return Wait.PAUSED
        deferred: Any = getattr(scheduler, "deferred_waiting", None)
        if deferred is None:  # until 0.30 vLLM kept them in a queue of their own
            deferred = getattr(scheduler, "skipped_waiting", ())
        if len(deferred) * 2 > self.waiting:
            status = next(iter(deferred)).status.name
            return BLOCKED.get(status, Wait.ADAPTER)
        if len(scheduler.running) >= scheduler.max_num_running_reqs:
            return Wait.MAX_NUM_SEQS
        if scheduled_tokens >= scheduler.max_num_scheduled_tokens:
            return Wait.TOKEN_BUDGET
        return Wait.KV_CACHE

    def updated(
        self, scheduler_output: Any, runner_output: Any, result: dict[int, Any], started: int
    ) -> None:
        self.updating = False
        identity = id(scheduler_output)
        while self.steps and self.steps[0].identity != identity:
            self.steps.popleft()  # its execution failed
        time_now = 0
        if self.steps:
            step = self.steps.popleft()
            if step.tokens:
                self._emit(step, scheduler_output, runner_output, result, started)
                time_now = self.last_end  # they left with this step, not after it
        if self.leaving:
            time_now = time_now or now()
            for request_id, tokens, held in self.leaving:
                self._remove(request_id, time_now, tokens, held)
            self.leaving.clear()
            self.left_empty = False

    def _emit(
        self,
        step: Step,
        scheduler_output: Any,
        runner_output: Any,
        result: dict[int, Any],
        started: int,
    ) -> None:
        """Record what came out of a step."""
        ring, cells = self.ring, self.ring.cells
        time_now = now()
        count = 0
        for outputs in result.values():
            count += len(outputs.outputs)
        first: list[str] = []
        accepted: int | None = None
        if (
            count == len(self.decoding)
            and not self.prefilling
            and not self.preempted
            and not self.left_empty
            and not self.resumable
        ):
            # Whatever can yield is decoding, and each has at most one output: all yielded.
            if self.several_tokens:
                tokens = self._several(time_now)
                if step.sequences == count and not self.leaving:
                    # All that was sampled is kept: none stops in this step, none did before it.
                    accepted = tokens - count
            else:
                tokens = count
                for cell, group in self.groups.items():
                    cells[GENERATED[cell]] += len(group.lists)
        else:
            tokens, first = self._uneven(result, time_now, step.number)
        if scheduler_output.scheduled_spec_decode_tokens:
            self._speculated(scheduler_output, runner_output, result, accepted)
        duration = time_now - max(step.started, self.last_end)
        waiting_tokens = cells[WAITING_TOKENS]
        ring.put(
            STEP,
            time_now,
            step.number & 0xFFFFFFFF,
            step.kind,
            self.reason,
            step.started,
            step.scheduled,
            started,
            step.sequences,
            step.tokens,
            tokens,
            self.waiting + len(self.preempted),
            waiting_tokens,
            max(step.started, self.last_end),
        )
        cells[SQUARES + step.kind] += step.sequences * step.sequences
        logarithm = math.log(max(duration, 1000) / 1000)
        square = logarithm * logarithm
        floats = ring.floats  # written out, for a loop takes twice as long
        floats[MOMENT] += 1.0
        floats[MOMENT + 1] += logarithm
        floats[MOMENT + 2] += square
        floats[MOMENT + 3] += square * logarithm
        floats[MOMENT + 4] += square * square
        cells[LAST_STEP] = time.time_ns()
        self.last_end = time_now
        for request_id in first:
            sequence = self.sequences.get(request_id)
            if sequence is not None and sequence.state is PREFILL:
                self._enter(request_id, sequence, DECODE)
        if time_now >= self.next_snapshot:
            self.next_snapshot = time_now + SNAPSHOT_NS
            self._snapshot(time_now)

    def _several(self, time_now: int) -> int:
        """Record the tokens of a step in which each decoding sequence yielded one or more, their
        sum by cell: what all of a cell have yielded by now, less what that was before. Who yielded
        how many is asked only of those that the front end cuts. Returns the tokens that came out.
        """
        cells = self.ring.cells
        total = 0
        more: list[int] = []
        for cell, group in self.groups.items():
            lists = group.lists
            if lists:
                have = sum(map(len, lists.values()))
                tokens = have - group.had
                group.had = have
                total += tokens
                cells[GENERATED[cell]] += tokens
                more.append(cell | tokens - len(lists) << 32)
        if self.cut:
            pairs: list[int] = []
            for sequence in self.cut.values():
                have = len(sequence.yielded)
                tokens = have - sequence.had
                sequence.had = have
                total += tokens
                if tokens != 1:
                    pairs += (sequence.number, tokens)
            self.ring.put_list(Kind.TOKENS, time_now, pairs)
        self._put_more(more, time_now)
        return total

    def _put_more(self, more: list[int], time_now: int) -> None:
        """Record what came beyond one token each: a cell, and above its 32 bits the number."""
        for start in range(0, len(more), schema.COLUMNS):
            part = more[start : start + schema.COLUMNS]
            self.ring.put(MORE, time_now, 0, 2 * len(part), 0, *part)

    def recount(self) -> None:
        """Take what the sequences have by now for what they had after the last step."""
        for group in self.groups.values():
            group.had = sum(map(len, group.lists.values()))
        for sequence in self.cut.values():
            sequence.had = len(sequence.yielded)

    def _uneven(
        self, result: dict[int, Any], time_now: int, step_number: int
    ) -> tuple[int, list[str]]:
        """Record the tokens of a step in which not simply each decoding sequence yielded one.

        Returns the tokens that came out, and the sequences that yielded their first since they were
        (re)started."""
        ring, cells = self.ring, self.ring.cells
        pairs: list[int] = []
        more: dict[int, int] = {}
        first: list[str] = []
        total = yielded = 0
        for outputs in result.values():
            for output in outputs.outputs:
                request_id = output.request_id
                sequence = self.sequences.get(request_id)
                if sequence is None:
                    continue
                count = len(output.new_token_ids)
                total += count
                if sequence.state is DECODE:
                    if count:
                        yielded += 1
                        sequence.step = step_number
                    if count < 2:
                        continue
                    if not sequence.flags & Flag.CUT:
                        more[sequence.cell] = more.get(sequence.cell, 0) + count - 1
                        continue
                elif sequence.state is PREFILL and count:
                    first.append(request_id)
                if count:
                    pairs += (sequence.number, count)
                    if not sequence.flags & Flag.CUT:
                        cells[GENERATED[sequence.cell]] += count
        skipped = []
        if yielded != len(self.decoding):
            skipped = [s for s in self.decoding.values() if s.step != step_number]
        for cell, group in self.groups.items():
            cells[GENERATED[cell]] += len(group.lists) + more.get(cell, 0)
        for sequence in skipped:
            if not sequence.flags & Flag.CUT:
                cells[GENERATED[sequence.cell]] -= 1
        self._put_more([cell | tokens << 32 for cell, tokens in more.items()], time_now)
        if pairs:
            ring.put_list(Kind.TOKENS, time_now, pairs)
        if skipped:
            ring.put_list(Kind.SKIP, time_now, [sequence.number for sequence in skipped])
        if self.several_tokens:
            self.recount()
        return total, first

    def _speculated(
        self,
        scheduler_output: Any,
        runner_output: Any,
        result: dict[int, Any],
        accepted: int | None,
    ) -> None:
        """Count drafts and acceptances: vLLM's own count where it keeps one, else as it counts (a
        draft accepted beyond the end of a sequence is one, too): `accepted` if that is known, else
        one by one."""
        cells = self.ring.cells
        for outputs in result.values():
            stats = outputs.scheduler_stats
            stats = stats.spec_decoding_stats if stats is not None else None
            if stats is not None:
                cells[DRAFT] += stats.num_draft_tokens
                cells[DRAFT + 1] += stats.num_accepted_tokens
                return
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if accepted is not None:
            cells[DRAFT] += sum(map(len, drafts.values()))
            cells[DRAFT + 1] += accepted
            return
        sampled = dict(zip(runner_output.req_ids, runner_output.sampled_token_ids, strict=True))
        for outputs in result.values():
            for output in outputs.outputs:
                draft = drafts.get(output.request_id)
                if draft and output.new_token_ids:
                    cells[DRAFT] += len(draft)
                    cells[DRAFT + 1] += len(sampled[output.request_id]) - 1

    def _snapshot(self, time_now: int) -> None:
        put = self.ring.put
        put(Kind.SNAPSHOT, time_now, self.step_number & 0xFFFFFFFF, 1)
        for group in (self.decoding, self.prefilling, self.preempted):
            for sequence in group.values():
                put(
                    Kind.SNAPSHOT_ENTRY,
                    time_now,
                    sequence.number,
                    sequence.state,
                    sequence.cell,
                    sequence.key,
                    sequence.prompt,
                    sequence.flags,
                )
        put(Kind.SNAPSHOT, time_now, self.step_number & 0xFFFFFFFF)

    # Changes outside of steps

    def starve(self, request: Any) -> None:
        """There were no blocks for the one that is first in line: told once for each wait."""
        sequence = self.sequences.get(request.request_id)
        if sequence is None:
            return
        sequence.starved += 1
        if sequence.starved == 1 and self.pool is not None:
            free = self.pool.queue.num_free_blocks
            self.ring.put(
                Kind.KV_STARVED, now(), sequence.number, 0, sequence.cell, sequence.key, free
            )

    def preempt(self, request: Any, lost: int, usage: int, held: kv_cache.Held = NOTHING) -> None:
        if self.scheduling and self.pool is not None:
            self.ring.cells[kv_cache.FAILURES] += 1  # each is for one attempt that failed
        request_id = request.request_id
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return
        self._enter(request_id, sequence, PREEMPTED)
        model = sequence.cell // schema.BUCKETS
        bucket = sequence.cell % schema.BUCKETS
        self.ring.cells[schema.model_cell("preemptions", model) + bucket] += 1
        tokens = request.num_output_tokens
        self.ring.put(
            Kind.PREEMPT,
            now(),
            sequence.number,
            self.scheduling,
            0,
            lost,
            tokens,
            sequence.key,
            usage,
            *held,
        )

    def leave(self, request: Any, held: kv_cache.Held = NOTHING) -> None:
        sequence = self.sequences.get(request.request_id)
        if sequence is None:
            return
        tokens = request.num_output_tokens
        if self.updating:
            # Its last tokens come with the step's record, which is written before its end.
            self.leaving.append((request.request_id, tokens, held))
            self.left_empty |= request.status.name not in ENDS_WITH_TOKEN
        else:
            self._remove(request.request_id, now(), tokens, held)

    def _remove(self, request_id: str, time_now: int, tokens: int, held: kv_cache.Held) -> None:
        self._integrate_waiting(time_now)
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            self._leave_state(request_id, sequence)
            if sequence.resumable:
                self.resumable -= 1
                self.recount()
            self.ring.put(
                Kind.LEAVE,
                time_now,
                sequence.number,
                0,
                0,
                tokens,
                sequence.key,
                *held,
                sequence.starved,
            )


# What the table of probes calls. One engine core has one scheduler; a process that builds several
# engines one after another (a script with LLM) follows the newest.

ENGINE: Engine | None = None
FOLLOWED = {"join", "schedule", "update", "leave"}
"""Where a vLLM has no place for one of these, what is kept of sequences and steps only grows."""


def starts(scheduler: Any, vllm_config: Any) -> None:
    """Before Scheduler.__init__: this process is an engine core."""
    global ENGINE
    state = process.current()
    model = vllm_config.model_config
    engine = getattr(vllm_config.parallel_config, "data_parallel_index", None)
    if engine is None:
        engine = vllm_config.parallel_config.data_parallel_rank
    state.open("engine_core", str(model.served_model_name), engine=engine)
    several = vllm_config.speculative_config is not None or getattr(model, "is_diffusion", False)
    ENGINE = None
    kv_cache.forget(state.ring)
    if _rust(vllm_config.parallel_config):
        state.lacks("foreign_frontend", "front_end", "http_edge")
    if vllm_config.parallel_config.distributed_executor_backend == "ray" and not state.sees(
        "worker"
    ):
        state.lacks("ray", "worker", "gpu_clock")  # they were made before the scheduler
    if state.ring is not None:
        for model_number in range(schema.MODEL_SLOTS):  # what an engine before this one left behind
            first = schema.model_cell("requests", model_number)
            for cell in range(first, first + 2 * schema.BUCKETS):
                state.ring.cells[cell] = 0
        state.ring.cells[WAITING_TOKENS] = 0
        if not FOLLOWED & state.missing.keys():
            ENGINE = Engine(state.ring, several)


def started(token: Any, result: Any, scheduler: Any, vllm_config: Any) -> None:
    """After Scheduler.__init__."""
    state = process.current()
    if ENGINE is not None:
        kv_cache.found(ENGINE.ring, scheduler)
        ENGINE.pool = kv_cache.POOL
    elif state.ring is not None:
        state.lacks("no_kv_pool", "kv_cache")  # nobody would see what fails


def _rust(parallel_config: Any) -> bool:
    """Whether vLLM's Rust front end is used: asked for, and this is the configuration of the
    launcher, which alone takes notice of that variable."""
    if getattr(parallel_config, "_api_process_rank", 0) != -1:
        return False
    from vllm import envs

    return bool(getattr(envs, "VLLM_USE_RUST_FRONTEND", False))


def joined(token: Any, result: Any, scheduler: Any, request: Any) -> None:
    if ENGINE is None:
        return
    if GUARD.total != ENGINE.swept:
        ENGINE.sweep(scheduler.requests)
    if ENGINE.front_end is None:
        state = process.current()
        ENGINE.front_end = state.sees("api_server")  # its ring was there before it sent anything
        if not ENGINE.front_end:
            state.lacks("foreign_frontend", "front_end", "http_edge")
    ENGINE.join(request)


def schedule_starts(scheduler: Any) -> int:
    if ENGINE is not None:
        ENGINE.scheduling = True
    return now()


def admission_tried(token: Any, result: Any, scheduler: Any) -> None:
    """A step looks at the first one in line: its running ones are scheduled by now."""
    if ENGINE is not None and ENGINE.scheduling and ENGINE.pool is not None:
        ENGINE.pool.watch(scheduler.kv_cache_manager, ENGINE.starve)


def scheduled(token: int, output: Any, scheduler: Any) -> None:
    if ENGINE is not None:
        ENGINE.scheduled(scheduler, output, token)


def update_starts(scheduler: Any, output: Any, runner_output: Any) -> int:
    if ENGINE is not None:
        ENGINE.updating = True
    return now()


def updated(token: int, result: Any, scheduler: Any, output: Any, runner_output: Any) -> None:
    if ENGINE is not None:
        ENGINE.updated(output, runner_output, result, token)


def preemption_starts(scheduler: Any, request: Any) -> tuple[int, int, kv_cache.Held]:
    # Read before: the preemption itself frees the blocks and forgets what was computed.
    usage = int(scheduler.kv_cache_manager.usage * 1_000_000)
    return int(request.num_computed_tokens), usage, _held(request)


def preempted(
    token: tuple[int, int, kv_cache.Held], result: Any, scheduler: Any, request: Any
) -> None:
    if ENGINE is not None:
        ENGINE.preempt(request, *token)


def end_starts(scheduler: Any, request: Any) -> kv_cache.Held:
    return _held(request)  # the end itself frees the blocks


def left(token: kv_cache.Held, result: Any, scheduler: Any, request: Any) -> None:
    if ENGINE is not None:
        ENGINE.leave(request, token)


def _held(request: Any) -> kv_cache.Held:
    if ENGINE is None or ENGINE.pool is None:
        return NOTHING
    return ENGINE.pool.held(request)
