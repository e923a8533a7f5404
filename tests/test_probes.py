"""The table of probes on modules that only look like vLLM's."""

import importlib
import os
import sys
from types import ModuleType
from typing import Any

import pytest

from llmobs import frontend, plugin, probes, process
from llmobs.guard import GUARD
from llmobs.probes import PROBES, attach, detach

SCHEDULER = "vllm.v1.core.sched.scheduler"
BEAMS = (
    "vllm.entrypoints.generate.beam_search.online",
    "vllm.entrypoints.openai.engine.serving",
)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A vLLM that has been imported already: its modules by name."""
    made: dict[str, Any] = {}

    def module(name: str, **content: Any) -> None:
        made[name] = ModuleType(name)
        vars(made[name]).update(content)
        monkeypatch.setitem(sys.modules, name, made[name])

    class Scheduler:
        def __init__(self, vllm_config: Any) -> None: ...

        def add_request(self, request: Any) -> str:
            return f"added {request}"

        def schedule(self, throttle_prefills: bool = False) -> str:
            return "scheduled"

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
            return "updated"

        def _preempt_request(self, victim: Any, timestamp: float) -> None: ...

    class OpenAIServing:
        def beam_search(self, *_: Any) -> str:
            return "beams"

    module("vllm", __version__="0.32.0")
    module(SCHEDULER, Scheduler=Scheduler)
    module(BEAMS[0])
    module(BEAMS[1], OpenAIServing=OpenAIServing)
    return made


def attached() -> dict[str, int]:
    return process.current().probes


def test_wraps_what_is_there(modules: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    scheduler = modules[SCHEDULER].Scheduler
    before = dict(vars(scheduler))
    attach()
    for name in ("__init__", "add_request", "schedule", "update_from_output"):
        assert vars(scheduler)[name].__wrapped__ is before[name]
    assert object.__new__(scheduler).add_request("r1") == "added r1"
    assert object.__new__(scheduler).schedule() == "scheduled"
    found = attached()
    assert (found["join"], found["schedule"], found["update"], found["scheduler"]) == (1, 1, 1, 1)
    # This one has another name for its parameter, and that one is missing: off, and said once each.
    assert (found["preempt"], found["leave"]) == (0, 0)
    assert vars(scheduler)["_preempt_request"] is before["_preempt_request"]
    # What was not imported at all is not attached, but known.
    assert (found["process_inputs"], found["forward"]) == (0, 0)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2
    assert "probe preempt is off, this vLLM has no" in said[0]
    assert "probe leave is off, this vLLM has no" in said[1]
    assert GUARD.failures == {}


def test_the_first_candidate_that_exists_is_wrapped(modules: dict[str, Any]) -> None:
    attach()
    assert attached()["beam_search"] == 1
    serving = modules[BEAMS[1]].OpenAIServing
    assert "__wrapped__" in vars(vars(serving)["beam_search"])
    # The oldest candidate comes later: it is left alone.
    late = type("OpenAIServing", (), {"beam_search": lambda self: "late"})
    original = vars(late)["beam_search"]
    module = ModuleType("vllm.entrypoints.openai.serving_engine")
    module.OpenAIServing = late  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        attach()
        assert vars(late)["beam_search"] is original
    finally:
        del sys.modules[module.__name__]


def test_attaching_twice_wraps_once(modules: dict[str, Any]) -> None:
    original = vars(modules[SCHEDULER].Scheduler)["schedule"]
    attach()
    once = vars(modules[SCHEDULER].Scheduler)["schedule"]
    attach()
    plugin.register()
    assert vars(modules[SCHEDULER].Scheduler)["schedule"] is once
    assert once.__wrapped__ is original


def test_detaching_restores_everything(modules: dict[str, Any]) -> None:
    scheduler = modules[SCHEDULER].Scheduler
    serving = modules[BEAMS[1]].OpenAIServing
    before = dict(vars(scheduler)), dict(vars(serving))
    attach()
    assert dict(vars(scheduler)) != before[0]
    detach()
    assert (dict(vars(scheduler)), dict(vars(serving))) == before
    assert set(attached().values()) == {0}
    detach()
    assert dict(vars(scheduler)) == before[0]
    attach()
    assert attached()["schedule"] == 1


def test_detaching_leaves_a_foreign_wrapper(modules: dict[str, Any]) -> None:
    scheduler = modules[SCHEDULER].Scheduler
    attach()
    ours = vars(scheduler)["schedule"]

    def foreign(self: Any, *arguments: Any) -> Any:
        return ours(self, *arguments)

    scheduler.schedule = foreign
    detach()
    assert vars(scheduler)["schedule"] is foreign
    assert not hasattr(vars(scheduler)["add_request"], "__wrapped__")
    assert object.__new__(scheduler).schedule() == "scheduled"


def test_a_module_that_is_imported_later(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    attach()
    assert attached()["sample"] == 0
    package = tmp_path / "vllm"
    (package / "v1" / "worker").mkdir(parents=True)
    (package / "v1" / "worker" / "gpu_worker.py").write_text(
        "class Worker:\n    def sample_tokens(self, grammar_output): return 'sampled'\n"
    )
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        path = package.joinpath(*name.split(".")[1:])
        sys.modules[name].__path__ = [str(path)]  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.gpu_worker", raising=False)
    module = importlib.import_module("vllm.v1.worker.gpu_worker")
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", module)
    assert attached()["sample"] == 1
    assert module.Worker().sample_tokens(None) == "sampled"


OFF = [
    ("LLMOBS_ENABLED", "0"),
    ("OTEL_SDK_DISABLED", "true"),
    ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "llmobs"),
    ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "redis, llmobs"),
]


@pytest.mark.parametrize(("name", "value"), OFF)
@pytest.mark.parametrize("door", [attach, plugin.register])
def test_switched_off_nothing_is_done(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str, value: str, door: Any
) -> None:
    monkeypatch.setenv(name, value)
    before = dict(vars(modules[SCHEDULER].Scheduler))
    door()
    assert dict(vars(modules[SCHEDULER].Scheduler)) == before
    assert attached() == {}
    assert not probes._hooked
    assert "_LLMOBS_SERVER_RUN" not in os.environ


def test_the_plugin_door_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(probes, "attach", broken)
    plugin.register()
    assert GUARD.failures == {"attach": 1}


@pytest.mark.parametrize("place", [0, 5, 10])
def test_a_class_that_cannot_be_patched(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Whatever fails while a probe is applied costs that probe alone."""

    class Stubborn(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            raise RuntimeError("not here")

    class Scheduler(metaclass=Stubborn):
        def schedule(self) -> str:
            return "scheduled"

    monkeypatch.setattr(modules[SCHEDULER], "Scheduler", Scheduler)
    attach()
    assert Scheduler().schedule() == "scheduled"
    assert attached()["schedule"] == 0
    assert attached()["beam_search"] == 1
    assert GUARD.failures == {"schedule": 1}


def test_the_table() -> None:
    assert len({probe.name for probe in PROBES}) == len(PROBES) <= 64
    assert {probe.role for probe in PROBES} == {"api_server", "engine_core", "worker"}
    for probe in PROBES:
        assert probe.transform or probe.after or probe.before
        for target in probe.targets:
            module, _, path = target.partition(":")
            assert module.split(".")[0] in ("vllm", "uvicorn")
            assert len(path.split(".")) == 2


def test_a_failing_transformation_hands_on_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> Any:
        raise RuntimeError("ours")

    call = probes._transformed("beam_search", lambda: "generator", broken)
    assert call() == "generator"
    assert GUARD.failures == {"beam_search": 1}
    assert frontend.observe_beams is not broken
