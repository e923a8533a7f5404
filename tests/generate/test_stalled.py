"""An engine that stands still, by its heartbeat; a server that llmobs does not tell of."""

from pathlib import Path

from tests.generate.cases import engine, labels
from tests.generate.promtool import Scenario, Series, counter, gauge, rules, run

STALLED = "LLMEngineStalled"
TENS = 60
"""Samples, one every 10 s."""


def heartbeat(who: str, stops: int | None, number: str = "0") -> Series:
    """The last step's time, 7 s ago until that sample (None: always)."""
    times = [10 * min(i, stops if stops is not None else i) - 7 for i in range(TENS)]
    name = "llmobs_engine_last_step_timestamp_seconds" + labels(who, engine=number)
    return Series(name, tuple(map(float, times)), False)


def running(who: str, *segments: tuple[float, int], number: str = "0") -> Series:
    of = {"engine": number, "state": "running", "context_bucket": "0-1k"}
    return gauge("llmobs_requests" + labels(who, **of), *segments)


def front(who: str, received: list[tuple[float, int]], ended: list[tuple[float, int]]) -> list:
    of = {"context_bucket": "0-1k"}
    return [
        counter("llmobs_requests_received_total" + labels(who, **of), *received),
        counter("llmobs_requests_total" + labels(who, outcome="stop", **of), *ended),
    ]


def passes(tmp_path: Path, scenarios: list[Scenario], alert: str = STALLED) -> None:
    done = run(tmp_path, rules(alert), scenarios, "10s")
    assert done.returncode == 0, done.stdout + done.stderr


def test_requests_run_and_nothing_moves(tmp_path: Path) -> None:
    """The last step at 293 s: more than 20 s ago at 320 s, `for` 10 s. An engine beside it goes on;
    one without requests may rest."""
    scenario = Scenario(
        "frozen",
        [
            heartbeat("frozen", 30),
            running("frozen", (3, TENS)),
            heartbeat("frozen", None, number="1"),
            running("frozen", (3, TENS), number="1"),
            heartbeat("idle", 30),
            running("idle", (3, 31), (0, TENS - 31)),
            heartbeat("busy", None),
            running("busy", (3, TENS)),
        ],
        "10s",
    )
    scenario.check(STALLED, "320s")
    scenario.check(STALLED, "330s", "frozen", where=',severity="page"')
    scenario.check(STALLED, "330s", "0", by="engine")
    scenario.check(STALLED, "550s", "frozen")
    passes(tmp_path, [scenario])


def test_requests_of_an_adapter_count(tmp_path: Path) -> None:
    adapter = "llmobs_requests" + engine("a", state="running", context_bucket="0-1k").replace(
        'model_name="a"', 'model_name="lora"'
    )
    scenario = Scenario("adapter", [heartbeat("a", 30), gauge(adapter, (2, TENS))], "10s")
    scenario.check(STALLED, "320s")
    scenario.check(STALLED, "330s", "a")
    passes(tmp_path, [scenario])


def test_requests_that_the_engine_never_saw(tmp_path: Path) -> None:
    """It froze while idle; one request came at 400 s. What a dead front end left open for ever is
    no request, nor is one that another engine works on."""
    idle = running("late", (0, TENS))
    scenario = Scenario(
        "never seen",
        [
            heartbeat("late", 30),
            idle,
            *front("late", [(1, 30), (0, 9), (1, 1), (0, 19)], [(1, 30), (0, 29)]),
            heartbeat("left", 30),
            running("left", (0, TENS)),
            *front("left", [(2, 20), (1, 10), (0, 29)], [(1, 40), (0, 19)]),
            heartbeat("other", 30),
            running("other", (0, TENS)),
            heartbeat("other", None, number="1"),
            running("other", (2, TENS), number="1"),
            *front("other", [(1, 30), (0, 9), (1, 1), (0, 19)], [(1, 30), (0, 29)]),
        ],
        "10s",
    )
    scenario.check(STALLED, "400s")
    scenario.check(STALLED, "410s", "late")
    scenario.check(STALLED, "550s", "late")
    passes(tmp_path, [scenario])


ABSENT = "LlmobsAbsent"


def up(who: str, *segments: tuple[float, int]) -> Series:
    return gauge(f'up{{job="llmobs",instance="{who}"}}', *segments)


def healthy(who: str, *segments: tuple[float, int]) -> Series:
    return gauge(f'probe_success{{job="llmobs-health",instance="{who}"}}', *segments)


def test_a_server_that_llmobs_does_not_tell_of(tmp_path: Path) -> None:
    """Two servers are healthy and one agent answers, from 300 s on; `for` is 2 m."""
    build = gauge("llmobs_build_info" + labels("a"), (1, TENS))
    both = [healthy("s1", (1, TENS)), healthy("s2", (1, TENS)), up("a", (1, TENS)), build]
    gone = Scenario("one gone", [*both, up("b", (1, 30), (0, TENS - 30))], "10s")
    kind = ',kind="server"'
    gone.check(ABSENT, "410s", by="kind", where=kind)
    gone.check(ABSENT, "420s", "server", by="kind", where=kind)
    never = Scenario("no agent at all", [healthy("s1", (1, TENS))], "10s")
    never.check(ABSENT, "110s", by="kind")
    never.check(ABSENT, "120s", "server", by="kind")
    # The server went with its agent: the health check says so, this alert does not.
    away = [healthy("s1", (1, 30), (0, TENS - 30)), up("a", (1, 30), (0, TENS - 30))]
    down = Scenario("both down", [*away, build], "10s")
    down.check(ABSENT, "500s", by="kind")
    passes(tmp_path, [gone, never, down], ABSENT)


def test_a_page_without_llmobs(tmp_path: Path) -> None:
    build = gauge("llmobs_build_info" + labels("b"), (1, TENS))
    scenario = Scenario("a stranger", [up("a", (1, TENS)), up("b", (1, TENS)), build], "10s")
    scenario.check(ABSENT, "110s")
    scenario.check(ABSENT, "120s", "a", where=',kind="page"')
    passes(tmp_path, [scenario], ABSENT)
