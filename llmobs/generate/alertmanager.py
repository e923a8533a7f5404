"""Alertmanager's configuration: who is told of what, and what says it for the others."""

import re
from collections.abc import Mapping
from typing import Any

KINDS = ("page", "ticket")


def _inhibit(source: str, targets: str, *equal: str) -> dict[str, Any]:
    return {
        "source_matchers": [f'alertname=~"{source}"', "severity=page"],
        "target_matchers": [f'alertname=~"{targets}"'],
        "equal": list(equal),
    }


CAUSES = "LLMEngineStalled|LLMPreemptionStorm"
"""An engine that stands still, or computes everything twice, brings others with it: alerts of that
engine, of its server, of the service."""
INHIBIT = [
    _inhibit(
        CAUSES,
        "LLMFirstTokenP99High|LLMSlowForLength|LLMBatchSizeUnstable|LLMKVStarved",
        *("job", "instance", "engine"),
    ),
    _inhibit(CAUSES, "LLMQueueDeep", "job", "instance"),
    _inhibit(
        CAUSES, "LLMFirstTokenBurn|LLMCapacityLow|LLMStreamThroughputLow", "job", "model_name"
    ),
    _inhibit(
        "LLMPreemptionStorm",
        "LLMMemoryPressure|LLMMemoryPressureCritical",
        *("job", "instance"),
    ),
    _inhibit("LLMMemoryPressureCritical", "LLMMemoryPressure|LLMKVStarved", "job", "instance"),
    # The quicker of two that say the same.
    _inhibit("LLMFirstTokenP99High", "LLMFirstTokenBurn", "job", "model_name", "context_bucket"),
    # A page says it for the slower rows of the same budget.
    {
        "source_matchers": ['alertname=~"LLM.*Burn"', "severity=page"],
        "target_matchers": ['alertname=~"LLM.*Burn"', "severity=ticket"],
        "equal": ["alertname", "job", "model_name", "instance", "context_bucket"],
    },
]


class ReceiverError(ValueError):
    """One line: the variable, and what is accepted."""


TEXT = (
    "{{ range .Alerts }}*{{ .Annotations.summary }}*\n{{ .Annotations.description }}\n"
    "Runbook: {{ .Annotations.runbook_url }}\nDashboard: {{ .Annotations.dashboard_url }}\n"
    "{{ end }}"
)


def content() -> dict[str, Any]:
    """Routes and inhibition; the receivers come from the environment (see `receivers`)."""
    return {
        "global": {"resolve_timeout": "5m"},
        "route": {
            "receiver": "ticket",
            "group_by": ["alertname", "job", "model_name", "instance"],
            "group_wait": "30s",
            "group_interval": "5m",
            "repeat_interval": "24h",
            "routes": [
                {
                    "matchers": ["severity=page"],
                    "receiver": "page",
                    "group_wait": "10s",
                    "group_interval": "1m",
                    "repeat_interval": "1h",
                }
            ],
        },
        "inhibit_rules": INHIBIT,
        "receivers": [{"name": kind} for kind in KINDS],
    }


def with_receivers(environ: Mapping[str, str]) -> dict[str, Any]:
    """The same with the receivers that the environment names. Raises ReceiverError."""
    made = content()
    receivers = [_receiver(kind, environ) for kind in KINDS]
    if len(receivers[0]) == 1:
        raise ReceiverError(
            "nobody would be paged; set one of LLMOBS_PAGE_WEBHOOK, LLMOBS_PAGE_SLACK (addresses), "
            "LLMOBS_PAGE_PAGERDUTY (an integration key) or LLMOBS_PAGE_EMAIL"
        )
    made["receivers"] = receivers
    if any("email_configs" in receiver for receiver in receivers):
        made["global"] |= _smtp(environ)
    return made


def _receiver(kind: str, environ: Mapping[str, str]) -> dict[str, Any]:
    def value(way: str, pattern: str, accepted: str) -> str:
        name = f"LLMOBS_{kind.upper()}_{way}"
        text = environ.get(name, "").strip()
        if text and not re.fullmatch(pattern, text):
            # What it is set to may be a secret: it is not repeated.
            raise ReceiverError(f"{name} is not {accepted}")
        return text

    found: dict[str, Any] = {"name": kind}
    if url := value("WEBHOOK", r"https?://\S+", "an address such as https://host/path"):
        found["webhook_configs"] = [{"url": url, "send_resolved": True}]
    if url := value("SLACK", r"https?://\S+", "the address of a Slack webhook"):
        title = "{{ .Status | toUpper }} {{ .CommonLabels.alertname }}"
        slack = {"api_url": url, "send_resolved": True, "title": title, "text": TEXT}
        found["slack_configs"] = [slack]
    if key := value("PAGERDUTY", r"[0-9a-zA-Z]{32}", "an integration key of 32 characters"):
        links = [
            {"href": "{{ (index .Alerts 0).Annotations.runbook_url }}", "text": "runbook"},
            {"href": "{{ (index .Alerts 0).Annotations.dashboard_url }}", "text": "dashboard"},
        ]
        found["pagerduty_configs"] = [
            {
                "routing_key": key,
                "description": "{{ .CommonAnnotations.summary }}",
                "details": {"description": "{{ .CommonAnnotations.description }}"},
                "links": links,
            }
        ]
    if address := value("EMAIL", r"[^@\s]+@[^@\s]+", "an address such as ops@example.com"):
        found["email_configs"] = [{"to": address, "send_resolved": True, "text": TEXT}]
    return found


def _smtp(environ: Mapping[str, str]) -> dict[str, Any]:
    host = environ.get("LLMOBS_SMTP_HOST", "").strip()
    if not re.fullmatch(r"[^\s:]+:\d+", host):
        raise ReceiverError("LLMOBS_SMTP_HOST is not a mail server such as mail.example.com:587")
    sender = environ.get("LLMOBS_SMTP_FROM", "").strip()
    if "@" not in sender:
        raise ReceiverError("LLMOBS_SMTP_FROM is not an address such as alerts@example.com")
    smtp = {"smtp_smarthost": host, "smtp_from": sender}
    if user := environ.get("LLMOBS_SMTP_USER", "").strip():
        password = environ.get("LLMOBS_SMTP_PASSWORD", "")
        if not password:
            raise ReceiverError("LLMOBS_SMTP_PASSWORD is not set, and LLMOBS_SMTP_USER is")
        smtp |= {"smtp_auth_username": user, "smtp_auth_password": password}
    return smtp
