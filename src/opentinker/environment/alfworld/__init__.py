"""Household tasks as text."""

from opentinker.environment.alfworld.alfworld_game import ALFWorldGame

__all__ = ["ALFWorldGame"]
