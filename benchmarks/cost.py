"""What observing costs a real server: CPU per token, P99 of the token gap, throughput.

Servers that differ only in who observes them stand side by side and get the same load in turn, in
an order drawn anew each round; each round gives one ratio to the bare servers. There are two of
those, whose own ratio is the control. After some rounds all are started anew, for two starts of a
server differ too. It goes on until the interval of llmobs' ratio is narrow enough, or the pairs are
used up.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from scipy import stats

from demo.client import Outcome, completion, open_session
from demo.model import make_model, prompt_ids
from demo.vllm_server import MODULE, VllmServer

SERVERS_CORE, CLIENTS_CORE = 0, 1
ROLES = ("api_server", "engine_core", "worker")
BARE, CONTROL, OURS = "bare", "bare again", "llmobs"
NARROW = 0.01
INSTRUMENT = str(Path(sys.executable).with_name("opentelemetry-instrument"))
SINK = """
import http.server, sys
class Sink(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@dataclass
class Turn:
    """One load on one server. CPU in seconds by role, the agent's too; gaps in seconds."""

    cpu: dict[str, float]
    tokens: int
    seconds: float
    p99: float

    @property
    def total(self) -> float:
        """CPU microseconds per token of the server's own processes."""
        return sum(self.cpu[role] for role in ROLES) / self.tokens * 1e6

    @property
    def front(self) -> float:
        return self.cpu["api_server"] / self.tokens * 1e6

    def __str__(self) -> str:
        by_role = "+".join(f"{self.cpu[role] / self.tokens * 1e6:.0f}" for role in ROLES)
        return f"{self.total:.0f} ({by_role})"

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Way:
    """A way to observe a server, and what was measured with it."""

    name: str
    prefix: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)


def ways(collector: str) -> list[Way]:
    """`collector` takes spans over HTTP and forgets them."""
    off = {"LLMOBS_ENABLED": "0"}
    export = {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
        # What is exported is to fall into the turn that made it.
        "OTEL_BSP_SCHEDULE_DELAY": "500",
    }
    ours = {
        "OTEL_METRICS_EXPORTER": "prometheus",
        "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "fastapi",
    }
    return [
        Way(BARE, env=off),
        Way(CONTROL, env=off),
        Way(OURS, (INSTRUMENT,), env=export | ours),
        Way(
            "vLLM's own tracing",
            args=(f"--otlp-traces-endpoint={collector}/v1/traces",),
            env=export | off,
        ),
        Way("OpenTelemetry's FastAPI instrumentation", (INSTRUMENT,), env=export | off),
    ]


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process (schedstat's first figure, nanoseconds)."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


class Subject:
    """A running server, and how much CPU its processes have had."""

    def __init__(self, server: VllmServer, runs: Path, page: str | None) -> None:
        self.url = server.url
        self.pages = [f"{server.url}/metrics", *([page] if page else [])]
        self.pids = {role: server.pids(role) for role in ROLES}
        assert all(self.pids.values()), self.pids
        self.pids["agent"] = [json.loads(f.read_text())["pid"] for f in runs.glob("*/agent.json")]
        # vLLM's engine core spins, yielding its core, until the worker answers. On two cores that
        # is some third of all CPU, more or less by chance; on one it costs next to nothing.
        for pid in chain.from_iterable(self.pids.values()):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), {SERVERS_CORE})

    def cpu(self) -> dict[str, float]:
        return {role: sum(map(cpu_seconds, pids)) for role, pids in self.pids.items()}


def turns(subjects: list[Subject], streams: int, tokens: int, seed: int) -> list[Turn]:
    """The same load on each, at once."""

    async def loads() -> list[list[Outcome]]:
        return await asyncio.gather(
            *(load(s.url, s.pages, streams, tokens, seed) for s in subjects)
        )

    before = [subject.cpu() for subject in subjects]
    began = time.monotonic()
    answers = asyncio.run(loads())
    seconds = time.monotonic() - began
    time.sleep(1.0)  # what is done afterwards, export above all, counts too
    found = []
    for subject, cpu, outcomes in zip(subjects, before, answers, strict=True):
        assert all(o.ok for o in outcomes), [o.error for o in outcomes if not o.ok]
        gaps = sorted(gap for outcome in outcomes for gap in outcome.gaps)
        found.append(
            Turn(
                {role: after - cpu[role] for role, after in subject.cpu().items()},
                sum(outcome.completion_tokens or 0 for outcome in outcomes),
                seconds,
                gaps[math.ceil(0.99 * len(gaps)) - 1],
            )
        )
    return found


async def load(url: str, pages: list[str], streams: int, tokens: int, seed: int) -> list[Outcome]:
    """So many streams of so many tokens at once, one in eight with a long prompt; meanwhile every
    page of metrics is scraped once."""

    async def scrape(page: str) -> None:
        await asyncio.sleep(1)
        async with session.get(page) as answer:
            assert answer.status == 200
            await answer.read()

    async with open_session() as session, asyncio.TaskGroup() as scrapes:
        for page in pages:
            scrapes.create_task(scrape(page))
        return await asyncio.gather(
            *(
                completion(
                    *(session, url, prompt_ids(50 if n % 8 else 1200, seed * 1000 + n)),
                    max_tokens=tokens,
                    stream=True,
                )
                for n in range(streams)
            )
        )


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """A collector that costs as little as can be, in a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", SINK], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()


def measure(options: argparse.Namespace, folder: Path) -> list[Way]:
    model = make_model(folder / "model")
    draw = random.Random(1)
    with collector() as address:
        measured = [way for way in ways(address) if not options.only or way.name in options.only]
        while True:
            with contextlib.ExitStack() as stack:
                subjects = []
                for place, way in enumerate(measured):
                    runs = folder / f"runs-{place}-{len(way.turns)}"
                    port = 19464 + 200 * place
                    server = VllmServer(
                        *(model, folder / f"log-{place}", way.args),
                        env={
                            "LLMOBS_RUN_DIR": str(runs),
                            "OTEL_EXPORTER_PROMETHEUS_PORT": str(port),
                            # Threads of PyTorch that spin for one another on busy cores are noise.
                            "OMP_NUM_THREADS": "1",
                            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                            **way.env,
                        },
                        prefix=way.prefix,
                        entry=MODULE,
                    )
                    stack.enter_context(server)
                    time.sleep(3)
                    page = f"http://localhost:{port}/metrics" if way.name == OURS else None
                    subjects.append((way, Subject(server, runs, page)))
                os.sched_setaffinity(0, {CLIENTS_CORE})
                sized = options.streams, options.tokens
                for _, subject in subjects:  # what comes first is no measure
                    turns([subject], *sized, 999)
                for _ in range(options.rounds):
                    draw.shuffle(subjects)
                    seed = draw.randrange(1 << 20)
                    groups = [subjects] if options.together else [[one] for one in subjects]
                    for group in groups:
                        found = turns([subject for _, subject in group], *sized, seed)
                        for (way, _), turn in zip(group, found, strict=True):
                            way.turns.append(turn)
                    told = " · ".join(f"{w.name} {w.turns[-1]}" for w in measured)
                    print(f"{len(measured[0].turns)}: {told}", file=sys.stderr, flush=True)
            by_name = {way.name: way for way in measured}
            os.sched_setaffinity(0, {SERVERS_CORE, CLIENTS_CORE})  # to start the next ones
            _, low, high = ratio(by_name[OURS], bare_ways(measured), "total")
            if len(by_name[BARE].turns) >= options.pairs or (high - low) / 2 <= NARROW:
                return measured


def bare_ways(measured: list[Way]) -> list[Way]:
    return [way for way in measured if way.name in (BARE, CONTROL)]


def ratio(way: Way, others: list[Way], what: str) -> tuple[float, float, float]:
    """The geometric mean of the rounds' ratios to the others' (geometric) mean, and its 95%
    interval (Student's t of their logarithms)."""

    def logarithm(turn: Turn) -> float:
        return math.log(getattr(turn, what))

    logs = [
        logarithm(turn) - statistics.mean(map(logarithm, same_round))
        for turn, *same_round in zip(way.turns, *(o.turns for o in others), strict=True)
    ]
    interval = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    return math.exp(statistics.mean(logs)), math.exp(interval.low), math.exp(interval.high)


def show(measured: list[Way], rounds: int) -> None:
    pairs = len(measured[0].turns)
    print(f"{pairs} pairs, all servers started anew after every {rounds}\n")
    print(
        "| | CPU µs/token | ÷ bare | API server ÷ bare | P99 gap ms | ÷ bare | tokens/s | ÷ bare |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for way in measured:
        total = statistics.mean(turn.total for turn in way.turns)
        p99 = statistics.mean(turn.p99 for turn in way.turns) * 1e3
        rate = statistics.mean(turn.rate for turn in way.turns)
        # The control is compared with the first bare server, what observes with both.
        others = {BARE: [], CONTROL: measured[:1]}.get(way.name, bare_ways(measured))
        cells = [
            "{:.3f} ({:.3f}–{:.3f})".format(*ratio(way, others, what)) if others else ""
            for what in ("total", "front", "p99", "rate")
        ]
        print(
            f"| {way.name} | {total:.0f} | {cells[0]} | {cells[1]} | {p99:.0f} | {cells[2]} "
            f"| {rate:.0f} | {cells[3]} |"
        )
    for way in measured:
        if way.turns[0].cpu["agent"]:
            agent = sum(t.cpu["agent"] for t in way.turns) / sum(t.tokens for t in way.turns) * 1e6
            print(f"\nThe agent of {way.name}, a process of its own: {agent:.1f} µs/token.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=10, help="between two starts of the servers")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--together",
        action="store_true",
        help="the load on all at once: what the machine does meanwhile hits all alike, so the "
        "ratio of the CPU per token is sharper (P99 and tokens/s: of servers that share a core)",
    )
    parser.add_argument("--only", nargs="*", help="names of ways to observe, bare and llmobs too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        show(measure(options, Path(name)), options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
