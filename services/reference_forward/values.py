"""Value models: the expected return before each sampled token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opentinker.shared.nn.forward import token_values
from opentinker.shared.nn.layout import Layout
from opentinker.shared.nn.models import load_value_model
from opentinker.shared.types.errors import JobFailed


@dataclass
class ValueModel:
    """A frozen critic: a language model with a scalar head in place of the vocabulary."""

    base: str
    model: Any
    """The whole model, with `config` and `parameters`."""
    decoder: Any
    head: Any

    @classmethod
    def load(cls, base: str, dtype: torch.dtype, device: str) -> ValueModel:
        """Raise JobFailed if the model is not a causal token classifier with one label."""
        return cls(base, *load_value_model(base, dtype, device))

    def values(self, plan: Layout) -> Tensor:
        """Return float32 [M]. Raises JobFailed if a value is not finite."""
        values_M = token_values(self.decoder, self.head, plan)
        if not bool(torch.isfinite(values_M).all()):
            raise JobFailed("it got a value that is no finite number")
        return values_M
