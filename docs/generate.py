"""Writes docs/metrics.md from the table of metrics; with --check says whether it is up to date."""

import sys
from pathlib import Path

from llmobs.features import FEATURES, MEANING
from llmobs.metrics import METRICS, OPEN, Exactness, Type
from llmobs.slo import SLO

PATH = Path(__file__).with_name("metrics.md")

KEPT = {
    Exactness.TOTAL: "server: exact, also over lost records and restarts of the agent",
    Exactness.RECORDS: "agent, from complete requests and steps",
    Exactness.AGENT: "agent, about itself",
    Exactness.READ: "the kernel or a driver, read by the agent; absent where it cannot be read",
}
INTRO = """# Metrics

Generated from `llmobs/metrics.py` by `make docs`; do not edit.

Every series carries `model_name`, the served name; LoRA adapters come under their own names when
first used (at most 20, the rest are `other`). `engine` is the index of the engine core. Every
combination of the label values below stands at 0 from the start, but for what is kept as `read`, or
says when it is absent. Times are seconds.

Context buckets, by the prompt tokens of the request: {buckets}; `unknown` where it was never
tokenised. With several prompts in one request the first decides; token series go by each
sequence's own prompt.

Where a figure is kept says what survives a gap in the records: {kept}.

"""


def table() -> str:
    """The whole page."""
    buckets = ", ".join(
        f"`{b.name}` (≤ {b.limit})" if b.limit is not None else f"`{b.name}`" for b in SLO.buckets
    )
    kept = "; ".join(f"`{kind}`: {text}" for kind, text in KEPT.items())
    lines = [INTRO.format(buckets=buckets, kept=kept)]
    lines.append("| metric | type | labels | kept | meaning |\n| --- | --- | --- | --- | --- |\n")
    for metric in METRICS:
        labels = "<br>".join(
            f"`{name}`" if values is OPEN else f"`{name}`: {', '.join(values)}"
            for name, values in metric.labels.items()
            if name != "model_name"
        )
        lines.append(
            f"| `{metric.name}` | {metric.type} | {labels} | {metric.exactness} | {metric.help} |\n"
        )
    lines.append("\n## Histogram boundaries\n\n| metric | upper bounds |\n| --- | --- |\n")
    lines += [
        f"| `{metric.name}` | {', '.join(f'{bound:g}' for bound in metric.bounds)} |\n"
        for metric in METRICS
        if metric.type is Type.HISTOGRAM
    ]
    lines.append(
        "\n## Features\n\n`llmobs_feature_available` is 1 with an empty `reason` unless one of "
        "these stands in the way.\n\n| feature | what it tells | reasons |\n| --- | --- | --- |\n"
    )
    lines += [
        f"| `{feature.name}` | {feature.tells} | "
        f"{', '.join(f'`{reason}`' for reason in feature.reasons)} |\n"
        for feature in FEATURES
    ]
    lines.append("\n| reason | why not |\n| --- | --- |\n")
    lines += [f"| `{reason}` | {why} |\n" for reason, why in MEANING.items()]
    lines.append("\n## Targets\n\n| context | first token | longest gap |\n| --- | --- | --- |\n")
    lines += [
        f"| `{b.name}` | {b.first_token * 1000:.0f} ms | {b.token_gap * 1000:.0f} ms |\n"
        for b in SLO.buckets
    ]
    return "".join(lines)


def main() -> int:
    if "--check" in sys.argv[1:]:
        if PATH.read_text() != table():
            print(
                "docs/metrics.md is not what llmobs/metrics.py says; run make docs", file=sys.stderr
            )
            return 1
        return 0
    PATH.write_text(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
