"""Environment variables, read in one place, once, into a frozen object."""

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("llmobs")

MIB = 1024 * 1024
SERVER_RUN = "_LLMOBS_SERVER_RUN"
"""Set by the first process of a server for those it starts: they share one run folder."""

TRUE, FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


@dataclass(frozen=True)
class Settings:
    """What the user set; see docs/settings.md for each variable's meaning.

    `run_base` holds one run folder per server. `ring_bytes` is the size of one process's ring.
    `agent` is a run folder that an agent already watches: none is started then. `page` is False
    when OTEL_METRICS_EXPORTER says that no metrics are wanted.
    """

    enabled: bool
    run_base: Path
    ring_bytes: int
    agent: Path | None
    host: str
    port: int
    page: bool


def _warn(name: str, value: str, accepted: str, used: object) -> None:
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
    run_base = environ.get("LLMOBS_RUN_DIR", "").strip()
    agent = environ.get("LLMOBS_AGENT", "").strip()
    return Settings(
        enabled=_switch(environ, "LLMOBS_ENABLED", True)
        and environ.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
        and not _names(environ, "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS") & {"llmobs", "*"},
        run_base=Path(run_base) if run_base else default_run_base(),
        ring_bytes=_number(
            environ,
            "LLMOBS_RING_BYTES",
            4 * MIB,
            "a number of bytes from 4096 to 1073741824",
            lambda n: 4096 <= n <= 1024 * MIB,
        ),
        agent=Path(agent) if agent else None,
        host=environ.get("OTEL_EXPORTER_PROMETHEUS_HOST", "").strip() or "localhost",
        port=_number(
            environ,
            "OTEL_EXPORTER_PROMETHEUS_PORT",
            9464,
            "a port number from 1 to 65535",
            lambda n: 1 <= n <= 65535,
        ),
        page=_names(environ, "OTEL_METRICS_EXPORTER") != {"none"},
    )
