"""Mathematical problems of data sets: answered directly (MathGame), or with programs on the way."""

from opentinker.environment.math.math_env import MathGameEnvironment
from opentinker.environment.math.math_game import MathGame
from opentinker.environment.math.math_tool_env import MathCodeInterpreterEnvironment
from opentinker.environment.math.math_tool_game import CodeInterpreterMathGame

__all__ = ["CodeInterpreterMathGame", "MathCodeInterpreterEnvironment", "MathGame", "MathGameEnvironment"]
