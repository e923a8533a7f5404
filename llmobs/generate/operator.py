"""The same for Kubernetes with the Prometheus operator: rules, a pod monitor, dashboards."""

from typing import Any

from llmobs.generate import own, rules
from llmobs.generate.dashboards.all import dashboards
from llmobs.generate.dashboards.board import text
from llmobs.generate.rule import Group
from llmobs.slo import Slo

LABELS = {"app.kubernetes.io/name": "llmobs"}


def files(slo: Slo) -> dict[str, str]:
    return {
        "kubernetes/prometheusrule.yaml": rules.dump(_rule(rules.groups(slo), slo)),
        "kubernetes/podmonitor.yaml": rules.dump(_monitor()),
        **{
            f"kubernetes/dashboard-{name}.yaml": rules.dump(_dashboard(name, text(found)))
            for name, found in dashboards(slo).items()
        },
    }


def _dashboard(name: str, content: str) -> dict[str, Any]:
    """Grafana's sidecar takes config maps with this label."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"llmobs-dashboard-{name}",
            "labels": {**LABELS, "grafana_dashboard": "1"},
        },
        "data": {f"llmobs-{name}.json": content},
    }


def _resource(api: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "labels": LABELS}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def _rule(groups: list[Group], slo: Slo) -> dict[str, Any]:
    spec = {"groups": [group.content(slo.links) for group in groups]}
    return _resource("monitoring.coreos.com/v1", "PrometheusRule", "llmobs", spec)


def _monitor() -> dict[str, Any]:
    """Pods of vLLM that carry the label `llmobs: scrape` and name their port `llmobs`. The rules go
    by the job's name."""
    spec = {
        "selector": {"matchLabels": {"llmobs": "scrape"}},
        "podMetricsEndpoints": [
            {
                "port": "llmobs",
                "interval": "10s",
                "relabelings": [{"targetLabel": "job", "replacement": own.JOB}],
            }
        ],
    }
    return _resource("monitoring.coreos.com/v1", "PodMonitor", "llmobs", spec)
