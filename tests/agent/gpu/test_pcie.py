"""Bytes over PCIe: counted by the driver, or made of a rate."""

from typing import Any

import pytest

from llmobs.agent.gpu.pcie import Pcie, advance
from tests.agent.gpu.machine import GIB, Machine

TX, RX, UINT = "0.field.197", "0.field.198", 1
LAP = 4 * GIB


class Look:
    """Looks of one GPU, every ten seconds."""

    def __init__(self, machine: Machine, nvml: Any) -> None:
        self.machine, self.nvml = machine, nvml
        self.handle = nvml.nvmlDeviceGetHandleByIndex(0)
        self.pcie = Pcie()
        self.now = 1000.0

    def __call__(self, **settings: object) -> list[float]:
        """tx and rx so far."""
        names = {"tx": TX, "rx": RX, "rate_tx": "0.rate.tx", "rate_rx": "0.rate.rx"}
        self.machine.change({names[name]: value for name, value in settings.items()})
        self.now += 10
        found = self.pcie.read(self.nvml, self.handle, self.now)
        assert [labels for _, labels, _ in found] == [("tx",), ("rx",)]
        assert {name for name, _, _ in found} == {"llmobs_gpu_pcie_bytes_total"}
        return [value for _, _, value in found]


@pytest.fixture
def look(machine: Machine, nvml: Any) -> Look:
    machine.change({"0.type.197": UINT, "0.type.198": UINT, "0.rate.tx": 0, "0.rate.rx": 0})
    return Look(machine, nvml)


def test_the_drivers_counters(look: Look) -> None:
    assert look(tx=5000, rx=7000) == [0, 0], "what was before this agent is not its own"
    assert look(tx=5300, rx=7000) == [300, 0]
    assert look(tx=5300, rx=7001) == [300, 1]


def test_a_counter_goes_round(look: Look) -> None:
    look(tx=LAP - 100, rx=0x7FFFFFF5)  # that is a number here, not a blank
    assert look(tx=50, rx=0x7FFFFFF8) == [150, 3]


def test_several_times_round_by_the_rate(look: Look) -> None:
    look(tx=0, rx=0, rate_tx=2_000_000)
    # 2 GB/s for 10 s: 18.6 GiB. The counter says 3 GiB, so it went round four times.
    assert look(tx=3 * GIB, rx=5) == [19 * GIB, 5]


def test_one_burst_is_no_proof(look: Look) -> None:
    """That the last 20 ms were busy does not say that the ten seconds were."""
    look(tx=0, rx=0)
    assert look(tx=GIB, rx=0, rate_tx=10_000_000) == [GIB, 0]
    assert look(tx=2 * GIB, rx=0, rate_tx=0) == [2 * GIB, 0]


def test_a_wide_counter(look: Look) -> None:
    look.machine.change({"0.type.197": 3, "0.type.198": 3})
    look(tx=10 * LAP, rx=5, rate_tx=10_000_000, rate_rx=10_000_000)
    assert look(tx=13 * LAP, rx=LAP + 5) == [3 * LAP, LAP]
    # Set back by a reset of the GPU: what passed meanwhile is not known.
    assert look(tx=70, rx=9) == [3 * LAP, LAP]
    assert look(tx=100, rx=9) == [3 * LAP + 30, LAP]


def test_without_counters_the_rate_is_taken_for_the_whole_time(look: Look) -> None:
    assert look(rate_tx=2000, rate_rx=1000) == [0, 0]
    assert look() == [20_000_000, 10_000_000]
    assert look(rate_tx=0, rate_rx=500) == [20_000_000, 15_000_000]


def test_a_look_that_fails_counts_nothing(look: Look) -> None:
    look(tx=100, rx=100)
    look.machine.change({"error.nvmlDeviceGetPcieThroughput": 4})
    with pytest.raises(look.nvml.NVMLError):
        look(tx=200, rx=300)
    look.machine.change({"error.nvmlDeviceGetPcieThroughput": None})
    assert look(tx=250, rx=350) == [150, 250]


@pytest.mark.parametrize(
    ("old", "new", "expected", "gone"),
    [
        (10, 10, 0, 0),
        (10, 9, 0, LAP - 1),
        (0, GIB, 1.4 * LAP, LAP + GIB),
        (0, GIB, 0.7 * LAP, GIB),
        (0, 3 * GIB, 0, 3 * GIB),
    ],
)
def test_laps(old: int, new: int, expected: float, gone: float) -> None:
    assert advance(old, new, expected) == gone
