"""Prefill time by length: known coefficients are found again, and nothing is made up."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import least_squares, nnls

from llmobs.agent.collect import RunCollector
from llmobs.agent.latency import LatencyModel, fit, nonnegative
from llmobs.agent.run import Run
from tests.agent.test_coldstarts import Kept
from tests.agent.world import BUCKETS, Life, World

MS = 1_000_000
SECOND = 1_000_000_000
RATIOS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)
SEEDS = range(6)
USERS = (0.05, 0.05e-3, 2e-9)
"""The curve that the user gave: 50 ms + 0.05 ms n + 2e-6 ms n^2."""
CURVES = [
    USERS,
    (0.004, 1e-5, 1e-10),
    (0.01, 0.0, 3e-9),
    (0.0, 3e-5, 3e-9),
    (0.05, 0.0, 0.0),
    (0.0, 1e-4, 0.0),
    (0.0, 0.0, 5e-9),
]


def curve(coefficients: tuple[float, ...], n: Any) -> Any:
    a, b, c = coefficients
    return a + b * n + c * n * n


def traffic(seed: int, count: int = 3000, longest: int = 60_000) -> np.ndarray:
    """Lengths: chats, and 2% of long documents."""
    rng = np.random.default_rng(seed)
    chats = np.clip(rng.lognormal(5.5, 0.9, count), 8, 8000)
    books = np.exp(rng.uniform(np.log(4096), np.log(longest), count))
    return np.where(rng.random(count) < 0.02, books, chats).astype(int)


def noisy(seed: int, seconds: np.ndarray) -> np.ndarray:
    """A tenth more or less, and each tenth one five times as long."""
    rng = np.random.default_rng(seed + 1000)
    held_up = np.where(rng.random(len(seconds)) < 0.1, 5.0, 1.0)
    return seconds * rng.lognormal(0, 0.1, len(seconds)) * held_up


def modelled(tokens: Any, seconds: Any, every: int = 20 * MS) -> LatencyModel:
    model = LatencyModel()
    for place, (n, s) in enumerate(zip(tokens, seconds, strict=True)):
        model.add(place * every, int(n), float(s))
    return model


# Known coefficients


@pytest.mark.parametrize("truth", CURVES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_known_curve_is_found_again_among_outliers(seed: int, truth: Any) -> None:
    """Within 15% at every length, short or long; with each term that is most of the time of some
    length within 15% too, and the others no larger than what hides in the noise."""
    tokens = traffic(seed)
    model = modelled(tokens, noisy(seed, curve(truth, tokens)))
    assert model.reason == ""
    lengths = np.geomspace(20, 30_000, 40).astype(int)
    found = np.array([model.predict(int(n)) for n in lengths])
    assert np.abs(found / curve(truth, lengths) - 1).max() < 0.15
    assert model.coefficients is not None
    for power, (value, true) in enumerate(zip(model.coefficients, truth, strict=True)):
        share = true * lengths.astype(float) ** power / curve(truth, lengths)
        if share.max() > 0.5:
            assert value == pytest.approx(true, rel=0.15), power
        extra = (value - true) * lengths.astype(float) ** power / curve(truth, lengths)
        assert np.abs(extra).max() < 0.2


@pytest.mark.parametrize("truth", CURVES)
def test_without_noise_they_are_exact(truth: Any) -> None:
    tokens = traffic(1)
    model = modelled(tokens, curve(truth, tokens))
    assert model.coefficients is not None
    for power, (value, true) in enumerate(zip(model.coefficients, truth, strict=True)):
        assert value * 60_000**power == pytest.approx(true * 60_000**power, rel=1e-3, abs=1e-4)


def test_least_squares_do_not_find_them_among_outliers() -> None:
    """What the robust fit is for: the same data by numpy.polyfit."""
    tokens = traffic(3)
    seconds = noisy(3, curve(USERS, tokens))
    plain = tuple(np.polyfit(tokens, seconds, 2)[::-1])
    lengths = np.geomspace(20, 30_000, 40)
    wrong = np.abs(curve(plain, lengths) / curve(USERS, lengths) - 1).max()
    ours = modelled(tokens, seconds).coefficients
    assert ours is not None
    assert np.abs(curve(ours, lengths) / curve(USERS, lengths) - 1).max() < 0.1
    assert wrong > 0.3


# Against scipy and numpy


@given(
    arrays(np.float64, (12, 3), elements=st.integers(0, 30).map(lambda n: n / 10)),
    arrays(np.float64, 12, elements=st.integers(-30, 30).map(lambda n: n / 10)),
)
def test_nonnegative_least_squares_are_scipys(matrix: np.ndarray, right: np.ndarray) -> None:
    ours = nonnegative(matrix.T @ matrix, matrix.T @ right)
    assert ours.min() >= 0
    _, norm = nnls(matrix, right)
    assert np.linalg.norm(matrix @ ours - right) <= norm + 1e-6


@pytest.mark.parametrize("seed", SEEDS)
def test_without_outliers_the_fit_is_a_weighted_polyfit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = np.exp(rng.uniform(np.log(50), np.log(30_000), 500))
    seconds = curve(USERS, tokens) * rng.normal(1, 0.03, 500)
    theirs = np.polyfit(tokens, seconds, 2, w=1 / curve(USERS, tokens))[::-1]
    assert fit(tokens, seconds) == pytest.approx(tuple(theirs), rel=0.06)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_outliers_the_fit_is_scipys_robust_one(seed: int) -> None:
    """Cauchy's loss of the relative errors, from the true curve on."""
    rng = np.random.default_rng(seed)
    tokens = np.exp(rng.uniform(np.log(50), np.log(30_000), 600))
    seconds = noisy(seed, curve(USERS, tokens))
    scale = np.array(USERS)

    def errors(x: np.ndarray) -> np.ndarray:
        return (seconds - curve(tuple(x * scale), tokens)) / curve(USERS, tokens)

    spread = 1.4826 * np.median(np.abs(errors(np.ones(3))))
    solved = least_squares(
        errors, np.ones(3), bounds=(0, np.inf), loss="cauchy", f_scale=2.385 * spread
    )
    lengths = np.geomspace(50, 30_000, 40)
    theirs = curve(tuple(solved.x * scale), lengths)
    assert np.abs(curve(fit(tokens, seconds), lengths) / theirs - 1).max() < 0.03


# Too little to tell


def test_before_thirty_prefills_nothing_is_predicted() -> None:
    tokens = [100, 1000, 8000] * 10
    model = modelled(tokens[:29], curve(USERS, np.array(tokens[:29])))
    assert (model.fitted, model.coefficients, model.reason) == (None, None, "few_prefills")
    assert [model.predict(n) for n in (1, 100, 1000, 8000, 50_000)] == [0.0] * 5
    model.add(SECOND, 8000, curve(USERS, 8000))
    assert model.reason == ""
    assert model.predict(1000) == pytest.approx(curve(USERS, 1000), rel=1e-3)


def test_of_one_length_only_that_length_is_predicted() -> None:
    """What is constant, linear or quadratic cannot be told, so it is not; and no other length."""
    model = modelled([500] * 200, noisy(1, np.full(200, 0.08)))
    assert (model.coefficients, model.reason) == (None, "few_lengths")
    assert model.predict(500) == pytest.approx(0.08, rel=0.1)
    assert [model.predict(n) for n in (1, 390, 630, 5000, 30_000)] == [0.0] * 5
    for n in (401, 624):  # a quarter beyond: at most as the square of it
        assert 0.08 / 1.7 < model.predict(n) < 0.08 * 1.7


def test_of_two_lengths_far_apart_nothing_between_is_predicted() -> None:
    tokens = np.array([30, 6000] * 100)
    model = modelled(tokens, curve(USERS, tokens))
    assert (model.coefficients, model.reason) == (None, "few_lengths")
    assert [n for n in (30, 600, 2000, 6000) if model.predict(n)] == [30, 6000]
    assert model.predict(6000) == pytest.approx(curve(USERS, 6000), rel=1e-3)


def test_a_single_long_one_says_nothing_of_its_length() -> None:
    """It may have been held up."""
    tokens = [*np.geomspace(50, 1500, 100).astype(int), 30_000]
    seconds = [*curve(USERS, np.array(tokens[:100])), 5 * curve(USERS, 30_000)]
    model = modelled(tokens, seconds)
    model.add(60 * SECOND, 200, curve(USERS, 200))
    assert model.predict(30_000) == 0
    assert model.predict(1000) == pytest.approx(curve(USERS, 1000), rel=0.01)


@given(st.lists(st.tuples(st.integers(1, 10**7), st.floats(1e-6, 1e4)), min_size=30, max_size=200))
def test_whatever_was_measured_predictions_stay_within_reach_of_it(
    prefills: list[tuple[int, float]],
) -> None:
    model = modelled(*zip(*prefills, strict=True))
    most = max(seconds for _, seconds in prefills)
    longest = max(tokens for tokens, _ in prefills)
    for n in (1, 10, 1000, 10**5, 10**7, 10**8):
        assert 0 <= model.predict(n) < float("inf")
        if n > 1.25 * longest:
            assert model.predict(n) == 0
    for tokens, _ in prefills:
        assert model.predict(tokens) <= most * (1 + 1e-6)
    if model.coefficients is not None:
        assert min(model.coefficients) >= 0


# The window


def test_ten_thousand_chats_do_not_push_out_the_documents() -> None:
    """One prompt in a thousand is long."""
    tokens = np.where(np.arange(10_000) % 1000 == 17, 20_000 + np.arange(10_000), 300)
    tokens = np.where(np.arange(10_000) % 3 == 1, 40, tokens)
    seconds = curve(USERS, tokens)
    model = modelled(tokens, seconds)
    for n in (40, 300, 25_000):
        assert model.predict(n) == pytest.approx(curve(USERS, n), rel=0.01)


@pytest.mark.parametrize("every", [10 * MS, 2 * SECOND])
def test_a_change_is_known_after_a_quarter_of_an_hour_whatever_the_traffic(every: int) -> None:
    lengths = np.array([100, 1000, 8000])
    model = LatencyModel()

    def play(since: int, seconds: float, factor: float) -> None:
        for place in range(int(seconds * SECOND / every)):
            n = int(lengths[place % 3])
            model.add(since + place * every, n, curve(USERS, n) * factor)

    play(0, 1200, 1.0)
    assert model.predict(1000) == pytest.approx(curve(USERS, 1000), rel=0.01)
    play(1200 * SECOND, 120, 3.0)  # not at once: then it would not be seen as slow
    assert model.predict(1000) == pytest.approx(curve(USERS, 1000), rel=0.05)
    play(1320 * SECOND, 800, 3.0)
    assert model.predict(1000) == pytest.approx(3 * curve(USERS, 1000), rel=0.01)


def test_after_a_quiet_night_the_old_fit_stands_until_there_is_a_new_one() -> None:
    tokens = np.array([100, 1000, 8000] * 40)
    model = modelled(tokens, curve(USERS, tokens))
    morning = 8 * 3600 * SECOND
    for place in range(120):
        n = int(tokens[place])
        expected = curve(USERS, n) * (1 if place < 20 else 0)
        if expected:
            assert model.predict(n) == pytest.approx(expected, rel=0.01)
        model.add(morning + place * SECOND, n, curve(USERS, n) / 2)
    for n in (100, 1000, 8000):
        assert model.predict(n) == pytest.approx(curve(USERS, n) / 2, rel=0.01)


def test_it_is_fitted_every_five_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[int] = []
    monkeypatch.setattr(
        "llmobs.agent.latency.fit", lambda tokens, _: fits.append(len(tokens)) or USERS
    )
    tokens = traffic(1, 10_000)
    modelled(tokens, curve(USERS, tokens), every=10 * MS)  # 100 s
    assert 5 <= len(fits) <= 21
    assert max(fits) <= 24 * 128


# In the engine's view


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch, whole=True)


def prefill(world: World, prompt: int, seconds: float, cached: int = 0) -> Life:
    """A request of one token, alone: so long from first scheduled to its token."""
    world.join(prompt, 1, "plain", None, True, 1, MS)
    world.step(0, 1 << 20, 1 << 20, [cached], [1], [False], [round(seconds * 1e9 / 4)])
    world.read(True)
    return world.lives[-1]


def residuals(run: Run) -> dict[str, tuple[int, float]]:
    found = dict.fromkeys(BUCKETS, (0, 0.0))
    children = run.store.histograms["llmobs_latency_residual_ratio"]
    for (_, engine, bucket), child in children.items():
        assert (engine, child.bounds) == ("0", RATIOS)
        count, total = found[bucket]
        found[bucket] = count + sum(child.counts), total + child.sum
    return found


def shown(run: Run, name: str) -> dict[tuple[str, ...], float]:
    (family,) = [f for f in RunCollector(run).collect() if f.name == name]
    return {tuple(s.labels.values()): s.value for s in family.samples}


LENGTHS = (100, 400, 900, 2500, 6000, 20_000)


def test_what_the_page_shows_of_a_known_curve(world: World) -> None:
    """Each first prefill of a bucket is a cold start, ten times as slow, and not of the fit."""
    run = world.run
    assert run is not None
    name = "llmobs_latency_model_coefficient"
    for n in (100, 2500, 6000):
        prefill(world, n, 10 * curve(USERS, n))
    for _ in range(4):
        for n in LENGTHS:
            prefill(world, n, curve(USERS, n))
    assert shown(run, name) == {}
    features = shown(run, "llmobs_feature_available")
    assert features["m", "latency_model", "few_prefills"] == 0
    assert sum(count for count, _ in residuals(run).values()) == 0
    for n in LENGTHS:
        prefill(world, n, curve(USERS, n))
    assert residuals(run) == dict.fromkeys(BUCKETS, (0, 0.0)), "each is judged by the fit before it"
    assert shown(run, name) == pytest.approx(
        {
            ("m", "0", "constant"): 0.05,
            ("m", "0", "linear"): 0.05e-3,
            ("m", "0", "quadratic"): 2e-9,
        },
        rel=1e-3,
    )
    assert shown(run, "llmobs_feature_available")["m", "latency_model", ""] == 1
    for n, factor in ((100, 1), (500, 4), (3000, 1.4), (20_000, 0.6), (100_000, 1)):
        prefill(world, n, factor * curve(USERS, n))
    assert residuals(run) == {
        "0-1k": (2, pytest.approx(5.0, rel=1e-3)),
        "1k-4k": (1, pytest.approx(1.4, rel=1e-3)),
        "4k-32k": (1, pytest.approx(0.6, rel=1e-3)),
        "32k+": (0, 0.0),  # such lengths were not seen yet
    }


def test_a_cached_prefix_is_not_long(world: World) -> None:
    """20,000 tokens of which all but 100 are cached take as long as 100, and are as expected."""
    run = world.run
    assert run is not None
    for _ in range(6):
        for n in LENGTHS:
            prefill(world, n, curve(USERS, n))
    for _ in range(40):
        life = prefill(world, 20_000, curve(USERS, 100), cached=19_900)
        assert life.request.num_prompt_tokens == 20_000
    count, total = residuals(run)["4k-32k"]
    assert count >= 40
    assert total == pytest.approx(count, rel=0.01)
    (view,) = run.engines.values()
    assert view.latency.predict(20_000) == pytest.approx(curve(USERS, 20_000), rel=1e-3)


def test_what_a_preemption_took_is_no_part_of_it(world: World) -> None:
    run = world.run
    assert run is not None
    for _ in range(6):
        for n in LENGTHS:
            prefill(world, n, curve(USERS, n))
    before, _ = residuals(run)["0-1k"]
    world.join(1000, 1, "plain", None, True, 1, MS)
    half: tuple[Any, ...] = (1 << 20, 500, [0], [1], [False], [10 * MS])
    world.step(0, *half)
    world.step(1, *half)
    world.tick(60 * SECOND)
    for _ in range(3):
        world.step(0, *half)
    world.finish()
    life = world.lives[-1]
    assert life.phases[3] > 60 * SECOND
    count, total = residuals(run)["0-1k"]
    assert count == before + 1
    assert total - before == pytest.approx(life.phases[2] / 1e9 / curve(USERS, 1000), rel=0.01)


def test_the_request_carries_what_was_predicted_before_it(world: World) -> None:
    kept = Kept()
    world.requests.traces = kept  # type: ignore[assignment]
    for _ in range(7):
        for n in LENGTHS:
            prefill(world, n, curve(USERS, n))
    prefill(world, 2500, 7 * curve(USERS, 2500))
    world.finish()
    predicted = [about.get("llm.latency.predicted") for about in kept.attributes]
    told = [finished.predicted_prefill for finished in world.requests.finished]
    assert predicted == told
    # Three cold starts, and thirty that it takes.
    assert [place for place, value in enumerate(told) if value is None] == list(range(33))
    for life, value in list(zip(world.lives, told, strict=True))[33:]:
        assert value == pytest.approx(curve(USERS, life.request.num_prompt_tokens), rel=1e-3)


def test_targets_are_the_slos(world: World) -> None:
    assert world.run is not None
    assert shown(world.run, "llmobs_slo_target_seconds") == {
        ("m", "0-1k", "first_token"): 0.3,
        ("m", "1k-4k", "first_token"): 0.3,
        ("m", "4k-32k", "first_token"): 0.8,
        ("m", "32k+", "first_token"): 0.8,
        **{("m", bucket, "token_gap"): 0.2 for bucket in BUCKETS},
    }
