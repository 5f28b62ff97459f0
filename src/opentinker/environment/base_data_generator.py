"""Rows of a data set for programs that look at them. Training itself takes prompts from the instance that plays."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class AbstractGameDataGenerator(ABC):
    """Makes sample `index`: prompt, env_kwargs, data_source, and what else there is to know of it."""

    @abstractmethod
    def generate_sample(self, index: int) -> dict[str, Any]: ...

    def get_interaction_name(self) -> str:
        return "game"


class DynamicGameDataset:
    """`virtual_size` rows, made when they are asked for; the same row each time if `seed` is given."""

    def __init__(
        self,
        data_generator: Any,
        tokenizer: Any = None,
        config: Any = None,
        processor: Any = None,
        virtual_size: int = 1000,
        seed: int | None = None,
    ) -> None:
        self.data_generator, self.tokenizer, self.virtual_size, self.seed = (
            data_generator,
            tokenizer,
            virtual_size,
            seed,
        )

    def __len__(self) -> int:
        return self.virtual_size

    def __getitem__(self, index: int) -> dict[str, Any]:
        """raw_prompt (a chat), index, data_source, interaction_kwargs, extra_info, reward_model; with a tokenizer
        raw_prompt_ids (list of token ids) too."""
        if not 0 <= index < self.virtual_size:
            raise IndexError(index)
        if self.seed is not None:
            random.seed(self.seed + index)
        sample = self.data_generator.generate_sample(index)
        arguments = sample.get("env_kwargs", {})
        row = {
            "raw_prompt": sample["prompt"],
            "index": index,
            "data_source": sample.get("data_source", self.data_generator.get_interaction_name()),
            "interaction_kwargs": {"name": self.data_generator.get_interaction_name(), "env_kwargs": arguments},
            "tools_kwargs": {},
            "extra_info": {"index": index, **sample.get("extra_info", {})},
            "reward_model": {"ground_truth": sample.get("ground_truth", arguments.get("ground_truth"))},
        }
        if self.tokenizer is not None:
            row["raw_prompt_ids"] = self.tokenizer.apply_chat_template(sample["prompt"], add_generation_prompt=True)
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(self.virtual_size))


def collate_fn(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows -> columns."""
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
