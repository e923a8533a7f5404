"""Faults that take a server of their own: those at its start, those that end it, the long ones."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from demo.vllm_server import DEFAULT_ENV
from llmobs.agent.collect import RunCollector
from llmobs.agent.run import Run
from tests.e2e.page import Figures, eventually
from tests.faults_of_ours.bench import NOBODY, Bench, Counts, Load, known, page_counts
from tests.faults_of_ours.faults import POINTS, backdate
from tests.faults_of_ours.results import Result

Life = Callable[[str, Path], Iterator[Result]]


def usual(bench: Bench, result: Result, page: bool = True) -> None:
    """Answer requests, and look whether all is counted."""
    with Load([*bench.usual(), *bench.usual()]) as load:
        pass
    result.failed += load.failed
    if result.unmeasured:
        return
    bench.expected += known(load.calls)
    if difference := bench.settle():
        result.inexact += str(dict(difference))
    if page and (said := bench.page_agrees()):
        result.inexact += said


def ended(bench: Bench, result: Result) -> Result:
    result.server_s, result.agent_s, result.orphans = bench.end()
    return result


# Ends


def of_the_dead(run: Path) -> Counts:
    """What an agent that comes too late makes of the rings."""
    late = Run(run)
    late.poll()
    registry = CollectorRegistry()
    registry.register(RunCollector(late))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return page_counts(
        Figures(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in families
                for sample in family.samples
            }
        )
    )


def killed(
    role: str, how: signal.Signals, streams: int, *, off: bool = False, raising: str = ""
) -> Life:
    """A process of the server is signalled, while so many streams are under way. `raising`: a
    probe that raises then."""

    def life(name: str, folder: Path) -> Iterator[Result]:
        result = Result(name, unmeasured=off)
        env = {"LLMOBS_ENABLED": "0"} if off else {}
        with Bench(folder / "server", env=env, observed=not off) as bench:
            usual(bench, result)
            served = bench.totals() if not off else Counts()
            pids = {p.role: p.pid for p in bench.server.processes()}
            with Load([bench.completion(400) for _ in range(streams)]) as load:
                time.sleep(0.4 if streams else 0)
                if raising:
                    bench.board.set(POINTS[raising], "error")
                result.server_s, result.agent_s, result.orphans = bench.end(how, pids[role])
            if not off:
                result.inexact += _after(bench, served, load)
        yield result

    return life


def _after(bench: Bench, served: Counts, load: Load) -> str:
    """What is not as it should be in the rings of a server that was killed; those under way are
    counted as received, and at most once as ended."""
    told = bench.totals()
    change = told - served
    finished = known([call for call in load.calls if call._answer is not None and call.answer.ok])
    broken = len(load.calls) - finished["received"]
    # A stream that is broken off may end with a chunk that says so and carries no token.
    seen = sum(
        call.answer.chunks - (not call.answer.ok and call.answer.finish_reason is not None)
        for call in load.calls
        if call._answer is not None
    )
    over = change["ended error"] + change["ended abort"]
    wrong = []
    if change["received"] != len(load.calls) or change["ended rejected"]:
        wrong.append(f"{len(load.calls)} received, counted {dict(change)}")
    if not finished["ended length"] <= change["ended length"] + over <= len(load.calls):
        wrong.append(f"{dict(finished)} and {broken} broken off, counted {dict(change)}")
    if change["generated tokens"] < seen:
        wrong.append(f"{seen} tokens came, counted {change['generated tokens']}")
    late = of_the_dead(bench.run)
    late.pop("in the engine")  # a gauge: of a dead engine there is none
    wrong += [
        f"late agent: {k} {late[k]}, in the rings {told[k]}" for k in late if late[k] != told[k]
    ]
    return "; ".join(wrong)


# Starts


def started(
    said: tuple[str, ...] = (),
    *,
    off: bool = False,
    page: bool = True,
    prepare: Callable[[Path], None] = lambda folder: None,
    times: int = 1,
    **options: Any,
) -> Life:
    """A server starts under a fault. `said`: each of these is in so many lines of its log."""

    def life(name: str, folder: Path) -> Iterator[Result]:
        result = Result(name, unmeasured=off)
        prepare(folder)
        made = {k: v(folder) if callable(v) else v for k, v in options.items()}
        with Bench(folder / "server", observed=not off, **made) as bench:
            usual(bench, result, page)
            lines = bench.server.log_text().splitlines()
            for words in said:
                found = sum(words in line for line in lines)
                if found != times:
                    result.inexact += f"{found} lines say {words!r}; "
            yield ended(bench, result)

    return life


def runs_owned_by_another(folder: Path) -> None:
    (folder / "server" / "runs").mkdir(parents=True)
    os.chown(folder / "server" / "runs", NOBODY, NOBODY)


def runs_a_file(folder: Path) -> None:
    (folder / "server").mkdir()
    (folder / "server" / "runs").write_text("")


def closed(folder: Path) -> Path:
    (folder / "closed").mkdir(mode=0o700)
    return folder / "closed" / "runs"


def stale_runs(folder: Path) -> None:
    """The run folders of six dead servers, their rings full of noise, and what is none."""
    runs = folder / "server" / "runs"
    runs.mkdir(parents=True, mode=0o700)
    for number in range(6):
        old = runs / f"{5_000_000 + number}-1"
        old.mkdir()
        (old / f"api_server-{5_000_000 + number}-1.ring").write_bytes(os.urandom(100_000))
    (runs / "1-x").mkdir()
    (runs / "file_sd").write_text("not even a folder")


def probe_at_start(probe: str) -> Life:
    """The process where it raises stays unobserved; the others are not."""

    def life(name: str, folder: Path) -> Iterator[Result]:
        result = Result(name, unmeasured=True)
        bench = Bench(folder / "server", observed=False)
        for point in POINTS.values() if probe == "every" else [POINTS[probe]]:
            bench.board.set(point, "error")
        with bench:
            usual(bench, result)
            first = "scheduler" if probe == "every" else probe
            if f"llmobs: probe {first} failed; the server is unaffected" not in (
                bench.server.log_text()
            ):
                result.inexact += "its failure is not said"
            yield ended(bench, result)

    return life


OFFLINE = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], load_format="dummy", dtype="float32", enforce_eager=True,
              max_model_len=512)
    params = SamplingParams(max_tokens=7, ignore_eos=True)
    for output in llm.generate([{"prompt_token_ids": [300, 301, 302]}] * 5, params):
        print("tokens", len(output.outputs[0].token_ids), flush=True)
"""


def offline(name: str, folder: Path) -> Iterator[Result]:
    """`LLM` in a script: the probe of its start raises."""
    result = Result(name, unmeasured=True)
    bench = Bench(folder / "server", observed=False)  # not started: for what it has prepared
    bench.board.set(POINTS["sync_engine"], "error")
    script = folder / "script.py"
    script.write_text(OFFLINE)
    done = subprocess.run(
        [sys.executable, script, folder / "server" / "llama"],
        env={**os.environ, **DEFAULT_ENV, **bench.environ},
        capture_output=True,
        text=True,
    )
    result.failed = 5 - done.stdout.count("tokens 7")
    if (
        "llmobs: probe sync_engine failed; the server is unaffected"
        not in done.stderr + done.stdout
    ):
        result.inexact = "its failure is not said"
    began = time.monotonic()
    with contextlib.suppress(AssertionError):
        eventually("no agent", lambda: not bench.agents(), 16)
    result.agent_s, result.orphans = time.monotonic() - began, len(bench.agents())
    yield result


def port_taken(name: str, folder: Path) -> Iterator[Result]:
    result = Result(name)
    bench = Bench(folder / "server")
    with socket.create_server(("127.0.0.1", bench.port)), bench:
        usual(bench, result)
        if f"port {bench.port} is taken by" not in bench.server.log_text():
            result.inexact += "it is not said"
        yield ended(bench, result)


BAD = {
    "LLMOBS_ENABLED": "maybe",
    "LLMOBS_RING_BYTES": "4MiB",
    "LLMOBS_TRACE_SAMPLING": "often",
    "OTEL_EXPORTER_PROMETHEUS_PORT": "http",
    "OTEL_METRICS_EXPORTER": "nonsense",
    "OTEL_TRACES_EXPORTER": "nonsense",
    "OTEL_RESOURCE_ATTRIBUTES": "a=" + "x" * 5000,
}
ELSEWHERE = "OTEL_EXPORTER_PROMETHEUS_HOST"


# Long ones, one after another beneath one server


def long_ones(name: str, folder: Path) -> Iterator[Result]:
    with Bench(folder / "server") as bench:
        for trouble in (stopped_long, killed_often, port_lost, ring_removed, folder_removed):
            result = Result((trouble.__doc__ or "").strip(" .\n"))
            trouble(bench, result)
            yield result
        yield ended(bench, Result(name))


def under_load(bench: Bench, result: Result, seconds: float, each: Callable[[], None]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        each()
        usual(bench, result, page=False)


def stopped_long(bench: Bench, result: Result) -> None:
    """Agent stopped for 90 s, more than a ring holds"""
    agent = bench.agent()
    agent.suspend()
    under_load(bench, result, 90, lambda: None)
    agent.resume()
    usual(bench, result)


def killed_often(bench: Bench, result: Result) -> None:
    """Agent killed whenever it comes back, for 40 s"""

    def kill() -> None:
        for agent in bench.agents():
            with contextlib.suppress(psutil.Error):
                agent.kill()

    under_load(bench, result, 40, kill)
    backdate(bench)
    usual(bench, result)


def port_lost(bench: Bench, result: Result) -> None:
    """Agent killed, and a stranger takes its port"""
    agent = bench.agent()
    backdate(bench)
    agent.kill()
    agent.wait(5)
    with socket.create_server(("127.0.0.1", bench.port)):
        usual(bench, result)


def ring_removed(bench: Bench, result: Result) -> None:
    """Worker's ring removed while it runs"""
    next(ring for ring in bench.rings if ring.name.startswith("worker")).unlink()
    under_load(bench, result, 2, lambda: None)
    usual(bench, result)


def folder_removed(bench: Bench, result: Result) -> None:
    """Run folder removed while the server runs"""
    bench.agent()
    shutil.rmtree(bench.run.rename(bench.run.with_name("gone")))  # at once: the agent writes there
    under_load(bench, result, 3, lambda: None)
    usual(bench, result)


SIGNALS = {
    "ended (SIGTERM)": signal.SIGTERM,
    "killed (SIGKILL)": signal.SIGKILL,
    "crashes (SIGSEGV)": signal.SIGSEGV,
}
ROLES = {"API server": "api_server", "EngineCore": "engine_core", "Worker": "worker"}

LIVES: dict[str, Life] = {
    **{
        f"{title} {what}, 4 streams open": killed(role, how, 4)
        for title, role in ROLES.items()
        for what, how in SIGNALS.items()
    },
    **{
        f"{title} {what}, {streams or 'no'} streams open, llmobs off": killed(
            role, SIGNALS[what], streams, off=True
        )
        for title, what, streams in (
            ("API server", "ended (SIGTERM)", 0),
            *(("API server", what, 4) for what in SIGNALS),
            ("EngineCore", "killed (SIGKILL)", 4),
            ("Worker", "killed (SIGKILL)", 4),
        )
        for role in [ROLES[title]]
    },
    "API server ended (SIGTERM), no streams open": killed("api_server", signal.SIGTERM, 0),
    "run folder: a file in its place": started(
        ("cannot write to the run folder",), off=True, times=3, prepare=runs_a_file
    ),
    "run folder of another user": started(
        ("owned by another user (uid 65534)",), off=True, times=3, prepare=runs_owned_by_another
    ),
    "run folder without rights": started(
        ("(Permission denied); set LLMOBS_RUN_DIR",), off=True, times=3, nobody=True, runs=closed
    ),
    "disk too small for the rings": started(
        ("(No space left on device); set LLMOBS_RUN_DIR",), off=True, times=3, disk="100k"
    ),
    "files may not grow (RLIMIT_FSIZE)": started(
        ("(File too large); set LLMOBS_RUN_DIR",),
        off=True,
        times=3,
        prefix=["prlimit", "--fsize=1000000"],
    ),
    "LLMOBS_AGENT names no folder": started(
        ("set LLMOBS_AGENT to a folder",),
        off=True,
        times=3,
        env={"LLMOBS_AGENT": "/nowhere/at/all"},
    ),
    "a bad value in each setting": started(
        tuple(f"llmobs: {name}=" for name in BAD), env={**BAD}, page=True
    ),
    "page's host is no address of this machine": started(
        (f"{ELSEWHERE}='203.0.113.1' must be",), page=False, env={ELSEWHERE: "203.0.113.1"}
    ),
    "port taken": port_taken,
    "run folders of dead servers, damaged": started(prepare=stale_runs),
    **{
        f"probe `{probe}` raises at the start": probe_at_start(probe)
        for probe in ("async_engine", "scheduler", "worker", "every")
    },
    "probe `sync_engine` raises at the start (`LLM` in a script)": offline,
    "probe `engine_dead` raises as EngineCore is killed": killed(
        "engine_core", signal.SIGKILL, 4, raising="engine_dead"
    ),
    "processes of others hidden in /proc": started(
        nobody=True,
        outside=[
            *("unshare", "--mount", "sh", "-c"),
            *('mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh"),
        ],
    ),
    "server of the long faults ended (SIGTERM)": long_ones,
}
