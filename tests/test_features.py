"""What a server lacks is said once, with the reason, and never without one."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmobs import engine, process
from llmobs.agent.collect import RunCollector
from llmobs.agent.run import Run
from llmobs.features import FEATURES, MEANING
from llmobs.metrics import BY_NAME
from llmobs.process import current, mark_server
from llmobs.ring import Reader, Writer
from tests.fake_scheduler import request
from tests.rings import ENGINE, FRONT, new_ring

NAME = "llmobs_feature_available"
MODEL = "deepseek-v4"
JOIN, LEAVE, CUT = 16, 22, 1
FOREIGN = {"front_end": "foreign_frontend", "http_edge": "foreign_frontend"}

GPU = (
    *("gpu_memory", "gpu_utilization", "gpu_power", "gpu_throttling", "gpu_pcie", "gpu_nvlink"),
    *("gpu_ecc", "gpu_xid", "gpu_memory_effective", "torch_memory"),
)
NVML = (
    *("ray", "no_gpu", "no_driver", "no_library", "old_library", "not_supported", "no_permission"),
    *("lost", "driver_error", "no_answer", "unknown_gpu"),
)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where run folders go. No agent is started."""
    monkeypatch.setenv("LLMOBS_RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.setattr(process, "_watch", lambda *_: None)
    monkeypatch.setattr(engine, "ENGINE", None)
    return tmp_path / "runs"


def config(rank: int = 0, executor: str = "mp") -> Any:
    """What the engine core reads of vLLM's configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(served_model_name=MODEL, is_diffusion=False),
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            _api_process_rank=rank,
            distributed_executor_backend=executor,
        ),
        speculative_config=None,
    )


def started(**options: Any) -> Path:
    """An engine core, and its run folder."""
    mark_server()
    engine.starts(None, config(**options))
    ring = current().ring
    assert ring is not None
    return ring.path.parent


def front_end(folder: Path, server: str) -> None:
    Writer(folder / "api_server-1-1.ring", 16, FRONT | {"server": server})


def joined(name: str, kind: str) -> int:
    """A request comes to the engine core; its flags."""
    engine.joined(None, None, None, request(name, 10, 50, kind))
    ring = current().ring
    assert ring is not None
    reader = Reader(ring.path)
    return int(reader.read().rows()[-1][2])


def test_the_vocabulary() -> None:
    assert BY_NAME[NAME].labels["feature"] == (
        *("front_end", "http_edge", "latency_model", "worker"),
        *("host_cpu", "run_queue", "cgroup_cpu", "pressure"),
        *GPU,
        "gpu_clock",
        "kv_cache",
    )
    reasons = {(f.name, reason) for f in FEATURES for reason in f.reasons}
    assert reasons == {
        ("front_end", "foreign_frontend"),
        ("http_edge", "foreign_frontend"),
        ("http_edge", "grpc"),
        ("latency_model", "few_prefills"),
        ("latency_model", "few_lengths"),
        ("worker", "ray"),
        ("host_cpu", "no_proc"),
        ("host_cpu", "no_permission"),
        ("run_queue", "no_schedstat"),
        ("run_queue", "no_permission"),
        ("cgroup_cpu", "no_cgroup"),
        ("cgroup_cpu", "no_permission"),
        ("pressure", "no_psi"),
        ("pressure", "no_permission"),
        *((feature, reason) for feature in GPU[:-1] for reason in NVML),
        ("gpu_memory_effective", "no_kv_pool"),
        *(("torch_memory", reason) for reason in ("ray", "no_gpu", "not_supported")),
        ("gpu_clock", "no_gpu"),
        ("gpu_clock", "failed"),
        ("gpu_clock", "ray"),
        ("kv_cache", "no_kv_pool"),
    }
    assert set(MEANING) == {reason for _, reason in reasons}


def test_requests_of_an_observed_front_end(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = started()
    front_end(folder, folder.name)
    assert joined("one", "cut") == CUT
    assert Reader(current().ring.path).info()["lacking"] == {}
    assert not caplog.records


@pytest.mark.parametrize("other", ["nobody", "another server's"])
def test_requests_of_a_foreign_front_end(
    base: Path, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = started()
    if other != "nobody":
        front_end(folder, "1-2")  # in a folder that several servers share
    assert current().lacking == {}, "nothing has come yet, so nothing is known"
    # Nobody but the engine core will count their tokens.
    assert [joined("one", "cut"), joined("two", "plain")] == [0, 0]
    assert Reader(current().ring.path).info()["lacking"] == FOREIGN
    (said,) = caplog.records
    assert "front end that llmobs does not see" in said.getMessage()


def test_an_engine_in_the_front_ends_own_process(base: Path) -> None:
    mark_server()
    current().open("api_server", MODEL)
    engine.starts(None, config())
    assert joined("one", "cut") == CUT
    assert current().lacking == {}


@pytest.mark.parametrize(
    ("asked", "rank", "missing"),
    [
        ("1", -1, FOREIGN),  # the launcher's configuration
        ("1", 0, {}),  # the variable is set, but this way to start vLLM ignores it
        ("0", -1, {}),  # several API servers
    ],
)
def test_the_rust_front_end_is_known_before_its_first_request(
    base: Path, monkeypatch: pytest.MonkeyPatch, asked: str, rank: int, missing: dict[str, str]
) -> None:
    envs = SimpleNamespace(VLLM_USE_RUST_FRONTEND=asked == "1")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(envs=envs))
    started(rank=rank)
    assert current().lacking == missing


def test_workers_in_rays_actors(base: Path) -> None:
    started(executor="ray")
    assert current().lacking == {"worker": "ray", "gpu_clock": "ray"}


def samples(run: Run) -> dict[tuple[str, str, str], float]:
    (family,) = [f for f in RunCollector(run).collect() if f.name == NAME]
    return {
        (s.labels["model_name"], s.labels["feature"], s.labels["reason"]): s.value
        for s in family.samples
    }


def test_the_page_says_why(tmp_path: Path) -> None:
    new_ring(tmp_path, FRONT | {"lacking": {"http_edge": "grpc"}})
    new_ring(tmp_path, ENGINE | {"lacking": {"worker": "ray"}})
    run = Run(tmp_path)
    run.signals.append(
        SimpleNamespace(
            poll=lambda: None, samples=dict, lacking=lambda: {"run_queue": "no_schedstat"}
        )
    )
    assert samples(run) == {
        (MODEL, "front_end", ""): 1,
        (MODEL, "http_edge", "grpc"): 0,
        (MODEL, "latency_model", "few_prefills"): 0,
        (MODEL, "worker", "ray"): 0,
        (MODEL, "host_cpu", ""): 1,
        (MODEL, "run_queue", "no_schedstat"): 0,
        (MODEL, "cgroup_cpu", ""): 1,
        (MODEL, "pressure", ""): 1,
        **{(MODEL, feature, ""): 1 for feature in GPU},
        (MODEL, "gpu_clock", ""): 1,
        (MODEL, "kv_cache", ""): 1,
    }


def test_nothing_is_kept_for_requests_that_nobody_announces(tmp_path: Path) -> None:
    ring = new_ring(tmp_path, ENGINE | {"lacking": {"front_end": "foreign_frontend"}}, 1 << 15)
    run = Run(tmp_path)
    run.poll()
    for number in range(1, 10_000):
        ring.put(JOIN, number, number, 0, 0, number, 10)
        ring.put(LEAVE, number + 1, number, 0, 0, 0, number)
    run.poll()
    (view,) = run.engines.values()
    assert len(run.requests.orphans) == len(view.sequences) == len(run.requests.by_key) == 0
