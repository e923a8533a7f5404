"""The table of probes, and the one loop that applies and undoes it."""

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import wrapt

from llmobs import engine, frontend, process, worker
from llmobs.guard import GUARD, Observer, wrap

log = logging.getLogger("llmobs")


@dataclass(frozen=True)
class Probe:
    """What is watched, and where it may be.

    `targets` are candidates as `module:Class.method`, newest vLLM first; the first that exists is
    wrapped. `parameters` are handed to the observers, bound by name. `role` says in which process
    a missing probe is missed; an `optional` one only where its module was imported at all.
    `transform` replaces the result (only an async generator needs it).
    """

    name: str
    role: str
    targets: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    before: Callable[..., Any] | None = None
    after: Observer | None = None
    transform: Callable[[Any], Any] | None = None
    optional: bool = False


_OUTPUT = "vllm.v1.engine.output_processor:OutputProcessor"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
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
    ),
    Probe("join", "engine_core", (f"{_SCHEDULER}.add_request",), ("request",), after=engine.joined),
    Probe(
        "schedule",
        "engine_core",
        (f"{_SCHEDULER}.schedule",),
        before=engine.schedule_starts,
        after=engine.scheduled,
    ),
    Probe(
        "update",
        "engine_core",
        (f"{_SCHEDULER}.update_from_output",),
        ("scheduler_output", "model_runner_output"),
        before=engine.update_starts,
        after=engine.updated,
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
        "leave", "engine_core", (f"{_SCHEDULER}._free_request",), ("request",), after=engine.left
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
        before=worker.call_starts,
        after=worker.forwarded,
    ),
    Probe(
        "sample",
        "worker",
        (f"{_WORKER}.sample_tokens",),
        before=worker.call_starts,
        after=worker.sampled,
    ),
    Probe(
        "trace_headers",
        "api_server",
        (
            "vllm.entrypoints.serve.engine.serving:BaseServing._get_trace_headers",
            "vllm.entrypoints.openai.engine.serving:OpenAIServing._get_trace_headers",
            "vllm.entrypoints.openai.serving_engine:OpenAIServing._get_trace_headers",
        ),
        transform=frontend.observe_trace_headers,
        optional=True,
    ),
)
ROLES = {probe.name: probe.role for probe in PROBES}
BESIDE = ("attach", "watch", "proxy")
"""What the guard also covers: putting probes on, keeping an agent, OpenTelemetry's page."""
NUMBERS = {name: number for number, name in enumerate((*(p.name for p in PROBES), *BESIDE))}

_applied: list[tuple[Any, str, Any, Any]] = []
"""Owner, attribute, what it was, what we put there: undone from the end."""
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
    except Exception:
        GUARD.failed("attach")


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
        *path, attribute = target.partition(":")[2].split(".")
        owner = module
        for name in path:
            owner = getattr(owner, name)
        original = owner.__dict__[attribute]
        replacement = _wrapped(probe, original)
        setattr(owner, attribute, replacement)
        _applied.append((owner, attribute, original, replacement))
        state.probes[probe.name] = 1
        state.write_info()
    except (AttributeError, LookupError) as error:
        state.probes[probe.name] = 0
        if len(probe.targets) == 1:
            log.warning(
                "llmobs: probe %s is off, this vLLM has no %s as llmobs knows it (%s)",
                *(probe.name, target, error),
            )
    except Exception:
        GUARD.failed(probe.name)


def _wrapped(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    if probe.transform is not None:
        return _transformed(probe.name, original, probe.transform)
    return wrap(
        probe.name, original, probe.after or _nothing, probe.before, parameters=probe.parameters
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
    while _applied:
        owner, attribute, original, replacement = _applied.pop()
        if owner.__dict__.get(attribute) is replacement:
            setattr(owner, attribute, original)
    state = process.current()
    state.probes = dict.fromkeys(state.probes, 0)
    state.write_info()
