"""One problem with a figure, one answer."""

from __future__ import annotations

from typing import Any

from opentinker.environment.math.math_game import MathGame


class Geo3KGame(MathGame):
    """A MathGame whose rows contain the questions and the answer format."""

    def reset(
        self, ground_truth: Any = None, data_source: str = "geometry3k", extra_info: Any = None, **kwargs: Any
    ) -> str:
        return super().reset(ground_truth, data_source, extra_info, **kwargs)

    def get_system_prompt(self) -> str | None:
        return None

    def get_interaction_name(self) -> str:
        return "geo3k"
