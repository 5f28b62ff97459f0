"""The frozen base of a bank: loads it, makes its layers adaptable, and makes fresh adapters for it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import get_peft_model_state_dict
from torch import Tensor, nn

from opentinker.services.trainer.bank.adapted_linear import AdaptedLinear, Segments
from opentinker.services.trainer.bank.adapter import Adapter, AdapterShape, FullShape
from opentinker.services.trainer.bank.limits import Refused
from opentinker.shared.nn.forward import VISION_ATTENTION
from opentinker.shared.nn.lora import attach_lora
from opentinker.shared.nn.models import load_model, torch_dtype
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.errors import JobFailed

PEFT_PREFIX = "base_model.model."


class BaseModel:
    def __init__(self, base: str, dtype: str = "float32", device: str = "cpu") -> None:
        """Load a text model. Raises JobFailed."""
        self.name, self.device, self.dtype = base, device, torch_dtype(dtype)
        self.causal: Any = load_model(base, self.dtype, device)
        if hasattr(self.causal, VISION_ATTENTION):
            raise JobFailed(f"model {base!r} is a vision model: adapters of vision models cannot share a base yet")
        self.causal.requires_grad_(False)
        self.vocabulary: int = self.causal.get_input_embeddings().num_embeddings
        self.outline = _outline(self.causal)
        """The model without its weights: shapes and configuration."""
        head = self._head_name()
        linear = [name for name, module in self.outline.named_modules() if isinstance(module, nn.Linear)]
        self.layers = [name for name in linear if name != head]
        """Names of the linear layers that an adapter may have."""
        self.segments = Segments(device)
        self._adapted: set[str] = set()

    def fresh_adapter(self, name: str, lora: LoraSpec, seed: int) -> Adapter:
        """Return an adapter with the weights that a LoRA job with this seed begins with. Raises Refused."""
        if lora.dropout:
            raise Refused(f"lora.dropout = {lora.dropout}: adapters that share a base have no dropout; set it to 0")
        head = self._head_name()
        targets = [] if isinstance(lora.target_modules, str) else lora.target_modules
        if any(f".{head}".endswith(f".{target}") for target in targets):
            raise Refused(
                f"target_modules: {head} is the output layer, which adapters that share a base leave as it is"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                wrapped = attach_lora(_outline(self.outline), lora)
            except JobFailed as error:
                raise Refused(str(error)) from error
        state = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        config = wrapped.peft_config["default"].to_dict() | {"base_model_name_or_path": self.name}
        shape = _shape(state, lora)
        self._adapt(shape)
        weights = torch.cat([tensor.detach().float().flatten() for tensor in state.values()])
        return Adapter.fresh(name, shape, _plain(config), weights.to(self.device))

    def full_weights(self, name: str) -> Adapter:
        """Return all weights of the base, to train."""
        weights = torch.cat([parameter.detach().float().flatten() for parameter in self.causal.parameters()])
        return Adapter.fresh(name, self._full_shape(), {}, weights)

    def _full_shape(self) -> FullShape:
        return FullShape({name: tuple(parameter.shape) for name, parameter in self.causal.named_parameters()})

    def _head_name(self) -> str:
        head = self.causal.get_output_embeddings()
        return str(next(name for name, module in self.causal.named_modules() if module is head))

    def _adapt(self, shape: AdapterShape) -> None:
        """Replace layers that no adapter has used so far."""
        for name in shape.layers.keys() - self._adapted:
            parent, _, leaf = name.rpartition(".")
            owner = self.causal.get_submodule(parent)
            setattr(owner, leaf, AdaptedLinear(getattr(owner, leaf), name, self.segments))
            self._adapted.add(name)

    def adapt_for(self, shape: AdapterShape | FullShape) -> None:
        """Prepare for an adapter of an earlier process. Raises Refused if it is of another model."""
        if isinstance(shape, FullShape):
            if self._adapted or shape != self._full_shape():
                raise Refused(
                    f"the weights are not of the model {self.name!r}: parameters are absent or of other sizes"
                )
            return
        for name, (inputs, outputs) in shape.layers.items():
            try:
                layer: Any = self.outline.get_submodule(name)
            except AttributeError:
                layer = None
            if not isinstance(layer, nn.Linear) or (layer.in_features, layer.out_features) != (inputs, outputs):
                raise Refused(
                    f"the adapter is not of the model {self.name!r}: layer {name} is absent or has other sizes"
                )
        self._adapt(shape)


def _outline(causal: nn.Module) -> nn.Module:
    """Return a copy of the model in which each parameter is one number, repeated: PEFT makes adapters from shapes."""
    memo: dict[int, Any] = {}
    for parameter in causal.parameters():
        number = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        memo[id(parameter)] = nn.Parameter(number, requires_grad=False)
    return copy.deepcopy(causal, memo)


def _shape(state: dict[str, Tensor], lora: LoraSpec) -> AdapterShape:
    """Read names and sizes of layers from tensors in PEFT's order: A, then B of each layer."""
    layers = {}
    for name, tensor in state.items():
        layer, _, matrix = name.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".")
        if matrix == "lora_A":
            layers[layer] = (tensor.shape[1], state[name.replace("lora_A", "lora_B")].shape[0])
    return AdapterShape(lora.rank, lora.alpha / lora.rank, layers)


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return a PEFT configuration as JSON has it."""

    def converted(value: Any) -> Any:
        return sorted(value) if isinstance(value, set) else getattr(value, "value", value)

    return {name: converted(value) for name, value in config.items()}
