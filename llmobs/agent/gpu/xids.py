"""XID errors: what the driver reports of a GPU in trouble, counted as they come."""

import contextlib
from collections import Counter
from typing import Any

from llmobs.agent.gpu.devices import Device
from llmobs.agent.gpu.library import TIMEOUT

XID = 0x8
"""nvmlEventTypeXidCriticalError."""
AT_ONCE = 256
"""Events taken in one go: an error that comes again and again must not keep us."""


class Xids:
    """Of all watched GPUs, since this agent began; known by UUID, since handles change."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.last: dict[str, int] = {}
        self._events: Any = None
        self._watched: set[str] = set()

    def forget(self, nvml: Any) -> None:
        """NVML is to be initialised anew: what it was asked to report is gone then."""
        if self._events is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(self._events)
        self._events = None
        self._watched.clear()

    def watch(self, nvml: Any, device: Device) -> list[tuple[str, tuple[str, ...], float]]:
        """Have a GPU's errors reported, and tell those so far. Raises what NVML does."""
        if device.uuid not in self._watched:
            if self._events is None:
                self._events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(device.handle, XID, self._events)
            self._watched.add(device.uuid)
        self._take(nvml)
        told = ("llmobs_gpu_xid_errors_total", (), float(self.counts[device.uuid]))
        if device.uuid not in self.last:
            return [told]
        return [told, ("llmobs_gpu_last_xid", (), self.last[device.uuid])]

    def _take(self, nvml: Any) -> None:
        for _ in range(AT_ONCE):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError as error:
                if error.value == TIMEOUT:
                    return
                raise
            if event.eventType == XID:
                uuid = str(nvml.nvmlDeviceGetUUID(event.device))
                self.counts[uuid] += 1
                self.last[uuid] = int(event.eventData)
