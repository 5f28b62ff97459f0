"""python -m opentinker.environment.android_world.phone_server [--port 8082] [--shards 4] [--emulator-console-port 5556]

Each shard has an emulator with separate ports: the n-th, from 0, console port + 2n and gRPC port + n.
"""

from opentinker.environment.android_world.phone_game import CONSOLE_PORT, GRPC_PORT, AndroidWorldGame
from opentinker.environment.base_game_server import GameStats, serve

if __name__ == "__main__":
    spread = {"emulator_console_port": (CONSOLE_PORT, 2), "emulator_grpc_port": (GRPC_PORT, 1)}
    serve(AndroidWorldGame, GameStats, port=8082, spread=spread)
