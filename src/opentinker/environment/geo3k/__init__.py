"""Geometry problems with a figure, answered in a box: in one turn, or with a few tries."""

from opentinker.environment.geo3k.geo3k_env import Geo3KGameEnvironment, Geo3KToolEnvironment
from opentinker.environment.geo3k.geo3k_game import Geo3KGame
from opentinker.environment.geo3k.geo3k_tool_game import Geo3KToolGame

__all__ = ["Geo3KGame", "Geo3KGameEnvironment", "Geo3KToolEnvironment", "Geo3KToolGame"]
