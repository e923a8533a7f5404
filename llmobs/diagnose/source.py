"""Where the commands get their figures: the page of an agent."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from llmobs.process import agent_runs
from llmobs.settings import Settings

TIMEOUT_SECONDS = 5.0


class SourceError(Exception):
    """No figures are to be had there; the text says why and what is accepted, in one line."""


def local_page(settings: Settings) -> str:
    """The page of this machine's agent: that of the newest run folder whose agent runs.

    Raises SourceError if there is none.
    """
    folders = [settings.agent] if settings.agent else list(_folders(settings.run_base))
    for folder in folders:
        try:
            state = json.loads((folder / "agent.json").read_text())
        except (OSError, ValueError, RecursionError):
            continue
        if "page" in state and agent_runs(folder):
            return str(state["page"])
    raise SourceError(
        f"no agent of llmobs runs here (looked in {settings.run_base}); start vLLM with llmobs "
        "installed, or name its page: --endpoint http://HOST:9464"
    )


def _folders(base: Path) -> list[Path]:
    try:
        folders = [path for path in base.iterdir() if (path / "agent.json").exists()]
    except OSError:
        return []
    return sorted(folders, key=lambda path: (path / "agent.json").stat().st_mtime, reverse=True)


def _get(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as reply:
            content: bytes = reply.read()
            return content
    except urllib.error.HTTPError as error:
        raise SourceError(f"{url}: HTTP {error.code}; accepted is the page of an agent") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise SourceError(f"{url}: {reason}; accepted is http://HOST:PORT of an agent") from error


def _base(endpoint: str) -> str:
    endpoint = endpoint.rstrip("/").removesuffix("/metrics")
    if "://" not in endpoint and ":" in endpoint:
        endpoint = f"http://{endpoint}"
    if not endpoint.startswith(("http://", "https://")):
        raise SourceError(f"{endpoint!r} is no URL; accepted is http://HOST:PORT of an agent")
    return endpoint


def finished_requests(endpoint: str) -> list[dict[str, Any]]:
    """The requests that ended lately, as the agent tells them (see agent/finished.py)."""
    try:
        content = json.loads(_get(_base(endpoint) + "/requests"))
        return [
            request
            | {
                name: dict(zip(content["phases"], request[name], strict=False))
                for name in ("phases", "first_token_phases")
            }
            for request in content["requests"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{endpoint} is not the page of an agent of llmobs") from error


def samples(endpoint: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """All samples of the metrics page, by name: labels and value."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(_get(_base(endpoint) + "/metrics").decode()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise SourceError(f"{endpoint} serves no Prometheus text") from error
    return found
