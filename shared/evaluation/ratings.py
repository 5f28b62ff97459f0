"""Ratings of players from the results of their games: Bradley-Terry with draws, on the Elo scale. Pure numpy.

The model is Davidson's (1970, "On Extending the Bradley-Terry Model to Accommodate Ties in Paired Comparison
Experiments", Journal of the American Statistical Association 65). With strengths p = 10^(rating / 400) and one
parameter d for draws,

    P(a beats b) = p_a / (p_a + p_b + d sqrt(p_a p_b)),    P(draw) = d sqrt(p_a p_b) / (p_a + p_b + d sqrt(p_a p_b)).

Its log-likelihood is concave in the ratings and in ln d, so the maximum does not depend on the order of the games. A
weak normal prior keeps the rating finite where all games were won or all were lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ELO = 400.0 / math.log(10.0)
"""Elo points per unit of ln p."""
PRIOR_DEVIATION = 500.0
"""Standard deviation of the prior of a rating, in Elo points, around the mean of the component's anchors, or of the
component. A game between equals has as much information as two such priors."""
DRAW_DEVIATION = 3.0
"""Likewise of ln d, around 0."""
MAX_PLAYERS = 1000
MAX_GAMES = 10**9
"""With one result between two players; beyond that the prior is lost in rounding."""
MAX_ITERATIONS = 200
MAX_STEP = 2.0
"""Largest change of ln p or ln d in one iteration: far from the maximum the curvature is too small to trust."""
TOLERANCE = 1e-10
"""Largest gradient component at the maximum, relative to the number of games."""
ROUNDING = 1e-12
"""Relative error of the log density."""
Floats = NDArray[np.float64]
Results = Mapping[tuple[str, str], Sequence[float]]
"""Wins of a, draws and losses of a, by (a, b); fractions of games where older ones count less. A pair may stand in
both orders."""


@dataclass(frozen=True)
class Rating:
    elo: float
    error: float
    """Standard error in Elo points; 0 for an anchor. In a component without anchors it is that of the distance to the
    component's mean."""
    games: float
    component: int
    """Place of the player's component in `Ratings.components`; ratings of two components cannot be compared."""
    anchored: bool
    """Whether the component has an anchor. Without one its mean rating is 0."""


@dataclass(frozen=True)
class Ratings:
    players: dict[str, Rating]
    """By name, in alphabetical order."""
    draws: float
    """d of the model: a game between equals is drawn with probability d / (2 + d). 0 if no game was drawn."""
    components: tuple[tuple[str, ...], ...]
    """Groups of players that games connect, largest first. More than one: the ratings of different groups say nothing
    of each other."""


def fit_ratings(results: Results, anchors: Mapping[str, float] | None = None) -> Ratings:
    """Return the ratings with the highest posterior density. Equal results give equal bits in any order.

    `anchors`: players with fixed ratings in Elo points, such as scripted bots; those without games are left out.
    Raise ValueError for counts that are no numbers of games, a player against itself, or too many players.
    """
    names, wins, draws = _count_results(results)
    anchors = {name: float(elo) for name, elo in (anchors or {}).items() if name in names}
    if odd := [name for name, elo in anchors.items() if not math.isfinite(elo)]:
        raise ValueError(f"anchors[{odd[0]!r}] must be a finite rating, not {anchors[odd[0]]}")
    games = wins + wins.T + draws
    components = _find_components(games > 0)
    fixed = np.array([anchors.get(name, math.nan) for name in names]) / ELO
    theta, log_d, covariance = _fit(wins, draws, fixed, components)
    players: dict[str, Rating] = {}
    for number, members in enumerate(components):
        anchored = not bool(np.isnan(fixed[members]).all())
        block = covariance[np.ix_(members, members)]
        if not anchored:
            block = block - block.mean(axis=0) - block.mean(axis=1)[:, None] + block.mean()
        for place, member in enumerate(members):
            players[names[member]] = Rating(
                elo=anchors.get(names[member], float(ELO * theta[member])),
                error=float(ELO * math.sqrt(max(0.0, block[place, place]))),
                games=float(games[member].sum()),
                component=number,
                anchored=anchored,
            )
    return Ratings(
        players={name: players[name] for name in names},
        draws=math.exp(log_d) if draws.any() else 0.0,
        components=tuple(tuple(names[member] for member in members) for members in components),
    )


def _count_results(results: Results) -> tuple[list[str], Floats, Floats]:
    """Return the names in alphabetical order, wins[a, b] of a against b, and the draws of each pair, symmetric.

    Each is a sum of two numbers at most, so it does not depend on the order. Raise ValueError.
    """
    names = sorted({name for pair in results for name in pair})
    if len(names) > MAX_PLAYERS:
        raise ValueError(f"{len(names):,} players have results; at most {MAX_PLAYERS:,} can be rated together")
    place = {name: number for number, name in enumerate(names)}
    won: dict[tuple[int, int], float] = {}
    drawn: dict[tuple[int, int], float] = {}
    for (a, b), counts in results.items():
        if a == b:
            raise ValueError(f"{a!r} has results against itself, which say nothing of its strength")
        if len(counts) != 3 or any(type(n) not in (int, float) or not 0 <= n <= MAX_GAMES for n in counts):
            raise ValueError(
                f"results of {a!r} against {b!r} must be wins, draws and losses, not {list(counts)!r:.100}"
            )
        wins, draws, losses = counts
        one, two = place[a], place[b]
        for table, key, count in ((won, (one, two), wins), (won, (two, one), losses)):
            table[key] = table.get(key, 0) + count
        for key in ((one, two), (two, one)):
            drawn[key] = drawn.get(key, 0) + draws
    return names, _as_matrix(won, len(names)), _as_matrix(drawn, len(names))


def _as_matrix(table: Mapping[tuple[int, int], float], size: int) -> Floats:
    found = np.zeros((size, size))
    for key, count in table.items():
        found[key] = count
    return found


def _find_components(played: NDArray[np.bool_]) -> list[list[int]]:
    """Return the connected components of the graph of games, largest first, then by their first member."""
    left, components = set(range(len(played))), []
    while left:
        members, frontier = set(), {min(left)}
        while frontier:
            members |= frontier
            frontier = {int(n) for member in frontier for n in np.flatnonzero(played[member])} - members
        components.append(sorted(members))
        left -= members
    return sorted(components, key=lambda members: (-len(members), members))


def _fit(
    wins: Floats, draws: Floats, fixed: Floats, components: Sequence[Sequence[int]]
) -> tuple[Floats, float, Floats]:
    """Return ln p of each player, ln d, and the covariance of ln p at the maximum.

    Newton's method; a step that would lower the density is halved. `fixed`: ln p of anchors, else NaN. Raise
    ArithmeticError if it does not converge.
    """
    size, has_draws = len(fixed), bool(draws.any())
    centre = np.zeros(size)
    for members in components:
        known = fixed[members][~np.isnan(fixed[members])]
        centre[members] = known.mean() if len(known) else 0.0
    theta = np.where(np.isnan(fixed), centre, fixed)
    point = np.append(theta, 0.0)
    free = np.append(np.isnan(fixed), has_draws)
    model = _Posterior(wins, draws, centre)
    tolerance = TOLERANCE * max(1.0, float(model.games.sum()))
    for _ in range(MAX_ITERATIONS):
        gradient, hessian = model.derivatives(point)
        if not free.any() or np.abs(gradient[free]).max() < tolerance:
            break
        step = np.zeros(size + 1)
        step[free] = np.linalg.solve(-hessian[np.ix_(free, free)], gradient[free])
        value = model.value(point)
        scale = min(1.0, MAX_STEP / float(np.abs(step).max()))
        while model.value(point + scale * step) < value - ROUNDING * abs(value):
            scale /= 2
        point = point + scale * step
    else:
        raise ArithmeticError(f"the ratings of {size} players did not converge in {MAX_ITERATIONS} iterations")
    covariance = np.zeros((size + 1, size + 1))
    _, hessian = model.derivatives(point)
    covariance[np.ix_(free, free)] = np.linalg.inv(-hessian[np.ix_(free, free)])
    return point[:size], float(point[size]), covariance[:size, :size]


class _Posterior:
    """Log posterior density of (ln p, ln d), and its derivatives."""

    def __init__(self, wins: Floats, draws: Floats, centre: Floats) -> None:
        self.games = np.triu(wins + wins.T + draws, 1)
        self._wins, self._draws, self._centre = wins, np.triu(draws, 1), centre
        self._has_draws = bool(draws.any())
        self._precision = (ELO / PRIOR_DEVIATION) ** 2

    def value(self, point: Floats) -> float:
        half, log_total = self._terms(point)
        likelihood = (self._wins * half).sum() + self._draws.sum() * point[-1] - (self.games * log_total).sum()
        prior = self._precision * ((point[:-1] - self._centre) ** 2).sum() + (point[-1] / DRAW_DEVIATION) ** 2
        return float(likelihood - prior / 2)

    def _terms(self, point: Floats) -> tuple[Floats, Floats]:
        """Return half the difference of ln p of each pair, and the logarithm of the sum of the three outcomes."""
        half = (point[:-1, None] - point[None, :-1]) / 2
        total = np.logaddexp(half, -half)
        return half, np.logaddexp(total, point[-1]) if self._has_draws else total

    def derivatives(self, point: Floats) -> tuple[Floats, Floats]:
        """Return gradient and Hessian."""
        half, log_total = self._terms(point)
        won, lost = np.exp(half - log_total), np.exp(-half - log_total)
        drawn = np.exp(point[-1] - log_total) if self._has_draws else np.zeros_like(half)
        games = self.games + self.games.T
        surplus = (self._wins - self._wins.T - games * (won - lost)) / 2
        gradient = np.append(
            surplus.sum(axis=1) - self._precision * (point[:-1] - self._centre),
            (self._draws - self.games * drawn).sum() - point[-1] / DRAW_DEVIATION**2,
        )
        between = games * (won + lost - (won - lost) ** 2) / 4
        hessian = np.zeros((len(point), len(point)))
        hessian[:-1, :-1] = between - np.diag(between.sum(axis=1) + self._precision)
        mixed = (games * (won - lost) * drawn).sum(axis=1) / 2
        hessian[:-1, -1] = hessian[-1, :-1] = mixed
        hessian[-1, -1] = -(self.games * drawn * (1 - drawn)).sum() - 1 / DRAW_DEVIATION**2
        return gradient, hessian
