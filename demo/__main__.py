"""The main job, from nothing: a real vLLM observed, and told where its P99 went.

Makes a tiny model, serves it under `opentelemetry-instrument python server.py`, sends short chats
and a burst of long documents, shows the metrics page and the trace of the slowest chat, and ends
with `llmobs diagnose`.
"""

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

from demo import traffic
from demo.model import make_model
from demo.receiver import Receiver, lines
from demo.vllm_server import ROOT, SCRIPT, VllmServer
from llmobs.diagnose.source import SourceError, local_page
from llmobs.settings import read_settings

FOLDER = ROOT / ".demo"
BIN = Path(sys.executable).parent
SHOWN = (
    "llmobs_requests_total",
    "decode_token_latency_seconds_count",
    "llmobs_queue_reason_seconds_total",
    "llmobs_probe_attached",
)
ENVIRONMENT = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_LOGS_EXPORTER": "none",
    # It would add a span per streamed chunk.
    "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "fastapi",
}


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def main() -> int:
    """Exit code 0 when all answers came and the breakdown was printed."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of traffic")
    parser.add_argument("--keep", action="store_true", help="leave the server running at the end")
    options = parser.parse_args()

    say("A tiny model with random weights")
    model = make_model(FOLDER / "model")
    print(model)

    command = [str(BIN / "opentelemetry-instrument")]
    log = FOLDER / "server.log"
    port = 8000 if _free(8000) else None
    receiver = Receiver()
    environment = ENVIRONMENT | {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.http_url}
    server = VllmServer(model, log, env=environment, prefix=command, entry=SCRIPT, port=port)
    say("opentelemetry-instrument python server.py   (vLLM on the CPU: 20 to 75 s)")
    receiver.__enter__()
    server.start()
    try:
        print(f"up after {server.startup_s:.0f} s on {server.url}, its log is {log}")
        for line in server.log_text().splitlines():
            if line.startswith("llmobs:"):
                print(line)
        page = _page()

        say(f"{options.seconds:.0f} s of chats, with a burst of long documents in the middle third")
        results = asyncio.run(traffic.run(server.url, seconds=options.seconds))
        for line in traffic.summary(results, options.seconds):
            print(line)
        statuses = Counter(outcome.status for _, outcome in results)

        metrics = f"http://localhost:{read_settings(ENVIRONMENT).port}/metrics"
        say(f"curl {metrics}   (a few lines of it)")
        _show_metrics(metrics, page)

        say("The slowest chat's trace, as a collector gets it over OTLP")
        _show_trace(receiver)

        say("llmobs diagnose")
        sys.stdout.flush()
        found = subprocess.run([BIN / "llmobs", "diagnose", "--endpoint", page], check=False)
        if options.keep:
            say(f"The server runs on (kill {server.pid} ends it), metrics on {metrics}")
            return 0
    finally:
        if not options.keep or sys.exc_info()[0]:
            server.stop()
    failed = sum(count for status, count in statuses.items() if status != 200)
    return int(failed > 0 or found.returncode == 2)


def _show_trace(receiver: Receiver) -> None:
    time.sleep(2)  # the last requests are on their way
    roots = [
        span
        for spans in receiver.traces().values()
        for span in spans
        if span.name == "llm.request" and span.attributes.get("llm.context_bucket") == "0-1k"
    ]
    if not roots:
        print("none: all chats met their targets, and 1% of those are kept")
        return
    root = max(roots, key=lambda span: span.attributes.get("gen_ai.server.time_to_first_token", 0))
    print(f"trace {root.trace}, kept because of {', '.join(root.attributes['llm.kept_because'])}")
    print(*lines(root), sep="\n")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _page() -> str:
    """The agent's page, as soon as it is there."""
    for _ in range(100):
        try:
            return local_page(read_settings())
        except SourceError:
            time.sleep(0.1)
    return local_page(read_settings())


def _show_metrics(url: str, page: str) -> None:
    try:
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        if "llmobs_build_info" not in text:
            raise OSError("another program's page")
    except OSError:
        url = f"{page}/metrics"
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        print(f"(the port is taken by another program, this is {url})")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for name in SHOWN:
        rows = [row for row in lines if row.startswith(name) and not row.endswith(" 0.0")]
        print(*rows[:4], sep="\n")
        if len(rows) > 4:
            print(f"... and {len(rows) - 4} more of {name}")
    print(f"{len(lines)} series")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
