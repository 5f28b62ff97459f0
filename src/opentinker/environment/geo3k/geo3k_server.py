"""python -m opentinker.environment.geo3k.geo3k_server [--port 8088]"""

from opentinker.environment.base_game_server import GameStats, serve
from opentinker.environment.geo3k.geo3k_game import Geo3KGame

if __name__ == "__main__":
    serve(Geo3KGame, GameStats, port=8088)
