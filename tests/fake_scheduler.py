"""A scheduler of plain Python objects that behaves as vLLM's does towards an observer.

It follows vllm/v1/core/sched/scheduler.py and async_scheduler.py of 0.32 in what is counted and
when (`num_computed_tokens` advanced at scheduling, output placeholders, stale output of preempted
requests still delivered, rejected drafts rolled back); what the real one decides by itself (who is
preempted, how much of a prompt fits, what the model samples) comes from the test.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from llmobs.engine import Engine


@dataclass(eq=False)
class Request:
    """The attributes of vLLM's Request that an observer may read, and some of the scheduler's."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    sampling_params: Any
    lora_request: Any = None
    status: Any = field(default_factory=lambda: SimpleNamespace(name="WAITING"))
    num_computed_tokens: int = 0
    _output_token_ids: list[int] = field(default_factory=list)
    placeholders: int = 0
    in_flight: int = 0
    stale: int = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self._output_token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def finished(self) -> bool:
        return self.status.name.startswith("FINISHED")


def request(
    name: str, prompt: int, max_tokens: int, kind: str = "plain", adapter: str | None = None
) -> Request:
    """`kind`: plain, cut (its end is decided by the front end) or pooling."""
    params: Any = SimpleNamespace(stop=["END"] if kind == "cut" else [], max_tokens=max_tokens)
    lora = SimpleNamespace(lora_name=adapter) if adapter is not None else None
    return Request(name, prompt, max_tokens, None if kind == "pooling" else params, lora)


class Scheduler:
    """Drives an Engine as the table of probes does: the host's call, then ours."""

    def __init__(
        self, engine: Engine, clock: Callable[[], int], ahead: bool = False, drafts: int = 0
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.ahead = ahead
        self.drafts = drafts
        self.drafted = self.accepted = 0
        self.order: Callable[[str], Any] = hash
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.max_num_running_reqs = 6
        self.max_num_scheduled_tokens = 10_000

    def add(self, new: Request) -> None:
        self.requests[new.request_id] = new
        self.waiting.append(new)
        self.engine.join(new)

    def abort(self, name: str) -> None:
        """The client left."""
        self._finish(self.requests[name], "FINISHED_ABORTED")

    def _finish(self, gone: Request, status: str) -> None:
        gone.status.name = status
        self.running = [r for r in self.running if r is not gone]
        self.waiting = [r for r in self.waiting if r is not gone]
        del self.requests[gone.request_id]
        self.engine.leave(gone)

    def preempt(self) -> tuple[Request, int]:
        """Take the blocks of the last one that runs, and tell what it loses. Part of `schedule`."""
        victim = self.running.pop()
        before = int(victim.num_computed_tokens)
        victim.status.name = "PREEMPTED"
        victim.num_computed_tokens = victim.placeholders = 0
        victim.stale = victim.in_flight
        self.waiting.insert(0, victim)
        self.engine.preempt(victim, before, 500_000)
        return victim, before

    def schedule(
        self,
        started: int,
        victims: int,
        budget: int,
        chunk: int,
        cached: Iterator[int],
        tick: Callable[[], None],
    ) -> Any:
        """`victims`: so many are preempted. `chunk`: at most so much of a prompt at once."""
        scheduled: dict[str, int] = {}
        spec: dict[str, list[int]] = {}
        fresh = []
        preempted = [self.preempt() for _ in range(min(victims, len(self.running)))]
        for running in self.running:
            if (
                running.placeholders > 0
                and running.num_computed_tokens + 2 - running.placeholders
                >= running.num_prompt_tokens + running.max_tokens
            ):
                continue
            owed = running.num_tokens + running.placeholders - running.num_computed_tokens
            drafts = 0
            if self.drafts and owed == 1 and (running.num_output_tokens or running.placeholders):
                drafts = self.drafts
            tokens = min(owed, chunk, budget)
            if tokens <= 0 or budget < tokens + drafts:
                continue
            if drafts:
                spec[running.request_id] = [-1] * drafts
            scheduled[running.request_id] = tokens + drafts
            budget -= tokens + drafts
        while (
            not preempted
            and self.waiting
            and budget > 0
            and len(self.running) < self.max_num_running_reqs
        ):
            new = self.waiting.pop(0)
            if new.status.name == "WAITING":
                fresh.append(SimpleNamespace(req_id=new.request_id))
            new.status.name = "RUNNING"
            new.num_computed_tokens = min(next(cached), new.num_tokens - 1)
            tokens = min(new.num_tokens - new.num_computed_tokens, chunk, budget)
            scheduled[new.request_id] = tokens
            budget -= tokens
            self.running.append(new)
        final = set()
        before = {}
        for name, tokens in scheduled.items():
            known = self.requests[name]
            before[name] = known.num_computed_tokens
            known.num_computed_tokens += tokens
            known.in_flight += tokens
            if known.num_computed_tokens >= known.num_tokens + known.placeholders:
                final.add(name)
                if self.ahead:
                    known.placeholders += 1 + len(spec.get(name, ()))
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_new_reqs=fresh,
            scheduled_spec_decode_tokens=spec,
            # The test's own knowledge:
            started=started,
            final=final,
            before=before,
            preempted=preempted,
        )
        tick()
        output.scheduled = self.clock()
        self.engine.scheduled(self, output, started)
        return output

    def update(
        self,
        output: Any,
        sampled: Callable[[Request, int], int],
        error: Callable[[Request], bool],
        tick: Callable[[], None],
    ) -> list[tuple[Request, int]]:
        """`sampled` says how many tokens a request that may yield some did yield (0: none, and what
        was computed is lost). Returns what came out."""
        self.engine.updating = True
        started = self.clock()
        came_out: list[tuple[Request, int]] = []
        outputs = []
        sampled_ids: dict[str, list[int]] = {key: [] for key in output.num_scheduled_tokens}
        for name, tokens in output.num_scheduled_tokens.items():
            known = self.requests.get(name)
            if known is None:
                sampled_ids[name] = [7]  # computed all the same
                continue
            known.in_flight -= tokens
            stale = known.stale > 0
            if stale:
                known.stale -= tokens
            if name not in output.final:
                continue
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            if known.sampling_params is None:
                self._finish(known, "FINISHED_STOPPED")
                came_out.append((known, 0))
                outputs.append(SimpleNamespace(request_id=name, new_token_ids=[]))
                continue
            count = sampled(known, 1 + drafts)
            sampled_ids[name] = [7] * count  # of one that stops, more than it keeps
            if drafts and count:
                self.drafted += drafts
                self.accepted += count - 1
            rolled_back = (1 + drafts - count) if not stale else 0
            known.num_computed_tokens -= rolled_back
            if self.ahead and not stale:
                known.placeholders -= 1 + drafts
            count = min(count, known.max_tokens - known.num_output_tokens)
            if not count:
                continue
            known._output_token_ids += [7] * count
            if known.num_output_tokens >= known.max_tokens:
                self._finish(known, "FINISHED_LENGTH_CAPPED")
            came_out.append((known, count))
            outputs.append(SimpleNamespace(request_id=name, new_token_ids=[7] * count))
        for known in list(self.requests.values()):
            if error(known):
                self._finish(known, "FINISHED_ERROR")
                outputs.append(SimpleNamespace(request_id=known.request_id, new_token_ids=[]))
        # One front end has the even ones, another the odd ones.
        result = {
            client: SimpleNamespace(outputs=part, scheduler_stats=None)
            for client in (0, 1)
            if (part := outputs[client::2])
        }
        tick()
        output.update = started
        # The runner's order is its own; requests that ended meanwhile are still in it.
        names = sorted(sampled_ids, key=self.order)
        runner = SimpleNamespace(req_ids=names, sampled_token_ids=[sampled_ids[n] for n in names])
        self.engine.updated(output, runner, result, started)
        return came_out
