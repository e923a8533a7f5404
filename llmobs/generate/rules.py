"""All rules, as Prometheus reads them."""

from typing import Any

import yaml

from llmobs.generate import burn, host, latency, load, memory, own
from llmobs.generate.rule import Alert, Group
from llmobs.slo import Slo

TOPICS = (burn, latency, load, memory, host, own)


def groups(slo: Slo) -> list[Group]:
    return [group for topic in TOPICS for group in topic.groups(slo)]


def alerts(slo: Slo) -> list[Alert]:
    """In the order of the groups; some names come more than once."""
    return [rule for group in groups(slo) for rule in group.rules if isinstance(rule, Alert)]


class _Dumper(yaml.SafeDumper):
    """Expressions of several lines as they are, and no references."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(content: Any) -> str:
    """YAML that a person can read."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    return text


def content(slo: Slo) -> dict[str, Any]:
    return {"groups": [group.content(slo.links) for group in groups(slo)]}
