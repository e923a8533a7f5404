"""What `llmobs generate` writes, and whether it stands there already."""

from collections.abc import Iterator
from pathlib import Path

from llmobs.generate import alertmanager, prometheus, rules, runbook
from llmobs.generate.dashboards import board
from llmobs.generate.dashboards.all import dashboards
from llmobs.slo import Slo

HEAD = "# Made by `llmobs generate` from the SLO file; change that, and run it again.\n"


def files(slo: Slo) -> dict[str, str]:
    """By path: what is generated, and overwritten each time."""
    return {
        "alerts/rules.yml": HEAD + rules.dump(rules.content(slo)),
        "alerts/alertmanager.yml": HEAD + rules.dump(alertmanager.content()),
        "alerts/prometheus.yml": HEAD + rules.dump(prometheus.content()),
        "alerts/blackbox.yml": HEAD + rules.dump(prometheus.blackbox()),
        "alerts/RUNBOOK.md": runbook.text(),
        "alerts/consoles/runbook.html": runbook.page(),
        **{f"dashboards/json/{name}.json": board.text(d) for name, d in dashboards(slo).items()},
    }


def targets() -> dict[str, str]:
    """Where the servers are: written once, and the user's then."""
    lines = '[{{"targets": ["{}"]}}]\n'
    return {
        f"alerts/targets/{name}.json": lines.format('", "'.join(addresses))
        for name, addresses in prometheus.TARGETS.items()
    }


def write(folder: Path, wanted: dict[str, str], first: dict[str, str]) -> list[Path]:
    """Write what is not there yet as it should be; returns those paths. Raises OSError."""
    written = []
    for path in stale(folder, wanted):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(wanted[path])
        written.append(folder / path)
    for path, text in first.items():
        if not (folder / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
            written.append(folder / path)
    return written


def stale(folder: Path, wanted: dict[str, str]) -> Iterator[str]:
    """The files that are missing or say something else."""
    for path, text in wanted.items():
        try:
            if (folder / path).read_text() == text:
                continue
        except (FileNotFoundError, UnicodeDecodeError):
            pass
        yield path
