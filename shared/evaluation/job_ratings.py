"""Ratings of all players of a job on one scale: versions of its policies, which members of pools are too, checkpoints,
models behind URLs and bots, from evaluations and from matches of training.

The trainer of a job has one `JobRatings` for all its policies. They restore it from their `validation.jsonl` and
`matches.jsonl`, so it is rolled back with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from opentinker.shared.evaluation.ratings import Rating, fit_ratings
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.match_results import BOT, DRAWN, MatchResult

MAX_RATED = 500
"""Most versions of policies that are rated together: those that have played last."""
SHARED = 0.5
"""Weight of a match of training with another policy: both report it if both train on it."""
Counts = tuple[float, float, float]
"""Games won, drawn and lost."""
Results = dict[tuple[str, str], Counts]
NONE: Counts = (0.0, 0.0, 0.0)


def version_name(policy: str, version: WeightVersion) -> str:
    """Return the player that a version of a policy is. All trainers of a job begin with the same weights."""
    return f"{policy}@{version if version.step else WeightVersion(0, 0)}"


class JobRatings:
    def __init__(self, policies: Iterable[str] = (), pools: Mapping[str, str] | None = None) -> None:
        """`policies`: of a job with several; `pools`: the policy whose versions are in each pool."""
        self._policies, self._pools = frozenset(policies), dict(pools or {})
        self._versions: dict[str, None] = {}
        """Players that are versions of policies, in the order in which they have played last."""
        self._trained: Results = {}
        self._evaluated: dict[str, dict[str, Counts]] = {}
        """By player and opponent, of the newest complete evaluation of each version."""
        self._resumed: dict[str, dict[int, int]] = {}
        """By policy, see `resume`."""
        self._restored: list[tuple[float, str, Results]] = []
        """Time, evaluated player and results of lines that are not counted yet."""

    def restore(self, lines: Iterable[tuple[float, str, Results]]) -> None:
        """Take over a policy's results from before a restart. Those of all policies are counted by time at the first
        use. `lines`: time, evaluated player (empty: matches of training) and results."""
        self._restored += lines

    def resume(self, policy: str, resumed: Mapping[int, int]) -> None:
        """`resumed`: step at which each epoch of the policy began."""
        self._resumed[policy] = dict(resumed)

    def _count_restored(self) -> None:
        lines, self._restored = sorted(self._restored, key=lambda line: line[0]), []
        for _, player, results in lines:
            if player:
                self.add_evaluation(player, {opponent: counts for (_, opponent), counts in results.items()})
            else:
                self._add(results)

    def add_matches(self, policy: str, matches: Iterable[MatchResult]) -> None:
        """Add matches of training as a policy has reported them."""
        self._count_restored()
        self._add(self.count_matches(policy, matches))

    def count_matches(self, policy: str, matches: Iterable[MatchResult]) -> Results:
        """Return the results of matches by pair of players."""
        found: Results = {}
        for match in matches:
            player = version_name(policy, WeightVersion.parse(match.version))
            for name, met in match.opponents.items():
                games = SHARED if name in self._policies else 1.0
                pair = player, self._player_of(name, met.version)
                won, drawn, lost = (games * (met.outcome == one) for one in (1.0, DRAWN, 0.0))
                had = found.get(pair, NONE)
                found[pair] = (had[0] + won, had[1] + drawn, had[2] + lost)
        return found

    def _add(self, results: Results) -> None:
        for (one, other), (won, drawn, lost) in results.items():
            player, opponent = self._same(one), self._same(other)
            if opponent != player:  # else a member of a pool that the policy has not trained away from yet
                had = self._trained.get((player, opponent), NONE)
                self._trained[player, opponent] = (had[0] + won, had[1] + drawn, had[2] + lost)
                self._note(player, opponent)

    def _same(self, player: str) -> str:
        """Return the name of a version under which its weights played first: a trainer that resumes publishes those of
        the checkpoint under its own epoch."""
        policy, mark, version = player.partition("@")
        resumed = self._resumed.get(policy)
        if not mark or not resumed:
            return player
        epoch, step = WeightVersion.parse(version).epoch, WeightVersion.parse(version).step
        while resumed.get(epoch) == step and (earlier := [one for one in resumed if one < epoch]):
            epoch = max(earlier)
        return version_name(policy, WeightVersion(epoch, step))

    def add_evaluation(self, player: str, results: Mapping[str, Counts]) -> None:
        """Set the results of a version in an evaluation, by opponent."""
        self._count_restored()
        player, results = self._same(player), {self._same(opponent): counts for opponent, counts in results.items()}
        self._evaluated[player] = {opponent: counts for opponent, counts in results.items() if opponent != player}
        self._note(player, *self._evaluated[player])

    def rate(self, player: str, results: Mapping[str, Counts], anchor: str) -> Rating | None:
        """Return the rating of a version whose evaluation has these results, relative to `anchor`; None without games
        that connect the two. May run in a thread, on a `copy`."""
        self.add_evaluation(player, results)
        found = fit_ratings(self.results(), {anchor: 0.0}).players.get(self._same(player))
        return found if found is not None and found.anchored else None

    def rate_members(self, pool: str, versions: Iterable[WeightVersion], anchor: str) -> dict[str, Rating]:
        """Return the ratings of those members of a pool that games connect with `anchor`, by version. If it is empty,
        the initial weights of the first pool's policy have 0. May run in a thread, on a `copy`."""
        policy, first = self._pools[pool], next(iter(self._pools.values()))
        rated = fit_ratings(self.results(), {anchor or version_name(first, WeightVersion(0, 0)): 0.0}).players
        found = {str(version): rated.get(self._same(version_name(policy, version))) for version in versions}
        return {version: rating for version, rating in found.items() if rating is not None and rating.anchored}

    def results(self) -> Results:
        """Return the results by pair of players; games of a version against itself, as a member of a pool, say nothing
        of its strength."""
        self._count_restored()
        found = dict(self._trained)
        for player, results in self._evaluated.items():
            for opponent, counts in results.items():
                had = found.get((player, opponent), NONE)
                found[player, opponent] = (had[0] + counts[0], had[1] + counts[1], had[2] + counts[2])
        return {pair: counts for pair, counts in found.items() if any(counts) and pair[0] != pair[1]}

    def copy(self) -> JobRatings:
        self._count_restored()
        copied = JobRatings(self._policies, self._pools)
        copied._resumed = dict(self._resumed)
        copied._versions, copied._trained = dict(self._versions), dict(self._trained)
        copied._evaluated = {player: dict(results) for player, results in self._evaluated.items()}
        return copied

    def _player_of(self, name: str, version: str) -> str:
        """Return the player whom matches name so, see `MatchResult.opponents`."""
        if name in self._policies:
            return version_name(name, WeightVersion.parse(version))
        pool, _, member = name.partition("@")
        if pool in self._pools and not name.startswith(BOT):
            return version_name(self._pools[pool], WeightVersion.parse(member))
        return name

    def _note(self, *players: str) -> None:
        """Forget the versions that have not played for longest, if there are too many."""
        for player in players:
            policy, _, _ = player.partition("@")
            if player.startswith("@") or policy in self._policies or player in self._evaluated:
                self._versions.pop(player, None)
                self._versions[player] = None
        while len(self._versions) > MAX_RATED:
            gone = next(iter(self._versions))
            del self._versions[gone]
            self._evaluated.pop(gone, None)
            for results in self._evaluated.values():
                results.pop(gone, None)
            self._trained = {pair: counts for pair, counts in self._trained.items() if gone not in pair}
