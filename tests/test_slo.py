"""The buckets, targets and boundaries of the contract, and a file of one's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmobs.slo import BUCKET_NAMES, SLO, load
from llmobs.slo_file import SloError


def test_the_users_buckets_and_targets() -> None:
    assert [(b.name, b.limit, b.first_token, b.token_gap, b.cold_start) for b in SLO.buckets] == [
        ("0-1k", 1024, 0.3, 0.2, 0.05),
        ("1k-4k", 4096, 0.3, 0.2, 0.12),
        ("4k-32k", 32768, 0.8, 0.2, 0.8),
        ("32k+", None, 0.8, 0.2, 0.8),
    ]
    assert BUCKET_NAMES == ("0-1k", "1k-4k", "4k-32k", "32k+")


def test_the_users_objectives_and_thresholds() -> None:
    objectives, alerts = SLO.objectives, SLO.alerts
    assert (objectives.availability, objectives.health) == (0.9995, 0.999)
    assert alerts.first_token_p99_high.every == 10
    batch = alerts.batch_size_unstable
    assert (batch.above, batch.for_, batch.every) == (0.4, 300, 30)
    assert (alerts.long_context_surge.times, alerts.long_context_surge.every) == (1.5, 60)
    assert (alerts.memory_pressure.above, alerts.memory_pressure_critical.above) == (0.85, 0.90)
    assert (alerts.cpu_steal.above, alerts.cpu_wait.above, alerts.cpi_high.above) == (
        *(0.15, 0.15),
        1.5,
    )
    assert alerts.stream_throughput_low.per_1000_tokens == 45
    assert alerts.capacity_low.per_second == 50
    assert (alerts.traffic_burst.times, alerts.traffic_burst.for_) == (2, 300)
    assert (alerts.node_load_high.above, alerts.node_load_high.for_) == (0.8, 120)
    assert [(w.long, w.short, w.rate, w.for_, w.severity) for w in SLO.burn_windows] == [
        (3600, 300, 14.4, 120, "page"),
        (21600, 1800, 6, 900, "page"),
        (86400, 7200, 3, 3600, "ticket"),
        (259200, 21600, 1, 10800, "ticket"),
    ]


def oracle(tokens: int) -> str:
    if tokens <= 1024:
        return "0-1k"
    if tokens <= 4096:
        return "1k-4k"
    return "4k-32k" if tokens <= 32768 else "32k+"


@given(
    st.integers(0, 1_000_000)
    | st.sampled_from([0, 1, 1023, 1024, 1025, 4095, 4096, 4097, 32767, 32768, 32769])
)
def test_the_bucket_of_a_prompt(tokens: int) -> None:
    assert BUCKET_NAMES[SLO.bucket_index(tokens)] == oracle(tokens)


def test_the_boundaries_of_the_contract() -> None:
    assert {0.05, 0.2, 0.3, 0.5, 0.8} <= set(SLO.fine_seconds)
    assert (SLO.fine_seconds[0], SLO.fine_seconds[-1]) == (0.001, 60.0)
    assert {1024, 4096, 32768} <= set(SLO.context_tokens)
    for coarse in (SLO.step_seconds, SLO.batch_sizes, SLO.context_tokens):
        assert len(coarse) <= 10


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [(1, 0.2), (512, 0.2), (1024, 0.2), (2048, 1.0), (4096, 1.5), (32768, 3.0)],
)
def test_the_dynamic_target(tokens: int, seconds: float) -> None:
    assert SLO.dynamic_target.seconds(tokens) == pytest.approx(seconds)


def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return path


TWO = """\
context_buckets:
  - {name: chat, limit: 2000, first_token: 250ms, token_gap: 90ms, cold_start: 1s}
  - {name: books, limit: null, first_token: 4s, token_gap: 0.2s, cold_start: 2s}
alerts:
  queue_deep: {above: 3.5}
  gc_pause: {longer_than: 70ms}
"""


def test_a_file_of_ones_own_says_only_what_differs(tmp_path: Path) -> None:
    slo = load(own(tmp_path, TWO))
    assert [(b.name, b.limit, b.first_token) for b in slo.buckets] == [
        ("chat", 2000, 0.25),
        ("books", None, 4.0),
    ]
    assert [slo.bucket_index(n) for n in (1, 2000, 2001, 10**6)] == [0, 0, 1, 1]
    assert (slo.alerts.queue_deep.above, slo.alerts.queue_deep.for_) == (3.5, 60)
    assert slo.objectives == SLO.objectives


def test_what_is_judged_becomes_a_boundary(tmp_path: Path) -> None:
    slo = load(own(tmp_path, TWO))
    assert set(slo.fine_seconds) - set(SLO.fine_seconds) == {0.25, 0.09, 4.0}
    assert list(slo.fine_seconds) == sorted(slo.fine_seconds)
    assert set(slo.context_tokens) - set(SLO.context_tokens) == {2000}
    assert set(slo.step_seconds) - set(SLO.step_seconds) == {0.07}


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load(own(tmp_path, "# nothing yet\n")) == SLO


BUCKET = "{name: a, limit: null, first_token: 1s, token_gap: 1s, cold_start: 1s}"
BURN = "{long: 5m, short: 1h, rate: 1, for: 1m, severity: page, at_least: 1}"


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("\nalerts: {queue_depth: {}}", 2, "`queue_depth` is not known in `alerts`"),
        ("alerts:\n  queue_deep:\n    above: lots", 3, "accepted is a number above 0"),
        ("alerts:\n  queue_deep: {above: 0}", 2, "accepted is a number above 0"),
        ("alerts:\n  queue_deep: {above: -1}", 2, "accepted is a number above 0"),
        ("alerts:\n  queue_deep: {for: 5}", 2, "accepted is a duration such as 0s, 30s or 5m"),
        ("alerts:\n  queue_deep: {severity: loud}", 2, "accepted is page or ticket"),
        ("alerts:\n  queue_deep: 3", 2, "`queue_deep` is no mapping"),
        ("objectives:\n  health: 101%", 2, "accepted is a share above 0, such as 15% or 0.15"),
        ("objectives: [a]", 1, "accepted is the keys availability, health, first_token"),
        ("objectives: {health: 1%, health: 2%}", 1, "`health` stands there twice"),
        ("context_buckets: []", 1, "accepted is a list of at least one"),
        ("context_buckets: 4", 1, "accepted is a list of at least one"),
        (f"\n\ncontext_buckets: [{BUCKET}, {BUCKET}]", 3, "accepted is a number for all but"),
        ("context_buckets:\n  - {name: a}", 2, "`limit` is missing in `an item of context_b"),
        ("context_buckets:\n- " + BUCKET.replace("null", "4"), 1, "but the last, which has null"),
        ("context_buckets:\n- " + BUCKET.replace("a,", "unknown,"), 1, "none of them `unknown`"),
        ("context_buckets:\n- " + BUCKET.replace("a,", "'a\"b',"), 2, "letters, digits or any of"),
        (
            "context_buckets:"
            + "".join("\n- " + BUCKET.replace("null", n).replace("a,", n + ",") for n in "98")
            + f"\n- {BUCKET}",
            1,
            "accepted is what rises strictly",
        ),
        (
            "context_buckets:"
            + "".join(f"\n- {BUCKET}".replace("null", n).replace("a,", n + ",") for n in "12345678")
            + f"\n- {BUCKET}",
            1,
            "accepted are 1 to 8",
        ),
        ("boundaries:\n  batch_sizes: [2, 1]", 2, "accepted is what rises strictly"),
        (f"burn_windows: [{BURN}]", 1, "accepted is short < long"),
        ("cold_start:\n  exclude: maybe", 2, "accepted is true or false"),
        ("links:\n  grafana: localhost", 2, "accepted is an address such as http://localhost"),
        ("a: [1", 2, "accepted is YAML"),
        ("- 1", 1, "`the file` is no mapping"),
        ("x" * 10 + "\n" * 3 + "y: 3: 4", 4, "accepted is YAML"),
    ],
)
def test_an_error_names_the_line_and_what_is_accepted(
    tmp_path: Path, text: str, line: int, said: str
) -> None:
    path = own(tmp_path, text)
    with pytest.raises(SloError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: line {line}: ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["missing", "folder", "bytes"])
def test_a_file_that_cannot_be_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "own.yaml"
    if kind == "folder":
        path.mkdir()
    if kind == "bytes":
        path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SloError, match=r"own\.yaml: .*; accepted is a YAML file") as caught:
        load(path)
    assert "\n" not in str(caught.value)


SERVER = """
from llmobs import process, schema
process._watch = lambda *_: None
process.mark_server()
process.current().open("api_server", "m")
ring = process.current().ring
ring.cells[schema.model_cell("received", 0) + 1] += 7
ring.put(1, 1000, 1, 1)
print(ring.path.parent)
"""
AGENT = """
import sys
from pathlib import Path
from prometheus_client import CollectorRegistry, generate_latest
from llmobs.agent.collect import RunCollector
from llmobs.agent.run import Run
run = Run(Path(sys.argv[1]))
run.say = print
run.poll()
registry = CollectorRegistry()
registry.register(RunCollector(run))
print(generate_latest(registry).decode())
"""


def run(code: str, folder: Path, *arguments: str, **environ: str) -> tuple[str, str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("LLMOBS_", "_LLMOBS"))}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**base, "LLMOBS_RUN_DIR": str(folder / "runs"), **environ},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip(), done.stderr


def test_a_server_with_buckets_of_its_own(tmp_path: Path) -> None:
    """Server and agent go by one file; an agent with another one says so and reads nothing."""
    own(tmp_path, TWO)
    folder, _ = run(SERVER, tmp_path, LLMOBS_SLO_FILE="own.yaml")
    page, _ = run(AGENT, tmp_path, folder, LLMOBS_SLO_FILE=str(tmp_path / "own.yaml"))
    assert 'llmobs_requests_received_total{context_bucket="books",model_name="m"} 7.0' in page
    assert 'context_bucket="chat"' in page
    assert "0-1k" not in page
    page, _ = run(AGENT, tmp_path, folder)
    assert "received_total{" not in page
    assert (
        "its context buckets are [['chat', 2000], ['books', None]], the agent's [['0-1k', 1024], "
        "['1k-4k', 4096], ['4k-32k', 32768], ['32k+', None]]: both must go by the same "
        "LLMOBS_SLO_FILE; start the server again"
    ) in page


def test_a_bad_file_stops_no_server(tmp_path: Path) -> None:
    own(tmp_path, "alerts:\n  queue_deep: {above: lots}\n")
    folder, log = run(SERVER, tmp_path, LLMOBS_SLO_FILE="own.yaml")
    (line,) = [line for line in log.splitlines() if line]
    assert line == (
        f"llmobs: {tmp_path}/own.yaml: line 2: `above` is 'lots'; accepted is a number above 0; "
        "going by the default SLO"
    )
    page, _ = run(AGENT, tmp_path, folder)
    assert 'llmobs_requests_received_total{context_bucket="1k-4k",model_name="m"} 7.0' in page


def test_all_processes_of_a_server_find_the_same_file(tmp_path: Path) -> None:
    own(tmp_path, TWO)
    code = (
        "import json, os\nfrom llmobs import process\nprocess.mark_server()\n"
        "print(os.environ['LLMOBS_SLO_FILE'])\n"
        "print(json.loads(os.environ['_LLMOBS_SERVER_ENVIRON'])['LLMOBS_SLO_FILE'])"
    )
    out, _ = run(code, tmp_path, LLMOBS_SLO_FILE="own.yaml")
    assert out.splitlines() == [str(tmp_path / "own.yaml")] * 2
