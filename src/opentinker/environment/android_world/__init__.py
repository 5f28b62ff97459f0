"""Phones: refused in words."""

from opentinker.refusal import refused

AndroidWorldGame = refused(
    "AndroidWorldGame", "emulated phones are not played here; serve yours with opentinker env serve module:Class"
)

__all__ = ["AndroidWorldGame"]
