"""Plays any reasoning-gym data set by its name: one question, one answer, scored by the data set."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import BaseModel, Field

from opentinker.envs.adapters.answers import ANSWER_S, harmless, within
from opentinker.envs.adapters.library import LibraryConfig, Randomness, check_known
from opentinker.envs.base import Action, DataRows, Environment, Step, user
from opentinker.shared.types.core import Message

CACHED = 16
"""Number of data sets cached in a process."""


class ReasoningGym(Environment):
    """Reward: the data set's score of the answer, 0 to 1.

    The answer is the content of the last `<answer>`, otherwise the whole text. For data sets that evaluate answers as
    Python or formulas, anything but a plain value or plain formula scores 0 without evaluation. So does an answer whose
    scoring raises or takes too long (metric `unscored`).
    """

    class Config(LibraryConfig):
        library: ClassVar[str] = "reasoning_gym"

        dataset: Annotated[str, Field(min_length=1)] = "chain_sum"
        """Name of the data set."""
        config: dict[str, Any] = {}
        """The data set's own settings, e.g. `{min_terms = 2}`."""
        seed: Annotated[int, Field(ge=0)] = 0
        """Seed of the data set; another seed gives other questions, e.g. for validation."""
        rows: Annotated[int, Field(ge=1)] = 10_000
        """Number of questions, generated on use."""
        instruction: str = "Give the final answer between <answer> and </answer>."
        """Added below every question; may be empty."""

        def check(self) -> None:
            from reasoning_gym.factory import DATASETS

            check_known("data set as dataset", self.dataset, DATASETS)
            if self.config.keys() & {"seed", "size"}:
                raise ValueError("config must not set seed and size: set seed and rows next to it")
            try:
                _made(self.dataset, self.seed, self.rows, msgspec.json.encode(self.config, order="sorted"))
            except (AssertionError, AttributeError, TypeError, ValueError) as error:
                raise ValueError(f"config: {self.dataset} does not take it: {error}") from None

    config: Config
    blocking = True

    @classmethod
    def data_rows(cls, config: BaseModel) -> Questions:
        assert isinstance(config, cls.Config)
        return Questions(config)

    async def open(self, row: int, seed: int) -> list[Message]:
        config = self.config
        self._randomness = Randomness(config.seed + row % config.rows)
        with self._randomness:
            self._dataset = _dataset_of(config)
            self._entry: dict[str, Any] = self._dataset[row % config.rows]
        return _prompt_of(config, self._entry)

    async def step(self, action: Action) -> Step:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(action.text)
        score = self._score(action.text.strip() if answer is None else answer)
        metrics = {
            "exact": float(score == 1.0),
            "answered": float(answer is not None),
            "unscored": float(score is None),
        }
        if self._source != self.config.dataset:
            metrics[f"task/{self._source}"] = 1.0
        return Step(reward=score or 0.0, done=True, metrics=metrics)

    def gold(self) -> str:
        """Return the data set's own answer; a few data sets score it 0, because they have many right answers."""
        return f"<answer>{self._entry['answer']}</answer>"

    @property
    def _source(self) -> str:
        """Return the question's data set, one of several in a `composite`."""
        return str(self._entry.get("metadata", {}).get("source_dataset", self.config.dataset))

    def _score(self, answer: str) -> float | None:
        if not harmless(self._source, answer):
            return 0.0
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "reasoning_gym scores within a time limit, which needs a separate process: name it, "
                "or module:Class, instead of handing over the class"
            )
        try:
            with self._randomness, within(ANSWER_S):
                score = float(self._dataset.score_answer(answer, self._entry))
        except Exception:  # noqa: BLE001 - the library's scoring has met a text that it did not expect: no right answer
            return None
        return score if 0.0 <= score <= 1.0 else None


class Questions(DataRows):
    """Questions that are generated when they are looked at."""

    def __init__(self, config: ReasoningGym.Config) -> None:
        self._config = config

    def __len__(self) -> int:
        return self._config.rows

    def number(self, row: int) -> int:
        return row % self._config.rows

    def prompt(self, number: int) -> list[Message]:
        with Randomness(self._config.seed + number):
            return _prompt_of(self._config, _dataset_of(self._config)[number])


def _dataset_of(config: ReasoningGym.Config) -> Any:
    return _made(config.dataset, config.seed, config.rows, msgspec.json.encode(config.config, order="sorted"))


def _prompt_of(config: ReasoningGym.Config, entry: dict[str, Any]) -> list[Message]:
    return [user("\n\n".join(filter(None, [entry["question"], config.instruction])))]


@lru_cache(CACHED)
def _made(name: str, seed: int, rows: int, config: bytes) -> Any:
    from reasoning_gym import create_dataset
    from reasoning_gym.composite import DatasetSpec

    settings = msgspec.json.decode(config)
    if name == "composite":
        parts = [{"weight": 1.0, "config": {}} | part for part in settings.get("datasets", [])]
        settings["datasets"] = [DatasetSpec(**part) for part in parts]
    return create_dataset(name, seed=seed, size=rows, **settings)
