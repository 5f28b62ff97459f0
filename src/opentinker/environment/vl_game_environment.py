"""A game over rows with images."""

from __future__ import annotations

from typing import Any

from opentinker.environment.rows_environment import Paths, RowsEnvironment
from opentinker.environment.static_data_generator import StaticDatasetGenerator
from opentinker.envs.game import AbstractGame
from opentinker.shared.rows import RowError


class VLGameEnvironment(RowsEnvironment):
    """As MathGameEnvironment; the column `image_key` holds an image, or a list of them: PNG or JPEG as bytes, as
    {"bytes": ...} or {"path": ...} (beside the data file), or as a data: URL. They stand where the prompt says
    `<image>`, else before the text of the first user message.

    No model that sees is served yet: `set_config` refuses rows that show something, and plays those that do not.
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

    def setup(self, client: Any) -> None:
        """Raises RowError if a row shows an image: nobody here could see it."""
        for loader in (self.train_dataloader, self.val_dataloader):
            if loader is not None and (where := loader.dataset.data_generator.first_with_images()):
                raise RowError(
                    f"{where}: shows images, and models that see are not served yet; leave the column "
                    f"{self.image_key} out to train on the texts alone"
                )
        super().setup(client)
