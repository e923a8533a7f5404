"""Each variable, good and bad: a bad one is named once, with what is accepted, and falls back."""

import os
from pathlib import Path

import pytest

from llmobs.settings import read_settings


def test_defaults(caplog: pytest.LogCaptureFixture) -> None:
    settings = read_settings({})
    assert settings.enabled is True
    assert settings.run_base in (
        Path(f"/dev/shm/llmobs-{os.geteuid()}"),
        Path(f"/tmp/llmobs-{os.geteuid()}"),
    )
    assert settings.ring_bytes == 4_194_304
    assert settings.agent is None
    assert settings.gpu_seconds == 10
    assert (settings.host, settings.port) == ("localhost", 9464)
    assert settings.page is True
    assert not caplog.records


GOOD = [
    *[("LLMOBS_ENABLED", v, "enabled", True) for v in ("1", "true", "yes", "on", " TRUE ", "")],
    *[("LLMOBS_ENABLED", v, "enabled", False) for v in ("0", "false", "no", "off", "Off")],
    ("OTEL_SDK_DISABLED", "true", "enabled", False),
    ("OTEL_SDK_DISABLED", "True", "enabled", False),
    # OpenTelemetry: any other value than true is false.
    ("OTEL_SDK_DISABLED", "1", "enabled", True),
    ("OTEL_SDK_DISABLED", "false", "enabled", True),
    ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "llmobs", "enabled", False),
    ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "redis,llmobs", "enabled", False),
    ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "redis, llmobs ,urllib", "enabled", False),
    ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "*", "enabled", False),
    ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "redis", "enabled", True),
    ("LLMOBS_RUN_DIR", "/somewhere/else", "run_base", Path("/somewhere/else")),
    ("LLMOBS_RING_BYTES", "4096", "ring_bytes", 4096),
    ("LLMOBS_RING_BYTES", " 1073741824 ", "ring_bytes", 1073741824),
    ("LLMOBS_AGENT", "/run/llmobs", "agent", Path("/run/llmobs")),
    ("LLMOBS_GPU_SECONDS", "1", "gpu_seconds", 1),
    ("LLMOBS_GPU_SECONDS", "3600", "gpu_seconds", 3600),
    ("OTEL_EXPORTER_PROMETHEUS_HOST", "0.0.0.0", "host", "0.0.0.0"),
    ("OTEL_EXPORTER_PROMETHEUS_PORT", "1", "port", 1),
    ("OTEL_EXPORTER_PROMETHEUS_PORT", "65535", "port", 65535),
    ("OTEL_EXPORTER_PROMETHEUS_PORT", "", "port", 9464),
    ("OTEL_METRICS_EXPORTER", "none", "page", False),
    ("OTEL_METRICS_EXPORTER", " none ", "page", False),
    ("OTEL_METRICS_EXPORTER", "", "page", True),
    ("OTEL_METRICS_EXPORTER", "otlp,prometheus", "page", True),
]


@pytest.mark.parametrize(("name", "value", "field", "expected"), GOOD)
def test_a_good_value(
    caplog: pytest.LogCaptureFixture, name: str, value: str, field: str, expected: object
) -> None:
    assert getattr(read_settings({name: value}), field) == expected
    assert not caplog.records


BAD = [
    ("LLMOBS_ENABLED", "maybe", "enabled", True, "one of 1, true, yes, on, 0, false, no, off"),
    ("LLMOBS_ENABLED", "2", "enabled", True, "one of 1, true, yes, on, 0, false, no, off"),
    *[
        ("LLMOBS_RING_BYTES", v, "ring_bytes", 4_194_304, "bytes from 4096 to 1073741824")
        for v in ("4MiB", "4095", "1073741825", "-1", "1e6", "4096.0", "٤x")
    ],
    *[
        ("LLMOBS_GPU_SECONDS", v, "gpu_seconds", 10, "a number of seconds from 1 to 3600")
        for v in ("0", "3601", "-1", "10s", "0.5", "often")
    ],
    *[
        ("OTEL_EXPORTER_PROMETHEUS_PORT", v, "port", 9464, "a port number from 1 to 65535")
        for v in ("0", "65536", "http", "-9464", "94 64")
    ],
    *[
        ("OTEL_METRICS_EXPORTER", v, "page", True, "prometheus, otlp or none")
        for v in ("console", "nonsense", "None of them")
    ],
    ("LLMOBS_AGENT", "~nobody-by-that-name/x", "agent", None, "a folder that can be found"),
]


@pytest.mark.parametrize(("name", "value", "field", "default", "accepted"), BAD)
def test_a_bad_value(
    *,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: str,
    field: str,
    default: object,
    accepted: str,
) -> None:
    assert getattr(read_settings({name: value}), field) == default
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    message = record.getMessage()
    for part in (name, value, accepted):
        assert part in message
    assert "\n" not in message


def test_a_run_folder_that_has_no_name(caplog: pytest.LogCaptureFixture) -> None:
    settings = read_settings({"LLMOBS_RUN_DIR": "~nobody-by-that-name/x"})
    assert settings.run_base == read_settings({}).run_base
    assert "LLMOBS_RUN_DIR='~nobody-by-that-name/x' is not a folder" in caplog.text


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        read_settings({}).port = 1  # type: ignore[misc]


def test_relative_folders_are_made_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The agent and the server's other processes may run elsewhere."""
    monkeypatch.chdir(tmp_path)
    found = read_settings({"LLMOBS_RUN_DIR": "run/here", "LLMOBS_AGENT": "~/agent"})
    assert found.run_base == tmp_path / "run/here"
    assert found.agent == Path.home() / "agent"


def test_a_resource_is_always_text_and_never_too_much(caplog: pytest.LogCaptureFixture) -> None:
    assert read_settings({"OTEL_SERVICE_NAME": "a\udcffb"}).resource == {"service.name": "a?b"}
    large = read_settings({"OTEL_RESOURCE_ATTRIBUTES": "k=" + "x" * 5000, "OTEL_SERVICE_NAME": "s"})
    assert large.resource == {"service.name": "s"}
    assert "OTEL_RESOURCE_ATTRIBUTES" in caplog.text


@pytest.mark.parametrize(
    ("value", "share"),
    [("", 0.01), ("slo", 0.01), ("ALWAYS", 1.0), ("off", None), ("0.05", 0.05), ("0", 0.0)],
)
def test_trace_sampling(value: str, share: float | None) -> None:
    assert read_settings({"LLMOBS_TRACE_SAMPLING": value}).trace_share == share


@pytest.mark.parametrize("value", ["2", "-0.1", "nan", "often"])
def test_trace_sampling_that_is_none(value: str, caplog: pytest.LogCaptureFixture) -> None:
    assert read_settings({"LLMOBS_TRACE_SAMPLING": value}).trace_share == 0.01
    assert "LLMOBS_TRACE_SAMPLING" in caplog.text
    assert "slo, always, off or a share from 0 to 1" in caplog.text
