"""python -m opentinker.environment.math.math_server [--port 8088]"""

from opentinker.environment.base_game_server import GameStats, serve
from opentinker.environment.math.math_game import MathGame

if __name__ == "__main__":
    serve(MathGame, GameStats, port=8088)
