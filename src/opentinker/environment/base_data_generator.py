"""Rows of a data set for programs that look at them. Training itself takes prompts from the instance that plays."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opentinker.client.settings import pick


class AbstractGameDataGenerator(ABC):
    """Makes sample `index`: prompt, env_kwargs, data_source, and what else there is to know of it."""

    @abstractmethod
    def generate_sample(self, index: int) -> dict[str, Any]: ...

    def get_interaction_name(self) -> str:
        return "game"


class DynamicGameDataset:
    """`virtual_size` rows, made when they are asked for; the same row each time if `seed` is given. Of a `processor`
    the tokenizer is used: what images become, the engine knows alone."""

    def __init__(
        self,
        data_generator: Any,
        tokenizer: Any = None,
        config: Any = None,
        processor: Any = None,
        virtual_size: int = 1000,
        seed: int | None = None,
    ) -> None:
        self.data_generator, self.config, self.virtual_size, self.seed = data_generator, config, virtual_size, seed
        self.tokenizer = tokenizer if tokenizer is not None else getattr(processor, "tokenizer", None)

    def __len__(self) -> int:
        return self.virtual_size

    def __getitem__(self, index: int) -> dict[str, Any]:
        """raw_prompt (a chat), index, data_source, interaction_kwargs, extra_info, reward_model, and its images.
        With a tokenizer also raw_prompt_ids, and, padded on the left to the config's `max_prompt_tokens`,
        input_ids, attention_mask and position_ids: lists of whole numbers. Raises ValueError for a longer prompt."""
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
        if sample.get("images"):
            row["multi_modal_data"] = {"image": sample["images"]}
        return row if self.tokenizer is None else row | self._tokens(self.tokenizer, index, sample["prompt"])

    def _tokens(self, tokenizer: Any, index: int, prompt: Any) -> dict[str, list[int]]:
        ids = list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
        width = int(pick(self.config, "max_prompt_tokens", 0) or len(ids))
        if len(ids) > width:
            raise ValueError(f"row {index}: the prompt has {len(ids)} tokens, max_prompt_tokens is {width}")
        left = width - len(ids)
        return {
            "raw_prompt_ids": ids,
            "input_ids": [int(tokenizer.pad_token_id or 0)] * left + ids,
            "attention_mask": [0] * left + [1] * len(ids),
            "position_ids": [0] * left + list(range(len(ids))),
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(self.virtual_size))


def collate_fn(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows -> columns."""
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
