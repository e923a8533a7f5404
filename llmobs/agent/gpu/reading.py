"""What NVML says of one device at one moment, as samples of the table of metrics."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from llmobs.agent.gpu.devices import Device
from llmobs.agent.gpu.library import (
    BLANK_32,
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    OF_THE_WHOLE,
    OTHER_VERSION,
    Blank,
    field_values,
    known,
    reason_of,
)
from llmobs.agent.gpu.pcie import Pcie
from llmobs.agent.gpu.xids import Xids
from llmobs.agent.signals import Samples

Found = list[tuple[str, tuple[str, ...], float]]
"""Metric, labels behind `gpu`, value."""

THROTTLED = {
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
}
"""NVML's reasons why clocks are below what they could be, but for 0x1: the GPU is idle."""
MOST_LINKS = 36
ALL_LINKS = 0xFFFFFFFF
KIB = 1024
# Field ids of nvml.h, written out: 202 and 204 came with driver 565.
NVLINK_DATA_TX, NVLINK_DATA_RX = 138, 139
NVLINK_XMIT_BYTES, NVLINK_RCV_BYTES = 202, 204
CORRECTED, UNCORRECTED, SINCE_MADE = 0, 1, 1


def memory(nvml: Any, handle: Any) -> Found:
    reserved = None
    try:
        told = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        reserved = known(told.reserved)
    except nvml.NVMLError as error:
        # A driver before 510. There `used` contains what the driver keeps for itself.
        old = (FUNCTION_NOT_FOUND, OTHER_VERSION, INVALID_ARGUMENT, NOT_SUPPORTED)
        if error.value not in old:
            raise
        told = nvml.nvmlDeviceGetMemoryInfo(handle)
    kinds = {"total": known(told.total), "used": known(told.used), "free": known(told.free)}
    if not kinds["total"]:
        raise Blank
    if reserved is not None:
        kinds["reserved"] = reserved
    found: Found = [("llmobs_gpu_memory_bytes", (kind,), value) for kind, value in kinds.items()]
    share = kinds["used"] / kinds["total"]
    return [*found, ("llmobs_gpu_memory_pressure_ratio", ("device",), share)]


def utilization(nvml: Any, handle: Any) -> Found:
    percent = known(nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 101)
    return [("llmobs_gpu_utilization_ratio", (), percent / 100)]


def power(nvml: Any, handle: Any) -> Found:
    milliwatts = known(nvml.nvmlDeviceGetPowerUsage(handle), BLANK_32)
    return [("llmobs_gpu_power_watts", (), milliwatts / 1000)]


def throttling(nvml: Any, handle: Any) -> Found:
    bits = known(_clocks(nvml, handle, "Current"))
    try:
        supported = known(_clocks(nvml, handle, "Supported"))
    except (nvml.NVMLError, Blank):
        supported = sum(THROTTLED.values())
    return [
        ("llmobs_gpu_throttled", (reason,), float(bool(bits & bit)))
        for reason, bit in THROTTLED.items()
        if supported & bit
    ]


def _clocks(nvml: Any, handle: Any, which: str) -> int:
    """Renamed with driver 535; either name may be missing, in the library or in the module."""
    try:
        return int(getattr(nvml, f"nvmlDeviceGet{which}ClocksEventReasons")(handle))
    except AttributeError:
        pass
    except nvml.NVMLError as error:
        if error.value != FUNCTION_NOT_FOUND:
            raise
    return int(getattr(nvml, f"nvmlDeviceGet{which}ClocksThrottleReasons")(handle))


def nvlinks(nvml: Any, handle: Any) -> Found:
    states = {"active": 0, "inactive": 0}
    last: Exception = Blank()
    for link in range(MOST_LINKS):
        try:
            active = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError as error:
            if error.value not in (NOT_SUPPORTED, INVALID_ARGUMENT):
                raise
            last = error  # there is no such link
        else:
            states["active" if active else "inactive"] += 1
    if not any(states.values()):
        raise last
    return [("llmobs_gpu_nvlinks", (state,), count) for state, count in states.items()]


def nvlink_bytes(nvml: Any, handle: Any) -> Found:
    """Without the protocol's own: what was carried, over all links."""
    try:
        fields = [(field, ALL_LINKS) for field in (NVLINK_DATA_TX, NVLINK_DATA_RX)]
        sent, received = (KIB * value for value in field_values(nvml, handle, *fields))
    except (nvml.NVMLError, Blank) as error:
        if reason_of(error) != "not_supported":
            raise
        fields = [(field, ALL_LINKS) for field in (NVLINK_XMIT_BYTES, NVLINK_RCV_BYTES)]
        sent, received = field_values(nvml, handle, *fields)
    name = "llmobs_gpu_nvlink_bytes_total"
    return [(name, ("tx",), sent), (name, ("rx",), received)]


def ecc(nvml: Any, handle: Any) -> Found:
    return [
        (
            "llmobs_gpu_ecc_errors_total",
            (kind,),
            known(nvml.nvmlDeviceGetTotalEccErrors(handle, number, SINCE_MADE)),
        )
        for kind, number in (("corrected", CORRECTED), ("uncorrected", UNCORRECTED))
    ]


READINGS: tuple[tuple[str, Callable[[Any, Any], Found]], ...] = (
    ("gpu_utilization", utilization),
    ("gpu_power", power),
    ("gpu_throttling", throttling),
    ("gpu_nvlink", nvlinks),
    ("gpu_nvlink", nvlink_bytes),
    ("gpu_ecc", ecc),
)
"""Of a whole GPU, with the feature that is lacking where one fails."""


class Reading:
    """What was found of all devices, and the features that were lacking with some."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.samples: dict[str, Samples] = defaultdict(dict)
        self.lacking: dict[str, str] = {}
        self.lost = False
        """Whether something is wrong that only another initialisation may heal."""

    def memory(self, device: Device) -> None:
        self.ask("gpu_memory", device, memory)

    def board(self, device: Device, pcie: Pcie, xids: Xids, now: float) -> None:
        for feature, question in READINGS:
            self.ask(feature, device, question)
        self.ask("gpu_pcie", device, lambda nvml, handle: pcie.read(nvml, handle, now))
        self.ask("gpu_xid", device, lambda nvml, _: xids.watch(nvml, device))

    def ask(self, feature: str, device: Device, question: Callable[[Any, Any], Found]) -> None:
        """Raises what concerns all of NVML."""
        try:
            found = question(self.nvml, device.handle)
        except (self.nvml.NVMLError, Blank) as error:
            self.failed(feature, error)
        else:
            for name, labels, value in found:
                self.samples[name][device.label, *labels] = value

    def failed(self, feature: str, error: Exception) -> None:
        if getattr(error, "value", None) in OF_THE_WHOLE:
            raise error
        reason = reason_of(error)
        self.lost |= reason in ("lost", "driver_error")
        # A GPU that is lost says more than one that never told.
        if self.lacking.get(feature) != "lost":
            self.lacking[feature] = reason
