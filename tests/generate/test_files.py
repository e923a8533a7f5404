"""What `llmobs generate` writes: up to date, taken by the real tools, complete."""

import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from llmobs.cli import main
from llmobs.generate import runbook
from llmobs.generate.rules import alerts
from llmobs.slo import SLO

ROOT = Path(__file__).parents[2]


def generate(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(["generate", *arguments], out, err)
    return code, out.getvalue(), err.getvalue()


def tool(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_committed_is_up_to_date() -> None:
    assert generate("--out", str(ROOT), "--check") == (0, "", "")


def test_check_names_what_is_not(tmp_path: Path) -> None:
    assert generate("--out", str(tmp_path))[0] == 0
    (tmp_path / "alerts/rules.yml").write_text("groups: []\n")
    (tmp_path / "alerts/RUNBOOK.md").unlink()
    code, out, err = generate("--out", str(tmp_path), "--check")
    assert code == 1
    assert out.split() == [str(tmp_path / f"alerts/{n}") for n in ("rules.yml", "RUNBOOK.md")]
    assert err == "llmobs generate: these are not up to date; run it without --check\n"
    assert (tmp_path / "alerts/rules.yml").read_text() == "groups: []\n"


def test_targets_are_the_users(tmp_path: Path) -> None:
    generate("--out", str(tmp_path))
    mine = tmp_path / "alerts/targets/llmobs.json"
    assert json.loads(mine.read_text()) == [{"targets": ["localhost:9464"]}]
    mine.write_text("[]")
    assert generate("--out", str(tmp_path))[1] == ""
    assert mine.read_text() == "[]"


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "alerts").write_text("")
    code, _, err = generate("--out", str(tmp_path))
    assert code == 2
    assert err.count("\n") == 1
    assert "--out is a folder to write to" in err


OWN = """\
context_buckets:
  - {name: chat, limit: 2000, first_token: 250ms, token_gap: 90ms, cold_start: 1s}
  - {name: books, limit: null, first_token: 4s, token_gap: 200ms, cold_start: 2s}
alerts:
  queue_deep: {above: 7, for: 90s}
links: {grafana: "https://grafana.example.com/", runbook: "https://wiki.example.com/llm"}
"""


def command(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "llmobs.cli", "generate", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_rules_from_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(OWN)
    assert command("--slo", tmp_path / "own.yaml", "--out", tmp_path).returncode == 0
    tool("promtool", "check", "config", tmp_path / "alerts/prometheus.yml")
    rules = yaml.safe_load((tmp_path / "alerts/rules.yml").read_text())
    by_name: dict[str, list[dict]] = {}
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        by_name.setdefault(rule.get("alert", ""), []).append(rule)
    (queue,) = by_name["LLMQueueDeep"]
    assert ">= on (job, instance) 7 * max" in queue["expr"]
    assert queue["for"] == "90s"
    chat, books = by_name["LLMFirstTokenP99High"]
    assert 'context_bucket=~"chat"' in chat["expr"]
    assert "> 0.25\n" in chat["expr"]
    assert "> 4\n" in books["expr"]
    (boundary,) = by_name["LlmobsBoundaryMissing"]
    assert 'le="4.0"' in boundary["expr"]
    links = chat["annotations"]
    assert links["runbook_url"] == "https://wiki.example.com/llm#llmfirsttokenp99high"
    assert links["dashboard_url"].startswith("https://grafana.example.com/d/llmobs-")
    # Nothing of the default's buckets is left.
    assert "4k-32k" not in (tmp_path / "alerts/rules.yml").read_text()


def test_a_wrong_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("alerts:\n  queue_deep: {above: many}\n")
    done = command("--slo", tmp_path / "own.yaml", "--out", tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"llmobs generate: {tmp_path}/own.yaml: line 2: `above` is 'many'; accepted is a number "
        "above 0\n"
    )
    assert not (tmp_path / "alerts").exists()


def test_the_tools_take_it() -> None:
    tool("promtool", "check", "config", "alerts/prometheus.yml")
    assert "7 inhibit rules" in tool("amtool", "check-config", "alerts/alertmanager.yml")
    tool("prometheus-blackbox-exporter", "--config.check", "--config.file=alerts/blackbox.yml")


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [("severity=page", "page"), ("severity=ticket", "ticket"), ("severity=", "ticket")],
)
def test_routes(labels: str, receiver: str) -> None:
    route = ("amtool", "config", "routes", "test", "--config.file=alerts/alertmanager.yml")
    assert tool(*route, labels).strip() == receiver


def test_kubernetes(tmp_path: Path) -> None:
    code, _, _ = generate("--format", "prometheus-operator", "--out", str(tmp_path))
    assert code == 0
    rule = yaml.safe_load((tmp_path / "kubernetes/prometheusrule.yaml").read_text())
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rule["spec"]))
    tool("promtool", "check", "rules", tmp_path / "rules.yml")
    monitor = yaml.safe_load((tmp_path / "kubernetes/podmonitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "llmobs"}]


def test_the_runbook_has_a_heading_for_each_alert() -> None:
    assert runbook.headings() == list(dict.fromkeys(runbook.headings()))
    assert set(runbook.headings()) == {alert.name for alert in alerts(SLO)}
    for part in runbook.text().split("\n## ")[1:]:
        for word in ("**Means.**", "**Look.**", "**Do.**"):
            assert part.count(word) == 1, part.split("\n")[0]


def test_every_link_to_the_runbook_finds_its_heading() -> None:
    page = (ROOT / "alerts/consoles/runbook.html").read_text()
    anchors = set(re.findall(r'<h2 id="(\w+)">', page))
    for alert in alerts(SLO):
        url = str(alert.content(SLO.links)["annotations"]["runbook_url"])
        assert url.partition("#")[2] in anchors
    assert "{{" not in page


def test_the_flags_are_vllms() -> None:
    """To ask vLLM's parser takes half a minute; its source names them too."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    (folder,) = map(Path, spec.submodule_search_locations or ())
    files = folder / "engine/arg_utils.py", folder / "entrypoints/launchers/cli_args.py"
    source = "".join(path.read_text() for path in files)
    named = set(re.findall(r"`(--[a-z-]+)", runbook.text())) - {"--cpunodebind", "--all-processes"}
    assert len(named) > 12
    assert not {flag for flag in named if f'"{flag}"' not in source}
