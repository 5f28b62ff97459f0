"""Bradley-Terry ratings with draws: a known ladder is found again, in any order of results, and always in finite
numbers."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping

import numpy as np
import pytest

from opentinker.shared.evaluation.ratings import ELO, PRIOR_DEVIATION, Floats, Results, fit_ratings

LADDER = {f"bot{rung}": 50.0 * rung for rung in range(8)}
MEAN = statistics.fmean(LADDER.values())
DRAWS = 0.2


def play(seed: int, games: int = 2000) -> dict[tuple[str, str], list[int]]:
    """Return the results of a simulated round robin, whose outcomes are drawn from the model."""
    draw, pairs = random.Random(seed), itertools.cycle(itertools.combinations(LADDER, 2))
    results: dict[tuple[str, str], list[int]] = {}
    for a, b in itertools.islice(pairs, games):
        results.setdefault((a, b), [0, 0, 0])[draw.choices(range(3), weights_of(LADDER[a], LADDER[b], DRAWS))[0]] += 1
    return results


def weights_of(elo: float, other: float, d: float) -> tuple[float, float, float]:
    """Return what wins, draws and losses are proportional to in the model, as the module's docstring has it."""
    one, two = 10 ** (elo / 400), 10 ** (other / 400)
    return one, d * math.sqrt(one * two), two


def log_density(results: Results, elo: dict[str, float], d: float) -> float:
    """Return the log posterior density as the module's docstring has it, in plain floats."""
    total = -sum((value / PRIOR_DEVIATION) ** 2 for value in elo.values()) / 2 - (math.log(d) / 3.0) ** 2 / 2
    for (a, b), counts in results.items():
        parts = weights_of(elo[a], elo[b], d)
        total += sum(n * math.log(part / sum(parts)) for n, part in zip(counts, parts, strict=True))
    return total


def largest_error(seed: int, games: int = 2000) -> float:
    ratings = fit_ratings(play(seed, games))
    assert ratings.draws == pytest.approx(DRAWS, abs=0.08)
    assert sum(rating.games for rating in ratings.players.values()) == 2 * games
    return max(abs(ratings.players[bot].elo + MEAN - elo) for bot, elo in LADDER.items())


def covariance_bound(games: Mapping[tuple[str, str], float]) -> Floats:
    """Return the Cramer-Rao bound of ratings around their mean, in Elo points squared: no unbiased estimate from games
    between these pairs varies less, whatever the fit."""
    place = {bot: rung for rung, bot in enumerate(LADDER)}
    information = np.zeros((len(place), len(place)))
    for (a, b), number in games.items():
        weights = weights_of(LADDER[a], LADDER[b], DRAWS)
        won, _, lost = (weight / sum(weights) for weight in weights)
        pair = np.zeros(len(place))
        pair[place[a]], pair[place[b]] = 1.0, -1.0
        information += number * (won + lost - (won - lost) ** 2) / 4 / ELO**2 * np.outer(pair, pair)
    bound: Floats = np.linalg.pinv(information).astype(np.float64)
    return bound


def round_robin(games: float, reach: int = len(LADDER)) -> dict[tuple[str, str], float]:
    """Return an equal number of games for each pair that is at most `reach` rungs apart."""
    rungs = list(LADDER)
    pairs = [(a, b) for a, b in itertools.combinations(rungs, 2) if rungs.index(b) - rungs.index(a) <= reach]
    return dict.fromkeys(pairs, games / len(pairs))


@pytest.mark.parametrize("seed", range(5))
def test_ladder_of_eight_bots_is_within_40_points_after_2000_results(seed: int) -> None:
    assert largest_error(seed) <= 40.0


def test_every_ladder_is_within_40_points_after_2000_results_of_each_bot() -> None:
    """8,000 games. The standard error at the ends of the ladder is then 8 points."""
    assert max(largest_error(seed, games=8000) for seed in range(100)) <= 40.0


def test_nine_of_ten_ladders_are_within_40_points_after_2000_results_in_all() -> None:
    """No estimate can do better: the bound for 71 games of each pair is 15 points in the middle of the ladder and 17 at
    its ends, so that one of eight errors exceeds 40 in 8 % of all ladders."""
    bound = covariance_bound(round_robin(2000))
    assert np.sqrt(np.diag(bound)) == pytest.approx([16.6, 15.8, 15.3, 15.0, 15.0, 15.3, 15.8, 16.6], abs=0.1)
    drawn = np.random.default_rng(0).multivariate_normal(np.zeros(len(LADDER)), bound, size=100_000)
    share = float((np.abs(drawn).max(axis=1) <= 40.0).mean())
    assert share == pytest.approx(0.92, abs=0.005)
    errors = [largest_error(seed) for seed in range(100)]
    assert statistics.fmean(errors) < 32.0
    assert sum(error <= 40.0 for error in errors) / 100 == pytest.approx(share, abs=0.08)  # three standard errors


@pytest.mark.parametrize("reach", [1, 2, 3, 4])
def test_games_between_neighbours_alone_say_less_of_a_ladder(reach: int) -> None:
    """Errors of neighbours add up along the ladder, which costs more than the uneven games of distant bots."""
    ends = [math.sqrt(covariance_bound(round_robin(2000, most))[0, 0]) for most in (reach, reach + 1, len(LADDER))]
    assert ends[0] > ends[1] > ends[2]


def test_standard_errors_are_those_of_repeated_ladders() -> None:
    for anchors, shift in (({}, MEAN), ({"bot0": 0.0, "bot7": 350.0}, 0.0)):
        deviations = []
        for seed in range(40):
            players = fit_ratings(play(seed), anchors).players
            rated = [bot for bot in LADDER if bot not in anchors]
            deviations += [(players[bot].elo + shift - LADDER[bot]) / players[bot].error for bot in rated]
        assert 0.85 < math.sqrt(statistics.fmean(value**2 for value in deviations)) < 1.15


def test_order_of_results_does_not_matter_to_the_last_bit() -> None:
    results = play(3)
    expected = fit_ratings(results, {"bot2": 100.0})
    for seed in range(10):
        draw, shuffled = random.Random(seed), list(results.items())
        draw.shuffle(shuffled)
        mixed: dict[tuple[str, str], list[int]] = {}
        for (a, b), (wins, draws, losses) in shuffled:
            part = [draw.randint(0, wins), draw.randint(0, draws), draw.randint(0, losses)]
            mixed[a, b] = part
            mixed[b, a] = [losses - part[2], draws - part[1], wins - part[0]]
        assert fit_ratings(mixed, {"bot2": 100.0}) == expected


def test_ratings_are_the_maximum_of_the_density() -> None:
    results = {("a", "b"): [6, 3, 2], ("b", "c"): [5, 1, 4], ("c", "a"): [1, 2, 7], ("c", "d"): [3, 0, 0]}
    ratings = fit_ratings(results)
    elo = {name: rating.elo for name, rating in ratings.players.items()}
    best = log_density(results, elo, ratings.draws)
    for name, value in elo.items():
        for step in (-0.5, 0.5):
            assert log_density(results, elo | {name: value + step}, ratings.draws) < best
    for factor in (0.99, 1.01):
        assert log_density(results, elo, ratings.draws * factor) < best


def test_two_players_have_the_closed_form() -> None:
    """Odds of 3 to 1 are 400 log10(3) points; equals that draw a fifth of their games have d / (2 + d) = 1/5."""
    players = fit_ratings({("a", "b"): [7_500_000, 0, 2_500_000]}).players
    assert players["a"].elo - players["b"].elo == pytest.approx(400 * math.log10(3), abs=1e-3)
    even = fit_ratings({("a", "b"): [400_000, 200_000, 400_000]})
    assert even.draws == pytest.approx(0.5, abs=1e-5) and even.players["a"].elo == 0.0


def test_fractions_of_games_count_as_such() -> None:
    halved = fit_ratings({("a", "b"): [1.5, 0, 0.5]}).players
    twice = fit_ratings({("a", "b"): [1.0, 0, 0.5], ("b", "a"): [0.0, 0, 0.5]}).players
    assert twice == halved and halved["a"].games == 2.0
    assert 0 < halved["a"].elo < fit_ratings({("a", "b"): [2, 0, 0]}).players["a"].elo


def test_anchors_keep_their_ratings_and_the_others_are_relative_to_them() -> None:
    ratings = fit_ratings({("a", "bot"): [3000, 0, 1000], ("bot", "c"): [10, 0, 10]}, {"bot": 1200.0, "absent": 9.0})
    assert ratings.players["bot"].elo == 1200.0 and ratings.players["bot"].error == 0.0
    assert ratings.players["a"].elo == pytest.approx(1200.0 + 400 * math.log10(3), abs=1.0)
    assert ratings.players["c"].elo == pytest.approx(1200.0, abs=1e-6)
    assert ratings.players["c"].error > 5 * ratings.players["a"].error > 0.0
    assert list(ratings.players) == ["a", "bot", "c"] and all(one.anchored for one in ratings.players.values())


@pytest.mark.parametrize("counts", [[20, 0, 0], [0, 20, 0], [0, 0, 20], [10**9, 0, 0], [0, 10**9, 0]])
def test_one_sided_results_stay_finite(counts: list[int]) -> None:
    ratings = fit_ratings({("a", "b"): counts, ("b", "c"): [1, 0, 0]})
    values = [(one.elo, one.error) for one in ratings.players.values()]
    assert all(math.isfinite(number) for pair in values for number in pair) and math.isfinite(ratings.draws)
    difference = ratings.players["a"].elo - ratings.players["b"].elo
    assert difference > 200.0 if counts[0] else difference < -200.0 if counts[2] else abs(difference) < 200.0


def test_players_that_no_games_connect_are_reported_apart() -> None:
    results = {("a", "b"): [5, 0, 3], ("c", "b"): [1, 1, 1], ("x", "y"): [9, 0, 1], ("n", "m"): [0, 0, 0]}
    ratings = fit_ratings(results, {"b": 800.0})
    assert ratings.components == (("a", "b", "c"), ("x", "y"), ("m",), ("n",))
    assert [ratings.players[name].component for name in "abcxymn"] == [0, 0, 0, 1, 1, 2, 3]
    assert [ratings.players[name].anchored for name in "acxn"] == [True, True, False, False]
    assert ratings.players["x"].elo == pytest.approx(-ratings.players["y"].elo)
    assert ratings.players["n"].games == 0


def test_any_table_has_finite_ratings() -> None:
    draw = random.Random(5)
    for _ in range(200):
        names = [f"p{number}" for number in range(draw.randint(2, 9))]
        most = draw.choice((1, 100, 10**6, 10**9))
        results = {
            (a, b): [draw.choice((0, draw.randint(0, most))) for _ in range(3)]
            for a, b in itertools.permutations(names, 2)
            if draw.random() < 0.3
        }
        anchors = {name: draw.uniform(-3000, 3000) for name in names if draw.random() < 0.3}
        ratings = fit_ratings(results, anchors)
        assert all(math.isfinite(one.elo) and math.isfinite(one.error) for one in ratings.players.values())
    assert fit_ratings({}).players == {} and fit_ratings({}).components == ()


@pytest.mark.parametrize(
    ("results", "anchors", "problem"),
    [
        ({("a", "a"): [1, 0, 0]}, {}, "'a' has results against itself"),
        ({("a", "b"): [1, 0]}, {}, "must be wins, draws and losses"),
        ({("a", "b"): [1, -1, 0]}, {}, "must be wins, draws and losses"),
        ({("a", "b"): [1, math.nan, 0]}, {}, "must be wins, draws and losses"),
        ({("a", "b"): [10**9 + 1, 0, 0]}, {}, "must be wins, draws and losses"),
        ({("a", "b"): [1, 0, 0]}, {"b": math.nan}, "must be a finite rating"),
        ({(f"p{n}", f"p{n + 1}"): [1, 0, 0] for n in range(1000)}, {}, "1,001 players have results"),
    ],
)
def test_wrong_tables_are_refused(results: Results, anchors: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        fit_ratings(results, anchors)


def test_a_rating_point_is_an_elo_point() -> None:
    assert pytest.approx(173.717793) == ELO
