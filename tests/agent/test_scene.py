"""What a server was doing at a moment, from its rings alone, against what it really did."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings

from llmobs.agent.run import Run
from llmobs.agent.scene import scene_of, servers
from tests.agent.test_steps import EVENTS, QUIET, STARTS
from tests.agent.world import Life, World
from tests.rings import ENGINE, FRONT, new_ring

SECOND = 1_000_000_000


def scene(folder: Path, at: int, until: int | None = None) -> dict[str, Any]:
    run = Run(folder, autopsy=True, until=until)
    run.read_dead()
    (server,) = servers(run)
    return scene_of(run, server, at)


def phase(life: Life) -> str:
    if life.left:
        return "deliver"
    if not life.started:
        return "queue"
    if life.preempted:
        return "preempted"
    return "prefill" if life.owing else "decode"


Told = list[tuple[Any, ...]]


def truth(world: World) -> Told:
    """Of all that are in flight: whose, how long, how far, since when."""
    return sorted(
        (
            *(life.model, life.bucket, life.request.num_prompt_tokens, phase(life)),
            *(sum(count for _, count in life.tokens), (world.time - life.arrival) / 1e9),
            len(life.losses),
        )
        for life in world.lives
        if not life.end
    )


def told(found: dict[str, Any]) -> Told:
    return sorted(
        (
            *(r["model"], r["bucket"], r["prompt_tokens"], r["phase"], r["output_tokens"]),
            *(r["age"], r["preemptions"]),
        )
        for r in found["requests"]
    )


def check_trend(world: World, found: dict[str, Any], at: int) -> None:
    start, before = at - 60 * SECOND, 0
    expected: Counter[tuple[int, str]] = Counter()
    worst: Counter[int] = Counter()
    for step in world.steps:
        if start < step.end <= at:
            place = (step.end - start - 1) // SECOND
            expected[place, "steps"] += 1
            expected[place, "tokens"] += step.came_out
            expected[place, "running"] += step.sequences
            worst[place] = max(worst[place], step.end - max(step.started, before))
        before = step.end
    for life in world.lives:
        for lost, _ in life.losses:
            if start < lost <= at:
                expected[(lost - start - 1) // SECOND, "preemptions"] += 1
    assert len(found["trend"]) == 60
    for place, second in enumerate(found["trend"]):
        for name in ("steps", "tokens", "running", "preemptions"):
            assert second[name] == expected[place, name], (place, name)
        assert second["worst"] == pytest.approx(worst[place] / 1e9, abs=1e-6)


@given(STARTS, EVENTS, EVENTS)
@hypothesis_settings(QUIET, max_examples=120)
def test_the_scene_is_what_was_going_on(
    starts: list[Any], events: list[Any], after: list[Any]
) -> None:
    """At once, and also when the rings go on: as of that moment."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as monkeypatch:
        world = World(Path(name), monkeypatch, ahead=True)
        for kind, *arguments in starts + events:
            getattr(world, kind)(*arguments)
        at, expected = world.time, truth(world)
        now = scene(Path(name), at)
        assert told(now) == expected
        check_trend(world, now, at)
        waiting, tokens = world.gauges()
        assert now["waiting"]["sequences"] == sum(
            n for (_, state, _), n in waiting.items() if state == "waiting"
        )
        assert now["waiting"]["prompt_tokens"] == tokens
        world.tick(1000)
        for kind, *arguments in after:
            getattr(world, kind)(*arguments)
        world.finish()
        later = scene(Path(name), at, until=at)
        assert told(later) == expected
        assert later["trend"] == now["trend"]
        assert [s["tokens_out"] for s in later["steps"]] == [
            step.came_out for step in [s for s in world.steps if s.end <= at][-10:]
        ]


def test_with_several_tokens_a_step_it_says_at_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, drafts=3)
    for prompt in (50, 2000):
        world.join(prompt, 100, "plain", None, True, 1, 1_000_000)
    for _ in range(8):
        world.step(0, 100_000, 100_000, [0], [1, 4, 3], [False], [1_000_000])
    found = scene(tmp_path, world.time)
    assert all(r["at_least"] for r in found["requests"])
    for mine, theirs in zip(told(found), truth(world), strict=True):
        assert mine[:4] == theirs[:4]
        assert 8 <= mine[4] <= theirs[4]


def test_what_is_folded_away_still_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a log of 64 steps."""
    from llmobs.agent import steps

    monkeypatch.setattr(steps, "STEPS_KEPT", 64)
    world = World(tmp_path, monkeypatch)
    world.join(50, 1000, "plain", None, True, 1, 1_000_000)
    world.join(70, 1000, "cut", None, True, 900, 1_000_000)
    for turn in range(200):
        world.step(0, 100_000, 100_000, [0], [turn % 5 != 0], [False], [1_000_000])
    found = scene(tmp_path, world.time)
    assert told(found) == truth(world)


def test_sequences_of_a_front_end_that_is_not_seen_are_told_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    world.join(5000, 9, "plain", "lora-a", True, 1, 1_000_000)
    world.step(0, 100_000, 100_000, [0], [1], [False], [1_000_000])
    next(tmp_path.glob("api_server*")).unlink()
    found = scene(tmp_path, world.time)
    (request,) = found["requests"]
    assert (request["model"], request["bucket"], request["phase"]) == ("lora-a", "4k-32k", "decode")
    assert (request["prompt_tokens"], request["output_tokens"]) == (5000, 1)
    assert found["in_flight"] == {"4k-32k": {"decode": 1}}


def test_what_has_arrived_and_is_not_tokenised_yet_is_in_flight(tmp_path: Path) -> None:
    ring = new_ring(tmp_path, FRONT)
    ring.put(1, 10 * SECOND, 1, 1)
    found = scene(tmp_path, 12 * SECOND)
    assert found["in_flight"] == {"unknown": {"preprocess": 1}}
    assert found["requests"][0]["age"] == 2.0


def test_times_are_of_the_servers_own_wall_clock(tmp_path: Path) -> None:
    """By the pair of times that a process wrote down last, not by the reader's clock."""
    from llmobs import schema

    ring = new_ring(tmp_path, {**ENGINE, "began": 1_000_000.0, "llmobs": "1.2.3"})
    ring.cells[schema.PROCESS_CELL["alive_ns"]] = 50 * SECOND
    ring.cells[schema.PROCESS_CELL["alive_wall_ns"]] = 1_000_050 * SECOND
    ring.put(21, 49 * SECOND, 7, 1, 1, *[48 * SECOND] * 3, 3, 3, 2, 4, 900, 48 * SECOND)
    found = scene(tmp_path, 51 * SECOND)
    assert (found["at"], found["began"]) == (1_000_051.0, 1_000_000.0)
    assert (found["vllm"], found["llmobs"], found["models"]) == ("0.32.0", "1.2.3", ["deepseek-v4"])
    (step,) = found["steps"]
    assert (step["at"], step["seconds"], step["kind"]) == (1_000_049.0, 1.0, "decode")
    assert (step["sequences"], step["tokens_out"], step["waiting"]) == (3, 2, 4)
    (process,) = found["processes"]
    assert (process["heartbeat"], process["last_sign"]) == (1_000_050.0, 1_000_050.0)


def test_the_reason_why_they_wait_is_the_last_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    for _ in range(8):  # two more than the fake scheduler runs
        world.join(50, 20, "plain", None, True, 1, 1_000_000)
    world.step(0, 100_000, 100_000, [0], [1], [False], [1_000_000])
    found = scene(tmp_path, world.time)
    assert found["waiting"] == {
        "sequences": 2,
        "prompt_tokens": 100,
        "reason": "max_num_seqs",
    }
