"""`llmobs stack`: who is told comes from the environment, and what is wrong is one line."""

import io
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from llmobs.cli import main

ROOT = Path(__file__).parents[1]
KEY = "0123456789abcdef0123456789abcdef"


def stack(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(["stack", *arguments], out, err)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("PAGE", "TICKET"):
        for way in ("WEBHOOK", "SLACK", "PAGERDUTY", "EMAIL"):
            monkeypatch.delenv(f"LLMOBS_{kind}_{way}", raising=False)
    for name in ("HOST", "FROM", "USER", "PASSWORD"):
        monkeypatch.delenv(f"LLMOBS_SMTP_{name}", raising=False)


def test_all_ways_to_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PAGE_WEBHOOK": "https://example.com/page",
        "PAGE_PAGERDUTY": KEY,
        "PAGE_SLACK": "https://hooks.example.com/a/b",
        "TICKET_EMAIL": "ops@example.com",
        "SMTP_HOST": "mail.example.com:587",
        "SMTP_FROM": "alerts@example.com",
        "SMTP_USER": "alerts",
        "SMTP_PASSWORD": "secret",
    }.items():
        monkeypatch.setenv(f"LLMOBS_{name}", value)
    code, out, err = stack("--configure", str(tmp_path))
    assert (code, err) == (0, "")
    path = tmp_path / "alertmanager.local.yml"
    assert out == f"{path}\n"
    assert path.stat().st_mode & 0o007 == 0
    subprocess.run(["amtool", "check-config", str(path)], check=True, capture_output=True)
    found = yaml.safe_load(path.read_text())
    page, ticket = found["receivers"]
    assert page["webhook_configs"][0]["url"] == "https://example.com/page"
    assert page["pagerduty_configs"][0]["routing_key"] == KEY
    assert page["slack_configs"][0]["api_url"] == "https://hooks.example.com/a/b"
    assert ticket["email_configs"][0]["to"] == "ops@example.com"
    assert found["global"]["smtp_smarthost"] == "mail.example.com:587"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "nobody would be paged; set one of LLMOBS_PAGE_WEBHOOK"),
        ({"TICKET_WEBHOOK": "https://example.com"}, "nobody would be paged"),
        ({"PAGE_WEBHOOK": "example.com"}, "LLMOBS_PAGE_WEBHOOK is not an address such as https:"),
        ({"PAGE_PAGERDUTY": "s3cret"}, "LLMOBS_PAGE_PAGERDUTY is not an integration key of 32"),
        ({"PAGE_EMAIL": "nobody"}, "LLMOBS_PAGE_EMAIL is not an address such as ops@example.com"),
        ({"PAGE_EMAIL": "a@b.c"}, "LLMOBS_SMTP_HOST is not a mail server such as"),
        (
            {"PAGE_EMAIL": "a@b.c", "SMTP_HOST": "mail:25"},
            "LLMOBS_SMTP_FROM is not an address such as",
        ),
        (
            {"PAGE_EMAIL": "a@b.c", "SMTP_HOST": "m:25", "SMTP_FROM": "a@b.c", "SMTP_USER": "u"},
            "LLMOBS_SMTP_PASSWORD is not set",
        ),
    ],
)
def test_a_wrong_or_missing_receiver_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], said: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(f"LLMOBS_{name}", value)
    for arguments in (("--configure", str(tmp_path)), ("--dir", str(tmp_path))):
        code, out, err = stack(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith(f"llmobs stack: {said}")
        assert err.count("\n") == 1
        assert "s3cret" not in err
    assert not (tmp_path / "data/prometheus.log").exists()


def compose(**environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["docker-compose", "--file", str(ROOT / "docker-compose.yml"), "config"],
        env={"PATH": "/usr/bin:/bin", **environ},
        capture_output=True,
        text=True,
    )


def test_the_compose_file() -> None:
    done = compose(GRAFANA_PASSWORD="a password")
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert set(services) == {
        *("prometheus", "alertmanager", "blackbox", "grafana", "tempo", "pyroscope"),
        *("receivers", "ebpf", "demo"),
    }
    for name, service in services.items():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name
        assert service["network_mode"] == "host"
    for name in ("prometheus", "alertmanager", "blackbox", "grafana", "tempo", "pyroscope"):
        assert services[name]["healthcheck"]
        assert services[name]["deploy"]["resources"]["limits"]["memory"]
        assert services[name]["user"] != "0:0"
    assert services["ebpf"]["profiles"] == ["ebpf"]
    assert services["demo"]["profiles"] == ["demo"]
    listening = [
        word for s in services.values() for word in s.get("command", ()) if "listen" in word
    ]
    assert len(listening) >= 4
    assert all("127.0.0.1" in word or word.endswith(("=", "4040")) for word in listening)


def test_no_default_password() -> None:
    done = compose()
    assert done.returncode != 0
    assert "set GRAFANA_PASSWORD to a password of yours" in done.stderr


def test_grafana_finds_what_the_dashboards_name() -> None:
    folder = ROOT / "dashboards/provisioning"
    (path,) = (folder / "datasources").glob("*.yml")
    sources = {s["type"]: s for s in yaml.safe_load(path.read_text())["datasources"]}
    assert set(sources) == {"prometheus", "tempo", "grafana-pyroscope-datasource"}
    (exemplars,) = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert exemplars["datasourceUid"] == sources["tempo"]["uid"]
    profiles = sources["tempo"]["jsonData"]["tracesToProfiles"]
    assert profiles["datasourceUid"] == sources["grafana-pyroscope-datasource"]["uid"]
    assert not re.search(r"(?<!\$)\$(?!\$)", re.sub(r"#.*", "", path.read_text()))
    (provider,) = yaml.safe_load((folder / "dashboards/llmobs.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/etc/llmobs/json"
