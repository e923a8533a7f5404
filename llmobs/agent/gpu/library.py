"""NVML by the package nvidia-ml-py: how it is loaded, and what its errors mean."""

import ctypes
import importlib
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
"""NVIDIA's driver brings it."""
NEEDED = (
    "NVMLError",
    "nvmlInit",
    "nvmlShutdown",
    "nvmlMemory_v2",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlEventSetWait_v2",
)
"""By these nvidia-ml-py is known. The old package `pynvml`, and others that call themselves so,
lack some, or are something else altogether."""

# What NVML returns (nvml.h, nvmlReturn_t), written out: an old nvidia-ml-py may not name them all.
UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 1, 2, 3, 4, 6
DRIVER_NOT_LOADED, TIMEOUT, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 9, 10, 12, 13
GPU_IS_LOST, RESET_REQUIRED, OTHER_VERSION = 15, 16, 25

REASONS = {
    INVALID_ARGUMENT: "not_supported",
    NOT_SUPPORTED: "not_supported",
    NOT_FOUND: "not_supported",
    FUNCTION_NOT_FOUND: "not_supported",
    OTHER_VERSION: "not_supported",
    NO_PERMISSION: "no_permission",
    DRIVER_NOT_LOADED: "no_driver",
    LIBRARY_NOT_FOUND: "no_driver",
    UNINITIALIZED: "lost",
    GPU_IS_LOST: "lost",
    RESET_REQUIRED: "lost",
}
"""Why a figure is missing, by the error; any other is a `driver_error`."""
OF_THE_WHOLE = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND})
"""Errors not of one GPU: the library must be initialised anew."""

BLANK_64 = 0x7FFFFFFFFFFFFFF0
BLANK_32 = 0x7FFFFFF0
"""From here on a number is none: `blank`, `not found`, `not supported`, `no permission`."""


class Unavailable(Exception):
    """There is no NVML here, for a `reason` of features.py."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason
        self.detail = detail


class Blank(Exception):
    """NVML answered with a number that is none."""


def known(value: int, blank: int = BLANK_64) -> int:
    """The number, unless it is none: raises Blank."""
    if value >= blank:
        raise Blank
    return value


def reason_of(error: Exception) -> str:
    """What stands in the way, for features.py."""
    if isinstance(error, Blank):
        return "not_supported"
    return REASONS.get(getattr(error, "value", -1), "driver_error")


def field_values(nvml: Any, handle: Any, *fields: int | tuple[int, int]) -> list[int]:
    """NVML's newer way to ask, by number, or number and scope: each field has an error of its own.
    Raises the first."""
    values = []
    for field in nvml.nvmlDeviceGetFieldValues(handle, list(fields)):
        if field.nvmlReturn:
            raise nvml.NVMLError(field.nvmlReturn)
        name = {1: "uiVal", 2: "ulVal", 3: "ullVal"}.get(field.valueType)
        if name is None:
            raise Blank
        values.append(known(int(getattr(field.value, name))))
    return values


def load() -> Any:
    """The module pynvml, with NVML initialised. Raises Unavailable, or what nvmlInit raises.

    Without the driver's library nothing is imported: the module takes 3 MB."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        raise Unavailable("no_driver") from None
    try:
        nvml = importlib.import_module("pynvml")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "pynvml":
            raise Unavailable("no_library") from None
        # Some other module by that name, whatever it does.
        raise Unavailable("old_library", f"importing pynvml fails: {error}") from None
    missing = [name for name in NEEDED if not hasattr(nvml, name)]
    if missing:
        raise Unavailable("old_library", f"{nvml.__file__} has no {missing[0]}")
    nvml.nvmlInit()
    return nvml
