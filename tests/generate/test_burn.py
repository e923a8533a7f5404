"""Burn rates: each of the four rows by itself, at the minute that arithmetic says."""

from pathlib import Path

import pytest

from tests.generate.cases import labels
from tests.generate.promtool import Scenario, Series, counter, gauge, rules, run

FIRST, AVAILABLE, HEALTH = "LLMFirstTokenBurn", "LLMAvailabilityBurn", "LLMHealthBurn"


def passes(tmp_path: Path, alert: str, scenarios: list[Scenario], every: str = "1m") -> None:
    done = run(tmp_path, rules(alert), scenarios, every)
    assert done.returncode == 0, done.stdout + done.stderr


def verdicts(who: str, *segments: tuple[float, float, int]) -> list[Series]:
    """(good, bad, samples) per sample, and many excluded, which count for nothing."""
    name, of = "llmobs_slo_requests_total", {"context_bucket": "1k-4k", "objective": "first_token"}
    return [
        counter(name + labels(who, result="good", **of), *((g, n) for g, _, n in segments)),
        counter(name + labels(who, result="bad", **of), *((b, n) for _, b, n in segments)),
        counter(name + labels(who, result="excluded", **of), (500, sum(n for *_, n in segments))),
    ]


def check(
    scenario: Scenario, alert: str, long: str, step: int, first: dict[str, int], last: int
) -> None:
    """By model: the sample at which the row of that long window begins to fire; none other does."""
    points = {n - 1 for n in first.values()} | set(first.values()) | {last}
    for sample in sorted(points):
        now = sorted(who for who, since in first.items() if since <= sample)
        at = f"{sample * step}m"
        scenario.check(alert, at, *now, by="model_name", where=f',long="{long}"')


def test_the_row_of_an_hour(tmp_path: Path) -> None:
    """20% late from minute 60 on: the hour has more than 14.4% after 44 minutes, `for` is 2. With
    no first token at all it takes 9. It ends 2 minutes after the cause: 5 minutes have 12%."""
    spoilt = Scenario(
        "20% late, all late, 0.9% late, none",
        [
            *verdicts("late", (100, 0, 60), (80, 20, 60), (100, 0, 30)),
            *verdicts("dead", (100, 0, 60), (0, 100, 60), (100, 0, 30)),
            *verdicts("quiet", (99.1, 0.9, 150)),
            *verdicts("fine", (100, 0, 150)),
        ],
    )
    check(spoilt, FIRST, "1h", 1, {"late": 106, "dead": 71}, 120)
    spoilt.check(FIRST, "121m", "dead", "late", by="model_name", where=',severity="page",long="1h"')
    spoilt.check(FIRST, "122m", "dead", by="model_name", where=',long="1h"')
    spoilt.check(FIRST, "125m", by="model_name", where=',long="1h"')
    passes(tmp_path, FIRST, [spoilt])


LONG_ROWS: dict[str, dict[str, int]] = {
    "1h": {},
    "6h": {"ten": 22 + 2},
    "1d": {"six": 74 + 6, "ten": 44 + 6},
    "3d": {"two": 217 + 18, "six": 74 + 18, "ten": 44 + 18},
}
"""By row and model, at which sample of ten minutes since it began to burn at 2, 5.9 and 10 times
the budget: 10 is above 6 in 6 h after 22 of its 36 samples, and 15 minutes are two more."""


def test_the_long_rows(tmp_path: Path) -> None:
    """Three days in order, then 2%, 5.9% and 10% late; a sample every 10 minutes."""
    day = 144
    scenario = Scenario(
        "slow burns",
        [
            series
            for who, bad in (("two", 20), ("six", 59), ("ten", 100), ("quiet", 9))
            for series in verdicts(who, (1000, 0, 3 * day), (1000 - bad, bad, 260))
        ],
        "10m",
    )
    start = 3 * day
    for long, first in LONG_ROWS.items():
        after = {who: start + n for who, n in first.items()}
        check(scenario, FIRST, long, 10, after, start + 250)
    for long, severity in (("6h", "page"), ("1d", "ticket"), ("3d", "ticket")):
        where = f',long="{long}",severity!="{severity}"'
        scenario.check(FIRST, f"{(start + 250) * 10}m", by="model_name", where=where)
    passes(tmp_path, FIRST, [scenario], "10m")


def test_one_bad_request_pages_nobody(tmp_path: Path) -> None:
    """Of one request in twelve minutes a single bad one is a sixth of the hour, two are more: no
    page. Four within five minutes are one, from the fourth on."""
    sparse = [(0.0, 0.0, 11), (1.0, 0.0, 1)] * 5
    few = Scenario(
        "sparse",
        [
            *verdicts("one", *sparse, (0, 1, 1), (0, 0, 59)),
            *verdicts("two", *sparse, (0, 1, 2), (0, 0, 58)),
            *verdicts("four", *sparse, (0, 1, 4), (0, 0, 56)),
            # One a minute, all bad: 9 of 60 after 9 minutes, more than 3 of them in 5 minutes.
            *verdicts("all", (1, 0, 60), (0, 1, 60)),
        ],
    )
    check(few, FIRST, "1h", 1, {"all": 71}, 119)
    few.check(FIRST, "65m", "four", by="model_name", where=',long="1h"')
    for minute in range(61, 75):
        where = ',model_name=~"one|two",severity="page"'
        few.check(FIRST, f"{minute}m", by="model_name", where=where)
    passes(tmp_path, FIRST, [few])


def test_no_traffic_is_no_outage_and_a_restart_is_none(tmp_path: Path) -> None:
    restarted = [s.reset(90).gap(90, 3) for s in verdicts("again", (99.5, 0.5, 180))]
    quiet = Scenario("nothing", [*verdicts("idle", (0, 0, 180)), *restarted])
    for minute in (30, 89, 93, 95, 100, 179):
        quiet.check(FIRST, f"{minute}m", by="model_name")
    record = "llmobs:first_token:bad_ratio_rate5m"
    none = {"expr": f'{record}{{model_name="idle"}}', "eval_time": "60m", "exp_samples": []}
    quiet.expected.append(none)
    passes(tmp_path, FIRST, [quiet])


def ended(who: str, errors: float, refused: float = 0, clients: float = 0) -> list[Series]:
    """Requests a minute from minute 60 on, beside 100 in order and 3 given up."""
    name, of = "llmobs_requests_total", {"context_bucket": "1k-4k"}
    return [
        counter(name + labels(who, outcome="stop", **of), (100, 120)),
        counter(name + labels(who, outcome="abort", **of), (3, 120)),
        counter(name + labels(who, outcome="error", **of), (0, 60), (errors, 60)),
        counter(name + labels(who, outcome="rejected", **of), (0, 60), (refused + clients, 60)),
        counter("llmobs_rejections_total" + labels(who, code="503"), (0, 60), (refused, 60)),
        counter("llmobs_rejections_total" + labels(who, code="400"), (0, 60), (clients, 60)),
    ]


def test_availability(tmp_path: Path) -> None:
    """2 of 105 fail: above 0.72% of the hour after 23 minutes. Wrong requests are not our failure,
    and do not hide one either."""
    scenario = Scenario(
        "errors, refusals, the clients' own mistakes",
        [
            *ended("failing", 2),
            *ended("refusing", 0, refused=2),
            *ended("hidden", 2, clients=1000),
            *ended("theirs", 0, clients=50),
            *ended("fine", 0),
            *ended("little", 0.7),
        ],
    )
    first = {"failing": 85, "refusing": 85, "hidden": 85}
    check(scenario, AVAILABLE, "1h", 1, first, 119)
    restarted = [s.reset(100).gap(100, 3) for s in ended("fine", 0)]
    after = Scenario("a restart", restarted)
    check(after, AVAILABLE, "1h", 1, {}, 104)
    passes(tmp_path, AVAILABLE, [scenario, after])


def test_few_errors_page_nobody(tmp_path: Path) -> None:
    """One request a minute: two failures are a thirtieth of the hour, and no page. Four are, while
    they are within five minutes; and a hundred that ended long ago are none."""
    name, of = "llmobs_requests_total", {"context_bucket": "1k-4k"}
    series = []
    for who, errors in (
        ("two", ((0, 60), (1, 2), (0, 58))),
        ("four", ((0, 60), (1, 4), (0, 56))),
        ("over", ((0, 60), (20, 5), (0, 55))),
    ):
        series += [
            counter(name + labels(who, outcome="stop", **of), (1, 120)),
            counter(name + labels(who, outcome="error", **of), *errors),
            counter("llmobs_rejections_total" + labels(who, code="503"), (0, 120)),
            counter("llmobs_rejections_total" + labels(who, code="400"), (0, 120)),
        ]
    few = Scenario("few", series)
    where = ',long="1h",severity="page"'
    few.check(AVAILABLE, "63m", "over", by="model_name", where=where)
    few.check(AVAILABLE, "65m", "four", "over", by="model_name", where=where)
    for minute in (71, 75, 100):
        few.check(AVAILABLE, f"{minute}m", by="model_name", where=where)
    passes(tmp_path, AVAILABLE, [few])


def outcomes(who: str, *segments: tuple[float, float, int]) -> list[Series]:
    """(good, bad, samples) as requests that were served or failed."""
    name, of = "llmobs_requests_total", {"context_bucket": "1k-4k"}
    length = sum(n for *_, n in segments)
    return [
        counter(name + labels(who, outcome="stop", **of), *((g, n) for g, _, n in segments)),
        counter(name + labels(who, outcome="error", **of), *((b, n) for _, b, n in segments)),
        counter("llmobs_rejections_total" + labels(who, code="503"), (0, length)),
        counter("llmobs_rejections_total" + labels(who, code="400"), (0, length)),
    ]


KINDS = {FIRST: (verdicts, 1.0), AVAILABLE: (outcomes, 0.05)}
"""How the series are made, and what of a hundred requests may be bad."""


@pytest.mark.parametrize("alert", KINDS)
def test_both_windows_must_burn(tmp_path: Path, alert: str) -> None:
    """After a day far beyond the limit, 0.8 times and 1.2 times of it: the one is over."""
    made, budget = KINDS[alert]
    series, day = [], 144
    for long, rate, after in (("6h", 6.0, 9), ("1d", 3.0, 24), ("3d", 1.0, 48)):
        for which, times in (("under", 0.8), ("over", 1.2)):
            bad, much = 100 * rate * budget * times, 100 * rate * budget * 5
            before = (10_000, 0, day), (10_000 - much, much, day + 48 - after)
            series += made(f"{which}-{long}", *before, (10_000 - bad, bad, after))
    scenario = Scenario("after a burn", series, "10m")
    for long in ("6h", "1d", "3d"):
        where = f',long="{long}",model_name=~".*{long}"'
        at = f"{(2 * day + 47) * 10}m"
        scenario.check(alert, at, f"over-{long}", by="model_name", where=where)
    minutes = []
    for which, times in (("under", 0.8), ("over", 1.2)):
        bad, much = 1440 * budget * times, 1440 * budget * 4
        before = (10_000, 0, 30), (10_000 - much, much, 30)
        minutes += made(which, *before, (10_000 - bad, bad, 12))
    hour = Scenario("after a burn", minutes)
    hour.check(alert, "70m", "over", by="model_name", where=',long="1h"')
    passes(tmp_path, alert, [scenario], "10m")
    passes(tmp_path, alert, [hour])


@pytest.mark.parametrize("alert", KINDS)
def test_few_are_too_few_in_every_row(tmp_path: Path, alert: str) -> None:
    """In the short window 2.4 bad requests, and 3.9; of so few that the shares are far beyond."""
    made, _ = KINDS[alert]
    series = []
    for long, samples in (("6h", 3), ("1d", 12), ("3d", 36)):
        for which, bad in (("two", 2.4), ("four", 3.9)):
            each = bad / samples
            series += made(f"{which}-{long}", (9 * each, each, 120))
    scenario = Scenario("few", series, "10m")
    for long in ("6h", "1d", "3d"):
        where = f',long="{long}",model_name=~".*{long}"'
        scenario.check(alert, f"{119 * 10}m", f"four-{long}", by="model_name", where=where)
    passes(tmp_path, alert, [scenario], "10m")


@pytest.mark.long
def test_both_windows_of_health_must_burn(tmp_path: Path) -> None:
    """The same for an average."""
    series, day = [], 144
    for long, rate, after in (("6h", 0.006, 9), ("1d", 0.003, 24), ("3d", 0.001, 48)):
        for which, times in (("under", 0.8), ("over", 1.2)):
            name = f'probe_success{{job="llmobs-health",instance="{which}-{long}"}}'
            levels = (1, day), (1 - 5 * rate, day + 48 - after), (1 - times * rate, after)
            series.append(gauge(name, *levels))
    scenario = Scenario("after a burn", series, "10m")
    for long in ("6h", "1d", "3d"):
        where = f',long="{long}",instance=~".*{long}"'
        scenario.check(HEALTH, f"{(2 * day + 47) * 10}m", f"over-{long}", where=where)
    passes(tmp_path, HEALTH, [scenario], "10m")
    name = 'probe_success{{job="llmobs-health",instance="{}"}}'
    hour = Scenario(
        "after a burn",
        [
            gauge(name.format("under"), (1, 30), (0.9, 30), (1 - 0.0144 * 0.8, 12)),
            gauge(name.format("over"), (1, 30), (0.9, 30), (1 - 0.0144 * 1.2, 12)),
        ],
    )
    hour.check(HEALTH, "70m", "over", where=',long="1h"')
    passes(tmp_path, HEALTH, [hour])


def test_health(tmp_path: Path) -> None:
    """A check every 15 s: the fourth failure of an hour is above 1.44%, the third is not."""

    def checks(who: str, *segments: tuple[float, int]) -> Series:
        return gauge(f'probe_success{{job="llmobs-health",instance="{who}"}}', *segments)

    scenario = Scenario(
        "down, and down for 45 s",
        [checks("down", (1, 240), (0, 60)), checks("short", (1, 240), (0, 3), (1, 57))],
        "15s",
    )
    where = ',long="1h",severity="page"'
    for at, firing in (("62m30s", ()), ("62m45s", ("down",)), ("70m", ("down",))):
        scenario.check(HEALTH, at, *firing, where=where)
    passes(tmp_path, HEALTH, [scenario], "15s")


@pytest.mark.long
def test_the_long_rows_of_availability(tmp_path: Path) -> None:
    """Three days in order, then 0.1%, 0.295% and 0.5% of errors: as many times the budget, so at
    the same minutes."""
    day, name, of = 144, "llmobs_requests_total", {"context_bucket": "1k-4k"}
    series = []
    for who, bad in (("two", 100), ("six", 295), ("ten", 500), ("quiet", 45)):
        series += [
            counter(
                name + labels(who, outcome="stop", **of), (100_000, 3 * day), (100_000 - bad, 260)
            ),
            counter(name + labels(who, outcome="error", **of), (0, 3 * day), (bad, 260)),
            counter("llmobs_rejections_total" + labels(who, code="503"), (0, 3 * day + 260)),
            counter("llmobs_rejections_total" + labels(who, code="400"), (0, 3 * day + 260)),
        ]
    scenario = Scenario("slow burns", series, "10m")
    for long, first in LONG_ROWS.items():
        after = {who: 3 * day + n for who, n in first.items()}
        check(scenario, AVAILABLE, long, 10, after, 3 * day + 250)
    passes(tmp_path, AVAILABLE, [scenario], "10m")


@pytest.mark.long
def test_the_long_rows_of_health(tmp_path: Path) -> None:
    """A value between 0 and 1 stands for many checks: an average is an average."""
    day = 144
    series = [
        gauge(
            f'probe_success{{job="llmobs-health",instance="{who}"}}', (1, 3 * day + 1), (good, 260)
        )
        for who, good in (("two", 0.998), ("six", 0.9941), ("ten", 0.99), ("quiet", 0.9991))
    ]
    scenario = Scenario("slow burns", series, "10m")
    for long, first in LONG_ROWS.items():
        points = {n + d for n in first.values() for d in (-1, 0, 1)}
        for n in sorted(points | {250}):
            now = sorted(who for who, since in first.items() if since < n)
            if n not in first.values():  # the ends of an average's window are both counted
                at = f"{(3 * day + n) * 10}m"
                scenario.check(HEALTH, at, *now, where=f',long="{long}"')
    passes(tmp_path, HEALTH, [scenario], "10m")
