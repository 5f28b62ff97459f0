"""python -m opentinker.environment.gomoku.gomoku_server [--port 8081] [--board-size 9] [--max-total-steps 40]"""

from opentinker.environment.base_game_server import serve
from opentinker.environment.gomoku.gomoku_game import GomokuGame
from opentinker.environment.gomoku.gomoku_stats import GomokuGameStats

if __name__ == "__main__":
    serve(GomokuGame, GomokuGameStats, port=8081)
