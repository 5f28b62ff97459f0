"""The published environment interface: programs written for it run here unchanged. Names are loaded on first use."""

from importlib import import_module
from typing import TYPE_CHECKING

_HOME = {
    "AbstractGame": "base_game",
    "GameDataGenerator": "base_game",
    "StepResult": "base_game",
    "BaseEnvironment": "environment",
    "RewardFunctionSpec": "environment",
    "GameEnvironment": "base_game_environment",
    "InteractionSpec": "base_game_environment",
    "AbstractGameDataGenerator": "base_data_generator",
    "DynamicGameDataset": "base_data_generator",
    "collate_fn": "base_data_generator",
    "StaticDatasetGenerator": "static_data_generator",
    "InferencePipeline": "inference_pipeline",
    "InferenceResult": "inference_pipeline",
    "RemoteEnvironmentClient": "inference_pipeline",
    "generate_samples": "inference_pipeline",
    "load_samples": "inference_pipeline",
    "run_inference": "inference_pipeline",
    "BaseGameStats": "base_game_server",
    "GameStats": "base_game_server",
    "create_game_server": "base_game_server",
    "run_game_server": "base_game_server",
}

if TYPE_CHECKING:
    from opentinker.environment.base_data_generator import AbstractGameDataGenerator as AbstractGameDataGenerator
    from opentinker.environment.base_data_generator import DynamicGameDataset as DynamicGameDataset
    from opentinker.environment.base_data_generator import collate_fn as collate_fn
    from opentinker.environment.base_game_environment import GameEnvironment as GameEnvironment
    from opentinker.environment.base_game_environment import InteractionSpec as InteractionSpec
    from opentinker.environment.base_game_server import BaseGameStats as BaseGameStats
    from opentinker.environment.base_game_server import GameStats as GameStats
    from opentinker.environment.base_game_server import create_game_server as create_game_server
    from opentinker.environment.base_game_server import run_game_server as run_game_server
    from opentinker.environment.environment import BaseEnvironment as BaseEnvironment
    from opentinker.environment.environment import RewardFunctionSpec as RewardFunctionSpec
    from opentinker.environment.inference_pipeline import InferencePipeline as InferencePipeline
    from opentinker.environment.inference_pipeline import InferenceResult as InferenceResult
    from opentinker.environment.inference_pipeline import RemoteEnvironmentClient as RemoteEnvironmentClient
    from opentinker.environment.inference_pipeline import generate_samples as generate_samples
    from opentinker.environment.inference_pipeline import load_samples as load_samples
    from opentinker.environment.inference_pipeline import run_inference as run_inference
    from opentinker.environment.static_data_generator import StaticDatasetGenerator as StaticDatasetGenerator
    from opentinker.envs.game import AbstractGame as AbstractGame
    from opentinker.envs.game import GameDataGenerator as GameDataGenerator
    from opentinker.envs.game import StepResult as StepResult


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
