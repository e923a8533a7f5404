"""What every test starts from: a process that is no server yet, and no setting of the outside."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmobs import pauses, probes, process
from llmobs.guard import GUARD


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """llmobs keeps its state per process: give each test a new one, and leave nothing behind."""
    for name in (
        *("LLMOBS_ENABLED", "LLMOBS_RUN_DIR", "LLMOBS_RING_BYTES", "LLMOBS_AGENT"),
        *("LLMOBS_SLO_FILE", "LLMOBS_FLIGHT_DIR"),
        "LLMOBS_GPU_SECONDS",
        *("OTEL_SDK_DISABLED", "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "OTEL_METRICS_EXPORTER"),
        *("OTEL_EXPORTER_PROMETHEUS_HOST", "OTEL_EXPORTER_PROMETHEUS_PORT", "_LLMOBS_SERVER_RUN"),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process, "_current", None)
    monkeypatch.setattr(GUARD, "failures", {})
    monkeypatch.setattr(GUARD, "total", 0)
    monkeypatch.setattr(GUARD, "_said", set())
    monkeypatch.setattr(GUARD, "on_failure", None)
    monkeypatch.setattr(pauses, "watch", lambda ring: None)  # a collection of pytest's own
    yield
    if probes._hooked or probes._applied:
        probes.detach()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where run folders go. No agent is started."""
    monkeypatch.setenv("LLMOBS_RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("LLMOBS_RING_BYTES", "8192")
    monkeypatch.setattr(process, "_watch", lambda *_: None)
    return tmp_path / "runs"
