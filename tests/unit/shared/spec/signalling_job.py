"""A job of two policies that play the signalling game."""

from __future__ import annotations

from typing import Any

from opentinker.shared.spec import parse_spec
from tests.support.factories import refusals

BASE: dict[str, Any] = {
    "name": "game",
    "model": {"base": "m"},
    "environment": {"name": "signalling"},
    "algorithm": {"group_size": 4, "groups_per_batch": 4},
    "rollout": {"engine": "toy"},
    "train": {"steps": 10, "lr": 1e-3},
    "policies": {"speaker": {}, "listener": {}},
    "seats": {"speaker": "speaker", "listener": "listener"},
}


def refused(**changes: Any) -> dict[str, str]:
    """By field, the problems of the base spec with these changes."""
    return refusals(parse_spec, {**BASE, **changes})
