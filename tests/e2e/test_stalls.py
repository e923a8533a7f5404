"""Processes of a real server that stand still: what is seen meanwhile, and told afterwards."""

import asyncio
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from demo.client import Outcome, completion, open_session
from demo.model import make_model, prompt_ids
from demo.receiver import Receiver, Span
from demo.vllm_server import VllmServer
from tests.e2e.conftest import Served, free_port
from tests.e2e.holdup import HEADER
from tests.e2e.page import Figures, Page, eventually

pytestmark = pytest.mark.e2e

STREAMS = 3
TOKENS = 600
FROZEN_S = float(os.environ.get("STALL_SECONDS", "6"))


@dataclass(frozen=True)
class Traced(Served):
    receiver: Receiver


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("server")
    with (
        Receiver() as receiver,
        VllmServer(
            make_model(folder / "model", "llama"),
            folder / "server.log",
            ["--middleware=tests.e2e.holdup.hold_up"],
            env={
                "LLMOBS_RUN_DIR": str(folder / "runs"),
                "OTEL_EXPORTER_PROMETHEUS_PORT": str(free_port()),
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.http_url,
                "OTEL_METRICS_EXPORTER": "prometheus",
                "OTEL_LOGS_EXPORTER": "none",
            },
        ) as server,
    ):
        yield Traced(server, Page(folder / "runs"), receiver)


class Freeze:
    """The engine core is stopped while streams run."""

    def __init__(self, served: Traced) -> None:
        self.before = served.page.figures()
        self.during: list[Figures] = []
        self.outcomes: list[Outcome] = []
        self.seconds = 0.0
        asyncio.run(self._run(served))
        self.change = served.page.settled(self.before, STREAMS)
        self.after = served.page.figures()
        self.roots = eventually("the traces", lambda: self._roots(served.receiver))

    async def _run(self, served: Traced) -> None:
        (engine,) = served.server.pids("engine_core")
        async with open_session() as session:
            streams = [
                asyncio.create_task(
                    completion(
                        session, served.url, prompt_ids(20, n), max_tokens=TOKENS, stream=True
                    )
                )
                for n in range(STREAMS)
            ]
            await asyncio.to_thread(
                eventually,
                "all of them decode",
                lambda: served.page.figures().total("llmobs_requests", state="running") == STREAMS,
            )
            os.kill(engine, signal.SIGSTOP)
            stopped = time.monotonic()
            try:
                for _ in range(3):
                    await asyncio.sleep(FROZEN_S / 4)
                    self.during.append(await asyncio.to_thread(served.page.figures))
                await asyncio.sleep(max(FROZEN_S - (time.monotonic() - stopped), 0))
            finally:
                os.kill(engine, signal.SIGCONT)
            self.seconds = time.monotonic() - stopped
            self.outcomes = list(await asyncio.gather(*streams))

    def _roots(self, receiver: Receiver) -> list[Span] | None:
        spans = [span for trace in receiver.traces().values() for span in trace]
        roots = [span for span in spans if span.name == "llm.request"]
        return roots if len(roots) >= STREAMS else None


@pytest.fixture(scope="module")
def freeze(served: Traced) -> Freeze:
    return Freeze(served)


def test_the_heartbeat_stands_while_requests_run(freeze: Freeze) -> None:
    beats = [f.total("llmobs_engine_last_step_timestamp_seconds") for f in freeze.during]
    assert len(set(beats)) == 1
    assert 0 < time.time() - beats[0] < 3600
    running = [f.total("llmobs_requests", state="running") for f in freeze.during]
    assert running == [STREAMS] * 3
    assert freeze.after.total("llmobs_engine_last_step_timestamp_seconds") > beats[0]


def test_each_stream_tells_that_it_was_frozen_and_for_how_long(freeze: Freeze) -> None:
    gaps = sorted(outcome.longest_gap or 0.0 for outcome in freeze.outcomes)
    assert gaps[0] >= freeze.seconds - 0.1, "the client noticed"
    for root in freeze.roots:
        assert "token_gap" in root.attributes["llm.kept_because"]
        (decode,) = [span for span in root.children if span.name == "llm.decode"]
        assert len(decode.events) <= 16
        stalls = [about for name, about in decode.events if name == "stall"]
        longest = max(stalls, key=lambda about: about["llm.stall.seconds"])
        assert longest["llm.stall.cause"] == "frozen"
        assert longest["llm.stall.process"] == "engine_core"
        # One step's work beside it; on a busy machine that takes a while.
        assert freeze.seconds - 0.1 <= longest["llm.stall.seconds"] <= freeze.seconds + 1.5
        assert abs(longest["llm.stall.seconds"] - gaps[-1]) < 1.0
        assert decode.attributes["llm.stall.seconds"] >= longest["llm.stall.seconds"]


def test_the_counter_has_the_stall_once_for_all_streams(freeze: Freeze) -> None:
    frozen = freeze.change.total("llmobs_stall_seconds_total", cause="frozen")
    assert freeze.seconds - 0.1 <= frozen <= freeze.seconds + 3


def test_where_there_is_no_gpu_its_clock_is_not_told(freeze: Freeze) -> None:
    figures = freeze.after
    host = figures.by("batch_kind", "llmobs_forward_seconds_count", clock="host")
    stage = figures.by("batch_kind", "llmobs_step_seconds_count", stage="forward")
    assert host == stage
    assert host["decode"] > 100
    with pytest.raises(KeyError):
        figures.total("llmobs_forward_seconds_count", clock="gpu")
    assert figures.total("llmobs_feature_available", feature="gpu_clock", reason="no_gpu") == 0


def hold_up(served: Traced, how: str) -> tuple[float, Figures]:
    """For how long it held up the API server, and what changed."""
    before = served.page.figures()
    asked = urllib.request.Request(f"{served.url}/health", headers={HEADER: how})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        held = float(answer.headers[HEADER])
    time.sleep(0.3)
    return held, served.page.figures() - before


def above(change: Figures, name: str, le: str) -> float:
    """Observations beyond a boundary, of the API server."""
    buckets = change.by("le", f"{name}_bucket", process="api_server")
    return buckets["+Inf"] - buckets[le]


def test_a_blocked_event_loop(served: Traced) -> None:
    held, change = hold_up(served, "loop")
    assert held >= 0.5
    assert above(change, "llmobs_event_loop_lag_seconds", "0.3") >= 1
    assert change.total("llmobs_event_loop_lag_seconds_sum", process="api_server") >= held - 0.11
    with pytest.raises(KeyError):
        change.total("llmobs_event_loop_lag_seconds_count", process="worker")


def test_a_long_collection(served: Traced) -> None:
    held, change = hold_up(served, "gc")
    assert held > 0.1
    assert above(change, "llmobs_gc_pause_seconds", "0.1") >= 1
    # Between the caller's two looks at the clock a busy machine has others to run, too.
    assert change.total("llmobs_gc_pause_seconds_sum", process="api_server") >= held / 2
    for process in ("engine_core", "worker"):
        assert served.page.figures().total("llmobs_gc_pause_seconds_count", process=process) > 0
