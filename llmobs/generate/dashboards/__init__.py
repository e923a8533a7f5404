"""Grafana dashboards, made with grafanalib."""
