"""A vLLM that has moved on: it serves, and it is said what is not seen any more."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from demo.client import completion, open_session
from demo.model import make_model, prompt_ids
from demo.vllm_server import VllmServer
from tests.e2e.conftest import free_port
from tests.e2e.page import Figures, Page, eventually

pytestmark = pytest.mark.e2e

SCHEDULER = "vllm.v1.core.sched.scheduler"
# In every process, before llmobs looks.
CHANGE = """
import wrapt

def change(module):
    Scheduler = module.Scheduler
    {change}

wrapt.register_post_import_hook(change, "{module}")
"""
MOVED = """
    Scheduler.__mro__[1]._free_request = Scheduler._free_request
    del Scheduler._free_request
    preempt = Scheduler._preempt_request
    Scheduler._preempt_request = lambda self, victim, *rest: preempt(self, victim, *rest)
"""
# Without this probe no process becomes an engine core.
RENAMED = """
    init = Scheduler.__init__
    Scheduler.__init__ = lambda self, **arguments: init(self, **arguments)
"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[str], tuple[VllmServer, Page]]]:
    servers = []

    def start(change: str) -> tuple[VllmServer, Page]:
        site = tmp_path / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(CHANGE.format(change=change, module=SCHEDULER))
        env = {
            "PYTHONPATH": str(site),
            "LLMOBS_RUN_DIR": str(tmp_path / "runs"),
            "OTEL_EXPORTER_PROMETHEUS_PORT": str(free_port()),
        }
        model = make_model(tmp_path / "model", "llama")
        server = VllmServer(model, tmp_path / "server.log", env=env)
        servers.append(server)
        server.start()
        return server, Page(tmp_path / "runs")

    yield start
    for server in servers:
        server.stop()


def ask(server: VllmServer) -> None:
    """Some requests, all answered."""

    async def traffic() -> None:
        async with open_session() as session:
            asked = [
                completion(session, server.url, prompt_ids(20, seed), max_tokens=20, stream=True)
                for seed in range(8)
            ]
            for answer in await asyncio.gather(*asked):
                assert answer.ok
                assert answer.completion_tokens == 20

    asyncio.run(traffic())


def observed(serve: Callable, change: str) -> tuple[VllmServer, Figures]:
    """A server of which this is changed, and its page once it has answered."""
    server, page = serve(change)
    ask(server)
    eventually("the ends", lambda: _ended(page) == 8)
    return server, page.figures()


def said(server: VllmServer) -> list[str]:
    """The lines about a probe: each once, whichever of the processes says it."""
    lines = server.log_text().splitlines()
    return sorted(line.partition("llmobs: ")[2] for line in lines if " is off, " in line)


def test_a_method_and_a_parameter_that_are_gone(serve: Callable) -> None:
    server, figures = observed(serve, MOVED)
    attached = figures.by("probe", "llmobs_probe_attached", process="engine_core")
    assert attached.pop("leave") == 0
    assert attached.pop("preempt") == 0
    assert set(attached.values()) == {1}
    for process in ("api_server", "worker"):
        assert set(figures.by("probe", "llmobs_probe_attached", process=process).values()) == {1}
    assert said(server) == [
        f"probe leave is off, this vLLM has no {SCHEDULER}:Scheduler._free_request "
        "(Scheduler does not define _free_request)",
        f"probe preempt is off, this vLLM has no {SCHEDULER}:Scheduler._preempt_request "
        "(change.<locals>.<lambda> has no parameter request)",
    ]
    assert figures.total("llmobs_guard_errors_total") == 0
    assert figures.total("llmobs_generated_tokens_total") == 0, "nothing is followed halfway"


def test_the_probe_is_gone_that_makes_a_process_an_engine_core(serve: Callable) -> None:
    server, figures = observed(serve, RENAMED)
    core = figures.by("probe", "llmobs_probe_attached", process="engine_core")
    assert core == {"scheduler": 0}
    (line,) = said(server)
    assert line.startswith("probe scheduler is off, ")
    assert figures.total("llmobs_guard_errors_total") == 0


def _ended(page: Page) -> float:
    return page.figures().total("llmobs_requests_total", outcome="length")
