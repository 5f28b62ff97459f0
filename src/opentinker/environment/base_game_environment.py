"""A game and its data, as the published client knows them. `fit` serves it to the job from the client's own process."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from opentinker.client.settings import pick
from opentinker.environment.base_data_generator import DynamicGameDataset
from opentinker.environment.environment import BaseEnvironment, RewardFunctionSpec
from opentinker.environment.game_server import Endpoints, GameServer, look_for
from opentinker.environment.prompts import messages_of
from opentinker.envs.base import EnvironmentConfig
from opentinker.envs.game import AbstractGame, GameDataGenerator, PlayedGame, check_arguments
from opentinker.shared.types.core import Message

VALIDATION_SEED = 42
VALIDATION_SAMPLES = 50
EPOCH_BATCHES = 100
REMEMBERED = 1024
"""Rows of a loader, the newest."""
OBSERVATION = "{observation}"


@dataclass
class InteractionSpec:
    """By which name and class a game is known."""

    name: str
    class_path: str
    config: dict[str, Any] = field(default_factory=dict)


class Batches:
    """A data set in whole batches, in order; the remainder is a last, smaller batch."""

    def __init__(self, dataset: Any, batch_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size

    def __len__(self) -> int:
        return (len(self.dataset) + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Any:
        for start in range(0, len(self.dataset), self.batch_size):
            yield [self.dataset[index] for index in range(start, min(start + self.batch_size, len(self.dataset)))]


class GameEnvironment(BaseEnvironment):
    """`config` is the program's (dict, OmegaConf, namespace). The game is played in the client's process, or, where
    `interaction.config.env_endpoint` or `env_endpoint` names a game server, there; the start states are drawn here.
    With `bind_worker_to_endpoint` each of the `env_shards` game servers has one episode at a time."""

    def __init__(
        self,
        game_class: type[AbstractGame],
        config: Any,
        game_kwargs: dict[str, Any] | None = None,
        reward_function: RewardFunctionSpec | None = None,
        job_id: str | None = None,
    ) -> None:
        self.game_class, self.config = game_class, config
        self.game_kwargs = dict(game_kwargs or {})
        self.reward_function, self.job_id = reward_function, job_id or pick(config, "interaction.config.job_id")
        check_arguments(game_class, self.game_kwargs)
        self._endpoints = endpoints_of(config)
        self.env_endpoint = None if self._endpoints is None else self._endpoints.places[0]
        self.max_steps = int(pick(config, "interaction.config.max_steps", pick(config, "max_steps", 100)))
        self._template = str(pick(config, "interaction.config.observation_template", OBSERVATION))
        check_template(self._template)
        if self._endpoints is not None and bound(config):
            self.concurrency = len(self._endpoints.places)
        self.interaction_name = game_class(**self.game_kwargs).get_interaction_name()
        self.train_dataloader: Any = None
        self.val_dataloader: Any = None
        self._file: Path | None = None
        self._drawn: tuple[Any, ...] = ()
        """Loaders of ours, whose start states the game draws itself."""
        self._samples: OrderedDict[tuple[str, int], Mapping[str, Any]] = OrderedDict()
        self._setup_dataloader()

    # --- data ---------------------------------------------------------------------------------------------------

    def _setup_dataloader(self) -> None:
        """The two data loaders; override it to give others, over a `dataset` with rows like DynamicGameDataset's."""
        batch = int(pick(self.config, "batch_size", 16))
        steps = int(pick(self.config, "num_steps", EPOCH_BATCHES))
        own = GameDataGenerator(self.game_class, self.game_kwargs)
        self.train_dataloader = Batches(DynamicGameDataset(own, virtual_size=batch * steps), batch)
        validation = int(pick(self.config, "val_batch_size", VALIDATION_SAMPLES))
        seeded = GameDataGenerator(self.game_class, self.game_kwargs, seed=VALIDATION_SEED)
        self.val_dataloader = Batches(DynamicGameDataset(seeded, virtual_size=validation), max(1, validation))
        self._drawn = (self.train_dataloader, self.val_dataloader)

    def get_dataloader(self) -> tuple[Any, Any]:
        return self.train_dataloader, self.val_dataloader

    def sample_of(self, row: int, split: str) -> Mapping[str, Any] | None:
        """The loader's row; None where it is one of ours: then the game draws its start state from the global `random`,
        which is seeded by row before. A row is asked for once, so that the episodes of a group begin alike."""
        loader = self.train_dataloader if split == "train" else self.val_dataloader
        if loader is None:
            raise ValueError(f"there are no rows to play for {split!r}: the environment has no such loader")
        if any(loader is own for own in self._drawn):
            return None
        if (split, row) not in self._samples:
            self._samples[split, row] = loader.dataset[row % len(loader.dataset)]
            while len(self._samples) > REMEMBERED:
                self._samples.popitem(last=False)
        return self._samples[split, row]

    def says_the_prompt(self, sample: Mapping[str, Any], split: str) -> bool:
        """Return whether the row's text is the prompt; otherwise the game writes the prompt, and the row only
        parametrizes its state."""
        loader = self.train_dataloader if split == "train" else self.val_dataloader
        return "raw_prompt" in sample and type(getattr(loader.dataset, "data_generator", None)) is not GameDataGenerator

    # --- what the published client asks for ----------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """Override it to say what the job's spec should say otherwise: {"opentinker": {"train": {"lr": 1e-5}}}."""
        return {}

    def setup(self, client: Any) -> None:
        """Called by `set_config`. Raises GameServerError if a required game server is missing."""
        for place in self._endpoints.places if self._endpoints else ():
            look_for(place)

    def get_interaction_config_content(self) -> dict[str, Any]:
        kind = f"{self.game_class.__module__}.{self.game_class.__qualname__}"
        spec = InteractionSpec(self.interaction_name, kind, {"max_steps": self.max_steps})
        if self.env_endpoint:
            spec.config["env_endpoint"] = self.env_endpoint
        if self.job_id:
            spec.config["job_id"] = self.job_id
        return {"interaction": [{"name": spec.name, "class_name": spec.class_path, "config": spec.config}]}

    def get_interaction_config_path(self) -> str:
        """A file with this content (JSON, which is YAML too), until `cleanup`."""
        if self._file is None:
            with tempfile.NamedTemporaryFile(suffix=".yaml", prefix="interaction-", delete=False) as file:
                file.write(orjson.dumps(self.get_interaction_config_content(), option=orjson.OPT_INDENT_2))
            self._file = Path(file.name)
        return str(self._file)

    def cleanup(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None

    # --- what is served -------------------------------------------------------------------------------------------

    def environment_class(self) -> type[PlayedGame]:
        """Return the class that `fit` serves: this game with these arguments."""
        owner = self

        class Served(PlayedGame):
            class Config(EnvironmentConfig):
                split: Literal["train", "val"] = "train"

            config: Config  # type: ignore[assignment]
            game = owner.game_class

            def make(self) -> AbstractGame:
                game = owner.game_class(**owner.game_kwargs)
                return game if owner._endpoints is None else GameServer(owner._endpoints, owner.job_id, game)

            def draw(self, game: AbstractGame, row: int) -> tuple[dict[str, Any], list[Message] | None]:
                """The keyword arguments of `reset`, and the prompt if the row says it."""
                sample = owner.sample_of(row, self.config.split)
                if sample is None:
                    return game.generate_initial_state(), None
                said = owner.says_the_prompt(sample, self.config.split)
                return dict(sample["interaction_kwargs"]["env_kwargs"]), messages_of(sample) if said else None

            def begin(self, game: AbstractGame, drawn: Any) -> list[Message]:
                arguments, said = drawn
                if said is None:
                    return super().begin(game, arguments)
                game.reset(**arguments)
                return list(said)

            def render_observation(self, observation: str) -> str:
                return owner._template.replace(OBSERVATION, observation)

        Served.__name__ = self.game_class.__name__
        return Served


def endpoints_of(config: Any) -> Endpoints | None:
    """The game servers that a config names. Raises ValueError for what would be ignored."""
    first = pick(config, "interaction.config.env_endpoint", pick(config, "env_endpoint"))
    shards = int(pick(config, "interaction.config.env_shards", pick(config, "env_shards", 1)))
    if shards < 1:
        raise ValueError(f"env_shards = {shards}: must be at least 1")
    if first:
        return Endpoints(str(first), shards, exclusive=bound(config))
    if bound(config):
        raise ValueError(
            "bind_worker_to_endpoint: there is no game server to bind to: give env_endpoint, or leave it out"
        )
    return None


def bound(config: Any) -> bool:
    """Return whether each game server plays one episode at a time."""
    return bool(pick(config, "interaction.config.bind_worker_to_endpoint", False))


def check_template(template: str) -> None:
    """Raises ValueError for one that would hide the observation."""
    if OBSERVATION not in template:
        raise ValueError(
            f"observation_template = {template!r:.100}: must hold {OBSERVATION}, which stands for the text"
        )


def create_game_environment(game_class: type[AbstractGame], config: Any, **game_kwargs: Any) -> GameEnvironment:
    return GameEnvironment(game_class, config, game_kwargs)
