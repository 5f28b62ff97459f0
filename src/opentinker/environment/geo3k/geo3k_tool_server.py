"""python -m opentinker.environment.geo3k.geo3k_tool_server [--port 8088] [--max-retries 3]"""

from opentinker.environment.base_game_server import GameStats, serve
from opentinker.environment.geo3k.geo3k_tool_game import Geo3KToolGame

if __name__ == "__main__":
    serve(Geo3KToolGame, GameStats, port=8088)
