"""Trainable weights with optimizer and random state: base class of the torch learners, independent of the loss.

Master weights and optimizer state are float32; with dtype bfloat16 the forward pass runs under autocast and snapshots
and saved models are bfloat16. With LoRA only the adapter trains, travels and is saved; the frozen base is held in the
job's dtype.

A learner accumulates gradients with `backward()`, then calls `set_lr`, `clip`, `require_finite`, and `optimizer_step`
or `discard_gradients`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from peft import get_peft_model_state_dict
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from opentinker.services.trainer.distributed.process_group import ProcessGroup
from opentinker.services.trainer.learners import optimizer_state
from opentinker.services.trainer.learners.base import BUCKET_BYTES, Interrupted, NonFinite
from opentinker.shared.nn import buckets
from opentinker.shared.nn.forward import VISION_ATTENTION, token_scores
from opentinker.shared.nn.layers import float32_head, recompute_layers
from opentinker.shared.nn.layout import Layout, layout
from opentinker.shared.nn.lora import attach_lora, causal_lm, lora_dropouts
from opentinker.shared.nn.models import autocast, load_model, load_tokenizer, refuse_other_model, torch_dtype
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.engines import may_merge
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.swap import Probe


class RandomState:
    """torch's random state, which all learners of a process share.

    In a deterministic job with several policies each has its own state: code that draws numbers or saves the state has
    exclusive use of the generators, in the state in which its policy left them."""

    _generators: ClassVar[threading.Lock] = threading.Lock()
    """Lock of torch's generators, which the whole process shares; held by the learner whose state they have."""

    def __init__(self, *, is_own: bool, cuda: bool) -> None:
        """`is_own` False: the learner is alone in its process, or need not draw the same again."""
        self._is_own, self._cuda = is_own, cuda
        self._state: dict[str, Tensor] | None = None
        """Where the learner's draws go on; None before the first."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Run the body with the learner's random state, after the bodies of other learners."""
        if not self._is_own:
            yield
            return
        with self._generators:
            if self._state is not None:
                optimizer_state.set_rng_state(self._state)
            try:
                yield
            finally:
                self._state = optimizer_state.rng_state(cuda=self._cuda)


class CheckpointTensors(NamedTuple):
    """Tensors of a checkpoint."""

    weights: dict[str, Tensor]
    """Model or adapter, in the job's dtype."""
    state: dict[str, Tensor]
    """See `optimizer_state`."""


def require_device(device: str) -> None:
    """Raise JobFailed if this process does not have it."""
    if device == "cuda" and not torch.cuda.is_available():
        raise JobFailed("resources.trainer_gpus > 0, but this trainer has no GPU; set it to 0 to train on the CPU")


class PolicyModel:
    """AdamW on one model, on one device; with a process group, the same model on the devices of all its ranks."""

    def __init__(self, spec: JobSpec, device: str = "cpu", process_group: ProcessGroup | None = None) -> None:
        self.spec = spec
        self.device = device
        self.process_group = process_group or ProcessGroup(device=device)
        self.dtype = torch_dtype(spec.model.dtype)
        self.total_steps = spec.train.steps
        """Length of the schedule. With data.epochs the training loop sets it once the data is read."""
        self.steps = 0
        """Batches trained on, over all resumes: the position of the learning-rate schedule."""
        self.probed: list[int] = []
        """Tokens of the last batch with which rollout workers verify that they loaded a version; see `probe`."""
        self.random_state = RandomState(
            is_own=spec.train.deterministic and len(spec.policies) > 1, cuda=self.device == "cuda"
        )
        self._interrupted = threading.Event()

    @property
    def load_device(self) -> str:
        return self.device

    @property
    def plan_device(self) -> str:
        """Device of the layouts that its passes take."""
        return self.device

    def load(self, checkpoint: Path | None) -> None:
        """Load the base model, or the state of a checkpoint directory. Raises JobFailed if either is unusable."""
        with self.random_state.held():
            self._build(checkpoint)
            self._resume(checkpoint)

    def start(self, checkpoint: Path, *, optimizer: bool) -> None:
        """Load the weights of another job's checkpoint, and its moments if `optimizer`; all else as at a first start.

        Raises JobFailed, naming tensors, if it belongs to another model.
        """
        if self.spec.model.lora is None:
            refuse_other_model(str(checkpoint), self.spec.model.base)
        self._build(checkpoint)
        self._load_start(checkpoint, moments=optimizer)

    def _build(self, checkpoint: Path | None) -> None:
        """Build model and optimizer; full weights already come from the checkpoint."""
        spec = self.spec
        require_device(self.device)
        # For the whole process, which trains one job at a time. Operations without a deterministic kernel raise.
        torch.use_deterministic_algorithms(spec.train.deterministic)
        self.tokenizer = load_tokenizer(spec.model.base)
        torch.manual_seed(spec.train.seed)
        if spec.model.lora is None:
            source = spec.model.base if checkpoint is None else str(checkpoint)
            self.model: nn.Module = load_model(
                source, torch.float32, self.load_device, train_vision=spec.model.train_vision
            )
        else:
            self.model = attach_lora(load_model(spec.model.base, self.dtype, self.load_device), spec.model.lora)
        self.causal = causal_lm(self.model)
        if spec.model.fp32_head:
            float32_head(self.causal)
        if spec.train.gradient_checkpointing:
            recompute_layers(self.causal)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.dropouts = lora_dropouts(self.model)
        self.optimizer = self._optimizer()

    def _resume(self, checkpoint: Path | None) -> None:
        """Restore adapter, moments, and finally the random state: nothing may draw from it afterwards."""
        self.steps = 0
        if checkpoint is not None:
            self.steps = optimizer_state.load(checkpoint, self.model, self.parameters, self.optimizer)

    def _load_start(self, checkpoint: Path, *, moments: bool) -> None:
        """Restore from another job's checkpoint: as `_resume`, without random state and step count."""
        self.steps = 0
        optimizer_state.start(checkpoint, self.model, self.parameters, self.optimizer if moments else None)

    def _optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer. Weight decay acts on matrices; norms and biases have none."""
        train = self.spec.train
        matrices = [p for p in self.parameters.values() if p.ndim >= 2]
        vectors = [p for p in self.parameters.values() if p.ndim < 2]
        return torch.optim.AdamW(
            [
                {"params": part, "weight_decay": decay}
                for part, decay in ((matrices, train.weight_decay), (vectors, 0.0))
                if part
            ],
            lr=train.lr,
            betas=(train.beta1, train.beta2),
            eps=1e-8,
            fused=True,
        )

    @property
    def lr_share(self) -> float:
        """Share of the learning rate for the next batch: (batches so far + 1) / warmup_steps, then by train.schedule.

        With x the share of the steps after the warmup that precede this one: constant 1, linear
        1 - (1 - end) x, cosine end + (1 - end) (1 + cos(pi x)) / 2.
        """
        train = self.spec.train
        if self.steps < train.warmup_steps or train.schedule == "constant":
            return min(1.0, (self.steps + 1) / max(1, train.warmup_steps))
        over = min(1.0, (self.steps - train.warmup_steps) / max(1, self.total_steps - train.warmup_steps))
        left = 1.0 - over if train.schedule == "linear" else (1.0 + math.cos(math.pi * over)) / 2.0
        end = train.lr_end or 0.0
        return end + (1.0 - end) * left

    def set_lr(self) -> float:
        """Set and return the next step's learning rate."""
        lr = self.spec.train.lr * self.lr_share
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def forward(
        self, plan: Layout, *, temperature: float = 1.0, entropy_gradient: bool = False, hits: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probability and entropy of every mask-1 token, float32 [M], and with `hits` whether it is the
        likeliest, see `token_scores`."""
        with autocast(self.device, self.dtype):
            return token_scores(
                self.causal, plan, temperature=temperature, entropy_gradient=entropy_gradient, hits=hits
            )

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add to the gradient; `last`: this is the last loss of the optimizer step."""
        loss.backward()

    def clip(self) -> Tensor:
        """Sum the gradient over the ranks and clip its norm; returns the norm before clipping."""
        self.process_group.sum_gradients(self.parameters.values())
        return nn.utils.clip_grad_norm_(list(self.parameters.values()), self.spec.train.grad_clip)

    def require_finite(self, sums: Mapping[str, Tensor], advice: str) -> dict[str, float]:
        """Return losses and norms of the step as floats. Raises NonFinite if one is not finite: then call
        `discard_gradients` instead of `optimizer_step`."""
        result = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
        if not all(abs(value) < float("inf") for value in result.values()):
            said = ", ".join(f"{name} {value}" for name, value in result.items())
            raise NonFinite(f"step refused after {self.steps} steps: {said}; the weights are unchanged. Try {advice}.")
        return result

    def optimizer_step(self) -> None:
        """Apply the gradients and reset them."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def discard_gradients(self) -> None:
        self.optimizer.zero_grad()

    def rollback_point(self) -> Callable[[], None]:
        """Return a function that undoes all later steps."""
        return optimizer_state.rollback_point(self.parameters, self.optimizer)

    @property
    def has_dropout(self) -> bool:
        return self.spec.model.lora is not None and self.spec.model.lora.dropout > 0

    def dropout(self, *, on: bool) -> None:
        for module in self.dropouts:
            module.train(on)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors to save, in the job's dtype: Hugging Face names without tied duplicates, or PEFT names."""
        return self._weights(frozen=True)

    def _weights(self, *, frozen: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield weights. `frozen`: include those of a vision tower that is not trained, which are not published."""
        if self.spec.model.lora is not None:
            state = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        else:
            untied: dict[int, tuple[str, Tensor]] = {}
            for name, tensor in self.causal.state_dict().items():
                untied.setdefault(tensor.data_ptr(), (name, tensor))
            if not frozen:
                still = {p.data_ptr() for p in self.causal.parameters() if not p.requires_grad}
                untied = {place: kept for place, kept in untied.items() if place not in still}
            state = revert_weight_conversion(self.causal, dict(untied.values()))
        for name, tensor in state.items():
            yield name, tensor.detach().to(self.dtype)

    def snapshot(self, version: WeightVersion) -> buckets.Snapshot:
        made = buckets.snapshot(version, self._weights(frozen=False), BUCKET_BYTES, probe=self.probe())
        return replace(made, base_bytes=self.base_bytes())

    def base_bytes(self) -> int:
        """Return the bytes of the weights into which engines may merge the adapter; 0 if they do not."""
        if not may_merge(self.spec):
            return 0
        # of a tensor that ranks share, each has a part alone
        sizes = (getattr(tensor, "ds_numel", tensor.numel()) for tensor in self.causal.parameters())
        return int(sum(sizes) * self.dtype.itemsize)

    def probe(self) -> Probe | None:
        """Return the log-probabilities of `probed` under the weights, without dropout; None before the first batch."""
        if not self.probed:
            return None
        mask = np.arange(len(self.probed)) > 0
        plan = layout([np.array(self.probed)], [mask]).to(torch.device(self.plan_device))
        self.dropout(on=False)
        with torch.no_grad():
            logprobs_M = self._forward_whole(plan)
        return Probe(ids=self.probed, logprobs=logprobs_M.tolist())

    def _forward_whole(self, plan: Layout) -> Tensor:
        """Return log-probabilities [M], computed by the rank that takes the snapshot."""
        return PolicyModel.forward(self, plan)[0]

    def save(self, directory: Path) -> None:
        """Save model (or adapter) and tokenizer at the top level, trainer state below `trainer/`."""
        self.write(directory, self.collect())

    def save_weights(self, directory: Path) -> None:
        """Save model (or adapter) and tokenizer alone."""
        self.write_weights(directory, dict(self.named_weights()))

    def collect(self) -> CheckpointTensors:
        tensors = optimizer_state.moments(self.parameters, self.optimizer)
        if self.has_masters:
            tensors |= {f"master/{name}": parameter.detach() for name, parameter in self.parameters.items()}
        return CheckpointTensors(dict(self.named_weights()), tensors)

    def write_weights(self, directory: Path, weights: dict[str, Tensor]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        optimizer_state.save_model(directory, self.model, weights, self.dtype)
        self.tokenizer.save_pretrained(directory)
        if (sight := getattr(self.causal, VISION_ATTENTION, None)) is not None:
            sight.save(directory)

    def write(self, directory: Path, saved: CheckpointTensors) -> None:
        self.write_weights(directory, saved.weights)
        with self.random_state.held():
            optimizer_state.save(directory, saved.state, self.steps, cuda=self.device == "cuda")

    @property
    def has_masters(self) -> bool:
        """Return whether the saved model has a lower precision than the trained weights."""
        return bool(self.dtype != torch.float32)

    def interrupt(self) -> None:
        """Request an interruption, which takes effect at the next `raise_if_interrupted`."""
        self._interrupted.set()

    def raise_if_interrupted(self, *, changes: bool = True) -> None:
        """Raise Interrupted after `interrupt`; called between micro-batches.

        Ranks that share weights or optimizer need each other to save their state: there, work that changes anything
        completes, and any other (`changes` false) is interrupted on all of them at the same place.
        """
        asked, shares = self._interrupted.is_set(), self.spec.train.parallel != "data"
        if shares:
            asked = not changes and bool(self.process_group.max_across_ranks(int(asked)))
        if asked:
            raise Interrupted("the job was cancelled", alike=shares)

    @contextmanager
    def undo_if_interrupted(self) -> Iterator[None]:
        """Undo an interrupted step: discard the gradient and restore the random state."""
        rng_state = optimizer_state.rng_state(cuda=self.device == "cuda")
        try:
            yield
        except Interrupted:
            self.discard_gradients()
            optimizer_state.set_rng_state(rng_state)
            raise

    def close(self) -> None:
        """Do nothing: only this process holds resources; the owner of the process group leaves it."""
