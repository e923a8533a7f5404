"""A person is paged: real vLLM, agent, Prometheus, Alertmanager; a webhook of ours is the person.

The SLO file is quicker than the default in everything that waits, so that the test is.
"""

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.client import completion
from demo.model import prompt_ids
from tests.e2e.conftest import Served, Start, free_port
from tests.e2e.page import eventually, fetch
from tests.e2e.traffic import Call, play, send_all

# Long: every wait is cut to a second, and on a busy machine a page takes longer than that.
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(420)]

SLO = """\
context_buckets:
  - {name: 0-1k, limit: 1024, first_token: 1ms, token_gap: 10s, cold_start: 60s}
  - {name: 1k+, limit: null, first_token: 30s, token_gap: 10s, cold_start: 60s}
alerts:
  first_token_p99_high: {window: 2m, at_least: 5, for: 0s, every: 1s}
  preemption_storm: {above: 0.02, window: 1m, for: 0s}
  engine_stalled: {no_step: 5s, arrived: 5m, for: 0s, every: 1s}
"""
ARGS = ("--num-gpu-blocks-override=24", "--no-enable-prefix-caching", "--max-model-len=2048")


class Person(http.server.BaseHTTPRequestHandler):
    """Takes down what it is told, and when."""

    told: list[tuple[float, dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.told.append((time.time(), body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def person() -> Iterator[tuple[str, list[tuple[float, dict[str, Any]]]]]:
    told: list[tuple[float, dict[str, Any]]] = []
    handler = type("Handler", (Person,), {"told": told})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/page", told
    server.shutdown()


@pytest.fixture(scope="module")
def slo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slo") / "slo.yaml"
    path.write_text(SLO)
    return path


@pytest.fixture(scope="module")
def served(start: Start, slo: Path) -> Served:
    return start(*ARGS, env={"LLMOBS_SLO_FILE": str(slo)})


Told = list[tuple[float, dict[str, Any]]]


@pytest.fixture(scope="module")
def stack(
    served: Served, slo: Path, person: tuple[str, Told], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Prometheus' address. What waits is made short: nobody else is on call here."""
    folder = tmp_path_factory.mktemp("stack")
    targets = folder / "alerts/targets"
    targets.mkdir(parents=True)
    page = eventually("the page", lambda: served.page.url).removeprefix("http://")
    (targets / "llmobs.json").write_text(json.dumps([{"targets": [page.split("/")[0]]}]))
    (targets / "health.json").write_text(json.dumps([{"targets": [served.url + "/health"]}]))
    (targets / "ebpf.json").write_text("[]")
    ports = {name: str(free_port()) for name in ("prometheus", "alertmanager", "blackbox")}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.quick_stack", "stack", f"--dir={folder}"]
        + [f"--{name}-port={port}" for name, port in ports.items()],
        env={**os.environ, "LLMOBS_PAGE_WEBHOOK": person[0], "LLMOBS_SLO_FILE": str(slo)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"Prometheus http://localhost:{ports['prometheus']}\n"
    url = f"http://localhost:{ports['prometheus']}"
    # Series stand at 0 from the start: what happens before the first scrape is no increase.
    scrapes = 'sum(count_over_time(up{job="llmobs"}[1m]))'
    eventually("scrapes", lambda: value(url, scrapes) > 3)
    yield url
    process.terminate()
    assert process.wait(30) == 0


def ask(served: Served, requests: int, tokens: int, together: bool) -> list[Call]:
    calls = [
        Call(
            "0-1k",
            60,
            lambda s, n=n: completion(
                s, served.url, prompt_ids(60, seed=n), max_tokens=tokens, stream=True
            ),
        )
        for n in range(requests)
    ]
    if together:
        play(lambda session: send_all(session, calls))
    else:
        for call in calls:
            play(lambda session, call=call: send_all(session, [call]))
    return calls


def paged(told: Told, alert: str, since: float) -> Callable[[], Any]:
    def look() -> Any:
        for when, body in list(told):
            for one in body["alerts"]:
                named = one["labels"]["alertname"] == alert
                if when >= since and named and one["status"] == "firing":
                    return when, body, one
        return None

    return look


def test_a_late_first_token_pages_with_working_links(
    served: Served, stack: str, person: tuple[str, Told]
) -> None:
    began = time.time()
    ask(served, 8, 2, together=False)
    when, body, alert = eventually(
        "a page", paged(person[1], "LLMFirstTokenP99High", began), within_s=90
    )
    print(f"first token: paged {when - began:.1f} s after the first request was sent")
    assert body["receiver"] == "page"
    assert alert["labels"]["severity"] == "page"
    assert alert["labels"]["context_bucket"] == "0-1k"
    notes = alert["annotations"]
    assert re.search(r"P99 [0-9.]+m?s for 0-1k tokens", notes["summary"]), notes
    assert "waited" in notes["description"]
    assert "the target is 1ms" in notes["description"]
    # The link to the runbook leads to a page with that heading.
    url, _, anchor = notes["runbook_url"].partition("#")
    assert url.startswith(stack + "/consoles/")
    assert f'<h2 id="{anchor}">LLMFirstTokenP99High</h2>' in fetch(url)
    # That of the alert leads to its very expression.
    query = urllib.parse.parse_qs(urllib.parse.urlparse(alert["generatorURL"]).query)
    assert alert["generatorURL"].startswith(stack)
    assert "decode_token_latency_seconds" in query["g0.expr"][0]
    instance = urllib.parse.quote_plus(alert["labels"]["instance"])
    assert notes["dashboard_url"] == (
        "http://localhost:3000/d/llmobs-latency?var-model_name=deepseek-v4"
        f"&var-instance={instance}&var-engine=0"
    )


def test_a_storm_of_preemptions_pages(served: Served, stack: str, person: tuple[str, Told]) -> None:
    began = time.time()
    ask(served, 16, 600, together=True)
    when, _, alert = eventually(
        "a page", paged(person[1], "LLMPreemptionStorm", began), within_s=90
    )
    print(f"storm: paged {when - began:.1f} s after the load began")
    assert re.search(r"preempts [0-9.]+ requests a second", alert["annotations"]["summary"])
    assert value(stack, "sum(max_over_time(llmobs_preemptions_total[5m]))") > 0


def test_a_stalled_engine_pages_and_speaks_for_its_first_tokens(
    served: Served, stack: str, person: tuple[str, Told]
) -> None:
    (engine,) = served.server.pids("engine_core")
    quiet = threading.Thread(target=ask, args=(served, 4, 400, True), daemon=True)
    quiet.start()
    eventually(
        "requests run",
        lambda: value(stack, 'sum(max_over_time(llmobs_requests{state="running"}[3s]))') > 0,
    )
    os.kill(engine, signal.SIGSTOP)
    began = time.time()
    try:
        when, _, alert = eventually(
            "a page", paged(person[1], "LLMEngineStalled", began), within_s=90
        )
        print(f"stalled: paged {when - began:.1f} s after it was stopped")
        # /health says that all is well.
        with urllib.request.urlopen(served.url + "/health", timeout=5) as answer:
            assert answer.status == 200
        assert "has made no step for" in alert["annotations"]["description"]
        held = json.loads(fetch(alertmanager(stack) + "/api/v2/alerts", "application/json"))
        first = [a for a in held if a["labels"]["alertname"] == "LLMFirstTokenP99High"]
        assert first, "the first tokens are late no more: nothing to silence"
        assert all(a["status"]["inhibitedBy"] for a in first)
    finally:
        os.kill(engine, signal.SIGCONT)
    quiet.join(60)


def value(stack: str, expr: str) -> float:
    """What Prometheus says now; 0 where it says nothing."""
    query = urllib.parse.urlencode({"query": expr})
    found = json.loads(fetch(f"{stack}/api/v1/query?{query}"))["data"]["result"]
    return float(found[0]["value"][1]) if found else 0.0


def alertmanager(stack: str) -> str:
    found = json.loads(fetch(stack + "/api/v1/alertmanagers"))["data"]["activeAlertmanagers"]
    return str(found[0]["url"]).removesuffix("/api/v2/alerts")


NEEDS_MORE = {
    "CUDA launches by family": "root and a GPU",
    "Run-queue delay: P99": "root",
    "Cycles per instruction": "root and a PMU",
    "Effective pressure": "a GPU",
    "Memory by kind": "a GPU",
    "PyTorch's allocator": "a GPU",
    "GPU utilisation": "a GPU",
    "Clock throttled": "a GPU",
    "PCIe traffic": "a GPU",
    "Throttled by the CPU quota": "a CPU quota",
    "Pressure": "a kernel with PSI",
    "Fitted prefill time per 1,000 tokens": "prefills of several lengths",
    "Prefill time over what its length explains, median": "prefills of several lengths",
    "1k+: mean time by phase": "such prompts",
}
"""Panels that may be empty here, and what they need."""


def test_every_panel_says_something(served: Served, stack: str, slo: Path, tmp_path: Path) -> None:
    """Each query, as Grafana would send it, on this very Prometheus; some figures are known."""
    ask(served, 3, 20, together=False)
    generate = [sys.executable, "-m", "llmobs.cli", "generate", f"--slo={slo}", f"--out={tmp_path}"]
    subprocess.run(generate, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, list[dict[str, Any]]] = {}
    empty = set()
    for path in (tmp_path / "dashboards/json").glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                if "expr" not in target:
                    continue
                expr = re.sub(r"\$(model_name|instance|engine)", ".*", target["expr"])
                expr = expr.replace("$__rate_interval", "2m")
                query = urllib.parse.urlencode({"query": expr})
                answer = json.loads(fetch(f"{stack}/api/v1/query?{query}"))["data"]["result"]
                values = [r for r in answer if r["value"][1] != "NaN"]
                found.setdefault(panel["title"], []).extend(values)
                if not values:
                    empty.add(panel["title"])
    assert len(found) > 60
    assert empty <= set(NEEDS_MORE), empty - set(NEEDS_MORE)

    def one(title: str) -> float:
        (only,) = found[title]
        return float(only["value"][1])

    assert one("Servers told of") == 1
    assert one("Availability budget left, 30 days") == 1
    budget = {
        r["metric"]["context_bucket"]: r["value"][1]
        for r in found["First-token budget left, 30 days"]
    }
    assert float(budget["0-1k"]) == pytest.approx(-99, rel=0.01)  # all late: 100 times the budget
    stages = {r["metric"]["stage"] for r in found["Step time by stage"]}
    assert stages == {"schedule", "forward", "sampling", "update"}
    assert {r["metric"]["phase"] for r in found["0-1k: mean time by phase"]} == {
        *("preprocess", "queue", "prefill", "preempted", "decode", "deliver"),
    }


def test_no_rule_failed(stack: str) -> None:
    found = json.loads(fetch(stack + "/api/v1/rules"))["data"]["groups"]
    rules = [rule for group in found for rule in group["rules"]]
    assert len(rules) > 70
    assert [rule["name"] for rule in rules if rule["health"] == "err"] == []
    status = json.loads(fetch(stack + "/api/v1/status/config"))["data"]["yaml"]
    jobs = [job["job_name"] for job in yaml.safe_load(status)["scrape_configs"]]
    assert jobs == ["llmobs", "llmobs-ebpf", "llmobs-health"]
    assert value(stack, 'probe_success{job="llmobs-health"}') == 1
