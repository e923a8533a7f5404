"""Every shape in which vLLM runs is really run, and all that is counted is what its clients count.

`make shapes` runs them all and writes what came of it into docs/reliability.md; `make test` runs
those marked short, which no other test covers.
"""

import asyncio
import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from demo.client import MODEL
from demo.receiver import Receiver
from tests.e2e.conftest import Served, free_port
from tests.e2e.page import Figures, Page, eventually, scrape
from tests.e2e.traffic import Call, play
from tests.shapes import load
from tests.shapes.adapter import make_adapter
from tests.shapes.check import check_counts, check_end, check_foreign, check_rings, check_steps
from tests.shapes.load import Part, Seeds
from tests.shapes.start import EXTRAS, a_program, a_server
from tests.shapes.table import SHAPES, Shape

pytestmark = pytest.mark.e2e

Record = Callable[[str, object], None]
OBSERVED = {"front_end": 1, "http_edge": 1, "worker": 1}


def shapes(programs: bool) -> pytest.MarkDecorator:
    parameters = [
        pytest.param(shape, id=shape.name, marks=[] if shape.short else [pytest.mark.long])
        for shape in SHAPES
        if isinstance(shape.start, str) == programs
    ]
    return pytest.mark.parametrize("shape", parameters)


@shapes(programs=False)
def test_a_server(shape: Shape, tmp_path: Path, record_property: Record) -> None:
    record(record_property, LOADS[shape.load](shape, tmp_path))


@shapes(programs=True)
def test_a_program(shape: Shape, tmp_path: Path, record_property: Record) -> None:
    with a_program(shape, tmp_path) as (page, calls):
        if shape.start == "EngineCore":
            check_foreign(page, calls, shape.processes)
        else:
            change = page.settled(Figures({}), len(calls))
            check_counts(change, calls, MODEL)
            check_steps(change)
            check_end(page.figures(), shape.processes)
            assert features(page) == OBSERVED
        check_rings(page, {"api_server": 1} if shape.inside else shape.processes)
        if not shape.inside:
            check_origin(page, forked=shape.env.get("VLLM_WORKER_MULTIPROC_METHOD") == "fork")
        record(record_property, calls)


def record(record_property: Record, calls: list[Call]) -> None:
    """For the table in docs/reliability.md."""
    ends = Counter(call.outcome for call in calls)
    record_property("requests", len(calls))
    record_property("outcomes", ", ".join(f"{n} {end}" for end, n in sorted(ends.items())))


# Servers, by what is sent to them; each returns what it sent


def mixed(shape: Shape, folder: Path) -> list[Call]:
    with a_server(shape, folder) as served:
        return observe(shape, served, load.mixed(served.url, [MODEL], Seeds()))


def repetitive(shape: Shape, folder: Path) -> list[Call]:
    """Drafts and acceptances are those that vLLM counts."""
    with a_server(shape, folder) as served:
        calls = observe(shape, served, load.mixed(served.url, [MODEL], Seeds(repeat=8)))
        counted = served.page.figures().by("kind", "llmobs_spec_tokens_total")
        vllm = scrape(f"{served.url}/metrics")
        assert counted["accepted"] > 0
        assert counted["draft"] == vllm.total("vllm:spec_decode_num_draft_tokens_total")
        assert counted["accepted"] == vllm.total("vllm:spec_decode_num_accepted_tokens_total")
        return calls


def storm(shape: Shape, folder: Path) -> list[Call]:
    with a_server(shape, folder) as served:
        calls = observe(shape, served, [load.storm(served.url, Seeds())])
        assert served.page.figures().total("llmobs_preemptions_total") > 0
        return calls


def pooling(shape: Shape, folder: Path) -> list[Call]:
    with a_server(shape, folder) as served:
        return observe(shape, served, [load.pooled(served.url, Seeds())])


def traced(shape: Shape, folder: Path) -> list[Call]:
    """vLLM's own spans go to a collector meanwhile, at least one for each request that ended."""
    with Receiver() as receiver:
        args = tuple(arg.replace("RECEIVER", receiver.grpc_url) for arg in shape.args)
        calls = mixed(dataclasses.replace(shape, args=args), folder)
        ended = sum(call.answer.ok for call in calls)
        spans = [span for span in receiver.spans if span.name == "llm_request"]
        assert len(spans) >= ended
    return calls


def adapters(shape: Shape, folder: Path) -> list[Call]:
    """Some LoRA adapters, named at the start or loaded while the server runs."""
    made = {name: make_adapter(folder / name, seed) for seed, name in enumerate(("ada", "bob"))}
    late = shape.load == "adapters at run time"
    given = [] if late else ["--lora-modules", *(f"{n}={path}" for n, path in made.items())]
    with a_server(shape, folder, *given) as served:

        async def load_all(session: aiohttp.ClientSession) -> None:
            for name, path in made.items():
                await load.load_adapter(session, served.url, name, str(path))

        if late:
            play(load_all)
        return observe(shape, served, load.mixed(served.url, [MODEL, *made], Seeds()))


def two_servers(shape: Shape, folder: Path) -> list[Call]:
    """They share the folder of run folders and ask for the same port; each page counts its own."""
    shared = {
        "LLMOBS_RUN_DIR": str(folder / "runs"),
        "OTEL_EXPORTER_PROMETHEUS_PORT": str(free_port()),
    }
    seeds = Seeds()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(a_server(shape, folder / name, **shared)) for name in "ab"]
        assert servers[0].page.url != servers[1].page.url
        calls = []
        # One after the other, then both at once, each something else.
        for number, served in enumerate(servers):
            parts = load.mixed(served.url, [MODEL], seeds)
            calls += observe(shape, served, parts[number:])
        parts = [
            load.whole(served.url, [MODEL], seeds, longest)
            for served, longest in zip(servers, (2000, 6000), strict=True)
        ]
        befores = [served.page.figures() for served in servers]

        async def both(session: aiohttp.ClientSession) -> None:
            await asyncio.gather(*(part.send(session) for part in parts))

        play(both)
        for served, part, before in zip(servers, parts, befores, strict=True):
            sent = part.calls[MODEL]
            check_counts(served.page.settled(before, len(sent)), sent, MODEL)
            calls += sent
        return calls


def foreign(shape: Shape, folder: Path) -> list[Call]:
    with a_server(shape, folder) as served:
        known = {"front_end": 0, "http_edge": 0, "worker": 1}
        assert features(served.page) == known, "before any request"
        calls = []
        for part in load.mixed(served.url, [MODEL], Seeds(), refused=False):
            play(part.send)
            calls += part.calls[MODEL]
        # The Rust front end of 0.32 does not take several sequences of a prompt.
        refused = [call for call in calls if call.outcome == "rejected"]
        assert not [call.answer for call in refused if call.sequences == 1]
        taken = [call for call in calls if call.outcome != "rejected"]
        check_foreign(served.page, taken, shape.processes)
        check_rings(served.page, shape.processes)
        return calls


def over_grpc(shape: Shape, folder: Path) -> list[Call]:
    sys.path.append(EXTRAS)  # for the client's side
    from tests.shapes.rpc import send

    with a_server(shape, folder) as served:
        page = served.page

        def all_told() -> Figures | None:
            figures = page.figures()
            received = figures.total("llmobs_requests_received_total")
            return (
                figures if received == figures.total("llmobs_request_seconds_count") > 0 else None
            )

        before = eventually("the warm-up is told", all_told)
        calls = send(served.url.removeprefix("http://"), Seeds())
        change = page.settled(before, len(calls))
        check_counts(change, calls, MODEL)
        check_steps(change)
        check_end(page.figures(), shape.processes)
        check_rings(page, shape.processes)
        assert features(page) == {"front_end": 1, "http_edge": 0, "worker": 1}
        return calls


LOADS: dict[str, Callable[[Shape, Path], list[Call]]] = {
    "mixed": mixed,
    "repetitive": repetitive,
    "storm": storm,
    "pooling": pooling,
    "traced": traced,
    "adapters": adapters,
    "adapters at run time": adapters,
    "two servers": two_servers,
    "foreign": foreign,
    "grpc": over_grpc,
}


def observe(shape: Shape, served: Served, parts: list[Part]) -> list[Call]:
    """Send each part and compare; then look at what is left at the end."""
    server, page = served.server, served.page
    pooling = shape.load == "pooling"
    for part in parts:
        before = page.figures()
        vllm = scrape(f"{served.url}/metrics") if shape.vllm_counts else None
        play(part.send)
        sent = [call for calls in part.calls.values() for call in calls]
        change = page.settled(before, len(sent))
        for model, calls in part.calls.items():
            check_counts(change, calls, model, pooling)
        check_steps(change)
        if part.exact and not pooling:
            generated = change.total("llmobs_generated_tokens_total")
            assert generated == sum(call.tokens for call in sent)
            if vllm is not None:
                vllm = scrape(f"{served.url}/metrics") - vllm
                assert generated == vllm.total("vllm:generation_tokens_total")
    assert shape.proof in server.log_text(), "the shape is not what it says"
    roles = Counter(process.role for process in server.processes())
    assert {role: roles[role] for role in shape.processes} == shape.processes
    check_rings(page, shape.processes)
    check_end(page.figures(), shape.processes)
    assert features(page) == OBSERVED
    if (engines := shape.processes["engine_core"]) > 1:
        steps = page.figures().by("engine", "batch_size_distribution_count")
        assert set(steps) == {str(number) for number in range(engines)}
        assert all(steps.values()), steps
    assert "llmobs: probe" not in server.log_text()
    return [call for part in parts for calls in part.calls.values() for call in calls]


def features(page: Page) -> dict[str, float]:
    """Those that the shape decides."""
    told = page.figures().by("feature", "llmobs_feature_available")
    return {feature: value for feature, value in told.items() if feature in OBSERVED}


def check_origin(page: Page, forked: bool) -> None:
    """Forked processes never ran another program: the kernel knows."""
    names = [path.name.split("-") for path in page.folder.glob("*.ring")]
    pids = {role: pid for role, pid, _ in names}
    for role in ("engine_core", "worker"):
        fields = Path(f"/proc/{pids[role]}/stat").read_text().rpartition(")")[2].split()
        never_executed = bool(int(fields[6]) & 0x40)  # PF_FORKNOEXEC, include/linux/sched.h
        assert never_executed == forked, role
