"""What the end-to-end tests share: real servers with llmobs on."""

import contextlib
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.model import make_model
from demo.vllm_server import VllmServer
from tests.e2e.page import Page


@dataclass(frozen=True)
class Served:
    """A running server and its metrics page."""

    server: VllmServer
    page: Page

    @property
    def url(self) -> str:
        return self.server.url


Start = Callable[..., Served]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a server under `opentelemetry-instrument`; it is stopped after the module's tests."""
    folder = tmp_path_factory.mktemp("server")
    with contextlib.ExitStack() as stack:

        def start(*args: str, kind: str = "llama", env: dict[str, str] | None = None) -> Served:
            runs = folder / "runs"
            server = VllmServer(
                make_model(folder / kind, kind),
                folder / "server.log",
                args,
                env={
                    "LLMOBS_RUN_DIR": str(runs),
                    "OTEL_TRACES_EXPORTER": "none",
                    "OTEL_LOGS_EXPORTER": "none",
                    "OTEL_EXPORTER_PROMETHEUS_PORT": str(free_port()),
                    **(env or {}),
                },
                prefix=[str(Path(sys.executable).with_name("opentelemetry-instrument"))],
            )
            stack.enter_context(server)
            return Served(server, Page(runs))

        yield start
