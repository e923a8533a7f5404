"""The table of probes, and the one loop that applies and undoes it."""

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import wrapt

from llmobs import engine, frontend, kv_cache, pauses, process, worker
from llmobs.guard import GUARD, Observer, wrap, wrap_rare


@dataclass(frozen=True)
class Probe:
    """What is watched, and where it may be.

    `targets` are candidates as `module:Class.method`, newest vLLM first; the first that exists is
    wrapped. `parameters` are handed to the observers, bound by name. `role` says in which process
    a probe belongs: until it is attached there it shows as 0, an `optional` one only where this
    vLLM has no place for it.
    `transform` replaces the result (only an async generator needs it). `raised` is told of vLLM's
    own exceptions. `rare` is all that is called where vLLM loops over blocks: with the instance, if
    the call returned something true.
    """

    name: str
    role: str
    targets: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    before: Callable[..., Any] | None = None
    after: Observer | None = None
    transform: Callable[[Any], Any] | None = None
    rare: Callable[[Any], None] | None = None
    optional: bool = False
    raised: Callable[[str, Exception], None] | None = None


_OUTPUT = "vllm.v1.engine.output_processor:OutputProcessor"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"

PROBES = (
    Probe(
        "async_engine",
        "api_server",
        ("vllm.v1.engine.async_llm:AsyncLLM.__init__",),
        ("vllm_config",),
        before=frontend.starts,
        optional=True,
    ),
    Probe(
        "sync_engine",
        "api_server",
        ("vllm.v1.engine.llm_engine:LLMEngine.__init__",),
        ("vllm_config",),
        before=frontend.starts,
        optional=True,
    ),
    Probe(
        "http_edge",
        "api_server",
        ("uvicorn.config:Config.load",),
        after=frontend.wrap_app,
        optional=True,
    ),
    Probe(
        "process_inputs",
        "api_server",
        ("vllm.v1.engine.input_processor:InputProcessor.process_inputs",),
        after=frontend.processed,
    ),
    Probe(
        "admit",
        "api_server",
        (f"{_OUTPUT}.add_request",),
        ("request", "parent_req", "request_index"),
        after=frontend.admitted,
    ),
    Probe(
        "refuse",
        "api_server",
        ("vllm.v1.engine.async_llm:AsyncLLM.add_request",),
        transform=frontend.observe_admission,
        optional=True,
    ),
    Probe(
        "finish",
        "api_server",
        (f"{_OUTPUT}._update_stats_from_finished",),
        ("req_state", "finish_reason"),
        after=frontend.finished,
    ),
    Probe("abort", "api_server", (f"{_OUTPUT}.abort_requests",), after=frontend.aborted),
    Probe("engine_dead", "api_server", (f"{_OUTPUT}.propagate_error",), after=frontend.broken),
    Probe(
        "beam_search",
        "api_server",
        (
            "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search",
            "vllm.entrypoints.openai.engine.serving:OpenAIServing.beam_search",
            "vllm.entrypoints.openai.serving_engine:OpenAIServing.beam_search",
        ),
        transform=frontend.observe_beams,
        optional=True,
    ),
    Probe(
        "scheduler",
        "engine_core",
        (f"{_SCHEDULER}.__init__",),
        ("vllm_config",),
        before=engine.starts,
        after=engine.started,
    ),
    Probe("join", "engine_core", (f"{_SCHEDULER}.add_request",), ("request",), after=engine.joined),
    Probe(
        "schedule",
        "engine_core",
        (f"{_SCHEDULER}.schedule",),
        before=engine.schedule_starts,
        after=engine.scheduled,
        raised=process.raised,
    ),
    Probe(
        "update",
        "engine_core",
        (f"{_SCHEDULER}.update_from_output",),
        ("scheduler_output", "model_runner_output"),
        before=engine.update_starts,
        after=engine.updated,
        raised=process.raised,
    ),
    Probe(
        "preempt",
        "engine_core",
        (f"{_SCHEDULER}._preempt_request",),
        ("request",),
        before=engine.preemption_starts,
        after=engine.preempted,
    ),
    Probe(
        "leave",
        "engine_core",
        (f"{_SCHEDULER}._free_request",),
        ("request",),
        before=engine.end_starts,
        after=engine.left,
    ),
    Probe(
        "worker",
        "worker",
        (f"{_WORKER}.__init__",),
        ("vllm_config", "rank"),
        after=worker.starts,
    ),
    Probe(
        "forward",
        "worker",
        (f"{_WORKER}.execute_model",),
        ("scheduler_output",),
        before=worker.forward_starts,
        after=worker.forwarded,
        raised=process.raised,
    ),
    Probe(
        "sample",
        "worker",
        (f"{_WORKER}.sample_tokens",),
        before=worker.sampling_starts,
        after=worker.sampled,
        raised=process.raised,
    ),
    Probe(
        "kv_free",
        "engine_core",
        (f"{_POOL}.free_blocks",),
        before=kv_cache.returning,
        after=kv_cache.returned,
    ),
    Probe(
        "kv_unpin",
        "engine_core",
        # Up to 0.25 there is but one way back to the queue; what is seen twice counts once.
        (f"{_POOL}.unpin_blocks", f"{_POOL}.free_blocks"),
        before=kv_cache.returning,
        after=kv_cache.returned,
    ),
    Probe(
        "kv_evict",
        "engine_core",
        (f"{_POOL}._maybe_evict_cached_block",),
        rare=kv_cache.evicted,
    ),
    Probe(
        "kv_attempt",
        "engine_core",
        # What a step calls for each waiting request that it tries, and for no running one.
        (
            f"{_SCHEDULER}._handle_blocked_waiting_request",
            f"{_SCHEDULER}._select_waiting_queue_for_scheduling",
        ),
        after=engine.admission_tried,
    ),
    Probe(
        "trace_headers",
        "api_server",
        (
            "vllm.entrypoints.serve.engine.serving:BaseServing._get_trace_headers",
            "vllm.entrypoints.generate.base.serving:GenerateBaseServing._get_trace_headers",
            "vllm.entrypoints.openai.engine.serving:OpenAIServing._get_trace_headers",
            "vllm.entrypoints.openai.serving_engine:OpenAIServing._get_trace_headers",
        ),
        transform=frontend.observe_trace_headers,
        optional=True,
    ),
    Probe("device", "worker", (f"{_WORKER}.init_device",), after=worker.on_device),
    Probe("warm_up", "worker", (f"{_WORKER}.compile_or_warm_up_model",), after=worker.warmed_up),
)
ROLES = {probe.name: probe.role for probe in PROBES}
BESIDE = ("attach", "watch", "proxy", "gpu_clock", "pauses")
"""What the guard also covers: putting probes on, keeping an agent, OpenTelemetry's page, the GPU's
clock, the pauses of Python itself."""
NUMBERS = {name: number for number, name in enumerate((*(p.name for p in PROBES), *BESIDE))}

_applied: list[tuple[Any, str, Any, Any]] = []
"""Owner, attribute, what it was, what we put there: undone from the end."""
_ruled_out: dict[str, dict[str, str]] = {}
"""By probe: the targets that this vLLM does not have, and why."""
_hooked = False


def attach() -> None:
    """Watch vLLM from now on. Never imports it: each probe is applied when its module is imported.

    Safe to call twice (both doors may lead here)."""
    global _hooked
    state = process.current()
    if not state.settings.enabled:
        return
    state.probe_numbers = NUMBERS
    state.probes = {probe.name: 0 for probe in PROBES if not probe.optional} | state.probes
    if _hooked:
        for probe in PROBES:
            _apply_loaded(probe)
        return
    _hooked = True
    if "vllm" in sys.modules:
        _vllm_imported(sys.modules["vllm"])
    else:
        wrapt.register_post_import_hook(_vllm_imported, "vllm")


def _vllm_imported(module: Any) -> None:
    """vLLM is being imported here: this process belongs to a server."""
    try:
        process.mark_server()
        for probe in PROBES:
            for target in probe.targets:
                name = target.partition(":")[0]
                wrapt.register_post_import_hook(functools.partial(_apply, probe, target), name)
                if not _exists(name, getattr(module, "__path__", None)):
                    _rule_out(probe, target, "there is no such module")
    except Exception:
        GUARD.failed("attach")


def _exists(name: str, vllm: Iterable[str] | None) -> bool:
    """Whether a module is there to be imported; only of vLLM's own can that be told without
    importing anything."""
    top, *parents, _ = name.split(".")
    if top != "vllm" or vllm is None or name in sys.modules:
        return True
    folders = [str(Path(folder, *parents)) for folder in vllm]
    return PathFinder.find_spec(name, folders) is not None


def _rule_out(probe: Probe, target: str, why: str) -> None:
    """One candidate is not there; without any other one the probe is off."""
    reasons = _ruled_out.setdefault(probe.name, {})
    reasons[target] = why
    if len(reasons) == len(probe.targets):
        told = ", ".join(f"{target} ({reasons[target]})" for target in probe.targets)
        said = f"llmobs: probe {probe.name} is off, this vLLM has no {told}"
        process.current().miss(probe.name, said, at_once=probe.before is frontend.starts)


def _apply_loaded(probe: Probe) -> None:
    for target in probe.targets:
        module = sys.modules.get(target.partition(":")[0])
        if module is not None:
            _apply(probe, target, module)


def _apply(probe: Probe, target: str, module: Any) -> None:
    """Wrap one target, unless the probe is on already or the target is not there."""
    state = process.current()
    if not _hooked or state.probes.get(probe.name):
        return
    try:
        try:
            _put_on(probe, target, module)
        except (AttributeError, LookupError) as error:
            _rule_out(probe, target, str(error))
        else:
            state.probes[probe.name] = 1
            state.write_info()
    except Exception:
        state.probes.setdefault(probe.name, 0)
        GUARD.failed(probe.name)


def _put_on(probe: Probe, target: str, owner: Any) -> None:
    """Raises AttributeError or LookupError where the target is not as the table says."""
    *path, attribute = target.partition(":")[2].split(".")
    for name in path:
        owner = getattr(owner, name)
    if attribute not in vars(owner):
        raise LookupError(f"{'.'.join(path)} does not define {attribute}")
    original = vars(owner)[attribute]
    replacement = _wrapped(probe, original)
    setattr(owner, attribute, replacement)
    _applied.append((owner, attribute, original, replacement))


def _wrapped(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    if probe.transform is not None:
        return _transformed(probe.name, original, probe.transform)
    if probe.rare is not None:
        return wrap_rare(probe.name, original, probe.rare)
    return wrap(
        probe.name,
        original,
        probe.after or _nothing,
        probe.before,
        parameters=probe.parameters,
        raised=probe.raised,
    )


def _nothing(*_: Any) -> None:
    """For probes that only look before the call."""


def _transformed(
    name: str, original: Callable[..., Any], transform: Callable[[Any], Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            return transform(result)
        except Exception:
            GUARD.failed(name)
            return result

    return wrapper


def detach() -> None:
    """Undo every probe that is still ours."""
    global _hooked
    _hooked = False
    _ruled_out.clear()
    pauses.stop()
    while _applied:
        owner, attribute, original, replacement = _applied.pop()
        if owner.__dict__.get(attribute) is replacement:
            setattr(owner, attribute, original)
    state = process.current()
    state.probes = dict.fromkeys(state.probes, 0)
    state.missing = {}
    state.write_info()
