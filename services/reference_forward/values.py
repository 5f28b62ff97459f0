"""Value models: what return is expected where each sampled token was about to be chosen."""

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
    """A frozen critic: its own weights, and one number where a language model has a vocabulary."""

    base: str
    model: Any
    """The whole, with `config` and `parameters`."""
    decoder: Any
    head: Any

    @classmethod
    def load(cls, base: str, dtype: torch.dtype, device: str) -> ValueModel:
        """Raises JobFailed if it is no causal token classifier with one label."""
        return cls(base, *load_value_model(base, dtype, device))

    def values(self, plan: Layout) -> Tensor:
        """float32 [M]. Raises JobFailed where the model makes no number."""
        values_M = token_values(self.decoder, self.head, plan)
        if not bool(torch.isfinite(values_M).all()):
            raise JobFailed("it got a value that is no finite number")
        return values_M
