"""Which GPU a worker is on, by what it says of itself."""

from typing import Any

import pytest

from llmobs.agent.gpu.devices import Device, Machine, Unknown, Use, device_of
from llmobs.agent.gpu.devices import machine as machine_of
from tests.agent.gpu import machine as stand_in
from tests.agent.gpu.machine import UUIDS
from tests.agent.gpu.server import on_gpu


def gpu(index: int, name: str = "H100", instances: int = 0) -> Device:
    made = Device(None, str(index), UUIDS[index], name)
    made.instances = [
        Device(None, f"{index}:{n}", f"MIG-{index}{n}000000-dddd", "MIG", parent=made)
        for n in range(instances)
    ]
    return made


ALIKE = Machine((gpu(0), gpu(1), gpu(2)))
MIXED = Machine((gpu(0, "L4"), gpu(1), gpu(2)))
SLICED = Machine((gpu(0, instances=2), gpu(1)))
GONE = Machine((gpu(0), gpu(2)), missing="lost")


def use(**told: Any) -> Use:
    found = Use.told(
        {"models": ["m"], "server": "1-2", "engine": 0, "rank": 3, "gpu": on_gpu(0) | told}
    )
    assert found is not None
    return found


FOUND = [
    # By the index among all, and among what the process sees.
    (ALIKE, {"index": 0}, "0"),
    (ALIKE, {"index": 2}, "2"),
    (ALIKE, {"index": 0, "visible": "2"}, "2"),
    (ALIKE, {"index": 1, "visible": "2,0"}, "0"),
    (ALIKE, {"index": 1, "visible": " 2 , 1 "}, "1"),
    (ALIKE, {"index": 0, "visible": "1,7,0"}, "1"),
    # UUIDs, whole or as much as tells them apart, in any case.
    (ALIKE, {"index": 0, "visible": UUIDS[1]}, "1"),
    (ALIKE, {"index": 0, "visible": UUIDS[1].lower()}, "1"),
    (ALIKE, {"index": 0, "visible": "GPU-1111222"}, "1"),
    (ALIKE, {"index": 1, "visible": "GPU-3,GPU-11111"}, "0"),
    (ALIKE, {"index": 1, "visible": "GPU-3,0"}, "0"),
    # What PyTorch says goes before what the list seems to say.
    (ALIKE, {"index": 0, "visible": "0", "uuid": UUIDS[2][4:]}, "2"),
    (ALIKE, {"index": 0, "uuid": UUIDS[2][4:].upper()}, "2"),
    (GONE, {"index": 1, "uuid": UUIDS[2][4:]}, "2"),
    # GPUs of several kinds.
    (MIXED, {"index": 1, "order": "PCI_BUS_ID"}, "1"),
    (MIXED, {"index": 0, "visible": "0", "order": "PCI_BUS_ID"}, "0"),
    (MIXED, {"index": 0, "visible": "GPU-3"}, "2"),
    (MIXED, {"index": 0, "uuid": UUIDS[0][4:]}, "0"),
    # MIG.
    (SLICED, {"index": 0, "visible": "MIG-01000000-dddd"}, "0:1"),
    (SLICED, {"index": 0, "visible": "MIG-01"}, "0:1"),
    (SLICED, {"index": 0, "uuid": "00000000-dddd"}, "0:0"),
    (SLICED, {"index": 0, "uuid": "01000000-dddd", "visible": "MIG-00"}, "0:1"),
    (SLICED, {"index": 0, "uuid": UUIDS[0][4:], "visible": "MIG-01"}, "0:1"),
    (SLICED, {"index": 0}, "0:0"),
    (SLICED, {"index": 0, "visible": "1"}, "1"),
    # None at all.
    (ALIKE, {"index": 0, "visible": ""}, None),
    (ALIKE, {"index": 0, "visible": "-1"}, None),
    (ALIKE, {"index": 0, "visible": "NoDevFiles"}, None),
    (ALIKE, {"index": 0, "visible": "7,0"}, None),
    (Machine(()), {"index": 0}, None),
]


@pytest.mark.parametrize(("known", "told", "expected"), FOUND)
def test_a_worker_and_its_device(
    known: Machine, told: dict[str, Any], expected: str | None
) -> None:
    found = device_of(use(**told), known)
    assert (found.label if found else None) == expected


UNKNOWN = [
    (ALIKE, {"index": 3}, "unknown_gpu"),
    (ALIKE, {"index": -1}, "unknown_gpu"),
    (ALIKE, {"index": 1, "visible": "2"}, "unknown_gpu"),
    (ALIKE, {"index": 1, "visible": "2,GPU-1"}, "unknown_gpu"),  # two begin so
    (ALIKE, {"index": 0, "uuid": "99999999-0000"}, "unknown_gpu"),
    (MIXED, {"index": 0}, "unknown_gpu"),  # the fastest first, whichever that is
    (MIXED, {"index": 0, "visible": "0", "order": "FASTEST_FIRST"}, "unknown_gpu"),
    # The indices behind the one that is lost are not what they were.
    (GONE, {"index": 1}, "lost"),
    (GONE, {"index": 0, "visible": "1"}, "lost"),
    (GONE, {"index": 1, "uuid": UUIDS[1][4:]}, "lost"),
]


@pytest.mark.parametrize(("known", "told", "reason"), UNKNOWN)
def test_a_device_that_cannot_be_told(known: Machine, told: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unknown) as caught:
        device_of(use(**told), known)
    assert caught.value.reason == reason


def test_what_a_worker_says() -> None:
    told = {"type": "cuda", "index": 1, "uuid": "u", "visible": "0,1", "order": "PCI_BUS_ID"}
    assert Use.told(
        {"models": ["m", "l"], "server": "1-2", "engine": 4, "rank": 7, "gpu": told}
    ) == Use("m", "1-2", "4", "7", "cuda", 1, "u", "0,1", "PCI_BUS_ID")
    damaged = {"type": "cuda", "index": "1", "uuid": 5, "visible": ["0"], "order": {}}
    assert Use.told({"models": ["m"], "gpu": damaged}) == Use("m", "None", "0", "0", "cuda")


def test_the_machine(machine: stand_in.Machine, nvml: Any) -> None:
    machine.change(
        {
            "1.instances": 2,
            "1:0.error.nvmlDeviceGetUUID": 4,  # another's
            "1:1.uuid": "MIG-1",
            "1:1.name": "1g",
            "2.error.nvmlDeviceGetHandleByIndex_v2": 15,
        }
    )
    found = machine_of(nvml)
    assert found.missing == "lost"
    assert [d.label for d in found.everything] == ["0", "1", "1:1"]
    instance = found.everything[2]
    assert (instance.uuid, instance.name) == ("MIG-1", "1g")
    assert instance.board is found.gpus[1]
    assert found.gpus[0].board is found.gpus[0]
