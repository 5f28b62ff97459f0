"""Household tasks in words."""

from opentinker.environment.alfworld.alfworld_game import ALFWorldGame

__all__ = ["ALFWorldGame"]
