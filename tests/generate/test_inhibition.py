"""One cause pages once: a real Alertmanager is told of several alerts, and says which it holds."""

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import free_port

ROOT = Path(__file__).parents[2]


def call(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        text = answer.read()
    return json.loads(text) if text else None


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, folder = free_port(), tmp_path_factory.mktemp("alertmanager")
    process = subprocess.Popen(
        [
            "prometheus-alertmanager",
            "--config.file=" + str(ROOT / "alerts/alertmanager.yml"),
            f"--storage.path={folder}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--cluster.listen-address=",
        ],
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            call(url + "/api/v2/status")
            break
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    yield url
    process.terminate()
    process.wait(10)


def alert(name: str, severity: str, **labels: str) -> dict[str, Any]:
    return {"labels": {"alertname": name, "severity": severity, "job": "llmobs", **labels}}


def held(url: str, server: str, *alerts: dict[str, Any]) -> set[tuple[str, ...]]:
    """Which of them are silenced. Each test has a server (and model) of its own."""
    for one in alerts:
        one["labels"] |= {k: v.format(s=server) for k, v in one["labels"].items()}
    call(url + "/api/v2/alerts", list(alerts))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = [
            a
            for a in call(url + "/api/v2/alerts")
            if server in (a["labels"].get("model_name"), a["labels"].get("instance"))
        ]
        if len(found) == len(alerts) and all(a["status"]["state"] != "unprocessed" for a in found):
            break
        time.sleep(0.1)
    assert len(found) == len(alerts)
    return {
        (a["labels"]["alertname"], a["labels"].get("engine", ""))
        for a in found
        if a["status"]["inhibitedBy"]
    }


ENGINE = {"instance": "{s}", "model_name": "{s}", "engine": "0"}
BUCKET = {"context_bucket": "1k-4k"}


def test_a_stalled_engine_speaks_for_its_first_tokens(alertmanager: str) -> None:
    found = held(
        alertmanager,
        "stalled",
        alert("LLMEngineStalled", "page", **ENGINE),
        alert("LLMFirstTokenP99High", "page", **ENGINE, **BUCKET),
        alert("LLMFirstTokenP99High", "page", **ENGINE | {"engine": "1"}, **BUCKET),
        alert("LLMFirstTokenBurn", "page", model_name="{s}", **BUCKET),
        alert("LLMAvailabilityBurn", "page", model_name="{s}"),
        alert("LLMQueueDeep", "ticket", instance="{s}"),
    )
    # The other engine is another matter, and so are requests that fail.
    assert found == {
        ("LLMFirstTokenP99High", "0"),
        ("LLMFirstTokenBurn", ""),
        ("LLMQueueDeep", ""),
    }


def test_a_storm_of_preemptions_speaks_for_what_it_brings(alertmanager: str) -> None:
    gpu = {"instance": "{s}", "gpu": "0"}
    found = held(
        alertmanager,
        "storm",
        alert("LLMPreemptionStorm", "page", **ENGINE),
        alert("LLMMemoryPressureCritical", "page", **gpu),
        alert("LLMMemoryPressure", "ticket", **gpu),
        alert("LLMKVStarved", "ticket", **ENGINE),
        alert("LLMFirstTokenP99High", "page", **ENGINE, **BUCKET),
        alert("LLMCPUSteal", "ticket", instance="{s}"),
    )
    assert found == {
        ("LLMMemoryPressureCritical", ""),
        ("LLMMemoryPressure", ""),
        ("LLMKVStarved", "0"),
        ("LLMFirstTokenP99High", "0"),
    }


def test_late_first_tokens_page_once(alertmanager: str) -> None:
    found = held(
        alertmanager,
        "late",
        alert("LLMFirstTokenP99High", "page", **ENGINE, **BUCKET),
        alert("LLMFirstTokenBurn", "page", model_name="{s}", **BUCKET),
        alert("LLMFirstTokenBurn", "page", model_name="{s}", context_bucket="4k-32k"),
    )
    assert found == {("LLMFirstTokenBurn", "")}


def test_a_page_speaks_for_the_ticket_of_the_same_budget(alertmanager: str) -> None:
    found = held(
        alertmanager,
        "budget",
        alert("LLMAvailabilityBurn", "page", model_name="{s}", long="1h"),
        alert("LLMAvailabilityBurn", "ticket", model_name="{s}", long="1d"),
        alert("LLMFirstTokenBurn", "ticket", model_name="{s}", long="1d", **BUCKET),
    )
    assert found == {("LLMAvailabilityBurn", "")}


def test_others_are_not_silenced(alertmanager: str) -> None:
    stalled = alert("LLMEngineStalled", "page", **ENGINE)
    stalled["labels"] |= {"instance": "else", "model_name": "else"}
    call(alertmanager + "/api/v2/alerts", [stalled])
    found = held(alertmanager, "alone", alert("LLMFirstTokenP99High", "page", **ENGINE, **BUCKET))
    assert not found
