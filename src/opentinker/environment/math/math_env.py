"""A game over the rows of a data set."""

from __future__ import annotations

from opentinker.environment.rows_environment import RowsEnvironment


class MathGameEnvironment(RowsEnvironment):
    """With MathGame, or a game of one's own whose `reset` takes ground_truth, data_source, extra_info."""
