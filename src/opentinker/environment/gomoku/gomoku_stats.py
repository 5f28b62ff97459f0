"""Games won, lost, drawn and not finished."""

from __future__ import annotations

from opentinker.environment.game_stats import GameStats


class GomokuGameStats(GameStats):
    """win_rate, loss_rate, draw_rate, timeout_rate, by the `result` of each game."""
