"""Every shape in which vLLM runs is really run, and all that is counted is what its clients count.

`make shapes` runs them all and writes what came of it into docs/reliability.md; `make test` runs
those marked short, which no other test covers.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from demo.client import MODEL, Outcome
from demo.model import make_model
from demo.receiver import Receiver
from demo.vllm_server import DEFAULT_ENV, ROOT, VllmServer
from tests.e2e.conftest import Served, free_port
from tests.e2e.page import Figures, Page, eventually, scrape
from tests.e2e.test_doors import SERVE, vllm_by_name
from tests.e2e.traffic import Call, play
from tests.shapes import as_asked, library, load
from tests.shapes.adapter import make_adapter
from tests.shapes.check import BUCKETS, check_counts, check_end, check_steps
from tests.shapes.load import Part
from tests.shapes.table import SHAPES, Shape

pytestmark = pytest.mark.e2e

Record = Callable[[str, object], None]

SERVERS = [shape for shape in SHAPES if not isinstance(shape.start, str)]
PROGRAMS = [shape for shape in SHAPES if isinstance(shape.start, str)]


def shapes(some: list[Shape]) -> pytest.MarkDecorator:
    parameters = [
        pytest.param(shape, id=shape.name, marks=[] if shape.short else [pytest.mark.long])
        for shape in some
    ]
    return pytest.mark.parametrize("shape", parameters)


EXTRAS = os.environ.get("SHAPES_EXTRAS") or str(Path(sys.prefix) / "shapes")
"""What `make shapes` installs for these tests alone."""


def environment(shape: Shape, folder: Path) -> dict[str, str]:
    env = {name: value.replace("EXTRAS", EXTRAS) for name, value in shape.env.items()}
    paths = [str(ROOT), *filter(None, [env.pop("PYTHONPATH", "")])]
    if shape.start == SERVE:
        paths.append(vllm_by_name(folder / "vllm"))
    if shape.as_asked:
        paths.append(as_asked.installed(folder / "as_asked"))
    return {
        "LLMOBS_RUN_DIR": str(folder / "runs"),
        "OTEL_EXPORTER_PROMETHEUS_PORT": str(free_port()),
        "OTEL_TRACES_EXPORTER": "none",
        "PYTHONPATH": os.pathsep.join(paths),
        **env,
    }


class GrpcServer(VllmServer):
    """It has no /health, and begins with requests of its own."""

    def healthy(self) -> bool:
        return "Planned warm-up over" in self.log_text()


@contextlib.contextmanager
def running(shape: Shape, folder: Path, *args: str, **env: str) -> Iterator[Served]:
    """A server of that shape."""
    server = (GrpcServer if shape.load == "grpc" else VllmServer)(
        make_model(folder / "model", shape.kind),
        folder / f"{free_port()}.log",
        [*shape.args, *args],
        env=environment(shape, folder) | env,
        entry=shape.start,
    )
    with server:
        yield Served(server, Page(folder / "runs", server.pid))


# Servers


@shapes(SERVERS)
def test_a_server(shape: Shape, tmp_path: Path, record_property: Record) -> None:
    seeds = load.Seeds(repeat=8 if shape.load == "repetitive" else 0)
    if shape.load == "two servers":
        two_servers(shape, tmp_path, record_property)
        return
    if shape.load == "traced":
        with Receiver() as receiver:
            args = [arg.replace("RECEIVER", receiver.grpc_url) for arg in shape.args]
            with running(Shape(**{**vars(shape), "args": tuple(args)}), tmp_path) as served:
                calls = observe(shape, served, mixed(served, [MODEL], seeds))
                record(record_property, calls)
                told = sum(call.outcome not in ("rejected",) for call in calls)
                eventually("vLLM's own spans", lambda: len(receiver.spans) >= told - 3)
        return
    if shape.load.startswith("adapters"):
        adapters = {name: make_adapter(tmp_path / name, i) for i, name in enumerate(("ada", "bob"))}
        given = [f"{name}={path}" for name, path in adapters.items()]
        args = ["--lora-modules", *given] if shape.load == "adapters" else []
        with running(shape, tmp_path, *args) as served:
            if not args:

                async def load_all(session: object) -> None:
                    for name, path in adapters.items():
                        await load.load_adapter(session, served.url, name, str(path))

                play(load_all)
            calls = observe(shape, served, mixed(served, [MODEL, *adapters], seeds))
            record(record_property, calls)
        return
    if shape.load == "grpc":
        sys.path.append(EXTRAS)  # for the client's side
        from tests.shapes.rpc import over_grpc

        with running(shape, tmp_path) as served:
            warm = eventually("the warm-up is told", lambda: all_told(served.page))
            calls = over_grpc(served.url.removeprefix("http://"), seeds)
            check_program(shape, served.page, calls, warm)
            said = served.page.figures().by("feature", "llmobs_feature_available")
            assert said == {"front_end": 1, "http_edge": 0, "worker": 1}
            record(record_property, calls)
        return
    if shape.load == "foreign":
        with running(shape, tmp_path) as served:
            said = served.page.figures().by("feature", "llmobs_feature_available")
            assert said == {"front_end": 0, "http_edge": 0, "worker": 1}, "before any request"
            calls = []
            for part in mixed(served, [MODEL], seeds, refused=False):
                play(part.send)
                calls += part.calls[MODEL]
            check_foreign(served.page, calls)
            record(record_property, calls)
        return
    with running(shape, tmp_path) as served:
        if shape.load == "storm":
            parts = [load.storm(served.url, seeds)]
        elif shape.load == "pooling":
            parts = [load.pooled(served.url, seeds)]
        else:
            parts = mixed(served, [MODEL], seeds)
        record(record_property, observe(shape, served, parts))
        figures = served.page.figures()
        if shape.load == "storm":
            assert figures.total("llmobs_preemptions_total") > 0
        if shape.load == "repetitive":
            counted = figures.by("kind", "llmobs_spec_tokens_total")
            vllm = scrape(f"{served.url}/metrics")
            assert counted["accepted"] > 0
            assert counted["draft"] == vllm.total("vllm:spec_decode_num_draft_tokens_total")
            assert counted["accepted"] == vllm.total("vllm:spec_decode_num_accepted_tokens_total")


def mixed(served: Served, models: list[str], seeds: load.Seeds, refused: bool = True) -> list[Part]:
    return [
        load.whole(served.url, models, seeds),
        load.cut_short(served.url, models, seeds, refused),
    ]


def observe(shape: Shape, served: Served, parts: list[Part]) -> list[Call]:
    """Send each part and compare; then look at what is left at the end."""
    server, page = served.server, served.page
    for part in parts:
        before = page.figures()
        vllm = scrape(f"{served.url}/metrics") if shape.vllm_counts else None
        play(part.send)
        sent = [call for calls in part.calls.values() for call in calls]
        change = page.settled(before, len(sent))
        for model, calls in part.calls.items():
            check_counts(change, calls, model, pooling=shape.load == "pooling")
        check_steps(change)
        generated = change.total("llmobs_generated_tokens_total")
        if part.exact and shape.load != "pooling":
            assert generated == sum(call.tokens for call in sent)
            if vllm is not None:
                vllm = scrape(f"{served.url}/metrics") - vllm
                assert generated == vllm.total("vllm:generation_tokens_total")
    assert shape.proof in server.log_text(), "the shape is not what it says"
    roles = Counter(process.role for process in server.processes())
    assert {role: roles[role] for role in shape.processes} == shape.processes
    check_rings(served.page, shape.processes)
    check_end(page.figures(), shape.processes)
    if (engines := shape.processes["engine_core"]) > 1:
        steps = page.figures().by("engine", "batch_size_distribution_count")
        assert set(steps) == {str(number) for number in range(engines)}
        assert all(steps.values()), steps
    assert "llmobs: probe" not in server.log_text()
    return [call for part in parts for calls in part.calls.values() for call in calls]


def check_rings(page: Page, processes: dict[str, int]) -> None:
    """Each observed process has a ring, and no other has."""
    rings = Counter(path.name.partition("-")[0] for path in page.folder.glob("*.ring"))
    assert rings == processes


def record(record_property: Record, calls: list[Call]) -> None:
    """For the table in docs/reliability.md."""
    ends = Counter(call.outcome for call in calls)
    record_property("requests", len(calls))
    record_property("outcomes", ", ".join(f"{n} {end}" for end, n in sorted(ends.items())))


def two_servers(shape: Shape, folder: Path, record_property: Record) -> None:
    """Both use the same run folder and ask for the same port; each page counts its own alone."""
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(running(shape, folder, OTEL_EXPORTER_PROMETHEUS_PORT=port))
            for _ in range(2)
        ]
        assert servers[0].page.url != servers[1].page.url
        seeds = load.Seeds()
        calls = []
        for number, served in enumerate(servers):
            # The first is not idle while the second is asked: other counts, at the same time.
            parts = mixed(served, [MODEL], seeds)
            calls += observe(shape, served, parts[: 2 - number])
        others = [
            load.whole(served.url, [MODEL], seeds, longest=2000 * n)
            for n, served in enumerate(servers, 1)
        ]
        befores = [served.page.figures() for served in servers]

        async def both(session: object) -> None:
            import asyncio

            await asyncio.gather(*(part.send(session) for part in others))

        play(both)
        for served, part, before in zip(servers, others, befores, strict=True):
            sent = part.calls[MODEL]
            check_counts(served.page.settled(before, len(sent)), sent, MODEL)
            calls += sent
        record(record_property, calls)


# Programs


@shapes(PROGRAMS)
def test_a_program(shape: Shape, tmp_path: Path, record_property: Record) -> None:
    options = {
        "model": str(make_model(tmp_path / "model", shape.kind)),
        "served_model_name": MODEL,
        "load_format": "dummy",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 33000,
    }
    command = [sys.executable, library.__file__, str(shape.start), json.dumps(options)]
    environ = os.environ | DEFAULT_ENV | environment(shape, tmp_path)
    log = tmp_path / "program.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,
        ) as program,
    ):
        calls = list(read_calls(program))
        assert calls, log.read_text()[-3000:]
        page = Page(tmp_path / "runs", program.pid)
        if shape.start == "EngineCore":
            check_foreign(page, calls)
        else:
            check_program(shape, page, calls, before=Figures({}))
        check_origin(shape, page)
        record(record_property, calls)
        program.communicate("", timeout=60)
        assert program.returncode == 0, log.read_text()[-3000:]
    assert "llmobs: probe" not in log.read_text()


def read_calls(program: subprocess.Popen) -> Iterator[Call]:
    assert program.stdout is not None
    for line in program.stdout:
        if line.startswith("done"):
            return
        if not line.startswith("{"):
            continue
        told = json.loads(line)
        refused = told["reason"] == "rejected"
        answer = Outcome(
            "library",
            status=400 if refused else 200,
            error="refused" if refused else None,
            prompt_tokens=told["prompt"],
            completion_tokens=told["tokens"],
            finish_reason=told["reason"],
            aborted=told["reason"] == "abort",
            chunks=told["seen"],
        )
        prompt = told["prompt"]
        limits = {"0-1k": 1024, "1k-4k": 4096, "4k-32k": 32768}
        bucket = next(name for name, limit in limits.items() if prompt <= limit)
        yield Call(
            *("unknown" if refused else bucket, prompt, None),
            sequences=told["sequences"],
            _answer=answer,
        )


def all_told(page: Page) -> Figures | None:
    figures = page.figures()
    received = figures.total("llmobs_requests_received_total")
    told = figures.total("llmobs_request_seconds_count")
    return figures if received == told > 0 else None


def check_program(shape: Shape, page: Page, calls: list[Call], before: Figures) -> None:
    change = page.settled(before, len(calls))
    check_counts(change, calls, MODEL)
    check_steps(change)
    check_end(page.figures(), shape.processes)
    check_rings(page, {"api_server": 1} if shape.inside else shape.processes)


def check_foreign(page: Page, calls: list[Call]) -> None:
    """The engine's figures are right, the front end's are not there, and it is said why."""
    assert all(call.answer.ok or call.answer.aborted for call in calls), calls
    figures = eventually("an empty engine", lambda: empty(page))
    tokens = figures.by("context_bucket", "llmobs_generated_tokens_total")
    for bucket in BUCKETS:
        here = [call for call in calls if call.bucket == bucket]
        told = sum(call.answer.completion_tokens or call.answer.chunks for call in here)
        # Of these the engine makes some more before it hears that they are over.
        over = [call for call in here if call.outcome in ("abort", "stop")]
        assert told <= tokens[bucket] <= told + library.VERY_LONG * len(over), bucket
    latency = "decode_token_latency_seconds_count"
    assert figures.total(latency, token="next") == sum(tokens.values()) - sum(
        call.sequences for call in calls
    )
    assert figures.total(latency, token="first") == 0
    check_steps(figures)
    check_end(figures, ("engine_core", "worker"))
    check_rings(page, {"engine_core": 1, "worker": 1})
    for name in ("llmobs_request_seconds_count", "llmobs_request_phase_seconds_count"):
        assert figures.total(name) == 0
    for name in ("llmobs_requests_total", "llmobs_requests_received_total"):
        with pytest.raises(KeyError):
            figures.total(name)
    said = figures.by("reason", "llmobs_feature_available", feature="front_end")
    assert said == {"foreign_frontend": 0}
    said = figures.by("reason", "llmobs_feature_available", feature="http_edge")
    assert said == {"foreign_frontend": 0}
    assert figures.by("reason", "llmobs_feature_available", feature="worker") == {"": 1}


def empty(page: Page) -> Figures | None:
    figures = page.figures()
    return figures if figures.total("llmobs_requests") == 0 else None


def check_origin(shape: Shape, page: Page) -> None:
    """Forked processes never ran another program: the kernel knows."""
    if shape.inside:
        return
    pids = {
        path.name.split("-")[0]: int(path.name.split("-")[1]) for path in page.folder.glob("*.ring")
    }
    forked = shape.env.get("VLLM_WORKER_MULTIPROC_METHOD") == "fork"
    for role in ("engine_core", "worker"):
        fields = Path(f"/proc/{pids[role]}/stat").read_text().rpartition(")")[2].split()
        never_executed = bool(int(fields[6]) & 0x40)  # PF_FORKNOEXEC, include/linux/sched.h
        assert never_executed == forked, role
