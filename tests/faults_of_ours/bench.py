"""A real server under load of which the client knows the counts, to break llmobs beneath it."""

import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import aiohttp
import psutil

from demo.client import Outcome, chat, completion
from demo.model import CHAT_OVERHEAD, make_model, prompt_ids, prompt_text
from demo.vllm_server import VllmServer
from llmobs import schema
from llmobs.probes import NUMBERS, PROBES
from tests.e2e.page import Figures, eventually, scrape
from tests.e2e.traffic import Call, play, send_all
from tests.faults_of_ours.clock import Clock
from tests.faults_of_ours.hook.fault_board import VARIABLE, Board
from tests.faults_of_ours.results import WAITED_S

HOOK = Path(__file__).parent / "hook"
POINTS = {probe.name: number for number, probe in enumerate(PROBES)}
NOBODY = 65534
END_S = 8.0  # the server's processes, and the agent's, are to be gone by then
PAGE_S = 40.0  # an agent that was killed is started again within 11 s; this machine may be busy

# A KV cache so small that a few long answers preempt each other: blocks of 128 tokens.
ARGS = ("--max-model-len=512", "--num-gpu-blocks-override=13", "--no-enable-prefix-caching")

NONSENSE = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""What may come of reading agent.json, which is one of the things that are broken."""

Counts = Counter[str]


def known(calls: Sequence[Call]) -> Counts:
    """What must be counted of these calls, as their client knows it."""
    counts: Counts = Counter()
    for call in calls:
        counts["received"] += 1
        counts[f"ended {call.outcome}"] += 1
        if call.outcome == "rejected":
            counts["rejections"] += 1
        else:
            counts["prompt tokens"] += call.prompt
            counts["generated tokens"] += call.tokens
    return counts


class Load:
    """Calls on their way in a thread of its own; leaving the context waits for them."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self._thread = threading.Thread(
            target=play, args=[lambda session: send_all(session, calls)], daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def failed(self) -> int:
        """Calls that did not end as they were to end: all but the first rejection do well."""
        return sum(
            call._answer is None
            or (call.answer.status != 404 if call.rejected else not _well(call))
            for call in self.calls
        )


def _well(call: "KnownCall") -> bool:
    return call.answer.ok or (call.leaves and call.answer.aborted)


class KnownCall(Call):
    """A call that is rejected, or whose client leaves, on purpose."""

    rejected = False
    leaves = False


class Bench:
    """A server with llmobs on, and all that is needed to break it and to look at it.

    As `nobody` it runs with rights that can be taken away. `disk` mounts a small disk of its
    own for the run folders (root only). `outside` goes before what makes it nobody's, `prefix`
    after.
    """

    def __init__(
        self,
        folder: Path,
        *,
        env: Mapping[str, str | None] | None = None,
        args: Sequence[str] = ARGS,
        prefix: Sequence[str] = (),
        outside: Sequence[str] = (),
        nobody: bool = False,
        disk: str = "",
        clock: bool = False,
        runs: Path | None = None,
        observed: bool = True,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.runs = runs or folder / "runs"
        self.observed = observed
        self.disk = disk
        self.nobody = nobody
        self.clock = Clock(folder) if clock else None
        if disk:
            self.runs.mkdir()
            owner = f"uid={NOBODY if nobody else 0}"
            options = f"size={disk},mode=700,{owner}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", self.runs], check=True)
        self.board = Board(folder / "board", create=True)
        self.port = _free_port()
        home = folder / "home"
        home.mkdir(exist_ok=True)
        model = make_model(folder / "llama", "llama")
        if nobody:
            # It may read all, for Python itself may be somebody's own, but write nothing.
            prefix = [
                *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
                *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
                *prefix,
            ]
            os.chown(home, NOBODY, NOBODY)
            if runs is None:
                self.runs.mkdir(exist_ok=True, mode=0o700)
                os.chown(self.runs, NOBODY, NOBODY)
        self.environ: dict[str, str | None] = {
            "LLMOBS_RUN_DIR": str(self.runs),
            "OTEL_EXPORTER_PROMETHEUS_PORT": str(self.port),
            "PYTHONPATH": os.pathsep.join([str(HOOK), os.environ.get("PYTHONPATH", "")]),
            VARIABLE: str(folder / "board"),
            **({"HOME": str(home)} if nobody else {}),
            **(self.clock.environ if self.clock is not None else {}),
            **(env or {}),
        }
        self.server = VllmServer(
            model, folder / "server.log", args, env=self.environ, prefix=[*outside, *prefix]
        )
        self.random = random.Random(0)
        self.seed = 0
        self.expected: Counts = Counter()
        self.told: Counts = Counter()
        self.rings: list[Path] = []
        self.files: list[tuple[str, BinaryIO]] = []
        self.page = ""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:  # a disk must not stay mounted either
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        self.server.start()
        self.family = [psutil.Process(p.pid) for p in self.server.processes()]
        self.root = psutil.Process(self.server.pid)
        if self.observed:
            pattern = f"{self.server.pid}-*/*.ring"
            eventually("three rings", lambda: len(list(self.runs.glob(pattern))) == 3, PAGE_S)
            self.rings = list(self.runs.glob(pattern))
            self.run = self.rings[0].parent
            # Kept open: one of the faults is to remove them.
            self.files = [(ring.name.partition("-")[0], ring.open("rb")) for ring in self.rings]
            self.rebase()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.server.stop()
        for agent in self.agents():
            with contextlib.suppress(psutil.Error):
                agent.kill()
                agent.wait(10)
        for _, file in self.files:
            file.close()
        if self.disk:
            subprocess.run(["umount", "--lazy", self.runs], check=True)

    # Load

    def _next(self) -> int:
        self.seed += 1
        return self.seed

    def completion(self, tokens: int = 0, **options: Any) -> KnownCall:
        seed = self._next()
        ids = prompt_ids(20 + seed % 40, seed)
        options = {"max_tokens": tokens or 6 + seed % 9, "stream": True, **options}

        async def ask(session: aiohttp.ClientSession) -> Outcome:
            return await completion(session, self.server.url, ids, **options)

        return KnownCall("0-1k", len(ids), ask)

    def chat(self) -> KnownCall:
        seed = self._next()
        text = prompt_text(30 - CHAT_OVERHEAD, seed)

        async def ask(session: aiohttp.ClientSession) -> Outcome:
            return await chat(session, self.server.url, text, max_tokens=7, stream=False)

        return KnownCall("0-1k", 30, ask)

    def usual(self) -> list[Call]:
        """Four requests that are answered and one that is refused."""
        headers = {"traceparent": f"00-{self._next():032x}-{1:016x}-00"}
        refused = self.completion(model="missing")
        refused.rejected = True
        return [
            *(self.completion(), self.completion(), self.completion(headers=headers)),
            *(self.chat(), refused),
        ]

    def beams(self) -> Call:
        """What beam search counts is more than what it returns: not to be checked to the token."""
        extra = {"use_beam_search": True}
        return self.completion(4, n=2, stream=False, extra=extra)

    def left(self) -> Call:
        """Its client leaves after two tokens."""
        call = self.completion(400, abort_after_chunks=2)
        call.leaves = True
        return call

    def storm(self) -> list[Call]:
        """Answers too long for the KV cache, all at once: they preempt each other."""
        return [self.completion(300) for _ in range(7)]

    # What is counted

    def totals(self) -> Counts:
        """The totals in the server's rings, read byte by byte, without an agent."""
        counts: Counts = Counter()
        for role, file in self.files:
            content = os.pread(file.fileno(), 8 * schema.CELLS, 16384)
            cells = struct.unpack(f"<{schema.CELLS}q", content)
            for model in range(schema.MODEL_SLOTS):

                def part(name: str, model: int = model, cells: Any = cells) -> tuple[int, ...]:
                    first = schema.model_cell(name, model)
                    return cells[first : first + schema.size(schema.PER_MODEL[name])]

                counts["generated tokens"] += sum(part("generated_tokens"))
                if role == "api_server":
                    counts["received"] += sum(part("received"))
                    counts["rejections"] += sum(part("rejections"))
                    counts["prompt tokens"] += sum(part("prompt_tokens"))
                    ended = part("ended")
                    for place, outcome in enumerate(("stop", "length", "abort", "error")):
                        counts[f"ended {outcome}"] += sum(ended[place::5])
                    counts["ended rejected"] += sum(ended[4::5])
                elif role == "engine_core":
                    counts["preemptions"] += sum(part("preemptions"))
                    counts["in the engine"] += sum(part("requests"))
            for name, number in NUMBERS.items():
                counts[f"guard {name}"] += cells[schema.GUARD_CELL + number]
        return counts

    def rebase(self) -> None:
        """Count from here on."""
        eventually("quiet", self._quiet, 10)
        self.told = self.totals()
        self.expected = Counter()

    def _quiet(self) -> bool:
        """Whether two looks at the totals, a little apart, are the same."""
        before = self.totals()
        time.sleep(0.03)
        return before == self.totals()

    def settle(self) -> Counts:
        """What the totals differ by from what is expected; empty once they agree."""
        difference: Counts = Counter()

        def agree() -> bool:
            nonlocal difference
            now = self.totals()
            difference = Counter(
                {
                    name: now[name] - self.told[name] - self.expected[name]
                    for name in now.keys() | self.expected.keys()
                    if now[name] - self.told[name] != self.expected[name]
                    and name not in ("preemptions", "in the engine")
                }
            )
            if now["in the engine"]:
                difference["in the engine"] = now["in the engine"]
            return not difference

        with contextlib.suppress(AssertionError):
            eventually("the totals agree", agree, 3)
        return difference

    def figures(self) -> Figures | None:
        """The agent's page, if there is one just now."""
        with contextlib.suppress(*NONSENSE):
            self.page = json.loads((self.run / "agent.json").read_text())["page"]
        try:
            return scrape(f"{self.page}/metrics")
        except (OSError, ValueError):
            return None

    def page_agrees(self, within_s: float = PAGE_S) -> str:
        """Empty once the page says what the rings say, else what it says in their stead."""
        said = "no page"

        def agree() -> bool:
            nonlocal said
            figures = self.figures()
            if figures is None:
                return False
            told = self.totals()
            shown = page_counts(figures)
            said = str({k: (shown[k], told[k]) for k in shown if shown[k] != told[k]})
            return said == "{}"

        with contextlib.suppress(AssertionError):
            eventually("the page agrees", agree, within_s)
        return "" if said == "{}" else said

    # Processes

    def agents(self) -> list[psutil.Process]:
        """The agents of this server that run."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or ()
            if (
                "llmobs.agent" in words
                and str(self.runs) in words[-1]
                and process.info["status"] != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        return found

    def agent(self) -> psutil.Process:
        """The agent, once there is one that has its page."""

        def serving() -> psutil.Process | None:
            with contextlib.suppress(*NONSENSE):
                pid = json.loads((self.run / "agent.json").read_text())["pid"]
                return next((a for a in self.agents() if a.pid == pid), None)
            return None

        agent: psutil.Process = eventually("an agent", serving, PAGE_S)
        return agent

    def fill(self) -> Path:
        """Leave not a byte on the disk of the run folders."""
        path = self.runs / "filler"
        with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        return path

    def end(self, how: signal.Signals = signal.SIGTERM, pid: int = 0) -> tuple[float, float, int]:
        """Signal a process of the server, by default the first: how many seconds until the server
        was gone, how many more until its agent was, and how many agents were left after all."""
        family = [self.root, *self.family]
        began = time.monotonic()
        os.kill(pid or self.server.pid, how)
        while any(map(_runs, family)) and time.monotonic() - began < WAITED_S:
            self.server.returncode  # noqa: B018 - so that no zombie is left of it
            time.sleep(0.02)
        server_s = time.monotonic() - began
        if left := [p.pid for p in family if _runs(p)]:
            titles = [p.title for p in self.server.processes() if p.pid in left]
            print(f"  left after {server_s:.0f} s: {left} {titles}", flush=True)
        self.server.stop(1)
        began = time.monotonic()
        with contextlib.suppress(AssertionError):
            eventually("no agent", lambda: not self.agents(), 2 * END_S)
        return server_s, time.monotonic() - began, len(self.agents())


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def page_counts(figures: Figures) -> Counts:
    """The same counts on the page."""

    def total(name: str, **labels: str) -> int:
        try:
            return int(figures.total(name, **labels))
        except KeyError:
            return -1

    counts = {
        "received": total("llmobs_requests_received_total"),
        "rejections": total("llmobs_rejections_total"),
        "prompt tokens": total("llmobs_prompt_tokens_total"),
        "generated tokens": total("llmobs_generated_tokens_total"),
        "preemptions": total("llmobs_preemptions_total"),
        "in the engine": total("llmobs_requests"),
    }
    for outcome in ("stop", "length", "abort", "error", "rejected"):
        counts[f"ended {outcome}"] = total("llmobs_requests_total", outcome=outcome)
    return Counter(counts)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder for a bench, that other users can reach too."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="llmobs-faults-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
