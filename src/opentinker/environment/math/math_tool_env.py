"""A game over the rows of a data set whose policy may run programs."""

from __future__ import annotations

from opentinker.environment.math.math_env import MathGameEnvironment


class MathCodeInterpreterEnvironment(MathGameEnvironment):
    """With CodeInterpreterMathGame."""
