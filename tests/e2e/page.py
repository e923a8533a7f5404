"""Read llmobs' metrics page, and vLLM's own, as any Prometheus would."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as read_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as read_text

AGENT_S = 30.0  # how long the agent may take to its page
SETTLE_S = 30.0  # how long the last words on a request may take
OPENMETRICS = "application/openmetrics-text; version=1.0.0"

Labels = frozenset[tuple[str, str]]


class Figures:
    """The samples of one scrape, or the difference of two."""

    def __init__(self, samples: dict[tuple[str, Labels], float]) -> None:
        self.samples = samples

    def __sub__(self, before: "Figures") -> "Figures":
        return Figures({k: v - before.samples.get(k, 0) for k, v in self.samples.items()})

    def _matching(self, name: str, wanted: dict[str, str]) -> list[tuple[dict[str, str], float]]:
        # A series that is not there is no zero: KeyError.
        found = [
            (dict(labels), value)
            for (sample, labels), value in self.samples.items()
            if sample == name and wanted.items() <= dict(labels).items()
        ]
        if not found:
            raise KeyError(f"no series {name} {wanted}")
        return found

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series of that name that have these labels."""
        return sum(value for _, value in self._matching(name, labels))

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The same by the values of one more label."""
        sums: dict[str, float] = {}
        for found, value in self._matching(name, labels):
            sums[found[label]] = sums.get(found[label], 0) + value
        return sums


def fetch(url: str, accept: str = "text/plain", timeout: float = 10) -> str:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return str(answer.read().decode())


def scrape(url: str) -> Figures:
    """The figures of any page in the text format, histogram buckets included."""
    return _figures(read_text(fetch(url)))


def _figures(families: Any) -> Figures:
    return Figures(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }
    )


def eventually(what: str, condition: Callable[[], Any], within_s: float = SETTLE_S) -> Any:
    """The condition's first true value; fails with its last one."""
    end = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s:.0f} s: {what}; last: {value!r}")
        time.sleep(0.1)


class Page:
    """The page of the one server whose run folder is below `runs`, or of that with this first
    process."""

    def __init__(self, runs: Path, pid: int | None = None) -> None:
        self.runs = runs
        self.folders = f"{pid or '*'}-*"
        self.state: dict[str, Any] = eventually("the agent's page", self._read_state, AGENT_S)
        self.url: str = self.state["page"]

    def _read_state(self) -> dict[str, Any] | None:
        found = list(self.runs.glob(f"{self.folders}/agent.json"))
        assert len(found) <= 1, f"several run folders: {found}"
        state = json.loads(found[0].read_text()) if found else {}
        return state if "page" in state else None

    @property
    def folder(self) -> Path:
        """The run folder."""
        (folder,) = self.runs.glob(self.folders)
        return folder

    def figures(self) -> Figures:
        return scrape(f"{self.url}/metrics")

    def openmetrics(self) -> Figures:
        return _figures(read_openmetrics(fetch(f"{self.url}/metrics", OPENMETRICS)))

    def requests(self) -> list[dict[str, Any]]:
        """The finished requests, oldest first; `phases` by name."""
        answer = json.loads(fetch(f"{self.url}/requests"))
        for request in answer["requests"]:
            # A rejected request has the first phase only.
            request["phases"] = dict(zip(answer["phases"], request["phases"], strict=False))
        return list(answer["requests"])

    def settled(self, before: Figures, ended: int) -> Figures:
        """What changed since `before`, once so many more requests ended and none is left.

        A counter counts an end at once; its histograms follow when the engine is done with it."""
        told = 0.0, 0.0, 0.0

        def all_told() -> Figures | None:
            nonlocal told
            try:
                now = self.figures()
            except (urllib.error.URLError, OSError):
                return None
            change = now - before
            told = (
                change.total("llmobs_requests_total"),
                change.total("llmobs_request_seconds_count")
                + change.total("llmobs_incomplete_requests_total"),
                now.total("llmobs_requests"),
            )
            return change if told[0] >= ended and told[1] >= ended and not told[2] else None

        try:
            change: Figures = eventually(f"{ended} requests told", all_told)
        except AssertionError as error:
            raise AssertionError(f"{error}; ended, told, in the engine: {told}") from None
        return change
