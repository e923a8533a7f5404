"""What the alert rules cost Prometheus: series, memory and rule time for many engines.

    python -m benchmarks.rules [ENGINES…]      default 1 20 200; two minutes each

A real page (all series of one engine) is served for each simulated engine, its counters rising; a
real Prometheus scrapes them every 10 s and evaluates the committed rules. Windows of days hold only
these two minutes, so their part of the rule time is not what it will be.
"""

import contextlib
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry, generate_latest

from llmobs.agent.collect import RunCollector
from llmobs.agent.run import Run
from llmobs.generate import prometheus, rules
from llmobs.ring import Writer, start_ticks
from llmobs.slo import SLO
from tests.e2e.conftest import free_port

SECONDS = 120
RISING = ("_total", "_bucket", "_count", "_sum")


def one_page(folder: Path) -> str:
    """The page of a server with one engine that has done nothing yet."""
    pid = os.getpid()
    for role in ("api_server", "engine_core", "worker"):
        info = {"roles": [role], "models": ["deepseek-v4"], "engine": 0, "vllm": "0.32.0"}
        Writer(folder / f"{role}-{pid}-{start_ticks(pid)}.ring", 256, info)
    run = Run(folder)
    run.poll()
    registry = CollectorRegistry()
    registry.register(RunCollector(run))
    return generate_latest(registry).decode()


class Pages(http.server.BaseHTTPRequestHandler):
    lines: list[tuple[str, bool]]
    made = (0.0, b"")

    def do_GET(self) -> None:
        second = time.time() // 1
        if Pages.made[0] != second:
            rising = str(second - 1.7e9)
            text = "".join(f"{head} {rising if up else '0'}\n" for head, up in Pages.lines)
            Pages.made = second, text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        with contextlib.suppress(OSError):  # a scrape that took too long
            self.wfile.write(Pages.made[1])

    def log_message(self, *_: object) -> None:
        pass


def value(url: str, expr: str) -> float:
    query = urllib.parse.urlencode({"query": expr})
    with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=120) as answer:
        found = json.loads(answer.read())["data"]["result"]
    return float(found[0]["value"][1]) if found else float("nan")


def measure(engines: int, port: int) -> tuple[float, float, float]:
    """(series in all, seconds of all rules once, MiB of memory)"""
    with tempfile.TemporaryDirectory() as name:
        folder, own = Path(name), free_port()
        config = prometheus.content()
        config.pop("alerting")
        targets = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": f"gpu-{n}:9464"}}
            for n in range(engines)
        ]
        itself = [{"targets": [f"127.0.0.1:{own}"]}]
        config["scrape_configs"] = [
            {"job_name": "llmobs", "static_configs": targets},
            {"job_name": "prometheus", "static_configs": itself},
        ]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (folder / "rules.yml").write_text(rules.dump(rules.content(SLO)))
        process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={folder}/prometheus.yml"),
                *(f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{own}"),
            ],
            stderr=subprocess.DEVNULL,
        )
        try:
            time.sleep(SECONDS)
            url = f"http://127.0.0.1:{own}"
            return (
                value(url, "prometheus_tsdb_head_series"),
                value(url, "sum(prometheus_rule_group_last_duration_seconds)"),
                value(url, 'process_resident_memory_bytes{job="prometheus"}') / 2**20,
            )
        finally:
            process.terminate()
            process.wait(30)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        page = one_page(Path(name))
    heads = [line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")]
    Pages.lines = [(head, head.partition("{")[0].endswith(RISING)) for head in heads]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"{len(heads)} series on the page of an engine (a CPU host, no GPU)")
    print("| engines | series | rules, once | memory |\n| --- | --- | --- | --- |")
    for engines in map(int, sys.argv[1:] or ("1", "20", "200")):
        series, seconds, memory = measure(engines, server.server_address[1])
        row = f"| {engines} | {series:,.0f} | {seconds * 1000:,.0f} ms | {memory:,.0f} MiB |"
        print(row, flush=True)
    server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
