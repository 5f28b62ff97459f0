"""Interface of an environment for a training client: data, and settings of the job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CONCURRENCY = 64
KINDS = ("config", "remote", "code")


@dataclass
class RewardFunctionSpec:
    """The source of rewards other than the environment. Here rewards always come from the environment: `fit` refuses an
    environment with a RewardFunctionSpec instead of training on other rewards than it declares."""

    type: str
    config_path: str | None = None
    config_name: str | None = None
    config_kwargs: dict[str, Any] = field(default_factory=dict)
    remote_endpoint: str | None = None
    remote_api_key: str | None = None
    code_function: Callable[..., Any] | None = None
    code_source: str | None = None

    def __post_init__(self) -> None:
        if self.type not in KINDS:
            raise ValueError(f"type = {self.type!r}: must be one of {', '.join(KINDS)}")

    def to_config_dict(self) -> dict[str, Any]:
        """The fields that are set, without functions and keys."""
        named = ("type", "config_path", "config_name", "config_kwargs", "remote_endpoint")
        return {name: value for name in named if (value := getattr(self, name))}


class BaseEnvironment(ABC):
    """Subclass GameEnvironment, which does all of this, rather than this."""

    concurrency = CONCURRENCY
    """Concurrent episodes that `fit` serves from its process; further ones wait."""

    @abstractmethod
    def setup(self, client: Any) -> None:
        """Called with the ServiceClient before training."""

    @abstractmethod
    def get_dataloader(self) -> tuple[Any, Any]:
        """Return the loaders for training and for validation (or None)."""

    @abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return overrides of the job's spec, under `opentinker`: {"opentinker": {"train": {"lr": 1e-5}}}."""
