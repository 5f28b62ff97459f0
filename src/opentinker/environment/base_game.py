"""Parts of a game, by their published names."""

from opentinker.envs.game import AbstractGame, GameDataGenerator, StepResult

__all__ = ["AbstractGame", "GameDataGenerator", "StepResult"]
