"""Five in a row against a scripted player."""

from opentinker.environment.gomoku.gomoku_game import GomokuGame
from opentinker.environment.gomoku.gomoku_stats import GomokuGameStats

__all__ = ["GomokuGame", "GomokuGameStats"]
