"""python -m opentinker.environment.math.math_tool_server [--port 8088] [--max-turns 10] [--backend monty|sandbox]"""

from opentinker.environment.base_game_server import GameStats, serve
from opentinker.environment.math.math_tool_game import CodeInterpreterMathGame

if __name__ == "__main__":
    serve(CodeInterpreterMathGame, GameStats, port=8088)
