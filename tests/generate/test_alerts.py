"""Every alert fires when it must, on the minute, and is silent when it must be: real promtool."""

from pathlib import Path

import pytest

from tests.generate.cases import CASES, Case
from tests.generate.promtool import Scenario, rules, run


def minutes(n: int) -> str:
    return f"{n}m"


def triple(case: Case) -> list[Scenario]:
    """Silent a minute before, firing on the minute; the twin silent then and later. And both at
    once, the twin with a scrape gap and a restart in it."""
    title = f"{case.alert} {case.note}".strip()
    loud = Scenario(title, case.loud("loud"))
    loud.check(case.alert, minutes(case.at - 1), by=case.by)
    loud.check(case.alert, minutes(case.at), "loud", by=case.by)
    twin = Scenario(f"{title}: the twin", case.quiet("quiet"))
    for later in (0, 1, 5, 10):
        twin.check(case.alert, minutes(case.at + later), by=case.by)
    gap = case.at - 3
    both = Scenario(
        f"{title}: two at once, gaps, a restart",
        [s.gap(gap - 20, 2) if gap > 20 else s for s in case.loud("loud")]
        + [s.reset(max(gap - 1, 1)).gap(gap) for s in case.quiet("quiet")],
    )
    both.check(case.alert, minutes(case.at + 1), "loud", by=case.by)
    both.check(case.alert, minutes(case.at + 5), "loud", by=case.by)
    return [loud, twin, both]


@pytest.mark.parametrize("alert", sorted({case.alert for case in CASES}))
def test_on_the_minute(tmp_path: Path, alert: str) -> None:
    scenarios = [s for case in CASES if case.alert == alert for s in triple(case)]
    done = run(tmp_path, rules(alert), scenarios)
    assert done.returncode == 0, done.stdout + done.stderr
