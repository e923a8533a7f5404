"""The agent's HTTP page."""

import errno
import json
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from llmobs.agent import page
from llmobs.agent.page import serve
from tests.agent.test_collect import registry, served

pytestmark = pytest.mark.timeout(60)


def get(port: int, path: str, **headers: str) -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.fixture
def port(tmp_path: Path) -> int:
    run = served(tmp_path)
    address, bound = serve(run, registry(run), "127.0.0.1", 0)
    assert address == "127.0.0.1"
    return bound


def test_text_for_whoever_asks_for_nothing_else(port: int) -> None:
    status, type_, body = get(port, "/metrics")
    assert (status, type_.split(";")[0]) == (200, "text/plain")
    assert "\nllmobs_requests_received_total{" in body


def test_openmetrics_for_prometheus(port: int) -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    status, type_, body = get(port, "/metrics", Accept=accept)
    assert (status, type_.split(";")[0]) == (200, "application/openmetrics-text")
    assert body.endswith("# EOF\n")


def test_finished_requests(port: int) -> None:
    status, type_, body = get(port, "/requests")
    assert (status, type_) == (200, "application/json")
    content = json.loads(body)
    phases = ["preprocess", "queue", "prefill", "preempted", "decode", "deliver"]
    assert content["phases"] == phases
    (request,) = content["requests"]
    assert request["model"] == "deepseek-v4"
    assert request["phases"] == [0.01, 0.011, 0.079, 0.0, 0.0, 0.01]
    assert request["seconds"] == 0.11
    assert (request["prompt_tokens"], request["output_tokens"]) == (10, 1)
    assert (request["first_token"], request["longest_gap"]) == (0.105, 0.0)
    assert request["outcome"] == "length"


def test_families_for_another_process(port: int) -> None:
    families = json.loads(get(port, "/families")[2])
    (family,) = [f for f in families if f[0] == "llmobs_requests_received"]
    _, _, type_, samples = family
    assert type_ == "counter"
    labels = {"model_name": "deepseek-v4", "context_bucket": "0-1k"}
    assert ["llmobs_requests_received_total", labels, 1.0, None, None] in samples


@pytest.mark.parametrize("path", ["/", "/metric", "/requests/1", "/../etc/passwd"])
def test_anything_else_is_told_what_there_is(port: int, path: str) -> None:
    status, _, body = get(port, path)
    assert status == 404
    assert body == "llmobs: /metrics (Prometheus), /requests (JSON)\n"


def test_a_query_changes_nothing(port: int) -> None:
    assert get(port, "/metrics?name[]=llmobs_build_info")[0] == 200


@pytest.mark.parametrize(
    "request_", [b"\0\1\2\n\n", b"GET /metrics", b"GET /metrics HTTP/9.9\r\n\r\n"]
)
def test_a_request_that_is_none_harms_nobody(port: int, request_: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(request_)
        # A second one is not held up by the first.
        assert get(port, "/metrics")[0] == 200


def taken(family: int = socket.AF_INET, address: str = "127.0.0.1") -> socket.socket:
    listener = socket.socket(family)
    listener.bind((address, 0))
    listener.listen()
    return listener


def serve_empty(tmp_path: Path, host: str, port: int) -> tuple[str, int]:
    run: Any = served(tmp_path)
    return serve(run, CollectorRegistry(), host, port)


def test_a_taken_port_moves_on_to_the_next_free_one(tmp_path: Path) -> None:
    with taken() as stranger:
        port = stranger.getsockname()[1]
        first = serve_empty(tmp_path, "127.0.0.1", port)
        assert port < first[1] <= port + 99
        # Two of our own never share a port either.
        (tmp_path / "second").mkdir()
        assert serve_empty(tmp_path / "second", "127.0.0.1", port)[1] > first[1]


def test_no_free_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PORTS_TRIED", 1)
    with taken() as stranger, pytest.raises(OSError, match="no free port") as caught:
        serve_empty(tmp_path, "127.0.0.1", stranger.getsockname()[1])
    assert caught.value.errno == errno.EADDRINUSE


def test_the_last_port(tmp_path: Path) -> None:
    assert serve_empty(tmp_path, "127.0.0.1", 65535)[1] == 65535


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_an_address_that_is_not_ours(tmp_path: Path, host: str) -> None:
    with pytest.raises(OSError):  # noqa: PT011
        serve_empty(tmp_path, host, 0)


def test_ipv6(tmp_path: Path) -> None:
    address, port = serve_empty(tmp_path, "::1", 0)
    assert address == "::1"
    with socket.create_connection(("::1", port), timeout=5):
        pass
