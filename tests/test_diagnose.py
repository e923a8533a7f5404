"""`llmobs diagnose`: the figures against numpy, and what it says of bad input."""

import io
import json
import socket
import time
from typing import Any

import numpy as np
import pytest

from llmobs import cli
from llmobs.diagnose import breakdown

PHASES = ("preprocess", "queue", "prefill", "preempted", "decode", "deliver")


def request(number: int, bucket: str = "0-1k") -> dict[str, Any]:
    """The higher its number the longer it waits."""
    queue = number / 100
    phases = dict(zip(PHASES, (0.01, queue, 0.02, 0.0, 0.5, 0.001), strict=True))
    before = dict(zip(PHASES, (0.01, queue, 0.02, 0.0, 0.0, 0.002), strict=True))
    return {
        "ended": time.time(),
        "model": "m",
        "context_bucket": bucket,
        "seconds": 0.531 + queue,
        "first_token": 0.032 + queue,
        "longest_gap": 0.1,
        "phases": phases,
        "first_token_phases": before,
        "predicted_prefill": 0.01 if number % 2 else None,
        "cold_start": number < 3,
        "kv_bytes": (number + 1) * 2**20 if number != 5 else None,
    }


def test_the_slowest_one_in_a_hundred_and_where_their_time_went() -> None:
    requests = [request(number) for number in range(1000)]
    (found,) = breakdown.breakdowns(requests[::-1])
    assert found.requests == 1000
    assert found.first_token_p99 == pytest.approx(
        np.quantile([r["first_token"] for r in requests], 0.99)
    )
    split = found.first_token
    assert split is not None
    assert split.slowest == 10
    assert split.phases["queue"] == pytest.approx(np.mean([9.90 + n / 100 for n in range(10)]))
    assert sum(split.phases.values()) == pytest.approx(split.total)
    assert split.dominant == "queue"
    assert found.missed == ("first token",)
    assert found.cold_starts == 3
    assert found.slow_for_length == pytest.approx(2.0)
    sizes = [(n + 1) * 2**20 for n in range(1000) if n != 5]
    assert found.kv_mean == pytest.approx(sum(sizes) / 999)
    assert found.kv_p99 == pytest.approx(np.quantile(sizes, 0.99))


def test_advice_names_the_reason_and_is_not_given_where_all_is_well() -> None:
    (slow,) = breakdown.breakdowns([request(n) for n in range(100)])
    samples: dict[str, list[breakdown.Sample]] = {
        "llmobs_queue_reason_seconds_total": [
            ({"reason": "kv_cache"}, 3.0),
            ({"reason": "token_budget"}, 1.0),
        ]
    }
    (line,) = breakdown.advice(slow, samples)
    assert line.startswith("first token: `kv_cache` is 75% of all waiting so far: ")
    (well,) = breakdown.breakdowns([request(0) for _ in range(100)])
    assert breakdown.advice(well, samples) == ()


def test_buckets_come_in_order_and_rejected_requests_are_left_out() -> None:
    rejected = request(1) | {"phases": {"preprocess": 0.1}}
    found = breakdown.breakdowns([request(1, "4k-32k"), rejected, request(1, "0-1k")])
    assert [(b.bucket, b.requests) for b in found] == [("0-1k", 1), ("4k-32k", 1)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--endpoint", "nonsense"], "'nonsense' is no URL; accepted is http://HOST:PORT"),
        (["--window", "soon"], "--window 'soon' is no time; accepted is such as 90s, 15m or 2h"),
        (["--window=-5m"], "--window '-5m' is no time"),
    ],
)
def test_bad_input_is_one_line_and_2(arguments: list[str], said: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    assert cli.main(["diagnose", *arguments], out, err) == 2
    assert out.getvalue() == ""
    assert err.getvalue().count("\n") == 1
    assert said in err.getvalue()


def test_a_page_that_is_not_there_is_one_line_and_2() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    err = io.StringIO()
    assert cli.main(["diagnose", "--endpoint", endpoint], io.StringIO(), err) == 2
    assert f"http://{endpoint}/requests" in err.getvalue()
    assert err.getvalue().count("\n") == 1


@pytest.mark.parametrize("number", [0, 99])
def test_json_and_text_and_their_exit_codes(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "llmobs.diagnose.source.finished_requests", lambda _: [request(number)] * 200
    )
    monkeypatch.setattr("llmobs.diagnose.source.samples", lambda _: {})
    out, text = io.StringIO(), io.StringIO()
    expected = int(number > 0)  # a finding
    assert cli.main(["diagnose", "--endpoint", "http://x", "--json"], out) == expected
    told = json.loads(out.getvalue())
    assert told["requests"] == 200
    assert told["models"] == ["m"]
    (bucket,) = told["buckets"]
    assert bucket["bucket"] == "0-1k"
    assert bool(bucket["missed"]) is bool(expected)
    assert bucket["dominant"] == ("queue" if number else "prefill")
    assert cli.main(["diagnose", "--endpoint", "http://x"], text) == expected
    assert "200 requests of m" in text.getvalue()
    assert f"{'100' if number else '1.00'} MiB" in text.getvalue()


@pytest.mark.parametrize("command", [[], ["diagnose"], ["agent"]])
def test_every_help_ends_with_examples(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    assert "examples:\n  " in capsys.readouterr().out
