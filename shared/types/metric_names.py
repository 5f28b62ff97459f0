"""Names of metrics that more than one part of the system reads."""

from __future__ import annotations

WIN_RATE = "val/winrate"
"""By opponent: `val/winrate/OPPONENT`. The names of its bounds end in `low` and `high`."""


def opponent_of(metric: str) -> str | None:
    """Return the opponent whose games a win rate is of, empty for all together; None for any other metric."""
    if metric == WIN_RATE:
        return ""
    opponent = metric.removeprefix(f"{WIN_RATE}/")
    return None if opponent == metric or opponent.rpartition("/")[2] in ("low", "high") else opponent
