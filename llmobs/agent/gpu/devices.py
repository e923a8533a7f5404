"""Which of the machine's GPUs the server uses: what its workers say, and what NVML knows."""

from dataclasses import dataclass, field
from typing import Any

from llmobs.agent.gpu.library import OF_THE_WHOLE, reason_of

NOWHERE = -1
"""The index of a worker that will never tell: this vLLM has no place for the probe."""


@dataclass(frozen=True)
class Use:
    """What one worker of a model says of its GPU (`gpu` in the header of its ring).

    `type` is PyTorch's of the device. `index` counts within what the process sees, `visible` and
    `order` are its CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. All but `type` are None until it
    has its device.
    """

    model: str
    server: str
    engine: str
    rank: str
    type: str
    index: int | None = None
    uuid: str | None = None
    visible: str | None = None
    order: str | None = None

    @classmethod
    def told(cls, info: dict[str, Any]) -> "Use | None":
        """From a ring's header; None if it says nothing of a GPU."""
        gpu = info.get("gpu")
        if not isinstance(gpu, dict) or not isinstance(gpu.get("type"), str):
            return None
        index = gpu.get("index")
        probes = info.get("probes")
        if index is None and isinstance(probes, dict) and probes.get("device") == 0:
            index = NOWHERE
        texts = {
            name: text if isinstance(text := gpu.get(name), str) else None
            for name in ("uuid", "visible", "order")
        }
        return cls(
            str(info["models"][0]),
            str(info.get("server")),
            str(info.get("engine", "0")),
            str(info.get("rank", "0")),
            gpu["type"],
            index if isinstance(index, int) else None,
            **texts,
        )


@dataclass(eq=False)
class Device:
    """A GPU, or a MIG instance of one, as NVML has it.

    `label` is its NVML index, which is also nvidia-smi's; that of an instance is `GPU:INSTANCE`.
    `parent` is an instance's GPU.
    """

    handle: Any
    label: str
    uuid: str
    name: str
    parent: "Device | None" = None
    instances: "list[Device]" = field(default_factory=list)

    @property
    def board(self) -> "Device":
        """What power, throttling, links and errors are told of: of a whole GPU only."""
        return self.parent or self


class Unknown(Exception):
    """Which GPU is meant cannot be told, for a `reason` of features.py."""

    def __init__(self, reason: str = "unknown_gpu") -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Machine:
    """The GPUs in NVML's order (by PCI address), with their MIG instances. `missing` is why some
    could not be had, "" if all could."""

    gpus: tuple[Device, ...]
    missing: str = ""

    @property
    def everything(self) -> list[Device]:
        return [device for gpu in self.gpus for device in (gpu, *gpu.instances)]


def machine(nvml: Any) -> Machine:
    """What NVML knows. Raises what concerns all of it."""
    gpus, missing = [], ""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = Device(handle, str(index), *_identity(nvml, handle))
        except nvml.NVMLError as error:
            if error.value in OF_THE_WHOLE:
                raise
            missing = reason_of(error)
            continue
        gpus.append(gpu)
        gpu.instances = _instances(nvml, gpu)
    return Machine(tuple(gpus), missing)


def _identity(nvml: Any, handle: Any) -> tuple[str, str]:
    """UUID and name."""
    return str(nvml.nvmlDeviceGetUUID(handle)), str(nvml.nvmlDeviceGetName(handle))


def _instances(nvml: Any, gpu: Device) -> list[Device]:
    try:
        if not nvml.nvmlDeviceGetMigMode(gpu.handle)[0]:
            return []
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)
    except nvml.NVMLError:
        return []
    found: list[Device] = []
    for slot in range(slots):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, slot)
            identity = _identity(nvml, handle)
        except nvml.NVMLError as error:
            if error.value in OF_THE_WHOLE:
                raise
            continue  # an empty slot, or none of ours
        found.append(Device(handle, f"{gpu.label}:{slot}", *identity, parent=gpu))
    return found


def device_of(use: Use, machine: Machine) -> Device | None:
    """A worker's device; None if it sees none. Raises Unknown."""
    if use.uuid is not None:
        # PyTorch's has neither GPU- nor MIG- in front.
        same = [d for d in machine.everything if _bare(d.uuid) == _bare(use.uuid)]
        if not same:
            raise Unknown(machine.missing or "unknown_gpu")
        # Of an instance it may be the whole GPU's, depending on CUDA's version.
        if not same[0].instances:
            return same[0]
    visible = _visible(use, machine)
    if not visible:
        return None
    if use.index is None or not 0 <= use.index < len(visible):
        raise Unknown(machine.missing or "unknown_gpu")
    return visible[use.index]


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _visible(use: Use, machine: Machine) -> list[Device]:
    """What CUDA shows a process of the machine's devices, in CUDA's order. As in CUDA, what is
    listed behind an entry that is none is not visible."""
    if use.visible is None:
        return _by_index(use, machine)
    found: list[Device] = []
    for entry in (part.strip() for part in use.visible.split(",")):
        if entry.isdecimal():
            matches = _by_index(use, machine)[int(entry) :][:1]
        elif entry.upper().startswith(("GPU-", "MIG-")):
            start = entry.lower()
            matches = [d for d in machine.everything if d.uuid.lower().startswith(start)]
        else:
            matches = []
        if len(matches) != 1:
            break
        found += matches
    return found


def _by_index(use: Use, machine: Machine) -> list[Device]:
    """CUDA's order: the fastest first unless it was told to go by PCI address as NVML does. Which
    is the fastest is CUDA's secret, but among equals it goes by PCI address too. Of a GPU that is
    cut into MIG instances a process sees the first one."""
    if machine.missing:
        raise Unknown(machine.missing)
    if use.order != "PCI_BUS_ID" and len({gpu.name for gpu in machine.gpus}) > 1:
        raise Unknown
    return [gpu.instances[0] if gpu.instances else gpu for gpu in machine.gpus]
