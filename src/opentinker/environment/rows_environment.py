"""A game over the rows of a data set: what mathematical and geometry games have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentinker.client.settings import pick
from opentinker.environment.base_data_generator import DynamicGameDataset
from opentinker.environment.base_game_environment import VALIDATION_SAMPLES, VALIDATION_SEED, Batches, GameEnvironment
from opentinker.environment.static_data_generator import StaticDatasetGenerator
from opentinker.envs.game import AbstractGame

Paths = str | Path | Sequence[str | Path | None]
EXTRA = ("extra_info",)
TRAINING_SEED = 0


class RowsEnvironment(GameEnvironment):
    """`data_paths`: .jsonl, .json, .parquet, directories of them, or ids of a hub; one or several. The prompt is the
    row's, after the game's system message; `reset` gets ground_truth, data_source and extra_info.

    An epoch is one pass over the rows, always in the same order. The first `val_batch_size` rows (default 50) of
    `val_data_paths` are evaluated; without them there are no evaluations.
    """

    def __init__(
        self,
        game_class: type[AbstractGame],
        config: Any,
        data_paths: Paths,
        val_data_paths: Paths | None = None,
        game_kwargs: dict[str, Any] | None = None,
        job_id: str | None = None,
    ) -> None:
        self.data_paths = paths_of(data_paths)
        self.val_data_paths = paths_of(val_data_paths)
        if not self.data_paths:
            raise ValueError("data_paths: names no data")
        super().__init__(game_class, config, game_kwargs, job_id=job_id)

    def _setup_dataloader(self) -> None:
        batch = int(pick(self.config, "batch_size", 16))
        rows = self.generator(self.data_paths, TRAINING_SEED)
        self.train_dataloader = Batches(DynamicGameDataset(rows, virtual_size=len(rows)), batch)
        if self.val_data_paths:
            held = self.generator(self.val_data_paths, VALIDATION_SEED)
            most = min(len(held), int(pick(self.config, "val_batch_size", VALIDATION_SAMPLES)))
            self.val_dataloader = Batches(DynamicGameDataset(held, virtual_size=most), max(1, most)) if most else None

    def generator(self, paths: list[str], seed: int) -> StaticDatasetGenerator:
        """The rows, as samples."""
        system = self.game_class(**self.game_kwargs).get_system_prompt()
        return StaticDatasetGenerator(paths, self.interaction_name, extra_keys=EXTRA, seed=seed, system_prompt=system)


def paths_of(given: Paths | None) -> list[str]:
    """Lists of any make; a list may hold None, as configs without a validation path do."""
    if given is None or isinstance(given, str | Path):
        return [str(given)] if given else []
    return [str(path) for path in given if path]
