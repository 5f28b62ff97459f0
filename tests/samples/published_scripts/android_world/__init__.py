"""The game of a checkout, by its published name."""

from .android_world_game import AndroidWorldGame as AndroidWorldGame
