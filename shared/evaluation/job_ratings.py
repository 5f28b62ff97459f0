"""Ratings of all players of a job on one scale: versions of its policies, which members of pools are too, checkpoints,
models behind URLs and bots, from evaluations and from matches of training.

The trainer of a job has one `JobRatings` for all its policies. They restore it from their `validation.jsonl` and
`matches.jsonl`, so it is rolled back with them.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import itemgetter

from opentinker.shared.evaluation.ratings import Rating, fit_ratings
from opentinker.shared.spec.matches.pools import pool_player
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.match_results import DRAWN, MatchResult

MAX_RATED = 500
"""Versions of policies that are rated together: those that have played last."""
MAX_LINKS = 100
"""Most older versions that are kept because only they connect the newer ones with a bot, checkpoint or URL."""
VERSION = re.compile(r"((?:[a-z][a-z0-9_]*)?)@([0-9]+\.[0-9]+)")
"""A player that is a version: `POLICY@EPOCH.STEP`, or `POOL@EPOCH.STEP` in results of matches. Models behind URLs have
names with an @ too, but none that ends so."""
SHARED = 0.5
"""Weight of a match of training with another policy: both report it if both train on it."""
Counts = tuple[float, float, float]
"""Games won, drawn and lost."""
Results = dict[tuple[str, str], Counts]
Opponents = Callable[[Collection[str]], Collection[str]]
"""See `Opposition.names`."""
Line = tuple[float, str, Results]
"""Time, evaluated player (empty: matches of training) and results."""
NONE: Counts = (0.0, 0.0, 0.0)


def version_name(policy: str, version: WeightVersion) -> str:
    """Return the player that a version of a policy is. All trainers of a job begin with the same weights."""
    return f"{policy}@{version if version.step else WeightVersion(0, 0)}"


def version_of(player: str) -> tuple[str, WeightVersion] | None:
    """Return the policy, or the pool, and the version that a player is; None of bots, checkpoints and models behind
    URLs."""
    found = VERSION.fullmatch(player)
    return None if found is None else (found[1], WeightVersion.parse(found[2]))


class JobRatings:
    def __init__(
        self,
        policies: Iterable[str] = (),
        pools: Mapping[str, str] | None = None,
        *,
        has_trees: bool = False,
        opponents: Mapping[str, Opponents] | None = None,
    ) -> None:
        """`policies`: of a job with several; `pools`: the policy whose versions are in each pool. `has_trees`: matches
        of training do not count, since a tree goes on from the best of several candidates. `opponents`: by policy, who
        may be an opponent in a match with these seats: earlier releases stored results against others too."""
        self._policies, self._pools, self._has_trees = frozenset(policies), dict(pools or {}), has_trees
        self._opponents = dict(opponents or {})
        self._versions: dict[str, None] = {}
        """Players that are versions of policies, in the order in which they have played last."""
        self._forget_above = MAX_RATED
        """Number of them above which some are forgotten."""
        self._trained: Results = {}
        self._evaluated: dict[str, dict[str, Counts]] = {}
        """By player and opponent, of the newest complete evaluation of each version."""
        self._resumed: dict[str, dict[int, int]] = {}
        """By policy, see `resume`."""
        self._restored: list[Iterable[Line]] = []
        """What is not counted yet of the time before a restart."""

    def restore(self, lines: Iterable[Line]) -> None:
        """Take over a policy's results from before a restart, by time. Those of all policies are counted together, see
        `count_restored`."""
        self._restored.append(lines)

    def resume(self, policy: str, resumed: Mapping[int, int]) -> None:
        """`resumed`: step at which each epoch of the policy began."""
        self._resumed[policy] = dict(resumed)

    def count_restored(self) -> None:
        """Count by time what the policies have restored; all must have called `resume`, which says who is whose equal.
        Blocking: reads files, a line at a time. Otherwise done at the first use."""
        restored, self._restored = self._restored, []
        for _, player, results in heapq.merge(*restored, key=itemgetter(0)):
            if player:
                self.add_evaluation(player, {opponent: counts for (_, opponent), counts in results.items()})
            else:
                self._add(results)

    def add_matches(self, policy: str, matches: Iterable[MatchResult]) -> None:
        """Add matches of training as a policy has reported them."""
        self.count_restored()
        self._add(self.count_matches(policy, matches))

    def count_matches(self, policy: str, matches: Iterable[MatchResult]) -> Results:
        """Return the results of matches by pair of players, as far as they count."""
        found: Results = {}
        for match in () if self._has_trees else matches:
            player = version_name(policy, WeightVersion.parse(match.version))
            opponents = self._opponents[policy](match.rewards) if policy in self._opponents else None
            for name, met in match.opponents.items():
                if opponents is not None and self._entry_of(name) not in opponents:
                    continue
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
        found = version_of(player)
        if found is None or not (resumed := self._resumed.get(found[0])):
            return player
        policy, version = found
        epoch, step = version.epoch, version.step
        while resumed.get(epoch) == step and (earlier := [one for one in resumed if one < epoch]):
            epoch = max(earlier)
        return version_name(policy, WeightVersion(epoch, step))

    def add_evaluation(self, player: str, results: Mapping[str, Counts]) -> None:
        """Set the results of a version in an evaluation, by opponent."""
        self.count_restored()
        player, same = self._same(player), dict[str, Counts]()
        for opponent, (won, drawn, lost) in results.items():
            had = same.get(self._same(opponent), NONE)
            same[self._same(opponent)] = (had[0] + won, had[1] + drawn, had[2] + lost)
        self._evaluated[player] = {opponent: counts for opponent, counts in same.items() if opponent != player}
        self._note(player, *self._evaluated[player])

    def rate(self, player: str, results: Mapping[str, Counts], anchor: str) -> Rating | None:
        """Return the rating of a version whose evaluation has these results, relative to `anchor`; None without games
        that connect the two. May run in a thread, on a `copy`."""
        self.add_evaluation(player, results)
        found = fit_ratings(self.results(), {anchor: 0.0}).players.get(self._same(player))
        return found if found is not None and found.anchored else None

    def rate_members(self, pool: str, versions: Iterable[WeightVersion], anchor: str) -> dict[str, Rating]:
        """Return the ratings of those members of a pool that games connect with `anchor`, by version. If it is empty,
        the first of the `versions` with games has 0: the initial weights are too far away once the policy has made many
        steps. May run in a thread, on a `copy`."""
        policy, results = self._pools[pool], self.results()
        players = {str(version): self._same(version_name(policy, version)) for version in versions}
        have_played = {player for pair in results for player in pair}
        anchor = anchor or next((player for player in players.values() if player in have_played), "")
        rated = fit_ratings(results, {anchor: 0.0}).players
        found = {version: rated.get(player) for version, player in players.items()}
        return {version: rating for version, rating in found.items() if rating is not None and rating.anchored}

    def results(self) -> Results:
        """Return the results by pair of players; games of a version against itself, as a member of a pool, say nothing
        of its strength."""
        self.count_restored()
        found = dict(self._trained)
        for player, results in self._evaluated.items():
            for opponent, counts in results.items():
                had = found.get((player, opponent), NONE)
                found[player, opponent] = (had[0] + counts[0], had[1] + counts[1], had[2] + counts[2])
        return {pair: counts for pair, counts in found.items() if any(counts) and pair[0] != pair[1]}

    def copy(self) -> JobRatings:
        self.count_restored()
        copied = JobRatings(self._policies, self._pools, has_trees=self._has_trees, opponents=self._opponents)
        copied._resumed = dict(self._resumed)
        copied._versions, copied._trained = dict(self._versions), dict(self._trained)
        copied._forget_above = self._forget_above
        copied._evaluated = {player: dict(results) for player, results in self._evaluated.items()}
        return copied

    def _player_of(self, name: str, version: str) -> str:
        """Return the player whom matches name so, see `MatchResult.opponents`."""
        if name in self._policies:
            return version_name(name, WeightVersion.parse(version))
        found = version_of(name)
        if found is not None and found[0] in self._pools:
            return version_name(self._pools[found[0]], found[1])
        return name

    def _entry_of(self, name: str) -> str:
        """Return the player as [seats] names it: of a member its pool."""
        found = version_of(name)
        return pool_player(found[0]) if found is not None and found[0] in self._pools else name

    def _note(self, *players: str) -> None:
        """Note that these have played last."""
        for player in players:
            if version_of(player) is not None:
                self._versions.pop(player, None)
                self._versions[player] = None
        if len(self._versions) > self._forget_above:
            self._forget()

    def _forget(self) -> None:
        """Forget the versions that have not played for longest, except those that connect the others with a player who
        always plays alike, because that one's rating may be fixed."""
        links = self._links()
        fixed = {player for player in links if version_of(player) is None}
        kept = fixed.union(list(self._versions)[-MAX_RATED:])
        older: set[str] = set()
        for player in sorted(fixed):
            found = older | _connecting(links, player, kept)
            older = found if len(found) <= MAX_LINKS else older
        kept |= older
        self._versions = {player: None for player in self._versions if player in kept}
        self._forget_above = len(self._versions) + MAX_RATED // 10
        self._trained = {pair: counts for pair, counts in self._trained.items() if kept.issuperset(pair)}
        self._evaluated = {
            player: {opponent: counts for opponent, counts in results.items() if opponent in kept}
            for player, results in self._evaluated.items()
            if player in kept
        }

    def _links(self) -> dict[str, dict[str, None]]:
        """Return whom each player has played."""
        links: dict[str, dict[str, None]] = {}
        evaluated = ((player, other) for player, results in self._evaluated.items() for other in results)
        for one, other in (*self._trained, *evaluated):
            links.setdefault(one, {})[other] = None
            links.setdefault(other, {})[one] = None
        return links


def _connecting(links: Mapping[str, Iterable[str]], root: str, kept: Collection[str]) -> set[str]:
    """Return the players beyond those kept over which the shortest chains of games run that connect these with
    `root`."""
    found: set[str] = set()
    connected: set[str] = set()
    before = _reach(links, root)
    for nearest in before:
        if nearest in kept and nearest not in connected:
            connected |= _reach(links, nearest, kept).keys()
            player = nearest
            while player != root:
                player = before[player]
                found.add(player)
    return found.difference(kept)


def _reach(links: Mapping[str, Iterable[str]], root: str, within: Collection[str] | None = None) -> dict[str, str]:
    """Return the players whom games between those `within` connect with `root`, nearest first, and the one before each
    on the way."""
    before = {root: root}
    ahead = [root]
    for player in ahead:
        for other in links.get(player, ()):
            if other not in before and (within is None or other in within):
                before[other] = player
                ahead.append(other)
    return before
