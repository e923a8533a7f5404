"""Cold starts: which prefills are, for how long, and what is said of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmobs.agent import requests
from llmobs.agent.run import Run
from llmobs.agent.spans import span_tree
from llmobs.ring import Writer
from llmobs.slo import SLO, ColdStart
from tests.agent.world import BUCKETS, Life, World
from tests.rings import ENGINE

MS = 1_000_000
SECOND = 1_000_000_000
MINUTE = 60 * SECOND
JOIN, CHUNK, TOKENS, STEP, LEAVE = 16, 17, 19, 21, 22
BOUNDS = (0.02, 0.05, 0.12, 0.3, 0.8, 2.0, 5.0, 15.0, 30.0, 60.0)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch, whole=True)


def prefill(
    world: World, prompt: int, ms: int = 100, kind: str = "plain", read: bool = True
) -> Life:
    """A request of one token, alone."""
    world.join(prompt, 1, kind, None, True, 1, MS)
    # The clock moves four times in a step before its tokens are out.
    world.step(0, 1 << 20, 1 << 20, [0], [1], [False], [ms * MS // 4])
    if read:
        world.read(True)
    return world.lives[-1]


def cold(view: Any) -> dict[str, tuple[int, float]]:
    """By bucket: how many, and their seconds together. Of all models."""
    found = dict.fromkeys(BUCKETS, (0, 0.0))
    children = view.store.histograms.get("llmobs_cold_start_seconds", {})
    for (_, engine, bucket), child in children.items():
        assert (engine, child.bounds) == ("0", BOUNDS)
        count, total = found[bucket]
        found[bucket] = count + sum(child.counts), total + child.sum
    return found


def counts(view: Any) -> list[int]:
    return [count for count, _ in cold(view).values()]


def took(life: Life) -> float:
    return (life.tokens[0][0] - life.started) / 1e9


def test_the_first_prefill_of_each_bucket_is_one(world: World) -> None:
    lives = [prefill(world, prompt, ms) for prompt, ms in ((60, 90), (2000, 300), (5000, 1200))]
    for prompt in (60, 1024, 1025, 4096, 4097, 1):
        prefill(world, prompt, 30)
    found = cold(world)
    for life, bucket in zip(lives, BUCKETS, strict=False):
        assert found[bucket] == (1, pytest.approx(took(life)))
    assert found["32k+"] == (0, 0.0)
    assert took(lives[2]) == pytest.approx(1.2)


def test_an_adapters_first_prefill_finds_its_bucket_warm(world: World) -> None:
    prefill(world, 60)
    world.join(60, 1, "plain", "lora-a", True, 1, MS)
    world.step(0, 1 << 20, 1 << 20, [0], [1], [False], [MS])
    world.read(True)
    assert counts(world) == [1, 0, 0, 0]


@pytest.mark.parametrize(("idle", "again"), [(599 * SECOND, 1), (600 * SECOND, 2)])
def test_an_engine_that_idled_is_cold_again(world: World, idle: int, again: int) -> None:
    for _ in range(3):
        prefill(world, 60)
        prefill(world, 2000)
    world.tick(idle)
    for _ in range(3):
        prefill(world, 60)
        prefill(world, 2000)
    assert counts(world) == [again, again, 0, 0]


def test_a_bucket_that_is_seldom_used_does_not_cool_off_while_the_engine_computes(
    world: World,
) -> None:
    prefill(world, 5000)
    for _ in range(5):
        world.tick(5 * MINUTE)
        prefill(world, 60)
    prefill(world, 5000)
    assert counts(world) == [1, 0, 1, 0]


def test_it_is_told_without_what_a_preemption_took(world: World) -> None:
    world.join(1000, 1, "plain", None, True, 1, MS)
    half: tuple[Any, ...] = (1 << 20, 500, [0], [1], [False], [10 * MS])
    world.step(0, *half)
    world.step(1, *half)
    world.tick(SECOND)
    for _ in range(3):
        world.step(0, *half)
    world.finish()
    (life,) = world.lives
    assert life.phases[3] > SECOND
    assert cold(world)["0-1k"] == (1, pytest.approx(life.phases[2] / 1e9))


def test_one_that_was_given_up_leaves_it_to_the_next(world: World) -> None:
    world.join(2000, 1, "plain", None, True, 1, MS)
    world.step(0, 1 << 20, 500, [0], [1], [False], [MS])
    world.abort(0, late=False)
    life = prefill(world, 2000)
    prefill(world, 2000)
    assert cold(world)["1k-4k"] == (1, pytest.approx(took(life)))


def test_one_that_was_given_up_when_another_was_through_leaves_it_to_nobody(world: World) -> None:
    world.join(4000, 1, "plain", None, True, 1, MS)
    world.step(0, 1 << 20, 500, [0], [1], [False], [MS])
    world.join(1030, 1, "plain", None, True, 1, MS)
    for _ in range(3):
        world.step(0, 1 << 20, 600, [0], [1], [False], [MS])
    assert world.lives[1].tokens
    assert not world.lives[0].tokens
    world.abort(0, late=False)
    prefill(world, 2000)
    assert counts(world) == [0, 0, 0, 0]


def test_what_yields_no_token_is_none(world: World) -> None:
    prefill(world, 60, kind="pooling")
    assert counts(world) == [0, 0, 0, 0]


# Whom the agent could not see


def lose(world: World, count: int = 20) -> None:
    """So many prefills, one in a second, that the rings go round."""
    for _ in range(count):
        prefill(world, 60, 1000, read=False)


def test_after_lost_records_any_bucket_may_be_warm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, capacity=32, whole=True)
    prefill(world, 60)
    lose(world)
    for _ in range(3):
        prefill(world, 2000, 1000)
    assert sum(source.lost for source in world.run.sources.values())
    assert counts(world) == [1, 0, 0, 0]
    # It has seen the engine idle: now it knows again.
    world.tick(10 * MINUTE)
    for _ in range(3):
        prefill(world, 2000)
    assert counts(world) == [1, 1, 0, 0]


def test_a_new_agent_does_not_know_what_is_warm_where_the_rings_have_gone_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, capacity=32, whole=True)
    lose(world)
    world.run = run = Run(tmp_path)
    run.skip_to_newest()
    for _ in range(5):
        prefill(world, 60, 1000)
        prefill(world, 2000, 1000)
    assert counts(run) == [0, 0, 0, 0]
    assert sum(source.records for source in run.sources.values()) > 50
    world.tick(10 * MINUTE)
    prefill(world, 60, 1000)
    assert counts(run) == [1, 0, 0, 0]


def test_a_new_agent_finds_the_same_where_the_rings_are_whole(world: World, tmp_path: Path) -> None:
    for prompt in (60, 2000, 60, 5000, 2000):
        prefill(world, prompt)
    run = Run(tmp_path)
    run.skip_to_newest()
    run.poll()
    assert cold(run) == cold(world)
    assert counts(run) == [1, 1, 1, 0]


def test_two_servers_of_one_agent_have_cold_starts_of_their_own(tmp_path: Path) -> None:
    rings = [
        Writer(tmp_path / f"engine_core-{n}.ring", 64, {**ENGINE, "server": f"{n}-1"})
        for n in (1, 2)
    ]
    run = Run(tmp_path)
    for number, ring in enumerate(rings * 2):
        ring.put(JOIN, 1000 * MS, number, 0, 0, number, 10)
        ring.put(CHUNK, 1000 * MS, number, 1, 0, 10, 0, number, number)
        ring.put(TOKENS, 1040 * MS, 0, 2, 0, number | 1 << 32)
        ring.put(STEP, 1040 * MS, number, 0, 0, 1000 * MS, 1001 * MS, 1039 * MS, 1, 10, 1)
        ring.put(LEAVE, 1040 * MS, number, 0, 0, 1, number)
        run.poll()
    assert cold(run)["0-1k"] == (2, pytest.approx(0.08))


# What is said of the request


class Kept:
    """In place of the traces: the trees of all that is offered."""

    share = 1.0

    def __init__(self) -> None:
        self.attributes: list[dict[str, Any]] = []
        self.dropped: dict[str, int] = {}

    def offer(self, request: Any, model: str, resource: Any, reasons: tuple[str, ...]) -> None:
        self.attributes.append(span_tree(request, model, reasons).attributes)


@pytest.mark.parametrize("excluded", [False, True])
def test_the_request_says_so_and_its_verdict_if_the_slo_wants_it(
    world: World, monkeypatch: pytest.MonkeyPatch, excluded: bool
) -> None:
    if excluded:
        monkeypatch.setattr(requests, "SLO", replace(SLO, cold_start=ColdStart(600, True)))
    else:
        assert not SLO.exclude_cold_starts
    kept = Kept()
    world.requests.traces = kept  # type: ignore[assignment]
    for prompt, ms in ((60, 900), (60, 900), (60, 30), (2000, 30), (2000, 30)):
        prefill(world, prompt, ms)
    world.finish()
    assert [about.get("llm.cold_start") for about in kept.attributes] == [
        *(True, None, None),
        *(True, None),
    ]
    assert [finished.cold_start for finished in world.requests.finished] == [
        *(True, False, False),
        *(True, False),
    ]
    verdicts = {
        (bucket, result): count
        for (_, bucket, objective, result), count in world.store.counters[
            "llmobs_slo_requests_total"
        ].items()
        if objective == "first_token" and count
    }
    if excluded:
        assert verdicts == {
            ("0-1k", "excluded"): 1,
            ("0-1k", "bad"): 1,
            ("0-1k", "good"): 1,
            ("1k-4k", "excluded"): 1,
            ("1k-4k", "good"): 1,
        }
        assert ["first_token" in about["llm.missed"] for about in kept.attributes][:2] == [
            *(False, True),
        ]
    else:
        assert verdicts == {("0-1k", "bad"): 2, ("0-1k", "good"): 1, ("1k-4k", "good"): 2}
