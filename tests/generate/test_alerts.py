"""Every alert fires when it must, on the minute, and is silent when it must be: real promtool."""

from pathlib import Path

import pytest

from tests.generate.cases import CASES, Case
from tests.generate.promtool import Scenario, Series, rules, run


def minutes(n: int) -> str:
    return f"{n}m"


def add(scenario: Scenario, number: int, case: Case) -> list[Series]:
    """Four servers at once: one that must fire, its twin that must not, and both again with failed
    scrapes, the twin with a restart as well."""
    loud, quiet, torn, again = (f"{who}{number}" for who in ("loud", "quiet", "torn", "again"))
    gap = case.at - 3

    def check(at: int, who: str, *firing: str) -> None:
        scenario.check(case.alert, minutes(at), *firing, by=case.by, where=f',{case.by}=~"{who}"')

    check(case.at - 1, loud)
    check(case.at, loud, loud)
    for later in (0, 1, 5, 10):
        check(case.at + later, f"{quiet}|{again}")
    for later in (1, 5):
        check(case.at + later, torn, torn)
    return [
        *case.loud(loud),
        *case.quiet(quiet),
        *(s.gap(gap - 20, 2) if gap > 20 else s for s in case.loud(torn)),
        *(s.reset(max(gap - 1, 1)).gap(gap) for s in case.quiet(again)),
    ]


@pytest.mark.parametrize("alert", sorted({case.alert for case in CASES}))
def test_on_the_minute(tmp_path: Path, alert: str) -> None:
    scenario = Scenario(alert, [])
    cases = [case for case in CASES if case.alert == alert]
    scenario.series = [s for n, case in enumerate(cases) for s in add(scenario, n, case)]
    done = run(tmp_path, rules(alert), [scenario])
    notes = "\n".join(f"{n}: {case.note}" for n, case in enumerate(cases))
    assert done.returncode == 0, notes + done.stdout + done.stderr
