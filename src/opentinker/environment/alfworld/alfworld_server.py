"""python -m opentinker.environment.alfworld.alfworld_server [--port 8082] [--max-steps 50] [--split train]"""

from opentinker.environment.alfworld.alfworld_game import ALFWorldGame
from opentinker.environment.base_game_server import GameStats, serve

if __name__ == "__main__":
    serve(ALFWorldGame, GameStats, port=8082)
