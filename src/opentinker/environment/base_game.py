"""What a game is made of, by its published names."""

from opentinker.envs.game import AbstractGame, GameDataGenerator, StepResult

__all__ = ["AbstractGame", "GameDataGenerator", "StepResult"]
