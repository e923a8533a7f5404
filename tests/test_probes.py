"""The table of probes on modules that only look like vLLM's."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from llmobs import engine, frontend, plugin, probes, process
from llmobs.guard import GUARD
from llmobs.probes import PROBES, attach, detach
from llmobs.ring import Reader

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

        def _handle_blocked_waiting_request(self, request: Any) -> bool:
            return True

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


def test_wraps_what_is_there(modules: dict[str, Any]) -> None:
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
    assert GUARD.failures == {}


# What a vLLM does not have


CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(served_model_name="deepseek-v4"),
    parallel_config=SimpleNamespace(data_parallel_index=0, distributed_executor_backend="mp"),
    speculative_config=None,
)


def test_a_forked_child_knows_what_its_parent_found_missing(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process.mark_server()
    process.current().miss("leave", "leave is gone", at_once=False)
    process._forked()  # what a fork's child does first
    process.current().open("engine_core", "deepseek-v4")
    assert noted(runs) == {"leave"}
    assert [record.getMessage() for record in caplog.records] == ["leave is gone"]


@pytest.mark.parametrize("missing", ["join", "schedule", "update", "leave", "preempt", None])
def test_what_would_only_grow_is_not_kept(
    runs: Path, monkeypatch: pytest.MonkeyPatch, missing: str | None
) -> None:
    monkeypatch.setattr(engine, "ENGINE", None)
    process.mark_server()
    if missing is not None:
        process.current().miss(missing, "gone", at_once=False)
    engine.starts(None, CONFIG)
    assert header()["roles"] == ["engine_core"]
    assert (engine.ENGINE is not None) == (missing in ("preempt", None))


def header() -> dict[str, Any]:
    ring = process.current().ring
    assert ring is not None
    return Reader(ring.path).info()


def noted(runs: Path) -> set[str]:
    (folder,) = [folder for folder in runs.iterdir() if folder.is_dir()]
    found = process.missing_probes(folder)
    assert {server for server, _ in found} <= {folder.name}
    return {probe for _, probe in found}


def test_a_missing_target_or_parameter_is_said_once_per_server(
    modules: dict[str, Any],
    runs: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attach()
    assert not caplog.records, "this process may be no server at all"
    process.current().open("engine_core", "deepseek-v4")
    said = [record.getMessage().replace("modules.<locals>.", "") for record in caplog.records]
    assert said == [
        "llmobs: probe preempt is off, this vLLM has no vllm.v1.core.sched.scheduler:"
        "Scheduler._preempt_request (Scheduler._preempt_request has no parameter request)",
        "llmobs: probe leave is off, this vLLM has no vllm.v1.core.sched.scheduler:"
        "Scheduler._free_request (Scheduler does not define _free_request)",
    ]
    assert noted(runs) == {"leave", "preempt"}
    found = header()["probes"]
    assert (found["join"], found["preempt"], found["leave"]) == (1, 0, 0)

    # The second door, and then another process of the same server.
    attach()
    detach()
    monkeypatch.setattr(process, "_current", None)
    attach()
    process.current().open("worker", "deepseek-v4")
    assert noted(runs) == {"leave", "preempt"}
    assert len(caplog.records) == 2


def test_a_probe_is_missed_once_its_last_candidate_is(
    modules: dict[str, Any],
    runs: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del modules[BEAMS[1]].OpenAIServing
    attach()
    process.current().open("api_server", "deepseek-v4")
    # Two of three have been looked at; where the third one is, it may still come.
    assert "beam_search" not in header()["probes"]
    caplog.clear()
    oldest = ModuleType("vllm.entrypoints.openai.serving_engine")
    monkeypatch.setitem(sys.modules, oldest.__name__, oldest)
    attach()
    assert header()["probes"]["beam_search"] == 0
    (record,) = [r for r in caplog.records if "beam_search" in r.getMessage()]
    for module in (*BEAMS, oldest.__name__):
        assert f"{module}:" in record.getMessage()


def test_a_module_that_is_gone_is_missed_though_nobody_imports_it(
    runs: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = tmp_path / "vllm"
    for name in ("v1/engine/async_llm", "v1/core/sched/scheduler/__init__"):
        file = (package / name).with_suffix(".py")
        file.parent.mkdir(parents=True)
        file.write_text("raise RuntimeError('imported')")
    vllm = ModuleType("vllm")
    vllm.__path__ = [str(package)]
    for name in [name for name in sys.modules if name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    attach()
    process.current().open("api_server", "deepseek-v4")
    gone = {
        *("sync_engine", "process_inputs", "admit", "finish", "abort", "engine_dead"),
        *("beam_search", "worker", "forward", "sample", "trace_headers", "device", "warm_up"),
        *("kv_free", "kv_unpin", "kv_evict"),
    }
    assert noted(runs) == gone
    assert {header()["probes"][probe] for probe in gone} == {0}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(gone)
    assert (
        "llmobs: probe process_inputs is off, this vLLM has no vllm.v1.engine.input_processor:"
        "InputProcessor.process_inputs (there is no such module)"
    ) in said


@pytest.mark.parametrize("shared", [False, True])
def test_a_process_without_a_ring_says_it_where_its_server_has_a_folder(
    modules: dict[str, Any],
    runs: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    shared: bool,
) -> None:
    """An engine core without the probe that would make it one, started by an API server."""
    modules[SCHEDULER].Scheduler.__init__ = lambda self, **_: None
    if shared:
        monkeypatch.setenv("LLMOBS_AGENT", str(runs / "shared"))
    process.mark_server()
    server = Path(os.environ["_LLMOBS_SERVER_RUN"])
    folder = runs / "shared" if shared else server
    folder.mkdir(parents=True)
    attach()
    assert set(process.missing_probes(folder)) == {
        (server.name, probe) for probe in ("scheduler", "preempt", "leave")
    }
    assert len(caplog.records) == 3
    assert process.current().ring is None


def test_where_nothing_may_make_it_a_front_end_it_is_said_at_once(
    modules: dict[str, Any],
    runs: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = ModuleType("vllm.v1.engine.async_llm")
    llm.AsyncLLM = type("AsyncLLM", (), {"add_request": len})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, llm.__name__, llm)
    monkeypatch.delitem(sys.modules, SCHEDULER)
    attach()
    assert noted(runs) == {"async_engine"}
    (record,) = caplog.records
    assert "probe async_engine is off" in record.getMessage()
    # Where there can be no folder it is said as well.
    detach()
    monkeypatch.setattr(process, "_current", None)
    monkeypatch.setenv("LLMOBS_RUN_DIR", "/dev/null/runs")
    monkeypatch.setenv("_LLMOBS_SERVER_RUN", "/dev/null/runs/1-1")
    attach()
    assert "probe async_engine is off" in caplog.records[-1].getMessage()
    assert len(caplog.records) == 2
    assert GUARD.failures == {}


def test_nothing_of_this_reaches_the_import(
    modules: dict[str, Any], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("ours")

    process.mark_server()
    process.current().open("engine_core", "deepseek-v4")
    with monkeypatch.context() as patch:
        patch.setattr(process.Process, "write_info", broken)
        attach()
    # Found or missing, each failed to be told.
    assert {"join", "schedule", "leave", "preempt"} <= set(GUARD.failures)
    assert object.__new__(modules[SCHEDULER].Scheduler).schedule() == "scheduled"


def test_where_the_run_folder_takes_no_more_files_it_is_said_all_the_same(
    modules: dict[str, Any],
    runs: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "touch", full)
    attach()
    process.current().open("engine_core", "deepseek-v4")
    assert len(caplog.records) == 2


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
        assert probe.transform or probe.after or probe.before or probe.rare
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
