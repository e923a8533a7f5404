"""Bytes over PCIe, as a counter: NVML has none that is both wide and everywhere."""

from dataclasses import dataclass, field
from typing import Any

from llmobs.agent.gpu.library import BLANK_32, Blank, field_values, known, reason_of

TX_BYTES, RX_BYTES = 197, 198
"""Field ids of nvml.h (driver 565 and later): bytes, of which it says `can be wrapped`."""
LAP = 1 << 32
KILO = 1000
DIRECTIONS = ("tx", "rx")
"""As the GPU sees it, in the order of NVML's numbers."""


@dataclass
class Pcie:
    """One GPU's traffic since this agent began.

    Where the driver counts bytes, it does so in 32 bits (as far as is known; a counter that was
    once beyond is taken for a wide one) and goes round after 4 GiB. How often it did between two
    looks is told by NVML's rate, which it measures over 20 ms: by the lower of those at both looks,
    for a single burst says little. So the figure is exact up to 4 GiB a look, and hardly too high
    above. Where the driver does not count, the rate is taken for the whole time since the last
    look: right on average, coarse where traffic comes in bursts.
    """

    totals: list[float] = field(default_factory=lambda: [0.0, 0.0])
    counts: list[int] | None = None
    rates: list[int] | None = None
    wide: bool = False
    at: float = 0.0

    def read(self, nvml: Any, handle: Any, now: float) -> list[tuple[str, tuple[str, ...], float]]:
        """`now`: seconds of the monotonic clock. Raises what NVML does."""
        counts = _counts(nvml, handle)
        self.wide |= counts is not None and max(counts) >= LAP
        rates = None if self.wide else _rates(nvml, handle)
        gone = self._gone(counts, rates, now - self.at)
        self.totals = [total + more for total, more in zip(self.totals, gone, strict=True)]
        self.counts, self.rates, self.at = counts, rates, now
        name = "llmobs_gpu_pcie_bytes_total"
        return [(name, (d,), total) for d, total in zip(DIRECTIONS, self.totals, strict=True)]

    def _gone(
        self, counts: list[int] | None, rates: list[int] | None, seconds: float
    ) -> list[float]:
        """The bytes of each direction since the last look."""
        if counts is not None and self.counts is not None:
            pairs = list(zip(self.counts, counts, strict=True))
            if rates is None:
                # One that falls was set back: by a reset of the GPU, or of its driver.
                return [max(new - old, 0) for old, new in pairs]
            lower = map(min, rates, self.rates or rates)
            return [
                advance(old, new, KILO * rate * seconds)
                for (old, new), rate in zip(pairs, lower, strict=True)
            ]
        if counts is None and rates is not None and self.at:
            return [KILO * rate * seconds for rate in rates]
        return [0.0, 0.0]


def _counts(nvml: Any, handle: Any) -> list[int] | None:
    """None where the driver does not count."""
    try:
        return field_values(nvml, handle, TX_BYTES, RX_BYTES)
    except (nvml.NVMLError, Blank) as error:
        if reason_of(error) != "not_supported":
            raise
        return None


def _rates(nvml: Any, handle: Any) -> list[int]:
    """In kB/s; this takes 20 ms each."""
    return [
        known(nvml.nvmlDeviceGetPcieThroughput(handle, number), BLANK_32)
        for number, _ in enumerate(DIRECTIONS)
    ]


def advance(old: int, new: int, expected: float) -> float:
    """How far a counter of 32 bits went, about `expected` being likely."""
    least = (new - old) % LAP
    return least + LAP * max(round((expected - least) / LAP), 0)
