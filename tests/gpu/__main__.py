"""On a machine with an NVIDIA GPU: what llmobs says of it, beside nvidia-smi and PyTorch.

    python -m tests.gpu [--seconds 2]

Takes half a minute and 2 GiB of memory of GPU 0. Prints figures; ends with 1 if some do not agree.
"""

import argparse
import contextlib
import csv
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmobs import process, worker
from llmobs.agent.collect import RunCollector
from llmobs.agent.gpu.signal import Gpus
from llmobs.agent.run import Run
from llmobs.metrics import BY_NAME

MIB = 1 << 20
MODEL = SimpleNamespace(served_model_name="m")
PARALLEL = SimpleNamespace(data_parallel_rank=0, distributed_executor_backend="mp")
CONFIG = SimpleNamespace(
    model_config=MODEL,
    parallel_config=PARALLEL,
    device_config=SimpleNamespace(device_type="cuda"),
)


class Check:
    def __init__(self) -> None:
        self.failed = 0

    def near(self, what: str, ours: float | None, theirs: float | None, by: float) -> None:
        """`by`: how far they may be apart; both may lack it."""
        known = ours is not None and theirs is not None
        good = abs(ours - theirs) <= by if known else ours is theirs  # type: ignore[operator]
        self.failed += not good
        print(f"{'ok ' if good else 'BAD'} {what:42} {ours!s:>22} {theirs!s:>22}")


def smi(*fields: str) -> dict[str, str]:
    """What nvidia-smi says of GPU 0."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}"]
    text = subprocess.check_output([*command, "--format=csv,noheader,nounits"], text=True)
    (row,) = csv.reader([text.strip()])
    return dict(zip(fields, (value.strip() for value in row), strict=True))


def number(text: str, scale: float = 1) -> float | None:
    try:
        return float(text) * scale
    except ValueError:
        return None  # [N/A]


class Ours:
    """A worker's ring, and the agent's view of it, both of this process."""

    def __init__(self, torch: Any, seconds: float) -> None:
        self.torch = torch
        worker.starts(None, None, None, CONFIG, 0)
        device = torch.device("cuda:0")
        worker.on_device(None, None, SimpleNamespace(device=device))
        ring = process.current().ring
        assert ring is not None, "no ring: see what was logged"
        self.run = Run(ring.path.parent)
        self.gpus = Gpus(self.run, seconds, print)
        self.run.signals.append(self.gpus)
        self.seconds = seconds
        self.run.poll()

    def step(self) -> None:
        worker.warmed_up(None, None, None)

    def look(self) -> None:
        """Wait for a look that began after this call."""
        time.sleep(2 * self.seconds + 1)
        self.run.poll()

    def value(self, metric: str, *labels: str) -> float | None:
        found = RunCollector(self.run).samples(BY_NAME[metric])
        return found.get(("m", *labels))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    seconds = parser.parse_args().seconds
    logging.basicConfig(level=logging.WARNING)
    import torch

    check = Check()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"LLMOBS_RUN_DIR": folder, "LLMOBS_AGENT": f"{folder}/run"}
        Path(folder, "run").mkdir()
        process.mark_server()
        torch.ones(1, device="cuda:0")
        ours = Ours(torch, seconds)
        compare(check, ours, torch)
        ours.gpus.close()
    print(f"{check.failed} do not agree" if check.failed else "all agree")
    return int(check.failed > 0)


def compare(check: Check, ours: Ours, torch: Any) -> None:
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")
    small = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda:0")
    del small  # reserved, no longer allocated
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(1000):
        torch.cuda.memory_stats_as_nested_dict(0)
    nested = (time.perf_counter() - began) * 1000
    began = time.perf_counter()
    for _ in range(100):
        torch.cuda.memory_stats(0)
    flat = (time.perf_counter() - began) * 10_000
    ours.step()
    ours.look()

    print(f"{'':46} {'llmobs':>22} {'nvidia-smi, PyTorch':>22}")
    told = smi(
        *("uuid", "name", "memory.total", "memory.reserved", "memory.used", "memory.free"),
        *("power.draw.instant", "power.draw.average", "utilization.gpu"),
        "clocks_event_reasons.sw_power_cap",
    )
    for kind in ("total", "reserved", "used", "free"):
        theirs = number(told[f"memory.{kind}"], MIB)
        check.near(
            f"memory {kind}", ours.value("llmobs_gpu_memory_bytes", "0", kind), theirs, 8 * MIB
        )
    used, total = number(told["memory.used"]), number(told["memory.total"])
    pressure = ours.value("llmobs_gpu_memory_pressure_ratio", "0", "device")
    check.near("pressure, device", pressure, used / total if used and total else None, 0.001)
    for kind, theirs in (
        ("allocated", torch.cuda.memory_allocated(0)),
        ("reserved", torch.cuda.memory_reserved(0)),
        ("peak", torch.cuda.max_memory_allocated(0)),
    ):
        value = ours.value("llmobs_torch_memory_bytes", "0", "0", kind)
        check.near(f"torch {kind}", value, theirs, 0)
    stats = torch.cuda.memory_stats(0)
    for event, name in (("alloc_retry", "num_alloc_retries"), ("oom", "num_ooms")):
        value = ours.value("llmobs_torch_memory_events_total", "0", "0", event)
        check.near(f"torch {name}", value, stats[name], 0)
    reason = ours.value("llmobs_gpu_throttled", "0", "sw_power_cap")
    active = told["clocks_event_reasons.sw_power_cap"]
    check.near("throttled, power cap", reason, float(active == "Active"), 0)
    power = ours.value("llmobs_gpu_power_watts", "0")
    check.near("power, W", power, number(told["power.draw.average"]), 60)

    # 4 GiB each way over PCIe: less than a counter's lap.
    before = [ours.value("llmobs_gpu_pcie_bytes_total", "0", d) for d in ("tx", "rx")]
    there = torch.empty(1 << 28, dtype=torch.uint8).pin_memory()
    for _ in range(12):
        held[: 1 << 28].copy_(there)
        there.copy_(held[: 1 << 28])
    torch.cuda.synchronize()
    ours.look()
    after = [ours.value("llmobs_gpu_pcie_bytes_total", "0", d) for d in ("tx", "rx")]
    for direction, old, new in zip(("tx", "rx"), before, after, strict=True):
        moved = None if old is None or new is None else new - old
        check.near(f"PCIe {direction}, bytes for 3 GiB copied", moved, 3 << 30, 1 << 29)

    # An allocation that must fail.
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(1 << 46, dtype=torch.uint8, device="cuda:0")
    ours.step()
    ours.look()
    oom = ours.value("llmobs_torch_memory_events_total", "0", "0", "oom")
    check.near("torch num_ooms after one", oom, stats["num_ooms"] + 1, 0)

    print(f"\nmemory_stats_as_nested_dict {nested:.1f} us, memory_stats {flat:.1f} us")
    began = time.perf_counter()
    ours.gpus._look(ours.gpus._uses, time.monotonic())
    print(f"one look {(time.perf_counter() - began) * 1000:.1f} ms")
    print("raw PCIe:", _raw())
    for name in BY_NAME:
        if name.startswith("llmobs_gpu_"):
            for labels, value in RunCollector(ours.run).samples(BY_NAME[name]).items():
                print(name, labels[1:], value)
    print("lacking:", ours.gpus.lacking())


def _raw() -> list[tuple[int, int, int]]:
    """Width and value of the driver's own counters: whether they are of 32 bits is what we want to
    know."""
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    fields = pynvml.nvmlDeviceGetFieldValues(handle, [197, 198])
    return [(f.nvmlReturn, f.valueType, f.value.ullVal) for f in fields]


if __name__ == "__main__":
    sys.exit(main())
