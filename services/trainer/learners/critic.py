"""The critic of `advantage = "gae"`: a second copy of the base model with one number in place of the vocabulary.

It starts from `model.base` with a head of zeros, so that every first value is 0 (or from the critic in the checkpoint
that the job starts from), and has a separate optimizer at `critic_lr`, which warms up with the policy's. With LoRA
it is an adapter too. It is saved in `trainer/critic.safetensors`: `weight/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`,
`step/NAME` per trained parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from opentinker.services.trainer.algorithm.advantages import F64
from opentinker.services.trainer.algorithm.credit_assignment import explained_variance
from opentinker.services.trainer.algorithm.losses import value_loss
from opentinker.services.trainer.batch.micro_batch import MicroBatch
from opentinker.services.trainer.learners import optimizer_state
from opentinker.shared.data.safetensors_header import difference
from opentinker.shared.nn.forward import token_values
from opentinker.shared.nn.layers import recompute_layers
from opentinker.shared.nn.layout import Layout
from opentinker.shared.nn.lora import attach_lora, causal_lm, lora_dropouts
from opentinker.shared.nn.models import autocast, load_model, torch_dtype
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import CRITIC


class Critic:
    """V(s): the expected return before a sampled token."""

    def __init__(self, spec: JobSpec, device: str) -> None:
        self.spec, self.device = spec, device
        self.dtype = torch_dtype(spec.model.dtype)
        lora = spec.model.lora
        base = load_model(spec.model.base, torch.float32 if lora is None else self.dtype, device)
        model = base if lora is None else attach_lora(base, lora)
        self.dropouts = lora_dropouts(model)
        causal = causal_lm(model)
        if spec.train.gradient_checkpointing:
            recompute_layers(causal)
        self.decoder = causal.get_decoder()
        self.head = nn.Linear(base.get_input_embeddings().weight.shape[1], 1, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        trained = [(f"decoder.{name}", p) for name, p in self.decoder.named_parameters() if p.requires_grad]
        self.parameters = dict(trained) | {f"head.{name}": p for name, p in self.head.named_parameters()}
        train = spec.train
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=float(spec.algorithm.critic_lr or 0.0),
            betas=(train.beta1, train.beta2),
            eps=1e-8,
            weight_decay=0.0,
            fused=True,
        )

    def values(self, plan: Layout) -> Tensor:
        """Return float32 [M]."""
        with autocast(self.device, self.dtype):
            return token_values(self.decoder, self.head, plan)

    def dropout(self, *, on: bool) -> None:
        for module in self.dropouts:
            module.train(on)

    def measure(self, micros: list[MicroBatch], check_interrupt: Callable[[], None]) -> None:
        """The values before the batch, without dropout. `raise_if_interrupted` is asked before each micro-batch."""
        self.dropout(on=False)
        with torch.no_grad():
            for micro in micros:
                check_interrupt()
                self._measure(micro)

    def _measure(self, micro: MicroBatch) -> None:
        if micro.ends is None:
            micro.values_M = self.values(micro.plan)
            return
        found = self.values(micro.ends.plan)
        micro.values_M = found[~micro.ends.added]
        micro.end_values_S = found.new_zeros(int(micro.sequence_M.max()) + 1)
        micro.end_values_S[micro.ends.places] = found[micro.ends.added]

    def accumulate(self, micro: MicroBatch) -> Tensor:
        """Add the gradient of one micro-batch, with dropout; returns its share of the step's value loss."""
        self.dropout(on=True)
        assert micro.values_M is not None and micro.returns_M is not None
        clip = float(self.spec.algorithm.value_clip or 0.0)
        loss_M = value_loss(self.values(micro.plan), micro.values_M, micro.returns_M, value_clip=clip)
        loss = loss_M.sum() / micro.batch_tokens
        loss.backward()
        return loss.detach()

    def clip(self) -> Tensor:
        """Clip the gradient's norm; returns the norm before clipping."""
        return nn.utils.clip_grad_norm_(list(self.parameters.values()), self.spec.train.grad_clip)

    def step(self, lr_share: float) -> None:
        """Run an optimizer step. `lr_share`: share of the learning rate by the schedule."""
        for group in self.optimizer.param_groups:
            group["lr"] = float(self.spec.algorithm.critic_lr or 0.0) * lr_share
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rollback_point(self) -> Callable[[], None]:
        """Return a function that undoes all later steps."""
        return optimizer_state.rollback_point(self.parameters, self.optimizer)

    def save(self, directory: Path) -> None:
        tensors = {f"weight/{name}": p.detach() for name, p in self.parameters.items()}
        tensors |= optimizer_state.moments(self.parameters, self.optimizer)
        save_file({name: t.contiguous() for name, t in tensors.items()}, directory / CRITIC)

    def load(self, checkpoint: Path, *, moments: bool = True) -> None:
        """Load the critic. Raises JobFailed, naming a tensor, if the checkpoint has none or another one."""
        try:
            tensors = load_file(checkpoint / CRITIC)
        except (OSError, SafetensorError) as error:
            raise JobFailed(f"checkpoint {checkpoint} has no usable critic: {error}") from error
        saved = {name.removeprefix("weight/"): t for name, t in tensors.items() if name.startswith("weight/")}
        own = {name: p.shape for name, p in self.parameters.items()}
        if odd := difference({name: t.shape for name, t in saved.items()}, own):
            raise JobFailed(f"critic of checkpoint {checkpoint} does not fit: {odd}")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(saved[name])
        if moments:
            optimizer_state.load_moments(tensors, self.parameters, self.optimizer)


def critic_columns(micros: list[MicroBatch]) -> dict[str, Tensor]:
    """Return the values before the batch and their targets; empty without a critic."""
    values = [micro.values_M for micro in micros if micro.values_M is not None]
    returns = [micro.returns_M for micro in micros if micro.returns_M is not None]
    parts = {"values": values, "returns": returns}
    return {name: torch.cat(found) if found else torch.empty(0) for name, found in parts.items()}


def critic_metrics(columns: Mapping[str, F64], results: list[dict[str, float]]) -> dict[str, float]:
    """loss/value, critic/grad_norm, and critic/explained_variance of the values before the batch."""
    return {
        "loss/value": sum(r["value"] for r in results) / len(results),
        "critic/grad_norm": max(r["critic_norm"] for r in results),
        **explained_variance("critic", columns["values"], columns["returns"]),
    }
