"""The engine's records, read back, against a model that counts everything by brute force."""

import math
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmobs import schema
from llmobs.agent import steps
from llmobs.ring import Reader
from tests.agent.world import (
    BUCKETS,
    FINE,
    FIRST_TARGET,
    LENGTHS,
    OUTCOMES,
    SIZES,
    STEPS,
    World,
    check_histogram,
    grouped,
)
from tests.rings import read_all

PAUSES = st.sampled_from([0, 1, 700, 50_000, 1_000_000, 9_999_999, 30_000_000, 250_000_000])
LONG_PAUSES = PAUSES | st.sampled_from([1_100_000_000, 7_000_000_000])
PROMPTS = st.sampled_from([1, 2, 60, 128, 1024, 1025, 4096, 5000, 32768, 32769, 70_000])
MODELS = ("m", "lora-a", "lora-b")

JOIN = st.tuples(
    st.just("join"),
    PROMPTS,
    st.integers(1, 12),
    st.sampled_from(["plain", "plain", "cut", "pooling"]),
    st.sampled_from([None, None, "lora-a", "lora-b"]),
    st.booleans(),
    st.integers(1, 9),
    PAUSES,
)
ABORT = st.tuples(st.just("abort"), st.integers(0, 9), st.booleans())
STEP = st.tuples(
    st.just("step"),
    st.sampled_from([0, 0, 0, 0, 1, 2]),
    st.sampled_from([1, 500, 2048, 10_000, 100_000]),
    st.sampled_from([1, 33, 512, 8192, 100_000]),
    st.lists(st.sampled_from([0, 0, 16, 1024, 99_999]), min_size=1, max_size=3),
    st.lists(st.sampled_from([1, 1, 1, 1, 0, 2, 3, 4]), min_size=1, max_size=5),
    st.lists(st.sampled_from([False] * 12 + [True]), min_size=1, max_size=4),
    st.lists(LONG_PAUSES, min_size=1, max_size=5),
)
READ = st.tuples(st.just("read"), st.booleans())
PLAIN_STEP = st.tuples(
    st.just("step"),
    *(st.just(0), st.just(100_000), st.just(100_000)),
    *(st.just([0]), st.just([1]), st.just([False])),
    st.lists(PAUSES, min_size=1, max_size=5),
)
EVENTS = st.lists(STEP | STEP | PLAIN_STEP | JOIN | ABORT | READ, max_size=45)
STARTS = st.lists(JOIN, min_size=1, max_size=5)


def play(world: World, events: list[tuple[Any, ...]]) -> None:
    for name, *arguments in events:
        getattr(world, name)(*arguments)
        check_gauges(world)
    world.finish()


def check_gauges(world: World) -> None:
    counts, tokens = world.gauges()
    cells = world.engine_ring.cells
    found: Counter[tuple[str, str, str]] = Counter()
    for number, model in enumerate(world.state.models):
        base = schema.model_cell("requests", number)
        for place, (state, bucket) in enumerate(product(("waiting", "running"), BUCKETS)):
            found[model, state, bucket] += cells[base + place]
    assert +found == counts
    assert min(found.values()) >= 0
    assert cells[schema.PROCESS_CELL["waiting_tokens"]] == tokens


def check_totals(world: World) -> None:
    """The cumulative totals: exact whatever became of the records."""
    cells, floats = world.engine_ring.cells, world.engine_ring.floats
    generated: Counter[tuple[str, str]] = Counter()
    for life in world.lives:
        if life.kind != "cut":
            generated[life.model, life.bucket] += sum(count for _, count in life.tokens)
    squares = Counter[str]()
    for step in world.steps:
        squares[step.kind] += step.sequences**2
    for number, model in enumerate(world.state.models):
        for place, bucket in enumerate(BUCKETS):
            found = cells[schema.model_cell("generated_tokens", number) + place]
            assert found == generated[model, bucket]
            found = cells[schema.model_cell("preemptions", number) + place]
            assert found == world.preemptions[model, bucket]
    for place, kind in enumerate(("prefill", "decode", "mixed")):
        assert cells[schema.PROCESS_CELL["batch_squares"] + place] == squares[kind]
    first = schema.PROCESS_CELL["spec_tokens"]
    assert list(cells[first : first + 2]) == [world.scheduler.drafted, world.scheduler.accepted]
    first = schema.PROCESS_CELL["wait_ns"]
    waits = [cells[first + place] for place in range(9)]
    assert min(waits) >= 0
    assert sum(waits) == world.waited()
    for power, expected in enumerate(world.moments()):
        found = floats[schema.PROCESS_CELL["log_moment"] + power]
        assert math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)


def check_gaps(world: World) -> None:
    gaps = grouped(
        ((life.model, life.bucket), [gap / 1e9 for gap in life.gaps]) for life in world.lives
    )
    firsts = grouped(
        ((life.model, life.bucket), [(life.first - life.arrival) / 1e9] if life.first else [])
        for life in world.lives
    )
    children = world.store.histograms.get("decode_token_latency_seconds", {})
    for model, bucket in product(MODELS, BUCKETS):
        found = children.get((model, "0", bucket, "next"))
        check_histogram(found, gaps.get((model, bucket), []), FINE)
        found = children.get((model, "0", bucket, "first"))
        check_histogram(found, firsts.get((model, bucket), []), FINE)


def check_steps(world: World) -> None:
    sizes = grouped((step.kind, [step.sequences]) for step in world.steps)
    schedule = grouped((s.kind, [(s.scheduled - s.started) / 1e9]) for s in world.steps)
    update = grouped((s.kind, [(s.end - s.update) / 1e9]) for s in world.steps)
    for kind in ("prefill", "decode", "mixed"):
        found = world.store.histograms.get("batch_size_distribution", {}).get(("m", "0", kind))
        check_histogram(found, sizes.get(kind, []), SIZES)
        children = world.store.histograms.get("llmobs_step_seconds", {})
        check_histogram(children.get(("m", "0", "schedule", kind)), schedule.get(kind, []), STEPS)
        check_histogram(children.get(("m", "0", "update", kind)), update.get(kind, []), STEPS)
    assert world.view.steps == len(world.steps)
    for place, step in enumerate(world.steps):
        row = world.view.log[place]
        found = [int(row[n]) for n in ("start", "scheduled", "update", "end", "sequences")]
        assert found == [step.started, step.scheduled, step.update, step.end, step.sequences]
        assert int(row["tokens"]) == step.tokens


def check_requests(world: World) -> None:
    expected = expected_requests(world)
    assert sorted(found_requests(world), key=repr) == sorted(expected, key=repr)
    verdicts: Counter[tuple[str, ...]] = Counter()
    for life in world.lives:
        first = "excluded"
        if life.kind != "pooling":
            target = life.arrival + FIRST_TARGET[life.bucket] * 1e9
            first = "good" if life.first and life.first <= target else "bad"
        verdicts[life.model, life.bucket, "first_token", first] += 1
        gap = "excluded"
        if life.tokens:
            gap = "good" if max(life.gaps, default=0) <= 0.2e9 else "bad"
        verdicts[life.model, life.bucket, "token_gap", gap] += 1
    counters = world.store.counters.get("llmobs_slo_requests_total", {})
    assert +Counter(counters) == verdicts
    lengths = grouped((f[0], [f[3]]) for f in expected)
    for model in MODELS:
        found = world.store.histograms.get("context_len_histogram", {}).get((model,))
        check_histogram(found, lengths.get(model, []), LENGTHS)
    assert world.requests.incomplete == 0
    for left_over in (
        *(world.requests.requests, world.requests.ending, world.requests.by_key),
        *(world.requests.orphans, world.view.sequences, world.view.behind),
    ):
        assert not left_over


def expected_requests(world: World) -> list[tuple[Any, ...]]:
    """What the agent should keep of each request."""
    expected = []
    for life in world.lives:
        assert sum(life.phases) == life.end - life.arrival
        assert min(life.phases) >= 0
        expected.append(
            (
                *(life.model, life.bucket, OUTCOMES[life.outcome], life.request.num_prompt_tokens),
                *(life.counted, (life.end - life.arrival) / 1e9),
                (life.first - life.arrival) / 1e9 if life.first else None,
                max(life.gaps, default=0) / 1e9 if life.tokens else None,
                *(len(life.losses), tuple(value / 1e9 for value in life.phases)),
            )
        )
    return expected


def found_requests(world: World) -> list[tuple[Any, ...]]:
    return [
        (
            *(f.model, f.context_bucket, f.outcome, f.prompt_tokens, f.output_tokens, f.seconds),
            *(f.first_token, f.longest_gap, f.preemptions, f.phases),
        )
        for f in world.requests.finished
    ]


def check_cold_starts(world: World) -> None:
    """The engine never idles for ten minutes here. Whose client left in its first prefill may have
    left the cold start to nobody: others were through before."""
    children = world.store.histograms.get("llmobs_cold_start_seconds", {})
    for bucket in BUCKETS:
        found = [child for labels, child in children.items() if labels[2] == bucket]
        count, total = sum(sum(child.counts) for child in found), sum(c.sum for c in found)
        begun = [life for life in world.begun if life.kind != "pooling"]
        begun = [life for life in begun if life.bucket == bucket]
        if begun and begun[0].tokens:
            assert (count, round(total * 1e9)) == (1, begun[0].prefill)
        else:
            assert count <= min(1, sum(bool(life.tokens) for life in begun))


def everything_agrees(world: World) -> None:
    check_cold_starts(world)
    check_totals(world)
    check_steps(world)
    check_gaps(world)
    check_requests(world)


QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.mark.parametrize(("ahead", "drafts"), [(False, 0), (True, 0), (False, 3), (True, 2)])
def test_every_figure_is_what_brute_force_counts(
    monkeypatch: pytest.MonkeyPatch, ahead: bool, drafts: int
) -> None:
    @given(STARTS, EVENTS)
    @settings(QUIET, max_examples=120)
    def run(starts: list[Any], events: list[Any]) -> None:
        with tempfile.TemporaryDirectory() as name:
            world = World(Path(name), monkeypatch, ahead, drafts)
            play(world, starts + events)
            everything_agrees(world)

    run()


WHOLLY_LOST = [("join", 1, tokens, "plain", None, False, 1, 0) for tokens in (1, 4, 2, 2)]
"""The first of them comes and goes within what the ring of 16 loses."""


@pytest.mark.parametrize("ahead", [False, True])
def test_after_lost_records_nothing_is_guessed(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Rings far too small: totals stay exact, what is told of a request is true, and each request
    is either told or counted as incomplete."""

    @example(WHOLLY_LOST, [("step", 0, 10_000, 10_000, [0], [1], [False], [250_000_000])] * 4, 16)
    @given(STARTS, EVENTS, st.integers(16, 60))
    @settings(QUIET, max_examples=150)
    def run(starts: list[Any], events: list[Any], capacity: int) -> None:
        with tempfile.TemporaryDirectory() as name:
            world = World(Path(name), monkeypatch, ahead, 0, capacity, whole=True)
            play(world, starts + events)
            world.tick(6_000_000_000)
            for _ in range(3):
                world.read(True)
            check_totals(world)
            guessed = Counter(found_requests(world)) - Counter(expected_requests(world))
            assert not guessed
            told = len(world.requests.finished) + world.requests.incomplete
            assert told == len(world.lives)
            assert not world.requests.requests
            assert not world.requests.ending
            if not sum(source.lost for source in world.run.sources.values()):
                everything_agrees(world)
            for source in world.run.sources.values():
                ring = world.engine_ring if source.engine else world.front_ring
                assert source.records + source.lost == ring._next() - 1

    run()


@given(
    STARTS,
    st.lists(STEP | PLAIN_STEP | PLAIN_STEP | PLAIN_STEP, min_size=40, max_size=200),
)
@settings(QUIET, max_examples=40)
def test_what_is_folded_away_keeps_its_longest_gap(starts: list[Any], events: list[Any]) -> None:
    """With a log of 64 steps in place of 131,072."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(steps, "STEPS_KEPT", 64)
        world = World(Path(name), monkeypatch)
        for place, (_, prompt, tokens, _, adapter, streamed, cut_at, pause) in enumerate(starts):
            # Every other one is cut by the front end, long after the log's first round.
            kind, late = ("cut", 100 + cut_at % 40) if place % 2 else ("plain", cut_at)
            world.join(prompt, 150 + tokens, kind, adapter, streamed, late, pause)
        play(world, events)
        check_totals(world)
        check_gaps(world)
        check_requests(world)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "sequences",
    [
        [(100, "plain"), (90, "plain"), (80, "plain")],
        [(100, "plain"), (2000, "plain"), (5000, "plain"), (70, "plain")],
        [(100, "plain"), (90, "cut")],
        [(100, "cut"), (2000, "plain"), (90, "cut"), (60, "plain")],
    ],
)
def test_several_tokens_at_once_are_counted_by_cell_and_of_the_cut_ones_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ahead: bool,
    sequences: list[tuple[int, str]],
) -> None:
    world = World(tmp_path, monkeypatch, ahead, drafts=3)
    for place, (prompt, kind) in enumerate(sequences):
        world.join(prompt, 30 + place, kind, None, False, 11, 1_000_000)
    world.step(0, 100_000, 100_000, [0], [1], [False], [1_000_000])
    for turn in range(20):  # of the last that each yields, more is sampled than it keeps
        world.scheduler.order = str if turn % 2 else hash  # the runner may sort them anew
        world.step(0, 100_000, 100_000, [0], [1, 4, 3, 2, 4], [False], [7_000_000, 100])
    play(world, [])
    everything_agrees(world)
    kinds = [record[1] for record in read_all(Reader(tmp_path / "engine_core.ring"))[0]]
    assert kinds.count(schema.Kind.MORE) >= 5
    assert schema.Kind.SKIP not in kinds


# Single cases, each a defect that there was


def one_step(world: World, chunk: int, victims: int = 0, cached: int = 0) -> None:
    world.step(victims, 100_000, chunk, [cached], [1], [False], [1_000_000])


def joined(world: World, prompt: int, max_tokens: int = 3) -> None:
    world.join(prompt, max_tokens, "plain", None, False, 1, 1_000_000)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("chunks", list(product([200, 300, 600, 2000], [300, 400, 2000])))
def test_preempted_again_while_it_is_recomputed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead: bool, chunks: tuple[int, int]
) -> None:
    """What was owed at the first loss is owed still, and a loss ends what was on its way."""
    world = World(tmp_path, monkeypatch, ahead)
    joined(world, 1500)
    one_step(world, 600)
    one_step(world, 600)
    for chunk in chunks:
        one_step(world, chunk, victims=1)
        one_step(world, chunk)
    for _ in range(14):
        one_step(world, 300)
    play(world, [])
    everything_agrees(world)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("cached", [16, 400, 599, 600, 900])
def test_a_cached_prefix_is_not_recomputed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead: bool, cached: int
) -> None:
    world = World(tmp_path, monkeypatch, ahead)
    joined(world, 1500)
    one_step(world, 600)
    one_step(world, 100, victims=1)
    for _ in range(20):
        one_step(world, 100, cached=cached)
    play(world, [])
    everything_agrees(world)


def test_a_late_token_of_one_is_not_taken_for_anothers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One decodes but yields nothing, another was preempted and yields its last on the way: as many
    tokens as there are that decode, but not theirs."""
    world = World(tmp_path, monkeypatch, ahead=True)
    joined(world, 10, 9)
    joined(world, 2000, 9)
    for _ in range(3):
        one_step(world, 5000)
    world.step(1, 100_000, 5000, [0], [0], [False], [1_000_000])
    for _ in range(3):
        one_step(world, 5000)
    play(world, [])
    everything_agrees(world)


@pytest.mark.parametrize("silent", range(8, 40))
def test_a_gap_that_reaches_over_the_fold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, silent: int
) -> None:
    """The longest one, wherever it falls: five steps without a token among a hundred with one."""
    monkeypatch.setattr(steps, "STEPS_KEPT", 64)
    world = World(tmp_path, monkeypatch)
    joined(world, 10, 200)
    for number in range(100):
        yields = 0 if silent <= number < silent + 5 else 1
        world.step(0, 100_000, 5000, [0], [yields], [False], [1_000_000])
    play(world, [])
    check_gaps(world)
    check_requests(world)
    assert next(iter(world.requests.finished)).longest_gap == 0.03


def test_one_that_fails_while_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A grammar that does not compile: its request ends in a step without tokens, long after the
    last one. The time that it waited is not taken back."""
    world = World(tmp_path, monkeypatch)
    joined(world, 10, 2)
    one_step(world, 100)
    one_step(world, 100)
    world.tick(5_000_000_000)
    joined(world, 20)
    world.step(0, 0, 100, [0], [1], [True], [1_000_000])
    joined(world, 30)
    world.step(0, 0, 100, [0], [1], [False], [1_000_000])
    play(world, [])
    everything_agrees(world)
    assert [life.phases[1] / 1e6 for life in world.lives][1] == 6.0


def test_a_token_after_the_client_left_is_no_first_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(tmp_path, monkeypatch, ahead=True)
    joined(world, 10)
    one_step(world, 100)
    world.abort(0, late=True)
    world.update([1], [False], iter([1_000_000] * 9))
    play(world, [])
    (life,) = world.lives
    assert life.tokens[0][0] > life.end
    everything_agrees(world)
    assert next(iter(world.requests.finished)).first_token is None
