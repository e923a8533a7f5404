"""Starts vLLM in a shape: as a server, or in a program of a user's."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from demo.client import MODEL, Outcome
from demo.model import make_model
from demo.vllm_server import DEFAULT_ENV, ROOT, VllmServer
from tests.e2e.conftest import Served, free_port
from tests.e2e.page import Page
from tests.e2e.test_doors import SERVE, vllm_by_name
from tests.e2e.traffic import Call
from tests.shapes import as_asked, library
from tests.shapes.table import Shape

EXTRAS = os.environ.get("SHAPES_EXTRAS") or str(Path(sys.prefix) / "shapes")
"""What `make shapes` installs for these tests alone."""
LIMITS = {"0-1k": 1024, "1k-4k": 4096, "4k-32k": 32768}


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
def a_server(shape: Shape, folder: Path, *args: str, **env: str) -> Iterator[Served]:
    """A server of that shape, its files in the folder."""
    folder.mkdir(exist_ok=True)
    server = (GrpcServer if shape.load == "grpc" else VllmServer)(
        make_model(folder / "model", shape.kind),
        folder / "server.log",
        [*shape.args, *args],
        env=environment(shape, folder) | env,
        entry=shape.start,
    )
    with server:
        runs = Path(env.get("LLMOBS_RUN_DIR", folder / "runs"))
        yield Served(server, Page(runs, server.pid))


@contextlib.contextmanager
def a_program(shape: Shape, folder: Path) -> Iterator[tuple[Page, list[Call]]]:
    """A program of that shape that has done its work and lives on, and what it was told."""
    options = {
        "model": str(make_model(folder / "model", shape.kind)),
        "served_model_name": MODEL,
        "load_format": "dummy",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 33000,
    }
    log = folder / "program.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, library.__file__, str(shape.start), json.dumps(options)],
            env=os.environ | DEFAULT_ENV | environment(shape, folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,
        ) as program,
    ):
        assert program.stdout is not None
        lines = []
        for line in program.stdout:
            if line == "done\n":
                break
            lines.append(line)
        else:
            raise AssertionError(f"the program ended early:\n{log.read_text()[-3000:]}")
        calls = [told(json.loads(line)) for line in lines if line.startswith("{")]
        yield Page(folder / "runs", program.pid), calls
        program.communicate("", timeout=60)
        assert program.returncode == 0, log.read_text()[-3000:]
    assert "llmobs: probe" not in log.read_text()


def told(answer: dict) -> Call:
    """A line of library.py as one of the tests' calls."""
    refused = answer["reason"] == "rejected"
    prompt = answer["prompt"]
    bucket = next(name for name, limit in LIMITS.items() if prompt <= limit)
    outcome = Outcome(
        "library",
        status=400 if refused else 200,
        error="refused" if refused else None,
        prompt_tokens=prompt,
        completion_tokens=answer["tokens"],
        finish_reason=answer["reason"],
        aborted=answer["reason"] == "abort",
        chunks=answer["seen"],
    )
    return Call(
        *("unknown" if refused else bucket, prompt, None),
        sequences=answer["sequences"],
        _answer=outcome,
    )
