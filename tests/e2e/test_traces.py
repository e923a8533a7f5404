"""Traces of a real server, as a receiver that decodes OTLP sees them."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from demo.client import chat, completion, open_session
from demo.model import make_model, prompt_ids
from demo.receiver import Receiver, Span
from demo.vllm_server import MODULE, VllmServer
from tests.e2e.conftest import free_port
from tests.e2e.page import OPENMETRICS, Page, eventually, fetch, scrape

pytestmark = pytest.mark.e2e

BIN = Path(sys.executable).parent
CANARY = "xylophone"
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "tracestate": "rojo=1,congo=t61"}


class Traced:
    """A server whose spans come to `receiver`."""

    def __init__(self, server: VllmServer, page: Page, receiver: Receiver) -> None:
        self.server, self.page, self.receiver = server, page, receiver

    def send(self, *asks: Callable[[Any, str], Any], at_once: int = 1 << 20) -> list[Any]:
        """Send all, so many at once; their outcomes."""

        async def run() -> list[Any]:
            free = asyncio.Semaphore(at_once)
            async with open_session() as session:

                async def one(ask: Callable[[Any, str], Any]) -> Any:
                    async with free:
                        return await ask(session, self.server.url)

                return await asyncio.gather(*(one(ask) for ask in asks))

        return asyncio.run(run())

    def roots(self, expected: int, within_s: float = 20.0) -> list[Span]:
        """The request spans, once so many are there."""
        return eventually(
            f"{expected} request spans",
            lambda: found if len(found := self._roots()) >= expected else None,
            within_s,
        )

    def _roots(self) -> list[Span]:
        traces = self.receiver.traces()
        return [span for spans in traces.values() for span in spans if span.name == "llm.request"]


Open = Callable[..., Traced]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Starts a server; the one before it is stopped."""
    model = make_model(tmp_path_factory.mktemp("model"), "llama")
    running: list[tuple[VllmServer, Receiver]] = []

    def stop() -> None:
        while running:
            server, receiver = running.pop()
            server.stop()
            receiver.__exit__(None, None, None)

    def start(*args: str, instrument: bool = False, **env: str) -> Traced:
        stop()
        receiver = Receiver().__enter__()
        folder = tmp_path_factory.mktemp("server")
        server = VllmServer(
            model,
            folder / "server.log",
            [a.replace("RECEIVER", receiver.grpc_url) for a in args],
            env={
                "LLMOBS_RUN_DIR": str(folder / "runs"),
                "OTEL_EXPORTER_PROMETHEUS_PORT": str(free_port()),
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.http_url,
                "OTEL_METRICS_EXPORTER": "none,otlp" if not instrument else "prometheus",
                "OTEL_LOGS_EXPORTER": "none",
                **env,
            },
            prefix=[str(BIN / "opentelemetry-instrument")] if instrument else [],
            entry=MODULE,
        )
        running.append((server, receiver))
        server.start()
        return Traced(server, Page(folder / "runs"), receiver)

    yield start
    stop()


def ask(prompt: int, tokens: int, seed: int, **more: Any) -> Callable[[Any, str], Any]:
    return lambda session, url: completion(
        session, url, prompt_ids(prompt, seed), max_tokens=tokens, stream=True, **more
    )


def check_tree(root: Span) -> None:
    """The direct children follow each other without a gap and sum to the request within 1 ms."""
    children = root.children
    assert children, root
    assert all(abs(a.end - b.start) < 1_000_000 for a, b in pairwise(children)), children
    assert abs(time.time() - root.start / 1e9) < 3600, "not of today"
    total = sum(child.end - child.start for child in children)
    assert abs(total - (root.end - root.start)) < 1_000_000
    for span in _below(root):
        assert len(span.events) <= 16
        assert span.start <= span.end
        assert CANARY not in json.dumps([span.attributes, span.events, span.resource])


def _cold(root: Span) -> bool:
    return root.attributes.get("llm.cold_start") is True


def _below(span: Span) -> Iterator[Span]:
    yield span
    for child in span.children:
        yield from _below(child)


def size(root: Span) -> int:
    return sum(1 for _ in _below(root))


def test_a_mixed_run_is_told_whole(trace: Open) -> None:
    """Every aborted, rejected and late request is there, with its status; no text is."""
    run = trace(
        "--max-num-queued-reqs=40",
        LLMOBS_TRACE_SAMPLING="always",
        OTEL_SERVICE_NAME="chat",
        OTEL_RESOURCE_ATTRIBUTES="instance_type=a10g,mem=24GB",
        OTEL_METRIC_EXPORT_INTERVAL="1000",
    )
    say = f"please say {CANARY} " * 5
    outcomes = run.send(
        ask(100, 20, 1),
        ask(5000, 8, 2),
        ask(60, 2000, 3),
        ask(50, 900, 4, abort_after_chunks=10),
        ask(20000, 9, 5, abort_after_s=0.3),
        ask(40000, 5, 6),
        lambda s, url: chat(s, url, say, max_tokens=12, stream=True),
        lambda s, url: completion(
            s, url, prompt_ids(30, 7), max_tokens=9, stream=True, n=3, temperature=0.8
        ),
        ask(70, 6, 8, headers=CALLER),
    )
    assert [o.status for o in outcomes].count(400) == 1
    roots = run.roots(len(outcomes))
    assert len(roots) == len({root.trace for root in roots}) == len(outcomes)
    for root in roots:
        check_tree(root)
        assert root.kind == 2  # SERVER: no other server span is there
        assert root.resource["service.name"] == "chat"
        assert root.resource["instance_type"] == "a10g"
    assert Counter(root.attributes["llm.outcome"] for root in roots) == {
        "length": 6,
        "abort": 2,
        "rejected": 1,
    }
    by_length = {root.attributes.get("gen_ai.usage.input_tokens"): root for root in roots}
    assert [child.name for child in by_length[100].children] == [
        "llm.preprocess",
        "llm.queue",
        "llm.prefill",
        "llm.decode",
        "llm.deliver",
    ]
    assert size(by_length[60]) <= 12  # 2,000 tokens
    assert by_length[60].attributes["gen_ai.usage.output_tokens"] == 2000
    cold = [root.attributes["llm.context_bucket"] for root in roots if _cold(root)]
    assert cold.count("0-1k") == 1
    events = next(s for s in _below(by_length[5000]) if s.name == "llm.prefill").events
    chunks = [about for name, about in events if name == "llm.prefill.chunk"]
    assert sum(about["llm.tokens.computed"] for about in chunks) == 5000
    (taken,) = [about for name, about in events if name == "kv.allocate"]
    assert taken["llm.kv.blocks"] == 40  # of 128 tokens
    assert taken["llm.kv.blocks_left"] > 0
    rejected = by_length[None]
    assert rejected.attributes["http.response.status_code"] == 400
    assert rejected.status == 0  # the caller's fault is no error of the server
    assert [child.name for child in rejected.children] == ["llm.preprocess"]
    called = by_length[70]
    assert (called.trace, called.parent) == (TRACE, "b7ad6b7169203331")
    assert called.state == "rojo=1,congo=t61"
    assert "caller" in called.attributes["llm.kept_because"]

    # The metrics, on the wire
    metrics = eventually("metrics that tell of all requests", lambda: _wire(run.receiver, 9))
    first = metrics["gen_ai.server.time_to_first_token"]
    assert (first.unit, first.histogram.aggregation_temporality) == ("s", 2)  # CUMULATIVE
    bounds = set(first.histogram.data_points[0].explicit_bounds)
    assert {0.05, 0.2, 0.3, 0.5, 0.8, 60.0} <= bounds
    assert metrics["gen_ai.client.token.usage"].unit == "{token}"
    for name in ("gen_ai.server.time_per_output_token", "gen_ai.server.request.duration"):
        assert metrics[name].unit == "s"


def _wire(receiver: Receiver, requests: int) -> dict[str, Any] | None:
    with receiver.lock:
        received = receiver.metrics[-1:]
    for request in received:
        metrics = {m.name: m for m in request.resource_metrics[0].scope_metrics[0].metrics}
        points = metrics["gen_ai.server.request.duration"].histogram.data_points
        if sum(point.count for point in points) == requests:
            return metrics
    return None


def test_the_ten_slowest_of_two_thousand_are_all_kept_and_explained(
    trace: Open, tmp_path: Path
) -> None:
    """Under the default sampling; and a real Prometheus leads from a bucket to such a trace."""
    run = trace("--max-num-batched-tokens=2048")
    with _prometheus(run.page.url, tmp_path) as prometheus:
        chats = [ask(20 + n % 40, 3, n) for n in range(1990)]
        books = [ask(6000, 3, 5000 + n) for n in range(10)]
        mixed = [*chats[:700], *books, *chats[700:]]
        outcomes = run.send(*mixed, at_once=24)
        assert len(outcomes) == 2000
        told = eventually(
            "all requests told",
            lambda: r if len(r := run.page.requests()) == 2000 else None,
        )
        slowest = sorted(told, key=lambda request: -request["seconds"])[:10]
        roots = run.roots(10, 60)
        time.sleep(3)
        seconds = sorted((root.seconds for root in run.roots(10)), reverse=True)
        for place, request in enumerate(slowest):
            assert seconds[place] == pytest.approx(request["seconds"], abs=1e-3)
        assert len(run.roots(10)) < 1500  # the rest was in order, and 1 % of it is kept
        roots = run.roots(10)
        chats_kept = [r for r in roots if r.attributes["gen_ai.usage.input_tokens"] < 60]
        predicted = [r.attributes.get("llm.latency.predicted") for r in chats_kept]
        assert sum(seconds is not None for seconds in predicted) > len(predicted) / 2
        assert all(0 < seconds < 5 for seconds in predicted if seconds is not None)
        assert sum(map(_cold, roots)) <= 2
        for root in roots:
            for step in (s for s in _below(root) if s.name == "llm.decode.step"):
                assert step.attributes["llm.batch.size"] >= 1
                assert step.attributes["llm.batch.kind"] in ("decode", "mixed")
                assert step.attributes["llm.batch.longest_context"] >= 20
        beside = [
            s.attributes["llm.batch.longest_context"]
            for root in roots
            for s in _below(root)
            if s.name == "llm.decode.step"
        ]
        assert 6000 in beside  # the books beside the chats are named

        exemplars = eventually("exemplars in Prometheus", lambda: _exemplars(prometheus), 30)
        traces = eventually(
            "the exemplars' traces",
            lambda: t if exemplars <= set(t := run.receiver.traces()) else None,
        )
        assert exemplars <= set(traces)
    text = fetch(f"{run.page.url}/metrics", OPENMETRICS)
    assert ' # {span_id="' in text


class _prometheus:
    """A real Prometheus that scrapes the page, with its exemplar storage."""

    def __init__(self, page: str, folder: Path) -> None:
        self.port = free_port()
        config = folder / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s}\n"
            "scrape_configs:\n"
            f"  - {{job_name: llmobs, static_configs: [{{targets: ['{page[7:]}']}}]}}\n"
        )
        binary = shutil.which("prometheus")
        assert binary, "Debian's package prometheus is needed (make test installs it)"
        self.command = [
            binary,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--enable-feature=exemplar-storage",
        ]

    def __enter__(self) -> str:
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return f"http://127.0.0.1:{self.port}"

    def __exit__(self, *_: Any) -> None:
        self.process.terminate()
        self.process.wait(20)


def _exemplars(prometheus: str) -> set[str] | None:
    """The trace ids of all exemplars that Prometheus has of the first token's latency."""
    query = urllib.parse.urlencode(
        {
            "query": 'decode_token_latency_seconds_bucket{token="first"}',
            "start": str(time.time() - 600),
            "end": str(time.time() + 10),
        }
    )
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_exemplars?{query}") as answer:
        series = json.load(answer)["data"]
    return {e["labels"]["trace_id"] for one in series for e in one["exemplars"]} or None


def check_kv(roots: list[Span]) -> None:
    """What each request took of the cache: blocks of 128 tokens, all its own."""
    starved = 0
    for root in roots:
        taken = lost = 0
        for span in root.children:
            for name, about in span.events:
                starved += name == "kv.starved"
                if name == "kv.allocate":
                    taken += about["llm.kv.blocks"]
                    assert 0 <= about["llm.kv.blocks_left"] <= 23
            lost += span.attributes.get("llm.kv.blocks_lost", 0)
        tokens = root.attributes["gen_ai.usage.input_tokens"] + 600 - 1
        assert taken - lost in (-(-tokens // 128), -(-tokens // 128) + 1), (taken, lost)
    assert starved >= len(roots) > 0


def test_preempted_spans_are_as_many_as_vllm_counts(trace: Open) -> None:
    run = trace(
        "--num-gpu-blocks-override=24", "--no-enable-prefix-caching", "--max-model-len=2048"
    )
    run.send(*(ask(60, 600, n) for n in range(16)))
    counted = scrape(f"{run.server.url}/metrics").total("vllm:num_preemptions_total")
    assert counted > 0

    def preempted() -> int:
        return sum(s.name == "llm.preempted" for s in run.receiver.spans)

    eventually(f"{counted} preempted spans", lambda: preempted() >= counted)
    time.sleep(1)
    assert preempted() == counted
    for root in run.roots(1):
        check_tree(root)
        for span in root.children:
            if span.name == "llm.preempted":
                assert span.attributes["llm.tokens.lost"] > 0
                assert 0.5 < span.attributes["llm.kv.usage"] <= 1
                for recompute in span.children:
                    assert recompute.attributes["llm.recompute"] is True
    check_kv(run.roots(1))


def test_a_collector_in_trouble_is_said_once_and_holds_up_nobody(trace: Open) -> None:
    """It refuses, is well again, then hangs while the server ends with a full queue."""
    run = trace(LLMOBS_TRACE_SAMPLING="always", OTEL_EXPORTER_OTLP_TIMEOUT="2")
    run.receiver.status = 503
    assert all(o.status == 200 for o in run.send(*(ask(20, 2, n) for n in range(20))))
    eventually("it is said", lambda: "llmobs: spans do not arrive (" in run.server.log_text(), 40)
    dropped = eventually(
        "drops are counted",
        lambda: run.page.figures().total("llmobs_spans_dropped_total", reason="export_failed"),
    )
    assert dropped > 0
    run.receiver.status = 200
    assert all(o.status == 200 for o in run.send(*(ask(20, 2, 100 + n) for n in range(20))))
    run.roots(20, 30)
    assert "llmobs: spans arrive again" in eventually(
        "its end is said", lambda: t if "arrive again" in (t := run.server.log_text()) else ""
    )
    run.receiver.delay = 30
    outcomes = run.send(*(ask(20, 2, 200 + n) for n in range(400)), at_once=32)
    assert all(o.status == 200 for o in outcomes)
    agent = run.page.state["pid"]
    began = time.monotonic()
    run.server.stop()
    eventually("the agent is gone", lambda: not psutil.pid_exists(agent), 20)
    assert time.monotonic() - began < 12  # the server's own end takes 2 to 4 s of it
    log = run.server.log_text()
    assert log.count("llmobs: spans do not arrive (") <= 2
    assert log.count("llmobs: spans arrive again") == 1


@pytest.mark.parametrize("fastapi", [False, True])
def test_one_trace_per_request_with_vllms_own_tracing_on(trace: Open, fastapi: bool) -> None:
    """Also with a caller's traceparent, and with OpenTelemetry's FastAPI instrumentation."""
    disabled = "" if fastapi else "fastapi,asgi"
    run = trace(
        "--otlp-traces-endpoint=RECEIVER",
        instrument=True,
        LLMOBS_TRACE_SAMPLING="always",
        OTEL_TRACES_EXPORTER="otlp",
        OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=disabled,
    )
    run.send(ask(40, 5, 1), ask(50, 5, 2, headers=CALLER))
    roots = run.roots(2)
    own = eventually(
        "vLLM's own spans",
        lambda: (
            s if len(s := [x for x in run.receiver.spans if x.name == "llm_request"]) == 2 else 0
        ),
        30,
    )
    assert {root.trace for root in roots} == {span.trace for span in own}
    assert TRACE in {root.trace for root in roots}
    ids = {span.id: span for span in run.receiver.spans}
    for root in roots:
        check_tree(root)
        if fastapi:
            parent = ids[root.parent]
            assert parent.kind == 2  # the server span, and we are no second one
            assert root.kind == 1
        else:
            assert root.kind == 2
            assert root.parent == ("b7ad6b7169203331" if root.trace == TRACE else "")
    for span in own:
        assert span.parent in ids or span.parent == "b7ad6b7169203331"


def test_requests_that_die_with_the_engine_are_told_as_errors(trace: Open) -> None:
    """Under the default sampling: what failed is always kept."""
    run = trace()

    async def crash() -> list[Any]:
        async with open_session() as session:
            asks = [ask(50, 20000, n)(session, run.server.url) for n in range(4)]
            tasks = [asyncio.create_task(one) for one in asks]
            await asyncio.sleep(1.5)
            for pid in run.server.pids("engine_core"):
                os.kill(pid, signal.SIGKILL)
            return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(crash())
    assert len(outcomes) == 4
    roots = run.roots(4, 30)
    for root in roots:
        check_tree(root)
        assert root.attributes["llm.outcome"] == "error"
        assert "error" in root.attributes["llm.kept_because"]
        assert root.status == 2  # ERROR
        assert root.children[-1].name == "llm.decode"  # where it was then
