"""What the agent costs, at 64 streams, over an hour's worth of records, and in a flood of them.

A process plays the server (writer.py), the agent is the real one. Everything is on: traces go to a
collector, the page is scraped in OpenMetrics. What the page tells at the end is compared with what
the writer counted; a difference ends the benchmark with an error.
"""

import argparse
import contextlib
import gzip
import json
import multiprocessing
import os
import re
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from benchmarks.writer import Traffic, Truth, serve
from demo.receiver import Receiver
from tests.e2e.page import OPENMETRICS, Figures

TICK = os.sysconf("SC_CLK_TCK")
NORMAL = Traffic()
INCIDENT = Traffic(streams=144, preprocess_ns=400_000_000, stall_every=2000)
"""Every request misses its target for the first token, and every 10 s all wait for 300 ms."""
FAST = Traffic(step_ns=200_000, preprocess_ns=80_000)
"""The same steps and requests, at 25 times the pace."""
FLOOD = Traffic(arrivals=50, tokens=(4, 12), running=1 << 20, budget=1 << 30)
"""10,000 requests a second: 50 before each of 200 steps."""
HALF_A_RING = 7_500
"""Steps: they and their requests fill half of the engine's ring."""
RULE = "| --- "
CHECKED = (
    ("llmobs_requests_received_total", ("context_bucket",), "received"),
    ("llmobs_requests_total", ("context_bucket", "outcome"), "ended"),
    ("llmobs_rejections_total", ("code",), "rejected"),
    ("llmobs_preemptions_total", ("context_bucket",), "preempted"),
    ("llmobs_prompt_tokens_total", ("context_bucket",), "prompts"),
    ("llmobs_generated_tokens_total", ("context_bucket",), "generated"),
)
"""Counters: exact, whatever is lost."""


class Usage:
    """What a process has used so far, by /proc."""

    def __init__(self, pid: int) -> None:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        self.cpu = (int(fields[11]) + int(fields[12])) / TICK
        self.time = time.monotonic()
        sizes = dict(
            line.split()[:2]
            for name in ("status", "smaps_rollup")
            for line in Path(f"/proc/{pid}/{name}").read_text().splitlines()
            if line.endswith("kB")
        )
        self.rss, self.pss = int(sizes["VmRSS:"]) / 1024, int(sizes["Pss:"]) / 1024
        self.own = int(sizes["RssAnon:"]) / 1024


class Watched:
    """A server that is played, its agent, and what both say."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.steps_read = context.Value("q", 0)
        self._commands, theirs = context.Pipe()
        self._writer = context.Process(target=serve, args=(theirs, self.steps_read), daemon=True)
        self._writer.start()
        self.folder: Path = self._commands.recv()
        self.truth = Truth()
        state = self._state()
        self.agent, self.page = int(state["pid"]), f"{state['page']}/metrics"
        self.scrapes: list[float] = []

    def _state(self) -> dict[str, Any]:
        for _ in range(600):
            with contextlib.suppress(OSError):
                state = json.loads((self.folder / "agent.json").read_text())
                if "page" in state:
                    return dict(state)
            time.sleep(0.1)
        raise TimeoutError(f"no page, see {self.folder / 'agent.log'}")

    def do(self, *command: Any) -> Any:
        """Let the writer do something; returns when it is done."""
        self.start(*command)
        return self.wait()

    def start(self, *command: Any) -> None:
        self._commands.send(command)

    def wait(self) -> Any:
        result, self.truth = self._commands.recv()
        return result

    def busy(self) -> bool:
        return not self._commands.poll()

    def ended(self) -> int:
        """Requests, as the writer knows."""
        return sum(self.truth.ended.values())

    def scrape(self) -> Figures:
        began = time.monotonic()
        headers = {"Accept": OPENMETRICS, "Accept-Encoding": "gzip"}
        request = urllib.request.Request(self.page, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            body = answer.read()
        self.scrapes.append(time.monotonic() - began)
        families = text_string_to_metric_families(gzip.decompress(body).decode())
        samples = (
            (s.name, frozenset(s.labels.items()), s.value) for f in families for s in f.samples
        )
        figures = Figures({(name, labels): value for name, labels, value in samples})
        self.steps_read.value = int(figures.total("batch_size_distribution_count"))
        return figures

    def measured(self, scrape_s: float, *command: Any, stopped_s: float = 0) -> list[Usage]:
        """What the agent uses while the writer does something: a look every second. It may be
        stopped for a while, once that goes on."""
        self.start(*command)
        self.scrapes.clear()
        looks = [Usage(self.agent)]
        next_scrape = time.monotonic() + scrape_s / 2
        while self.busy():
            if stopped_s and time.monotonic() - looks[0].time > stopped_s:
                os.kill(self.agent, signal.SIGSTOP)
                time.sleep(stopped_s)
                os.kill(self.agent, signal.SIGCONT)
                stopped_s = 0
            time.sleep(max(min(1.0, next_scrape - time.monotonic()), 0.0))
            if time.monotonic() >= next_scrape:
                next_scrape += scrape_s
                self.scrape()
            if time.monotonic() - looks[-1].time >= 1:
                looks.append(Usage(self.agent))
        self.wait()
        return looks

    def settled(self) -> Figures:
        """The page, once all that ended is told, or known to be lost."""
        for _ in range(100):
            figures = self.scrape()
            if told(figures) + incomplete(figures) >= self.ended():
                return figures
            time.sleep(0.2)
        return figures

    def end(self) -> dict[str, tuple[int, int]]:
        """The server's end, and the agent's. Records read and lost, by ring, as it says."""
        self._commands.send(None)
        self._writer.join()
        self.truth.written["api_server"] += 1  # a process says that it ends
        for _ in range(100):
            if not Path(f"/proc/{self.agent}").exists():
                break
            time.sleep(0.1)
        said = re.findall(
            r"ring (\w+?)-\S+ ended, (\d+) records read, (\d+) lost",
            (self.folder / "agent.log").read_text(),
        )
        return {role: (int(read), int(lost)) for role, read, lost in said}


class Collector:
    """demo's OTLP receiver in a process of its own, so that it holds up nobody here."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=collect, args=(theirs,), daemon=True)
        self._process.start()
        self.url: str = self._pipe.recv()

    def close(self) -> int:
        """Tells how many spans came."""
        self._pipe.send(None)
        arrived = int(self._pipe.recv())
        self._process.join()
        return arrived


def collect(pipe: Any) -> None:
    """The collector's process."""
    with Receiver() as receiver:
        pipe.send(receiver.grpc_url)
        pipe.recv()
        pipe.send(len(receiver.spans))


@contextlib.contextmanager
def watched(collector: str) -> Iterator[Watched]:
    """A server whose spans go to a collector."""
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        environ = {
            "LLMOBS_RUN_DIR": f"{folder}/runs",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
            "OTEL_EXPORTER_PROMETHEUS_PORT": "19464",
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
        }
        os.environ.update(environ)
        server = Watched()
        try:
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.agent, signal.SIGTERM)
            server._writer.kill()
            for name in environ:
                del os.environ[name]


def memory() -> str | None:
    """Where the rings lie, as a server's do."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def told(figures: Figures) -> float:
    return figures.total("llmobs_request_seconds_count")


def incomplete(figures: Figures) -> float:
    return figures.total("llmobs_incomplete_requests_total")


def differences(figures: Figures, truth: Truth) -> list[str]:
    """Where the page's counters are not what the writer counted."""
    found = []
    for name, labels, attribute in CHECKED:
        shown: Counter[Any] = Counter()
        for (sample, pairs), value in figures.samples.items():
            if sample == name:
                own = dict(pairs)
                key = tuple(own[label] for label in labels)
                shown[key if len(key) > 1 else key[0]] += value
        expected = getattr(truth, attribute)
        if +shown != +expected:
            found.append(f"{name}: page {dict(+shown)}, writer {dict(+expected)}")
    ended = sum(truth.ended.values())
    if told(figures) + incomplete(figures) != ended:
        found.append(f"{told(figures)} told + {incomplete(figures)} incomplete, {ended} ended")
    return found


def differences_of_all(figures: Figures, truth: Truth) -> list[str]:
    """The same where nothing was lost: then the histograms are exact too."""
    found = differences(figures, truth)
    for what, shown, expected in (
        ("lost", figures.total("llmobs_records_lost_total"), 0),
        ("incomplete", incomplete(figures), 0),
        ("steps", figures.total("batch_size_distribution_count"), truth.steps),
        *(
            (
                f"{token} in {bucket}",
                figures.total(
                    "decode_token_latency_seconds_count", token=token, context_bucket=bucket
                ),
                expected[bucket],
            )
            for token, expected in (("first", truth.firsts), ("next", truth.gaps))
            for bucket in ("0-1k", "1k-4k", "4k-32k", "32k+")
        ),
    ):
        if shown != expected:
            found.append(f"{what}: page {shown}, writer {expected}")
    return found


def share(looks: list[Usage]) -> float:
    """Of one core, in percent."""
    return 100 * (looks[-1].cpu - looks[0].cpu) / (looks[-1].time - looks[0].time)


def milliseconds(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e3:.0f} / {max(times) * 1e3:.0f}"


def complain(what: str, found: list[str]) -> bool:
    for line in found:
        print(f"WRONG, {what}: {line}", file=sys.stderr, flush=True)
    return bool(found)


def steady(seconds: float) -> bool:
    """64 streams at 200 steps a second, in real time."""
    print(
        "| 64 streams | page every | % of a core | RSS / PSS MB | page median / worst ms | spans |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    wrong = False
    for name, traffic, every, alive, length in (
        ("in order", NORMAL, 10, True, seconds),
        ("in order", NORMAL, 1, True, seconds / 2),
        ("in order, collector dead", NORMAL, 10, False, seconds / 2),
        ("every request misses", INCIDENT, 10, True, seconds / 2),
    ):
        collector = Collector()
        url = collector.url if alive else "http://127.0.0.1:9"
        with watched(url) as server:
            server.do("stream", traffic, 1000)
            looks = server.measured(min(every, length / 2), "stream", traffic, int(length * 200))
            times = list(server.scrapes)
            server.do("drain", traffic)
            wrong |= complain(name, differences_of_all(server.settled(), server.truth))
        print(
            f"| {name} | {every} s | {share(looks):.1f} | {looks[-1].rss:.0f} / "
            f"{looks[-1].pss:.0f} | {milliseconds(times)} | {collector.close()} |",
            flush=True,
        )
    return wrong


def hour(steps: int) -> bool:
    """As many records as an hour has at 200 steps a second, at 25 times the pace."""
    collector = Collector()
    with watched(collector.url) as server:
        # The page every 10 s of that hour; so the writer learns how far the agent is, too.
        looks = server.measured(0.4, "stream", FAST, steps, HALF_A_RING)
        times = list(server.scrapes)
        server.do("drain", FAST)
        figures = server.settled()
        wrong = complain("hour", differences_of_all(figures, server.truth))
    records = sum(server.truth.written.values())
    cpu = looks[-1].cpu - looks[0].cpu
    print(f"| records | seconds | agent CPU | page median / worst ms |\n{RULE * 4}|")
    print(
        f"| {records} of {server.truth.steps} steps, {server.ended()} requests "
        f"| {looks[-1].time - looks[0].time:.0f} | {cpu / records * 1e6:.2f} us a record "
        f"| {milliseconds(times)} |"
    )
    print(f"| of the hour | RSS MB | PSS MB | own MB |\n{RULE * 4}|")
    for percent in (2, 10, 25, 50, 75, 100):
        look = looks[max(len(looks) * percent // 100 - 1, 0)]
        print(f"| {percent} % | {look.rss:.1f} | {look.pss:.1f} | {look.own:.1f} |")
    flushed = looks[len(looks) // 4 :]
    slope = np.polyfit([look.time for look in flushed], [look.rss for look in flushed], 1)[0]
    over = (flushed[-1].time - flushed[0].time) / 0.75
    print(f"slope from 25 % on: {slope * over:+.2f} MB an hour; {collector.close()} spans arrived")
    return wrong


def flood(steps: int, stopped_s: float) -> bool:
    """10,000 requests a second, maybe with the agent stopped for a while in between; afterwards it
    must be right again."""
    collector = Collector()
    with watched(collector.url) as server:
        server.do("stream", NORMAL, 400)
        before = server.ended()
        server.do("record", FLOOD, steps, steps * 600)
        quiet = Usage(server.agent)
        looks = server.measured(1, "blast", stopped_s=stopped_s)
        times, flooded = list(server.scrapes), server.ended() - before
        server.do("stream", NORMAL, 400)  # a list of what runs comes once a second
        server.do("drain", NORMAL)
        after = server.settled()
        wrong = complain("flood", differences(after, server.truth))
        before = server.ended()
        server.do("stream", NORMAL, 400)
        server.do("drain", NORMAL)
        again = server.settled()
        wrong |= complain("after the flood", differences(again, server.truth))
        whole = told(again) - told(after)
        if whole != server.ended() - before:
            wrong |= complain("after the flood", [f"{server.ended() - before} ended, {whole} told"])
        last = Usage(server.agent)
        read = server.end()
    lost = after.total("llmobs_records_lost_total")
    for role, written in server.truth.written.items():
        if sum(read[role]) != written:
            wrong |= complain(role, [f"{read[role]} read and lost of {written}"])
    if sum(number for _, number in read.values()) != lost:
        wrong |= complain("lost", [f"page {lost}, rings {read}"])
    seconds, records = looks[-1].time - looks[0].time, sum(server.truth.written.values())
    most = max(look.rss for look in looks)
    print(
        f"| {flooded / seconds:.0f} | {stopped_s:.0f} s | {share(looks):.0f} | {records} "
        f"| {lost:.0f} | {100 - 100 * incomplete(after) / flooded:.1f} % | {whole:.0f} of "
        f"{server.ended() - before} | {quiet.rss:.0f}, {most:.0f}, {last.rss:.0f} "
        f"| {milliseconds(times)} |",
        flush=True,
    )
    collector.close()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--only", choices=("steady", "hour", "flood"))
    options = parser.parse_args()
    wrong = False
    if options.only in (None, "steady"):
        wrong |= steady(5 if options.quick else 60)
    if options.only in (None, "hour"):
        wrong |= hour(20_000 if options.quick else 720_000)
    if options.only in (None, "flood"):
        print(
            "| requests a second | agent stopped | % of a core | records written | lost, as told "
            "| requests told whole | afterwards | RSS MB before, at most, after "
            "| page median / worst ms |\n" + RULE * 9 + "|"
        )
        wrong |= flood(600 if options.quick else 3000, 0)
        wrong |= flood(600 if options.quick else 2000, 1 if options.quick else 3)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
