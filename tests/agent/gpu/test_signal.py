"""What the page says of a server's GPUs: the real pynvml over a stand-in for the driver."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from llmobs.agent.gpu import library, signal
from llmobs.agent.gpu.signal import Gpus
from tests.agent.gpu.machine import GIB, UUIDS, Machine, build
from tests.agent.gpu.server import NVML_FEATURES, Server, kv, on_gpu

Make = Callable[..., Server]
CPU = {"type": "cpu"}
EFFECTIVE = "gpu_memory_effective"
EVERYTHING = {*NVML_FEATURES, EFFECTIVE}
GPU_METRICS = {
    *("llmobs_gpu_memory_bytes", "llmobs_gpu_memory_pressure_ratio", "llmobs_gpu_info"),
    *("llmobs_gpu_utilization_ratio", "llmobs_gpu_power_watts", "llmobs_gpu_throttled"),
    *("llmobs_gpu_pcie_bytes_total", "llmobs_gpu_nvlink_bytes_total", "llmobs_gpu_nvlinks"),
    *("llmobs_gpu_ecc_errors_total", "llmobs_gpu_xid_errors_total"),
}


def test_all_figures_of_the_one_gpu_that_is_used(machine: Machine, server: Make) -> None:
    page = server(on_gpu(1)).until_figures()
    expected = {
        'llmobs_gpu_memory_bytes{gpu="1",kind="total"}': 80 * GIB,
        'llmobs_gpu_memory_bytes{gpu="1",kind="used"}': 72 * GIB,
        'llmobs_gpu_memory_bytes{gpu="1",kind="reserved"}': GIB,
        'llmobs_gpu_memory_bytes{gpu="1",kind="free"}': 7 * GIB,
        'llmobs_gpu_memory_pressure_ratio{gpu="1",kind="device"}': 0.9,
        'llmobs_gpu_utilization_ratio{gpu="1"}': 0.93,
        'llmobs_gpu_power_watts{gpu="1"}': 512.345,
        'llmobs_gpu_throttled{gpu="1",reason="applications_clocks_setting"}': 0,
        'llmobs_gpu_throttled{gpu="1",reason="sw_power_cap"}': 1,
        'llmobs_gpu_throttled{gpu="1",reason="hw_slowdown"}': 0,
        'llmobs_gpu_throttled{gpu="1",reason="sync_boost"}': 0,
        'llmobs_gpu_throttled{gpu="1",reason="sw_thermal_slowdown"}': 0,
        'llmobs_gpu_throttled{gpu="1",reason="hw_thermal_slowdown"}': 0,
        'llmobs_gpu_throttled{gpu="1",reason="hw_power_brake_slowdown"}': 0,
        # This GPU has no display: NVML says that it never slows down for one.
        'llmobs_gpu_nvlinks{gpu="1",state="active"}': 3,
        'llmobs_gpu_nvlinks{gpu="1",state="inactive"}': 1,
        'llmobs_gpu_nvlink_bytes_total{direction="tx",gpu="1"}': 10 * 1024,
        'llmobs_gpu_nvlink_bytes_total{direction="rx",gpu="1"}': 20 * 1024,
        'llmobs_gpu_ecc_errors_total{gpu="1",kind="corrected"}': 3,
        'llmobs_gpu_ecc_errors_total{gpu="1",kind="uncorrected"}': 0,
        'llmobs_gpu_xid_errors_total{gpu="1"}': 0,
        'llmobs_gpu_info{engine="0",gpu="1",name="NVIDIA H100 80GB HBM3",rank="0",'
        f'uuid="{UUIDS[1]}"}}': 1,
    }
    found = {series: value for series, value in page.items() if "_gpu_" in series}
    # That grows from look to look: see test_pcie.py.
    pcie = {f'llmobs_gpu_pcie_bytes_total{{direction="{d}",gpu="1"}}' for d in ("tx", "rx")}
    assert {series for series in found if "pcie" in series} == pcie
    assert {series: value for series, value in found.items() if "pcie" not in series} == expected


def test_the_ranks_of_an_engine_each_have_their_gpu(machine: Machine, server: Make) -> None:
    machine.change({"2.free": 39 * GIB})
    one = server(on_gpu(0, visible="2,0"), on_gpu(1, visible="2,0"))
    page = one.until_figures()
    assert page['llmobs_gpu_memory_pressure_ratio{gpu="2",kind="device"}'] == 0.5
    assert page['llmobs_gpu_memory_pressure_ratio{gpu="0",kind="device"}'] == 0.9
    assert not [series for series in page if 'gpu="1"' in series]
    info = {s.split(",rank=")[1] for s in page if "_info" in s and 'gpu="2"' in s}
    assert info == {f'"0",uuid="{UUIDS[2]}"}}'}


# Effective pressure

EFFECTIVE_OF = 'llmobs_gpu_memory_pressure_ratio{{gpu="{}",kind="effective"}}'


def test_free_kv_blocks_are_no_pressure(machine: Machine, server: Make) -> None:
    one = server(on_gpu(0), on_gpu(1))
    one.until_figures()
    assert one.lacking() == {EFFECTIVE: "no_kv_pool"}
    # Each rank has a pool of 50 GiB: 100 blocks, one of them vLLM's null block.
    kv(one.engine, 50 * GIB, 99, 19)
    page = one.page()
    # 72 GiB are used, 80 blocks of half a GiB are free: (72 - 40) / 80.
    assert page[EFFECTIVE_OF.format(0)] == page[EFFECTIVE_OF.format(1)] == 0.4
    assert one.lacking() == {}
    kv(one.engine, 50 * GIB, 99, 99)
    assert one.page()[EFFECTIVE_OF.format(0)] == 0.9
    # The engine sleeps: its pool is not there, though all its blocks are free.
    machine.change({"0.free": 59 * GIB})
    kv(one.engine, 50 * GIB, 99, 0)
    one.until(lambda: one.page()[EFFECTIVE_OF.format(0)] == 0.25)


def test_two_engines_on_one_gpu(machine: Machine, server: Make) -> None:
    one = server(on_gpu(0), on_gpu(0))
    about = {"models": ["m"], "server": "1-2", "engine": 1}
    one.workers[1].write_info(about | {"roles": ["worker"], "gpu": on_gpu(0)})
    other = one.ring("engine_core1", about | {"roles": ["engine_core"]})
    one.until_figures()
    kv(one.engine, 20 * GIB, 99, 49)
    assert one.lacking() == {EFFECTIVE: "no_kv_pool"}, "half of it would be no truth"
    kv(other, 40 * GIB, 99, 79)
    # Half of one pool and a fifth of the other are free: (72 - 10 - 8) / 80.
    one.until(lambda: one.page().get(EFFECTIVE_OF.format(0)) == 0.675)
    assert one.lacking() == {}


def test_two_servers_of_one_agent_each_have_their_gpus(machine: Machine, server: Make) -> None:
    one = server(on_gpu(0), on_gpu(1))
    one.workers[1].write_info(
        {"roles": ["worker"], "models": ["other"], "server": "3-4", "gpu": on_gpu(1)}
    )
    one.until_figures()
    power = 'llmobs_gpu_power_watts{{gpu="{}"{}}}'
    one.until(lambda: power.format(1, ',model_name="other"') in one.page())
    names = {series for series in one.page() if "power_watts" in series}
    assert names == {power.format(0, ""), power.format(1, ',model_name="other"')}


# MIG


def test_an_instance_has_memory_of_its_own_and_the_boards_power(
    machine: Machine, server: Make
) -> None:
    machine.change(
        {
            "0.instances": 2,
            "0.error.nvmlDeviceGetUtilizationRates": 3,
            **{f"0:{n}.uuid": f"MIG-{n}0000000-0000-4000-8000-000000000000" for n in range(2)},
            **{f"0:{n}.name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb" for n in range(2)},
            "0:1.total": 10 * GIB,
            "0:1.reserved": 0,
            "0:1.free": 4 * GIB,
        }
    )
    one = server(on_gpu(0, visible="MIG-1"))
    page = one.until_figures()
    assert page['llmobs_gpu_memory_bytes{gpu="0:1",kind="used"}'] == 6 * GIB
    assert page['llmobs_gpu_memory_pressure_ratio{gpu="0:1",kind="device"}'] == 0.6
    assert page['llmobs_gpu_power_watts{gpu="0"}'] == 512.345
    by_gpu = {
        label: {s.partition("{")[0] for s in page if f'gpu="{label}"' in s}
        for label in ("0", "0:1")
    }
    assert by_gpu["0:1"] == {
        *("llmobs_gpu_memory_bytes", "llmobs_gpu_memory_pressure_ratio", "llmobs_gpu_info"),
    }
    assert by_gpu["0"] == GPU_METRICS - by_gpu["0:1"] - {"llmobs_gpu_utilization_ratio"}
    assert one.lacking(page) == {"gpu_utilization": "not_supported", EFFECTIVE: "no_kv_pool"}


# What NVML does not tell

MEMORY = ("llmobs_gpu_memory_bytes", "llmobs_gpu_memory_pressure_ratio")
FAULTS = [
    ("nvmlDeviceGetUtilizationRates", "gpu_utilization", ("llmobs_gpu_utilization_ratio",)),
    ("nvmlDeviceGetPowerUsage", "gpu_power", ("llmobs_gpu_power_watts",)),
    ("nvmlDeviceGetCurrentClocksEventReasons", "gpu_throttling", ("llmobs_gpu_throttled",)),
    ("nvmlDeviceGetPcieThroughput", "gpu_pcie", ("llmobs_gpu_pcie_bytes_total",)),
    ("nvmlDeviceGetNvLinkState", "gpu_nvlink", ("llmobs_gpu_nvlinks",)),
    ("nvmlDeviceGetTotalEccErrors", "gpu_ecc", ("llmobs_gpu_ecc_errors_total",)),
    ("nvmlDeviceRegisterEvents", "gpu_xid", ("llmobs_gpu_xid_errors_total",)),
    ("nvmlEventSetWait_v2", "gpu_xid", ("llmobs_gpu_xid_errors_total",)),
]
CODES = [
    (2, "not_supported"),
    (3, "not_supported"),
    (4, "no_permission"),
    (13, "not_supported"),
    (15, "lost"),
    (16, "lost"),
    (999, "driver_error"),
    (12345, "driver_error"),  # of a version to come
]


@pytest.mark.parametrize(("code", "reason"), CODES)
@pytest.mark.parametrize(("function", "feature", "metrics"), FAULTS)
def test_one_thing_that_cannot_be_told(
    *,
    machine: Machine,
    server: Make,
    function: str,
    feature: str,
    metrics: tuple[str, ...],
    code: int,
    reason: str,
) -> None:
    if (function, code) == ("nvmlDeviceGetCurrentClocksEventReasons", 13):
        # The name before driver 535 answers then, see test_an_old_driver.
        machine.change({"error.nvmlDeviceGetCurrentClocksThrottleReasons": 13})
    machine.change({f"error.{function}": code})
    one = server(on_gpu(0))
    one.until_figures()
    assert one.figures() == GPU_METRICS - set(metrics)
    assert one.lacking() == {feature: reason, EFFECTIVE: "no_kv_pool"}
    assert one.said == []


@pytest.mark.parametrize(("code", "reason"), CODES)
def test_memory_that_cannot_be_told(machine: Machine, server: Make, code: int, reason: str) -> None:
    machine.change({f"error.nvmlDeviceGetMemoryInfo{version}": code for version in ("", "_v2")})
    one = server(on_gpu(0))
    one.until_figures()
    assert one.figures() == GPU_METRICS - set(MEMORY)
    assert one.lacking() == {"gpu_memory": reason, EFFECTIVE: reason}


BLANK, BLANK_32 = 9223372036854775794, 2147483634
BLANKS = [
    ({"0.power": BLANK_32}, "gpu_power"),
    ({"0.power": 0xFFFFFFFF}, "gpu_power"),
    ({"0.utilization": BLANK_32}, "gpu_utilization"),
    ({"0.utilization": 101}, "gpu_utilization"),
    ({"0.throttled": BLANK}, "gpu_throttling"),
    ({"0.field.138": BLANK, "0.field.202": BLANK}, "gpu_nvlink"),
    ({"0.field.138": BLANK, "0.field.202": 1 << 64 - 1}, "gpu_nvlink"),
    ({"0.type.138": 0}, "gpu_nvlink"),  # a floating-point number for a count
    ({"0.rate.tx": BLANK_32}, "gpu_pcie"),
    ({"0.ecc.corrected": BLANK}, "gpu_ecc"),
    ({"0.ecc.uncorrected": (1 << 64) - 1}, "gpu_ecc"),
]


@pytest.mark.parametrize(("settings", "feature"), BLANKS)
def test_a_number_that_is_none(
    machine: Machine, server: Make, settings: dict[str, object], feature: str
) -> None:
    machine.change(settings)
    one = server(on_gpu(0))
    one.until_figures()
    assert one.lacking() == {feature: "not_supported", EFFECTIVE: "no_kv_pool"}
    assert not [v for s, v in one.page().items() if v > 1 << 40]


@pytest.mark.parametrize("settings", [{"0.total": BLANK}, {"0.reserved": BLANK}, {"0.total": 0}])
def test_memory_that_is_no_number(
    machine: Machine, server: Make, settings: dict[str, object]
) -> None:
    machine.change(settings)
    one = server(on_gpu(0))
    one.until_figures()
    assert one.lacking() == {"gpu_memory": "not_supported", EFFECTIVE: "not_supported"}
    assert not one.figures() & set(MEMORY)


def test_gpus_without_links_or_ecc(machine: Machine, server: Make) -> None:
    machine.change({"0.links": None, "0.ecc.corrected": None, "0.field.138": None})
    one = server(on_gpu(0))
    one.until_figures()
    assert one.lacking() == {
        "gpu_nvlink": "not_supported",
        "gpu_ecc": "not_supported",
        EFFECTIVE: "no_kv_pool",
    }


def test_a_newer_links_counters(machine: Machine, server: Make) -> None:
    machine.change({"0.field.138": None, "0.field.202": 5000, "0.field.204": 6000})
    page = server(on_gpu(0)).until_figures()
    assert page['llmobs_gpu_nvlink_bytes_total{direction="tx",gpu="0"}'] == 5000
    assert page['llmobs_gpu_nvlink_bytes_total{direction="rx",gpu="0"}'] == 6000


def test_an_old_driver(
    machine: Machine, server: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the functions that came later: it still tells most."""
    import ctypes

    old = ctypes.CDLL(str(build(tmp_path, "-DOLD_DRIVER")))
    monkeypatch.setattr(pynvml, "nvmlLib", old)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    one = server(on_gpu(0))
    page = one.until_figures()
    assert one.lacking() == {"gpu_nvlink": "not_supported", EFFECTIVE: "no_kv_pool"}
    assert 'llmobs_gpu_memory_bytes{gpu="0",kind="reserved"}' not in page
    # There the driver's own is part of what is used.
    assert page['llmobs_gpu_memory_bytes{gpu="0",kind="used"}'] == 73 * GIB
    assert page['llmobs_gpu_throttled{gpu="0",reason="sw_power_cap"}'] == 1


# NVML that is not there, or goes away


def test_no_driver(machine: Machine, server: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LIBRARY", "libnvidia-ml-nowhere.so.1")
    monkeypatch.delitem(sys.modules, "pynvml")
    one = server(on_gpu(0))
    one.until(lambda: one.lacking())
    assert one.lacking() == dict.fromkeys(EVERYTHING, "no_driver")
    assert one.figures() == set()
    assert "pynvml" not in sys.modules, "3 MB for nothing"
    (said,) = one.said
    assert "libnvidia-ml.so.1" in said
    monkeypatch.undo()
    machine.change({})  # the driver is there now


def test_no_package(machine: Machine, server: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    one = server(on_gpu(0))
    one.until(lambda: one.lacking())
    assert one.lacking() == dict.fromkeys(EVERYTHING, "no_library")
    assert one.said == [
        "llmobs: no figures of the GPUs: the package nvidia-ml-py, which llmobs needs, is not "
        "installed for the agent"
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def nvmlInit(): pass\n", "__init__.py has no NVMLError"),
        ("raise RuntimeError('for Python 2')\n", "importing pynvml fails: for Python 2"),
        ("import no_such_module_anywhere\n", "importing pynvml fails: No module named"),
        ("print 1\n", "importing pynvml fails: "),
    ],
)
def test_another_package_by_that_name(
    *,
    machine: Machine,
    server: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    told: str,
) -> None:
    """Such as the old `pynvml`, earlier on the path."""
    (tmp_path / "old" / "pynvml").mkdir(parents=True)
    (tmp_path / "old" / "pynvml" / "__init__.py").write_text(text)
    monkeypatch.delitem(sys.modules, "pynvml")
    monkeypatch.syspath_prepend(tmp_path / "old")
    one = server(on_gpu(0))
    one.until(lambda: one.said)
    assert one.lacking() == dict.fromkeys(EVERYTHING, "old_library")
    (said,) = one.said
    assert told in said
    assert "pip uninstall pynvml" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("code", "reason"), [(9, "no_driver"), (4, "no_permission"), (999, "driver_error")]
)
def test_a_driver_that_will_not_begin_and_then_does(
    machine: Machine, server: Make, code: int, reason: str
) -> None:
    machine.change({"error.nvmlInitWithFlags": code})
    one = server(on_gpu(0))
    one.until(lambda: one.lacking())
    assert one.lacking() == dict.fromkeys(EVERYTHING, reason)
    assert one.figures() == set()
    machine.change({"error.nvmlInitWithFlags": None})
    one.until_figures()
    assert one.lacking() == {EFFECTIVE: "no_kv_pool"}
    assert len(one.said) == 1


def test_nvml_that_dies_and_comes_back(machine: Machine, server: Make) -> None:
    one = server(on_gpu(0))
    one.until_figures()
    machine.change({"error.nvmlDeviceGetMemoryInfo_v2": 1, "error.nvmlInitWithFlags": 9})
    one.until(lambda: one.figures() == set())
    assert set(one.lacking()) == EVERYTHING
    assert set(one.lacking().values()) <= {"lost", "no_driver"}
    one.until(lambda: one.lacking() == dict.fromkeys(EVERYTHING, "no_driver"))
    machine.change({"error.nvmlDeviceGetMemoryInfo_v2": None, "error.nvmlInitWithFlags": None})
    one.until_figures()
    assert one.figures() == GPU_METRICS


def test_one_gpu_that_is_lost_and_comes_back(machine: Machine, server: Make) -> None:
    one = server(on_gpu(0, uuid=UUIDS[0][4:]), on_gpu(1, uuid=UUIDS[1][4:]))
    one.until_figures()
    machine.change({"0.error.all": 15})
    one.until(lambda: not [series for series in one.page() if 'gpu="0"' in series])
    assert one.lacking() == dict.fromkeys(EVERYTHING, "lost")
    # Its UUID cannot be had any more either; the other one is not taken for it.
    for _ in range(5):
        used = {s: v for s, v in one.page().items() if "_info" in s}
        assert [s for s in used if 'rank="1"' in s and 'gpu="1"' in s]
        assert not [s for s in used if 'gpu="0"' in s and UUIDS[1] in s]
        assert one.page()['llmobs_gpu_memory_bytes{gpu="1",kind="used"}'] == 72 * GIB
    machine.change({"0.error.all": None})
    one.until(lambda: 'llmobs_gpu_power_watts{gpu="0"}' in one.page())
    assert one.lacking() == {EFFECTIVE: "no_kv_pool"}


def test_the_attempts_become_fewer(machine: Machine, server: Make) -> None:
    one = server(on_gpu(0))
    gpus = Gpus(one.run, 10, one.said.append)
    assert [gpus._pause(n) for n in range(7)] == [10, 20, 40, 80, 160, 300, 300]
    assert Gpus(one.run, 3600, one.said.append)._pause(1000) == 3600


def test_a_driver_that_hangs(machine: Machine, server: Make) -> None:
    one = server(on_gpu(0), patience=0.5)
    one.until_figures()
    machine.change({"hang.nvmlDeviceGetPowerUsage": 1})
    # The page goes on, and does not show for long what it cannot know.
    one.until(lambda: one.lacking() == dict.fromkeys(EVERYTHING, "no_answer"))
    assert one.figures() == set()
    machine.change({"hang.nvmlDeviceGetPowerUsage": None})
    one.until_figures()
    assert one.lacking() == {EFFECTIVE: "no_kv_pool"}


def test_a_failure_of_our_own_is_no_end(
    machine: Machine, server: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(signal, "device_of", None)
        one = server(on_gpu(0))
        one.until(lambda: one.lacking())
        assert one.lacking() == dict.fromkeys(EVERYTHING, "driver_error")
    one.until_figures()


# XID errors


def test_xid_errors_are_counted(machine: Machine, server: Make) -> None:
    machine.change({"0.xids": 5, "0.xid": 13})  # these were before
    one = server(on_gpu(0), on_gpu(1))
    one.until_figures()
    machine.change({"0.xids": 8, "0.xid": 79})
    count = 'llmobs_gpu_xid_errors_total{{gpu="{}"}}'
    one.until(lambda: one.page()[count.format(0)] == 3)
    page = one.page()
    assert page[count.format(1)] == 0
    assert page['llmobs_gpu_last_xid{gpu="0"}'] == 79
    assert 'llmobs_gpu_last_xid{gpu="1"}' not in page
    # They are not forgotten when NVML begins anew.
    machine.change({"error.nvmlDeviceGetPowerUsage": 1})
    one.until(lambda: one.figures() == set())
    machine.change({"error.nvmlDeviceGetPowerUsage": None})
    one.until_figures()
    assert one.page()[count.format(0)] == 3


# Servers without a GPU that can be told of


@pytest.mark.parametrize("worker", [CPU, {"type": "xpu"}])
def test_a_server_without_an_nvidia_gpu(
    machine: Machine, server: Make, worker: dict[str, Any]
) -> None:
    one = server(worker)
    assert one.lacking() == dict.fromkeys({*EVERYTHING, "torch_memory"}, "no_gpu")
    assert one.figures() == set()
    (gpus,) = one.run.signals
    assert gpus._thread is None  # type: ignore[attr-defined]


def test_a_worker_that_is_not_on_its_device_yet(machine: Machine, server: Make) -> None:
    one = server({"type": "cuda"})
    assert one.lacking() == {}
    assert one.figures() == set()


@pytest.mark.parametrize("damage", [None, {}, {"type": 7}, {"index": 1}, [], "cuda"])
def test_a_worker_that_says_nothing_sensible(machine: Machine, server: Make, damage: Any) -> None:
    one = server(damage)
    assert one.lacking() == {}
    assert one.figures() == set()


def test_workers_of_ray(machine: Machine, server: Make) -> None:
    one = server()
    one.engine.write_info({"roles": ["engine_core"], "models": ["m"], "lacking": {"worker": "ray"}})
    one.run.poll()
    assert one.lacking() == dict.fromkeys({*EVERYTHING, "torch_memory"}, "ray")


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (on_gpu(0, visible=""), "no_gpu"),
        (on_gpu(0, visible="-1"), "no_gpu"),
        (on_gpu(3), "unknown_gpu"),
        (on_gpu(0, uuid="99999999-0000-4000-8000-000000000000"), "unknown_gpu"),
    ],
)
def test_a_gpu_that_cannot_be_found(
    machine: Machine, server: Make, gpu: dict[str, Any], reason: str
) -> None:
    one = server(gpu)
    one.until(lambda: one.lacking())
    assert one.lacking() == dict.fromkeys(EVERYTHING, reason)
    assert one.figures() == set()


def test_a_vllm_without_a_place_for_the_probe(machine: Machine, server: Make) -> None:
    one = server({"type": "cuda"})
    info = {"roles": ["worker"], "models": ["m"], "gpu": {"type": "cuda"}}
    one.workers[0].write_info(info | {"probes": {"worker": 1, "device": 0}})
    one.until(lambda: one.lacking())
    one.until(lambda: len(one.lacking()) > 1)
    assert one.lacking() == {
        **dict.fromkeys(EVERYTHING, "unknown_gpu"),
        "torch_memory": "not_supported",
    }
    one.workers[0].write_info(info | {"probes": {"worker": 1, "device": 1}})
    one.until(lambda: one.lacking() == {})


def test_a_server_that_ends(machine: Machine, server: Make) -> None:
    one = server(on_gpu(0))
    one.until_figures()
    for source in one.run.sources.values():
        if "worker" in source.roles:
            source.reader.ticks = 1  # another process has its pid now
    one.run.poll()
    one.until(lambda: one.figures() == set())
