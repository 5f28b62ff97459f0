"""Geometry games over rows with a figure."""

from __future__ import annotations

from typing import Any

from opentinker.environment.geo3k.geo3k_game import Geo3KGame
from opentinker.environment.geo3k.geo3k_tool_game import Geo3KToolGame
from opentinker.environment.rows_environment import Paths
from opentinker.environment.vl_game_environment import VLGameEnvironment


class Geo3KGameEnvironment(VLGameEnvironment):
    def __init__(
        self, config: Any, data_paths: Paths, val_data_paths: Paths | None = None, job_id: str | None = None
    ) -> None:
        super().__init__(Geo3KGame, config, data_paths, val_data_paths, job_id=job_id)


class Geo3KToolEnvironment(VLGameEnvironment):
    def __init__(
        self,
        config: Any,
        data_paths: Paths,
        val_data_paths: Paths | None = None,
        job_id: str | None = None,
        max_retries: int = 3,
    ) -> None:
        super().__init__(Geo3KToolGame, config, data_paths, val_data_paths, {"max_retries": max_retries}, job_id)
