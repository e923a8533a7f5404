"""How long a prefill takes for its length: seconds = a + b·n + c·n² over its computed tokens."""

from itertools import combinations

import numpy as np
import numpy.typing as npt

from llmobs.metrics import TERMS

PREFILLS_NEEDED = 30
PER_OCTAVE_NEEDED = 3
"""An octave, from 2^k to 2^(k+1) - 1 tokens, with fewer prefills tells nothing: one of them may
well have been held up."""
REACH = 1.25
"""So far beyond the lengths that were seen it predicts. Between them one octave may be empty."""
KEPT_PER_OCTAVE = 128
EVERY_NS = 900_000_000_000 // KEPT_PER_OCTAVE
OLDEST_NS = 3_600_000_000_000
REFIT_NS = 5_000_000_000
REFIT_SHARE = 0.05
"""Of the window that must be new."""
OCTAVES = 24

Array = npt.NDArray[np.float64]
Coefficients = tuple[float, float, float]
"""In the order of TERMS: seconds, seconds a token, seconds a token squared."""

SUPPORTS = [list(s) for size in (1, 2, 3) for s in combinations(range(3), size)]
ROUNDS = 30
CAUCHY = 2.385
"""Residuals of so many standard deviations have half the weight; of normal noise 95% of the
information is used (Holland and Welsch, 1977)."""
LEAST_SCALE = 0.01


def nonnegative(gram: Array, target: Array) -> Array:
    """The x ≥ 0 for which x·gram·x - 2 target·x is least: non-negative least squares by its normal
    equations. Three unknowns have seven sets of which the others are 0, and all are tried."""
    best, least = np.zeros(3), 0.0
    for support in SUPPORTS:
        part = gram[np.ix_(support, support)]
        x = np.linalg.lstsq(part, target[support], rcond=None)[0]
        if x.min() < 0:
            continue
        value = float(x @ part @ x - 2 * target[support] @ x)
        if value < least - 1e-12 * abs(least):  # of equal ones the simplest
            best, least = np.zeros(3), value
            best[support] = x
    return best


def fit(tokens: Array, seconds: Array) -> Coefficients:
    """The coefficients for which the relative errors are smallest, those of the slow outliers (held
    up by a batch, by a collection of garbage) hardly counting."""
    longest = float(tokens.max())
    n = tokens / longest
    terms = np.stack([np.ones_like(n), n, n * n], axis=1)
    # Relative to what was measured at first, so that nothing slow weighs more than 1.
    near, weights = seconds, np.ones_like(seconds)
    before = np.zeros_like(seconds)
    x = np.zeros(3)
    for _ in range(ROUNDS):
        rows = terms * (np.sqrt(weights) / near)[:, None]
        right = np.sqrt(weights) * seconds / near
        size = np.sqrt((rows * rows).sum(axis=0))
        rows /= size
        x = nonnegative(rows.T @ rows, rows.T @ right) / size
        near = terms @ x
        if np.abs(near - before).max() <= 1e-3 * near.max():
            break
        before = near
        errors = seconds / near - 1
        scale = max(1.4826 * float(np.median(np.abs(errors))), LEAST_SCALE)
        weights = 1 / (1 + (errors / (CAUCHY * scale)) ** 2)
    a, b, c = (x / (1.0, longest, longest**2)).tolist()
    return a, b, c


class LatencyModel:
    """The fit of one engine, over the newest KEPT_PER_OCTAVE prefills of each octave of lengths.

    So the rare long ones are not pushed out by the many short ones, nor outweighed. An octave that
    is full takes one in 7 s, whatever the traffic: it reaches back about a quarter of an hour, and
    an hour where there is less. A fit stands until the next one can be made.
    """

    def __init__(self) -> None:
        self.fitted: Coefficients | None = None
        """The last fit; without it nothing is predicted."""
        self.reason = "few_prefills"
        """Why the coefficients are not known (features.py), or nothing."""
        self._ranges: list[tuple[float, float]] = []
        self._kept = np.zeros((OCTAVES, KEPT_PER_OCTAVE, 3))  # time, tokens, seconds
        self._counts = [0] * OCTAVES
        self._due = [0] * OCTAVES
        self._next_fit = 0
        self._new = 0

    @property
    def coefficients(self) -> Coefficients | None:
        """As far as they are known."""
        return None if self.reason else self.fitted

    def predict(self, tokens: int) -> float:
        """Seconds that so many computed tokens should take; 0 where nothing is known, as beyond
        the lengths that were seen."""
        if self.fitted is None:
            return 0.0
        if not any(low / REACH <= tokens <= high * REACH for low, high in self._ranges):
            return 0.0
        a, b, c = self.fitted
        return a + b * tokens + c * tokens * tokens

    def add(self, time: int, tokens: int, seconds: float) -> None:
        """A prefill was done, at so many nanoseconds."""
        if tokens < 1 or seconds <= 0:
            return
        octave = min(tokens.bit_length(), OCTAVES) - 1
        count = self._counts[octave]
        if count >= KEPT_PER_OCTAVE and time < self._due[octave]:
            return
        self._kept[octave, count % KEPT_PER_OCTAVE] = time, tokens, seconds
        self._counts[octave] = count + 1
        # Once full by the schedule, not from this one on: that would be one in up to 14 s.
        self._due[octave] = min(max(self._due[octave], time - EVERY_NS), time) + EVERY_NS
        self._new += 1
        if time >= self._next_fit:
            self._fit(time)

    def _fit(self, time: int) -> None:
        filled = [min(count, KEPT_PER_OCTAVE) for count in self._counts]
        if sum(filled) < PREFILLS_NEEDED or self._new < REFIT_SHARE * sum(filled):
            return
        self._next_fit = time + REFIT_NS
        self._new = 0
        parts = {}
        for octave, count in enumerate(filled):
            kept = self._kept[octave, :count]
            kept = kept[kept[:, 0] >= time - OLDEST_NS]
            if len(kept) >= PER_OCTAVE_NEEDED:
                parts[octave] = kept
        if sum(map(len, parts.values())) < PREFILLS_NEEDED:
            return
        window = np.concatenate(list(parts.values()))
        self.fitted = fit(window[:, 1], window[:, 2])
        self._ranges = _ranges({o: kept[:, 1] for o, kept in parts.items()})
        self.reason = "" if _apart(list(parts)) >= len(TERMS) else "few_lengths"


def _ranges(seen: dict[int, Array]) -> list[tuple[float, float]]:
    """Where it predicts, from the lengths seen in each octave."""
    ranges: list[tuple[float, float]] = []
    last = -OCTAVES
    for octave, tokens in seen.items():
        low, high = float(tokens.min()), float(tokens.max())
        if octave - last <= 2:
            low = ranges.pop()[0]
        ranges.append((low, high))
        last = octave
    return ranges


def _apart(octaves: list[int]) -> int:
    """How many there are of which none is beside another: so many terms can be told apart."""
    count, last = 0, -2
    for octave in octaves:
        if octave - last >= 2:
            count, last = count + 1, octave
    return count
