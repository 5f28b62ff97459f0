"""Classifies the outcome of an episode of an evaluation, and chooses the episodes whose transcripts are kept. Pure
functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from opentinker.shared.spec import EvaluationSpec
from opentinker.shared.types.evaluation import EvalResult

OUTCOME_NAMES = ("solved", "unsolved", "won", "drawn", "lost")
GAMES = {1.0: "won", 0.5: "drawn", 0.0: "lost"}
"""By `EvalResult.outcome`."""
OUTCOME_TRANSCRIPTS = 2
"""Maximal number of kept episodes of each outcome against each opponent."""
Outcome = tuple[int, str]
"""Number of the opponent, and one of OUTCOME_NAMES."""


def outcomes_of(reward: float, outcome: float | None, solved_at: float) -> list[str]:
    """Return solved or unsolved and, where other players have seats, won, drawn or lost."""
    solved = OUTCOME_NAMES[0] if reward >= solved_at else OUTCOME_NAMES[1]
    return [solved] if outcome is None else [solved, GAMES[outcome]]


def is_among_first(index: int, total: int, opponents: int, first: int) -> bool:
    """Return whether an episode is one of the `first`, taken in turn from each opponent."""
    opponent, place = divmod(index, total)
    return place * max(1, opponents) + opponent < first


def choose_kept(results: Iterable[EvalResult], plan: EvaluationSpec, opponents: Sequence[str] = ()) -> list[EvalResult]:
    """Return the results whose episodes are kept, in order: the first `plan.transcripts`, and OUTCOME_TRANSCRIPTS of
    each outcome against each opponent, of those that have messages."""
    read = sorted((result for result in results if result.messages), key=lambda result: result.index)
    first = [r for r in read if is_among_first(r.index, plan.total, len(opponents), plan.transcripts)]
    counts: Counter[Outcome] = Counter()
    kept: dict[int, EvalResult] = {}
    for result in [*first, *read]:
        ended = outcomes_of(result.reward, result.outcome, plan.solved_at)
        keys = [(result.index // plan.total, name) for name in ended]
        wanted = len(kept) < len(first) or any(counts[key] < OUTCOME_TRANSCRIPTS for key in keys)
        if wanted and result.index not in kept:
            kept[result.index] = result
            counts.update(keys)
    return [kept[index] for index in sorted(kept)]
