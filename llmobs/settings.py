"""Environment variables, read in one place, once, into a frozen object."""

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

log = logging.getLogger("llmobs")

MIB = 1024 * 1024
SERVER_RUN = "_LLMOBS_SERVER_RUN"
"""Set by the first process of a server for those it starts: they share one run folder."""
SERVER_ENVIRON = "_LLMOBS_SERVER_ENVIRON"
"""Set with it: the user's own OTEL_ and LLMOBS_ variables. vLLM changes some for its children (its
--otlp-traces-endpoint becomes OpenTelemetry's), and the agent must go by what the user said."""

SLO_FILE = "LLMOBS_SLO_FILE"
"""Names the user's own SLO file."""

RESOURCE_LIMIT = 4096
SLO_SHARE = 0.01
"""Of the requests that met their targets, so many traces are kept."""

TRUE, FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


@dataclass(frozen=True)
class Settings:
    """What the user set; see docs/settings.md for each variable's meaning.

    `run_base` holds one run folder per server. `ring_bytes` is the size of one process's ring.
    `agent` is a run folder that an agent already watches: none is started then. `flight` is where
    the agent writes what a post-mortem needs, beside the run folder. `page` is False
    when OTEL_METRICS_EXPORTER says that no metrics are wanted. `trace_share` is the share of the
    requests in order whose traces are kept beside those that are not (None: no traces at all);
    `traces_exporter` and `metrics_otlp` are what OpenTelemetry's variables ask for, `resource` its
    resource attributes. `gpu_seconds` is how often the GPUs are looked at.
    """

    enabled: bool
    run_base: Path
    ring_bytes: int
    agent: Path | None
    flight: Path | None
    host: str
    port: int
    page: bool
    trace_share: float | None
    traces_exporter: str
    metrics_otlp: bool
    resource: dict[str, str]
    gpu_seconds: int


def _warn(name: str, value: str, accepted: str, used: object) -> None:
    if SERVER_RUN in os.environ:
        return  # the server's first process has said so
    log.warning("llmobs: %s=%r is not %s; using %s", name, value, accepted, used)


def _switch(environ: Mapping[str, str], name: str, default: bool) -> bool:
    value = environ.get(name, "").strip().lower()
    if not value:
        return default
    if value in TRUE | FALSE:
        return value in TRUE
    _warn(name, value, "one of 1, true, yes, on, 0, false, no, off", int(default))
    return default


def _number(
    environ: Mapping[str, str], name: str, default: int, accepted: str, fits: Callable[[int], bool]
) -> int:
    value = environ.get(name, "").strip()
    if not value:
        return default
    try:
        number = int(value)
    except ValueError:
        number = None
    if number is not None and fits(number):
        return number
    _warn(name, value, accepted, default)
    return default


def _trace_share(environ: Mapping[str, str]) -> float | None:
    name = "LLMOBS_TRACE_SAMPLING"
    value = environ.get(name, "").strip().lower()
    words = {"": SLO_SHARE, "slo": SLO_SHARE, "always": 1.0, "off": None}
    if value in words:
        return words[value]
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if 0 <= share <= 1:
        return share
    _warn(name, value, "slo, always, off or a share from 0 to 1", "slo")
    return SLO_SHARE


def _traces_exporter(environ: Mapping[str, str]) -> str:
    """`otlp` or `none`. Like OpenTelemetry's SDK for Python we export nothing unless
    told to; an endpoint tells us."""
    name = "OTEL_TRACES_EXPORTER"
    value = environ.get(name, "").strip().lower()
    if not value:
        asked = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get(
            "OTEL_EXPORTER_OTLP_ENDPOINT"
        )
        return "otlp" if asked else "none"
    wanted = [v.strip() for v in value.split(",")]
    for exporter in ("otlp", "none"):
        if exporter in wanted:
            return exporter
    _warn(name, value, "otlp or none", "none")
    return "none"


def resource_attributes(environ: Mapping[str, str]) -> dict[str, str]:
    """OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, as the SDK reads them."""
    attributes: dict[str, str] = {}
    name = "OTEL_RESOURCE_ATTRIBUTES"
    if len(environ.get(name, "")) > RESOURCE_LIMIT:
        _warn(name, environ[name][:40] + "…", f"at most {RESOURCE_LIMIT} characters", "none")
        environ = {k: v for k, v in environ.items() if k != name}
    for item in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        key, equals, value = item.partition("=")
        if key.strip() and equals:
            attributes[key.strip()] = unquote(value.strip())
    if service := environ.get("OTEL_SERVICE_NAME", "").strip():
        attributes["service.name"] = service
    # A variable may hold any bytes; what cannot be text becomes question marks.
    return {k: v.encode("utf-8", "replace").decode() for k, v in attributes.items()}


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    """Absolute: the agent is to find it wherever it runs."""
    value = environ.get(name, "").strip()
    if not value:
        return None
    try:
        return Path(value).expanduser().absolute()
    except (RuntimeError, OSError):  # ~nobody-by-that-name; no current folder
        _warn(name, value, "a folder that can be found", "the default")
        return None


def slo_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The user's own SLO file. Apart from the rest, since the layout of rings goes by it."""
    return _path(environ, SLO_FILE)


def _metrics_exporters(environ: Mapping[str, str]) -> set[str]:
    name = "OTEL_METRICS_EXPORTER"
    names = _names(environ, name)
    if not names & {"", "prometheus", "otlp", "none"}:
        _warn(name, environ[name], "prometheus, otlp or none", "prometheus")
    return names


def _names(environ: Mapping[str, str], name: str) -> set[str]:
    """A list of names, separated by commas."""
    return {part.strip() for part in environ.get(name, "").split(",")}


def default_run_base() -> Path:
    """Memory if there is some, else the disk's folder for temporary files: a mapped file on a disk
    makes its writer wait for the kernel's write-back."""
    shm = Path("/dev/shm")
    parent = shm if os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return parent / f"llmobs-{os.geteuid()}"


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read all settings; a bad value warns, names the variable and falls back."""
    exporters = _metrics_exporters(environ)
    return Settings(
        enabled=_switch(environ, "LLMOBS_ENABLED", True)
        and environ.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
        and not _names(environ, "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS") & {"llmobs", "*"},
        run_base=_path(environ, "LLMOBS_RUN_DIR") or default_run_base(),
        ring_bytes=_number(
            environ,
            "LLMOBS_RING_BYTES",
            4 * MIB,
            "a number of bytes from 4096 to 1073741824",
            lambda n: 4096 <= n <= 1024 * MIB,
        ),
        agent=_path(environ, "LLMOBS_AGENT"),
        flight=_path(environ, "LLMOBS_FLIGHT_DIR"),
        host=environ.get("OTEL_EXPORTER_PROMETHEUS_HOST", "").strip() or "localhost",
        port=_number(
            environ,
            "OTEL_EXPORTER_PROMETHEUS_PORT",
            9464,
            "a port number from 1 to 65535",
            lambda n: 1 <= n <= 65535,
        ),
        page=exporters != {"none"},
        trace_share=_trace_share(environ),
        traces_exporter=_traces_exporter(environ),
        metrics_otlp="otlp" in exporters,
        resource=resource_attributes(environ),
        gpu_seconds=_number(
            environ,
            "LLMOBS_GPU_SECONDS",
            10,
            "a number of seconds from 1 to 3600",
            lambda n: 1 <= n <= 3600,
        ),
    )
