"""Rows of files as samples: prompt and right answer, as the published client reads them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentinker.environment.base_data_generator import AbstractGameDataGenerator
from opentinker.envs.data import images_of
from opentinker.shared.data.dataset import open_rows
from opentinker.shared.data.jsonl import RowError

HOLDERS = ("reward_model", "extra_info")
"""Columns in which a ground truth may hide."""


class StaticDatasetGenerator(AbstractGameDataGenerator):
    """`data_paths`: .jsonl, .json (a list of objects) and .parquet files, one or several. Raises RowError, with file
    and line, for what is no row or lacks the prompt, and where there are no rows."""

    def __init__(
        self,
        data_paths: str | Sequence[str],
        interaction_name: str = "math",
        prompt_key: str = "prompt",
        ground_truth_key: str = "ground_truth",
        data_source_key: str = "data_source",
        extra_keys: Sequence[str] | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        cache_dir: str | None = None,
        system_prompt: str | None = None,
    ) -> None:
        if cache_dir is not None:
            raise ValueError("cache_dir: nothing is downloaded here, leave it out")
        self.interaction_name, self.system_prompt = interaction_name, system_prompt
        self.prompt_key, self.ground_truth_key, self.data_source_key = prompt_key, ground_truth_key, data_source_key
        self.extra_keys = list(extra_keys or ())
        paths = [data_paths] if isinstance(data_paths, str | Path) else list(data_paths)
        self.image_key: str | None = None
        """The column with images, if they are to be shown."""
        self._read = [
            (where, self._checked(where, row), Path(path).parent)
            for path in paths
            for where, row in open_rows(str(path), None, "train")
        ]
        if shuffle:
            random.Random(seed).shuffle(self._read)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for _, row, _ in self._read]

    def __len__(self) -> int:
        return len(self._read)

    def get_interaction_name(self) -> str:
        return self.interaction_name

    def generate_sample(self, index: int) -> dict[str, Any]:
        """`index` is taken modulo the number of rows."""
        where, row, folder = self._read[index % len(self._read)]
        prompt = row[self.prompt_key]
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.system_prompt:
            chat = [{"role": "system", "content": self.system_prompt}, *(m for m in chat if m["role"] != "system")]
        truth, source = self._truth(row), str(row.get(self.data_source_key, self.interaction_name))
        arguments = {"ground_truth": truth, "data_source": source, **{k: row[k] for k in self.extra_keys if k in row}}
        sample = {"prompt": chat, "env_kwargs": arguments, "ground_truth": truth, "data_source": source}
        if self.image_key is not None:
            sample["images"] = images_of((where, row), self.image_key, folder)
        return sample

    def _truth(self, row: dict[str, Any]) -> Any:
        for holder in (row, *(row[name] for name in HOLDERS if isinstance(row.get(name), dict))):
            if holder.get(self.ground_truth_key) is not None:
                return holder[self.ground_truth_key]
        return None

    def _checked(self, where: str, row: dict[str, Any]) -> dict[str, Any]:
        prompt = row.get(self.prompt_key)
        if not prompt or not isinstance(prompt, str | list):
            raise RowError(f"{where}: {self.prompt_key} must be a text or a chat; the columns are: {', '.join(row)}")
        return row
