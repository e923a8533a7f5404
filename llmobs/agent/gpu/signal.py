"""The server's GPUs, looked at by a thread of its own: the page never waits for a driver."""

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from llmobs import schema
from llmobs.agent.gpu.devices import NOWHERE, Device, Machine, Unknown, Use, device_of, machine
from llmobs.agent.gpu.library import Unavailable, load, reason_of
from llmobs.agent.gpu.pcie import Pcie
from llmobs.agent.gpu.reading import Reading
from llmobs.agent.gpu.xids import Xids
from llmobs.agent.run import Run, Source
from llmobs.agent.signals import Samples
from llmobs.features import GPU_FEATURES, MEANING

log = logging.getLogger("llmobs.agent")

PATIENCE_SECONDS = 10.0
"""A look that takes longer hangs: what was found before is no longer shown."""
LONGEST_PAUSE = 300.0
RATIO = "llmobs_gpu_memory_pressure_ratio"
EFFECTIVE = "gpu_memory_effective"
TORCH = "torch_memory"
OF_NVML = tuple(name for name in GPU_FEATURES if name not in (TORCH, EFFECTIVE))


class View(NamedTuple):
    """What one look found; handed over by the thread as a whole."""

    found: dict[str, Samples]
    lacking: dict[str, str]
    devices: dict[Use, Device]


class Gpus:
    """A Signal (signals.py). `seconds` is the time between two looks."""

    def __init__(
        self,
        run: Run,
        seconds: float,
        say: Callable[[str], None],
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.run = run
        self.seconds = seconds
        self.say = say
        self.patience = patience
        self._uses: list[Use] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stop = False
        self._began: float | None = None
        """When the look now in progress began."""
        self._view = View({}, {}, {})
        self._shown, self._hung = self._view, False
        self._answer: dict[str, Samples] | None = None
        # The thread's own.
        self._nvml: Any = None
        self._machine = Machine(())
        self._pcie: dict[str, Pcie] = {}
        self._xids = Xids()
        self._failures = 0
        """Of NVML as a whole, in a row."""
        self._renewals = 0
        """How often it was initialised anew for the sake of single GPUs, in a row."""
        self._renew_at: float | None = None
        self._said: set[str] = set()

    def poll(self) -> None:
        # One page tells one state, whatever the thread finds meanwhile.
        self._answer, self._shown, self._hung = None, self._view, self._hangs()
        uses = [use for _, use in self._workers()]
        if uses == self._uses:
            return
        self._uses = uses
        if any(use.type == "cuda" for use in uses) and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="gpus", daemon=True)
            self._thread.start()
        self._wake.set()

    def samples(self) -> dict[str, Samples]:
        if self._answer is None:  # it is asked for by each metric
            self._answer = {} if self._hung else self._of_models(self._shown)
        return self._answer

    def _of_models(self, view: View) -> dict[str, Samples]:
        """Under the name of each model that a GPU works for: several servers may have one agent."""
        models: dict[str, set[str]] = defaultdict(set)
        for use, device in view.devices.items():
            models[device.label].add(use.model)
            models[device.board.label].add(use.model)
        samples: dict[str, Samples] = {}
        for name, found in (*view.found.items(), (RATIO, self._effective(view))):
            of_all = (
                (m, labels, value) for labels, value in found.items() for m in models[labels[0]]
            )
            samples.setdefault(name, {}).update({(m, *labels): v for m, labels, v in of_all})
        samples["llmobs_gpu_info"] = {
            (use.model, device.label, device.uuid, device.name, use.engine, use.rank): 1.0
            for use, device in view.devices.items()
        }
        return samples

    def lacking(self) -> dict[str, str]:
        uses = self._uses
        if not uses:
            workers = (s.info.get("lacking", {}).get("worker") for s in self.run.sources.values())
            reason = next(filter(None, workers), None)
            return dict.fromkeys(GPU_FEATURES, reason) if reason else {}
        if not any(use.type == "cuda" for use in uses):
            return dict.fromkeys(GPU_FEATURES, "no_gpu")
        view = self._shown
        lacking = dict.fromkeys(OF_NVML, "no_answer") if self._hung else dict(view.lacking)
        if memory := lacking.get("gpu_memory"):
            lacking[EFFECTIVE] = memory
        elif len(self._effective(view)) < len({d.label for d in view.devices.values()}):
            lacking[EFFECTIVE] = "no_kv_pool"
        if any(use.index == NOWHERE for use in uses):
            lacking[TORCH] = "not_supported"
        return lacking

    def close(self) -> None:
        self._stop = True
        self._wake.set()

    def _workers(self) -> Iterator[tuple[Source, Use]]:
        for source in self.run.sources.values():
            if source.alive and "worker" in source.roles:
                use = Use.told(source.info)
                if use is not None:
                    yield source, use

    def _hangs(self) -> bool:
        began = self._began
        return began is not None and time.monotonic() - began > self.patience

    # The KV cache's free blocks are memory that is used only for the driver

    def _effective(self, view: View) -> Samples:
        """The share of a device's memory that is used, without the KV blocks that are free."""
        free = self._free_kv()
        memory = view.found.get("llmobs_gpu_memory_bytes", {})
        samples: Samples = {}
        for label in {device.label for device in view.devices.values()}:
            used, total = memory.get((label, "used")), memory.get((label, "total"))
            pools = [free.get(use) for use, d in view.devices.items() if d.label == label]
            if used is None or not total or None in pools:
                continue
            # A pool that is larger than all that is used is not there: the engine sleeps.
            unused = sum(part for pool, part in filter(None, pools) if pool <= used)
            samples[label, "effective"] = max(used - unused, 0.0) / total
        return samples

    def _free_kv(self) -> dict[Use, tuple[float, float]]:
        """By worker: the bytes of its KV pool, and of those that are free. Every worker of an
        engine has as many blocks as the engine counts."""
        engines = {
            (str(source.info.get("server")), str(source.info.get("engine", "0"))): source
            for source in self.run.sources.values()
            if source.alive and "engine_core" in source.roles
        }
        pools = {}
        for _, use in self._workers():
            source = engines.get((use.server, use.engine))
            if source is not None and (pool := _pool(source)) is not None:
                pools[use] = pool
        return pools

    # The thread

    def _work(self) -> None:
        while not self._stop:
            self._wake.clear()
            self._began = time.monotonic()
            try:
                self._look(self._uses, self._began)
            except Exception:
                log.exception("looking at the GPUs failed")
                self._fail("driver_error")
            self._began = None
            self._wake.wait(self._pause(self._failures))

    def _pause(self, failures: int) -> float:
        """Seconds to the next attempt: the more failed in a row, the longer."""
        return float(min(self.seconds * 2.0 ** min(failures, 10), max(LONGEST_PAUSE, self.seconds)))

    def _look(self, uses: list[Use], now: float) -> None:
        """One look at all devices of the server."""
        if self._renew_at is not None and now >= self._renew_at:
            self._give_up()
        try:
            if self._nvml is None:
                self._nvml = load()
                self._machine = machine(self._nvml)
        except Unavailable as error:
            self._fail(error.reason, error.detail)
            return
        except Exception as error:
            self._fail(reason_of(error))
            return
        devices, lacking = self._resolve(uses)
        reading = Reading(self._nvml)
        try:
            self._read(reading, devices, now)
        except self._nvml.NVMLError as error:
            self._fail(reason_of(error))
            return
        self._failures = 0
        self._view = View(reading.samples, lacking | reading.lacking, devices)
        if not reading.lost and not self._machine.missing:
            self._renewals, self._renew_at = 0, None
        elif self._renew_at is None or now >= self._renew_at:
            # Only a new beginning brings back a lost GPU. The others are looked at as ever.
            self._renewals += 1
            self._renew_at = now + self._pause(self._renewals)

    def _read(self, reading: Reading, devices: dict[Use, Device], now: float) -> None:
        boards = {}
        for device in dict.fromkeys(devices.values()):
            reading.memory(device)
            boards[device.board.uuid] = device.board
        for uuid, board in boards.items():
            reading.board(board, self._pcie.setdefault(uuid, Pcie()), self._xids, now)

    def _resolve(self, uses: list[Use]) -> tuple[dict[Use, Device], dict[str, str]]:
        """Each worker's device; what is lacking if one has none."""
        devices, reason = {}, ""
        for use in uses:
            if use.type != "cuda" or (use.uuid is None and use.index is None):
                continue  # not on its device yet
            try:
                device = device_of(use, self._machine)
            except Unknown as unknown:
                reason = unknown.reason
                continue
            if device is not None:
                devices[use] = device
            else:
                reason = reason or "no_gpu"
        return devices, dict.fromkeys(OF_NVML, reason) if reason else {}

    def _fail(self, reason: str, detail: str = "") -> None:
        """Nothing can be told now; begin anew after a while."""
        self._view = View({}, dict.fromkeys(OF_NVML, reason), {})
        if reason not in self._said:
            self._said.add(reason)
            more = f" ({detail})" if detail else ""
            self.say(f"llmobs: no figures of the GPUs: {MEANING[reason]}{more}")
        self._failures += 1
        self._give_up()

    def _give_up(self) -> None:
        """NVML is to be initialised anew."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            self._xids.forget(nvml)
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()


def _pool(source: Source) -> tuple[float, float] | None:
    """An engine's KV pool, as each of its workers has one: bytes, and free bytes; None while it is
    not known."""
    cells, at = source.cells, schema.PROCESS_CELL
    total, blocks = cells[at["kv_cache_bytes"]], cells[at["kv_pool_blocks"]]
    if not total or not blocks:
        return None
    allocated, freed = cells[at["kv_block_events"] : at["kv_block_events"] + 2]
    # vLLM's null block has its place in the pool, and is neither used nor free.
    return total, total * (blocks - (allocated - freed)) / (blocks + 1)
