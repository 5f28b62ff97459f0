"""python android_world_server.py --port 8092"""

import argparse


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8082)
    parser.add_argument("--max_steps", type=int, default=50)
    given = parser.parse_args()
    from opentinker.environment.android_world.android_world_game import (  # type: ignore[import-not-found]
        AndroidWorldGame,
    )

    from opentinker.environment.base_game_server import run_game_server

    run_game_server(
        game_class=AndroidWorldGame,
        host=given.host,
        port=given.port,
        stats_class=None,
        config_path=None,
        max_steps=given.max_steps,
        split="train",
        num_games=-1,
        emulator_console_port=5556,
    )


if __name__ == "__main__":
    main()
