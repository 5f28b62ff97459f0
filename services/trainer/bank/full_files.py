"""All weights of a model as a Hugging Face directory, which engines and transformers load."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from opentinker.services.trainer.bank.adapter import Adapter, FullShape
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.bank.limits import Refused
from opentinker.services.trainer.learners.optimizer_state import save_model
from opentinker.shared.nn.models import load_model, load_tokenizer
from opentinker.shared.types.errors import JobFailed


def export_full(base: BaseModel, adapter: Adapter, directory: Path) -> None:
    """Write weights, in the dtype of the base, configuration and tokenizer. Raises OSError."""
    assert isinstance(adapter.shape, FullShape)
    own = {name: view.to("cpu", base.dtype, copy=True) for name, view in adapter.shape.named(adapter.weights).items()}
    save_model(directory, base.outline, revert_weight_conversion(base.outline, own), base.dtype)
    load_tokenizer(base.name).save_pretrained(directory)


def import_full(directory: Path, shape: FullShape) -> Tensor:
    """Return the weights of a directory as a vector of this shape. Raises Refused if it does not fit."""
    try:
        parameters = dict(load_model(str(directory), torch.float32).named_parameters())
    except JobFailed as error:
        raise Refused(f"the checkpoint cannot be read: {error}") from error
    if {name: tuple(parameter.shape) for name, parameter in parameters.items()} != shape.parameters:
        raise Refused("the checkpoint has other parameters than the model; create the model from it instead")
    return torch.cat([parameters[name].detach().flatten() for name in shape.parameters])
