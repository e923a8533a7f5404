"""The command `llmobs`."""

import argparse
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from llmobs import __version__
from llmobs.settings import SLO_FILE


def parser() -> argparse.ArgumentParser:
    """The command line, with examples under every `--help`."""
    top = argparse.ArgumentParser(
        prog="llmobs",
        description="Why did this LLM server's P99 jump?",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  llmobs diagnose\n  llmobs diagnose --endpoint http://gpu-7:9464\n",
    )
    top.add_argument("--version", action="version", version=f"llmobs {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    diagnose = commands.add_parser(
        "diagnose",
        help="per context length and phase: where the P99 went, where to look next",
        description="Reads the requests that an agent saw end lately, and says per context length "
        "where the slowest spent their time. Exit code 1 when a target is missed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  llmobs diagnose                              the server on this machine\n"
        "  llmobs diagnose --endpoint http://gpu-7:9464\n"
        "  llmobs diagnose --window 2h\n"
        "  llmobs diagnose --json | jq '.buckets[] | {bucket, missed, dominant}'\n",
    )
    diagnose.add_argument("--endpoint", metavar="URL", help="the page of an agent (default: local)")
    diagnose.add_argument(
        "--window",
        metavar="TIME",
        default="15m",
        help="how far back, such as 90s, 15m or 2h (default 15m; the last 20,000 requests at most)",
    )
    diagnose.add_argument("--json", action="store_true", help="JSON on standard output")

    postmortem = commands.add_parser(
        "postmortem",
        help="why a server ended, and what it was doing: from what it left behind",
        description="Tells the end of a dead server in a page, from its rings and its flight "
        "record; no agent or server need be alive. Of several servers the newest is told. Exit "
        "code 1 when it did not end in good order.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  llmobs postmortem /dev/shm/llmobs-0              the server that ended last\n"
        "  llmobs postmortem /dev/shm/llmobs-0/1234-567890\n"
        "  llmobs postmortem /var/lib/llmobs                what LLMOBS_FLIGHT_DIR named\n"
        "  llmobs postmortem --json /var/lib/llmobs | jq .cause\n",
    )
    postmortem.add_argument(
        "path", metavar="DIR", type=Path, help="a run folder, flight records, or their parent"
    )
    postmortem.add_argument("--json", action="store_true", help="JSON on standard output")

    agent = commands.add_parser(
        "agent",
        help="watch servers by hand (each server starts an agent by itself)",
        description="For one agent per node: servers started with LLMOBS_AGENT=FOLDER write there.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  llmobs agent --stay /var/lib/llmobs\n"
        "  LLMOBS_AGENT=/var/lib/llmobs vllm serve MODEL\n",
    )
    from llmobs.agent.__main__ import add_arguments

    add_arguments(agent)

    generate = commands.add_parser(
        "generate",
        help="alert rules, their runbook, configuration and dashboards from the SLO file",
        description="Writes alerts/ and dashboards/, or with --format prometheus-operator "
        "kubernetes/. alerts/targets/ is written once, and yours then.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  llmobs generate --out monitoring\n"
        "  llmobs generate --slo slo.yaml --out monitoring\n"
        "  llmobs generate --format prometheus-operator --out deploy\n"
        "  llmobs generate --check\n",
    )
    generate.add_argument("--slo", metavar="FILE", help="the SLO file (default: LLMOBS_SLO_FILE)")
    generate.add_argument("--out", metavar="DIR", default=".", help="where to (default: here)")
    generate.add_argument(
        "--format",
        choices=("files", "prometheus-operator"),
        default="files",
        help="files for Prometheus and Grafana (default), or resources for Kubernetes",
    )
    generate.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if anything is not up to date"
    )

    stack = commands.add_parser(
        "stack",
        help="Prometheus and Alertmanager on this machine, without docker",
        description="Starts the installed prometheus, alertmanager and blackbox exporter on what "
        "`llmobs generate` writes, until it is interrupted. Who is told comes from the "
        "environment: LLMOBS_PAGE_WEBHOOK, _SLACK, _PAGERDUTY or _EMAIL, and LLMOBS_TICKET_… "
        "likewise (docs/alerts.md).",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  LLMOBS_PAGE_WEBHOOK=https://example.com/hook llmobs stack\n"
        "  llmobs stack --dir /var/lib/llmobs --slo slo.yaml\n"
        "  llmobs stack --configure /etc/alertmanager       only Alertmanager's receivers\n",
    )
    stack.add_argument("--slo", metavar="FILE", help="the SLO file (default: LLMOBS_SLO_FILE)")
    stack.add_argument(
        "--dir", metavar="DIR", default="llmobs-stack", help="its files (default: llmobs-stack)"
    )
    stack.add_argument("--configure", metavar="DIR", help="only write alertmanager.local.yml there")
    stack.add_argument(
        "--host", metavar="NAME", default="localhost", help="this machine's name in links"
    )
    for name, port in (("prometheus", 9090), ("alertmanager", 9093), ("blackbox", 9115)):
        stack.add_argument(
            f"--{name}-port", metavar="PORT", type=int, default=port, help=f"default: {port}"
        )
    return top


def main(
    argv: Sequence[str] | None = None, out: TextIO = sys.stdout, err: TextIO = sys.stderr
) -> int:
    """Run one command. Exit codes: 0, 1 (a finding), 2 (bad input, one line on `err`)."""
    options = parser().parse_args(argv)
    if options.command == "agent":
        from llmobs.agent.__main__ import run

        return run(options)
    # Before anything imports it: all else goes by what the SLO file says.
    if getattr(options, "slo", None):
        os.environ[SLO_FILE] = options.slo
    from llmobs.slo import PROBLEM

    if PROBLEM:
        print(f"llmobs {options.command}: {PROBLEM}", file=err)
        return 2
    if options.command in ("generate", "stack"):
        try:
            from llmobs import stack
            from llmobs.generate import command
        except ModuleNotFoundError as error:
            needed = f"{error.name} is not installed; pip install 'llmobs[generate]'"
            print(f"llmobs {options.command}: {needed}", file=err)
            return 2
        run_it = command.run if options.command == "generate" else stack.run
        return run_it(options, out, err)
    if options.command == "postmortem":
        return _postmortem(options, out, err)
    return _diagnose(options, out, err)


def _postmortem(options: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    from llmobs.postmortem import case, cause, show

    page = io.StringIO()
    try:
        found = case.open_case(options.path)
        why = cause.cause_of(found)
        if options.json:
            show.show_json(found, why, page)
        else:
            show.show(found, why, page, out.isatty())
    except case.CaseError as error:
        print(f"llmobs postmortem: {error}", file=err)
        return 2
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        print(
            f"llmobs postmortem: {options.path}: its flight record is damaged ({error!r}); "
            "accepted is one as the agent wrote it",
            file=err,
        )
        return 2
    out.write(page.getvalue())
    return int(not why.good)


def seconds(text: str) -> float:
    """A stretch of time such as 90s, 15m, 2h. Raises SourceError with what is accepted."""
    from llmobs.diagnose.source import SourceError

    number, unit = text[:-1], text[-1:]
    try:
        value = float(number) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
    except (ValueError, KeyError):
        value = -1.0
    if not 0 < value < float("inf"):
        raise SourceError(f"--window {text!r} is no time; accepted is such as 90s, 15m or 2h")
    return value


def _diagnose(options: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    from llmobs.diagnose import breakdown, show, source
    from llmobs.settings import read_settings

    try:
        window = seconds(options.window)
        endpoint = options.endpoint or source.local_page(read_settings())
        since = time.time() - window
        requests = [r for r in source.finished_requests(endpoint) if r["ended"] >= since]
        found = breakdown.breakdowns(requests)
        samples = source.samples(endpoint)
        if not found:
            raise source.SourceError(
                f"{endpoint}: no admitted request ended there in the last {options.window}"
            )
    except source.SourceError as error:
        print(f"llmobs diagnose: {error}", file=err)
        return 2
    ends = [r["ended"] for r in requests]
    models = tuple(sorted({r["model"] for r in requests}))
    scope = show.Scope(endpoint, models, len(requests), min(ends), max(ends))
    if options.json:
        show.show_json(scope, found, samples, out)
    else:
        show.show(scope, found, samples, out)
    return int(any(b.missed for b in found))


if __name__ == "__main__":
    sys.exit(main())
