"""Whatever breaks in llmobs, the server answers all, and what is counted is exact.

The short form: every fault once that a server takes and runs on, a few that take a server of their
own. `make chaos` is the long one.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults_of_ours.bench import Bench, open_folder
from tests.faults_of_ours.chaos import inject, may
from tests.faults_of_ours.faults import FAULTS, Fault
from tests.faults_of_ours.lives import LIVES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_folder() as folder, Bench(folder / "server", clock=True) as bench:
        yield bench


ANYWHERE = [fault for fault in FAULTS if fault.needs in ("", "clock", "ours")]


@pytest.mark.parametrize("fault", ANYWHERE, ids=lambda fault: fault.name)
def test_the_server_takes_it_and_runs_on(bench: Bench, fault: Fault) -> None:
    assert may(fault, bench)
    result = inject(bench, fault)
    assert result.failed == 0
    assert result.inexact == ""
    if fault.ends_agent:
        assert bench.page_agrees() == ""


def test_after_all_that_the_page_is_exact_and_no_figure_impossible(bench: Bench) -> None:
    """The clock was set to and fro as well."""
    assert bench.page_agrees() == ""
    figures = bench.figures()
    assert figures is not None
    assert min(figures.samples.values()) >= 0
    seconds = figures.total("llmobs_request_seconds_sum")
    assert seconds < 60 * figures.total("llmobs_request_seconds_count")
    assert len(bench.agents()) == 1


def test_it_ends_with_the_server(bench: Bench) -> None:
    _, _, orphans = bench.end()
    assert orphans == 0


OWN = (
    "EngineCore killed (SIGKILL), 4 streams open",
    "a bad value in each setting",
)


@pytest.mark.parametrize("name", OWN)
def test_a_server_of_its_own(name: str) -> None:
    with open_folder() as folder:
        for result in LIVES[name](name, Path(folder)):
            assert result.failed == 0
            assert result.inexact == ""
            assert not result.orphans
