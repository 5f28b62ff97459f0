"""A game over rows with images."""

from __future__ import annotations

from typing import Any

from opentinker.environment.rows_environment import Paths, RowsEnvironment
from opentinker.environment.static_data_generator import StaticDatasetGenerator
from opentinker.envs.game import AbstractGame


class VLGameEnvironment(RowsEnvironment):
    """A MathGameEnvironment with images: the column `image_key` holds an image, or a list of them: PNG or JPEG as
    bytes, as {"bytes": ...} or {"path": ...} (relative to the data file), or as a data: URL. They replace `<image>` in
    the prompt, otherwise they come before the text of the first user message.

    Rows with images need a vision model of a supported family; otherwise the job fails with that reason.
    """

    def __init__(
        self,
        game_class: type[AbstractGame],
        config: Any,
        data_paths: Paths,
        val_data_paths: Paths | None = None,
        game_kwargs: dict[str, Any] | None = None,
        job_id: str | None = None,
        image_key: str = "images",
    ) -> None:
        self.image_key = image_key
        super().__init__(game_class, config, data_paths, val_data_paths, game_kwargs, job_id)

    def generator(self, paths: list[str], seed: int) -> StaticDatasetGenerator:
        rows = super().generator(paths, seed)
        rows.image_key = self.image_key
        return rows
