"""Prometheus' configuration, and the blackbox exporter's."""

from typing import Any

from llmobs.generate.burn import HEALTH_JOB
from llmobs.generate.own import JOB

TARGETS = {
    "llmobs": ["localhost:9464"],
    "ebpf": ["localhost:9466"],
    "health": ["http://localhost:8000/health"],
}
"""What `targets/` begins with; those files are the user's then. The agents' own file_sd folder
(/dev/shm/llmobs-UID/file_sd) may be added where Prometheus may read it."""
BLACKBOX = "localhost:9115"
ALERTMANAGER = "localhost:9093"


def content(alertmanager: str = ALERTMANAGER, blackbox: str = BLACKBOX) -> dict[str, Any]:
    """Paths are relative to the file itself."""
    return {
        "global": {"scrape_interval": "10s", "evaluation_interval": "30s"},
        "rule_files": ["rules.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [
            {"job_name": JOB, "file_sd_configs": [{"files": ["targets/llmobs*.json"]}]},
            {"job_name": f"{JOB}-ebpf", "file_sd_configs": [{"files": ["targets/ebpf*.json"]}]},
            {
                "job_name": HEALTH_JOB,
                "scrape_interval": "15s",
                "metrics_path": "/probe",
                "params": {"module": ["health"]},
                "file_sd_configs": [{"files": ["targets/health*.json"]}],
                "relabel_configs": [
                    {"source_labels": ["__address__"], "target_label": "__param_target"},
                    {"source_labels": ["__param_target"], "target_label": "instance"},
                    {"target_label": "__address__", "replacement": blackbox},
                ],
            },
        ],
    }


def blackbox() -> dict[str, Any]:
    """vLLM's /health is 200 with an empty body."""
    module = {
        "prober": "http",
        "timeout": "5s",
        "http": {"valid_status_codes": [200], "preferred_ip_protocol": "ip4"},
    }
    return {"modules": {"health": module}}
