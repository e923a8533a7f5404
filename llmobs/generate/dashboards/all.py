"""The dashboards by file name."""

from typing import Any

from llmobs.generate.dashboards import batching, host, itself, latency, memory, overview
from llmobs.slo import Slo

PAGES = {
    "overview": overview,
    "latency": latency,
    "batching": batching,
    "memory": memory,
    "host": host,
    "itself": itself,
}


def dashboards(slo: Slo) -> dict[str, dict[str, Any]]:
    return {name: page.dashboard(slo) for name, page in PAGES.items()}
