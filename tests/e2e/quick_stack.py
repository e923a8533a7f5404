"""`llmobs stack`, scraping and evaluating each second, grouping pages at once: for tests."""

import sys

from llmobs.cli import main
from llmobs.generate import alertmanager, prometheus
from llmobs.generate.rule import Group

_prometheus, _alertmanager, _group = prometheus.content, alertmanager.content, Group.content


def quick_prometheus(*addresses: str) -> dict:
    found = _prometheus(*addresses)
    found["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    return found


def quick_alertmanager() -> dict:
    found = _alertmanager()
    found["route"]["routes"][0] |= {"group_wait": "0s", "group_interval": "1s"}
    return found


Group.content = lambda group, links: _group(group, links) | {"interval": "1s"}  # type: ignore
prometheus.content = quick_prometheus
alertmanager.content = quick_alertmanager

if __name__ == "__main__":
    sys.exit(main())
