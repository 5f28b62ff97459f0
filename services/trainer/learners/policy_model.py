"""Trainable weights, their optimizer and random state: what every torch learner stands on, whatever its loss is.

Master weights and optimizer state are float32; with dtype bfloat16 the forward pass runs under autocast and snapshots
and saved models are bfloat16. With LoRA only the adapter trains, travels and is saved; the frozen base is held in the
job's dtype.

A learner adds up gradients with `backward()`, then `set_lr`, `clip`, `finite`, and `apply` or `forget`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from peft import get_peft_model_state_dict
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from opentinker.services.trainer.distributed.process_group import ProcessGroup
from opentinker.services.trainer.learners import optimizer_state
from opentinker.services.trainer.learners.base import BUCKET_BYTES, Interrupted, NonFinite
from opentinker.shared.nn import transport
from opentinker.shared.nn.forward import SIGHT, token_scores
from opentinker.shared.nn.layers import float32_head, recompute_layers
from opentinker.shared.nn.layout import Layout, layout
from opentinker.shared.nn.lora import attach_lora, causal_lm, lora_dropouts
from opentinker.shared.nn.models import autocast, load_model, load_tokenizer, refuse_other_model, torch_dtype
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import Probe, WeightVersion
from opentinker.shared.types.errors import JobFailed


class Saved(NamedTuple):
    """Of a checkpoint."""

    weights: dict[str, Tensor]
    """Model or adapter, in the job's dtype."""
    state: dict[str, Tensor]
    """See `train_state`."""


class PolicyModel:
    """AdamW on one model, on one device; with a gang, the same model on the devices of all its ranks."""

    def __init__(self, spec: JobSpec, device: str = "cpu", gang: ProcessGroup | None = None) -> None:
        self.spec = spec
        self.device = device
        self.gang = gang or ProcessGroup(device=device)
        self.dtype = torch_dtype(spec.model.dtype)
        self.total_steps = spec.train.steps
        """Of the schedule. Where data.epochs say how many, whoever has read the data sets it."""
        self.steps = 0
        """Batches trained on, over all resumes: the position of the learning-rate schedule."""
        self.probed: list[int] = []
        """Tokens of the last batch by which rollout workers check that they have loaded a version; see `probe`."""
        self._interrupted = threading.Event()

    @property
    def loads_on(self) -> str:
        """Where the weights go first."""
        return self.device

    def load(self, checkpoint: Path | None) -> None:
        """The base model, or the state of a checkpoint directory. Raises JobFailed if either is unusable."""
        self._build(checkpoint)
        self._resume(checkpoint)

    def start(self, checkpoint: Path, *, optimizer: bool) -> None:
        """The weights of another job's checkpoint, and its moments if asked for; all else as at a first start.

        Raises JobFailed, naming tensors, if it is of another model.
        """
        if self.spec.model.lora is None:
            refuse_other_model(str(checkpoint), self.spec.model.base)
        self._build(checkpoint)
        self._take_over(checkpoint, moments=optimizer)

    def _build(self, checkpoint: Path | None) -> None:
        """Model and optimizer; full weights are those of the checkpoint already."""
        spec = self.spec
        if self.device == "cuda" and not torch.cuda.is_available():
            raise JobFailed("resources.trainer_gpus > 0, but this trainer has no GPU; set it to 0 to train on the CPU")
        self._set_determinism()
        self.tokenizer = load_tokenizer(spec.model.base)
        torch.manual_seed(spec.train.seed)
        if spec.model.lora is None:
            source = spec.model.base if checkpoint is None else str(checkpoint)
            self.model: nn.Module = load_model(source, torch.float32, self.loads_on)
        else:
            self.model = attach_lora(load_model(spec.model.base, self.dtype, self.loads_on), spec.model.lora)
        self.causal = causal_lm(self.model)
        if spec.model.fp32_head:
            float32_head(self.causal)
        if spec.train.gradient_checkpointing:
            recompute_layers(self.causal)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.dropouts = lora_dropouts(self.model)
        self.optimizer = self._optimizer()

    def _resume(self, checkpoint: Path | None) -> None:
        """Adapter, moments, and last of all the random state: nothing may draw from it afterwards."""
        self.steps = 0
        if checkpoint is not None:
            self.steps = optimizer_state.load(checkpoint, self.model, self.parameters, self.optimizer)

    def _set_determinism(self) -> None:
        """Of the whole process, which trains one job at a time. An operation that has no such kernel raises."""
        torch.use_deterministic_algorithms(self.spec.train.deterministic)

    def _take_over(self, checkpoint: Path, *, moments: bool) -> None:
        """Of `_resume`, what another job's checkpoint gives."""
        self.steps = 0
        optimizer_state.start(checkpoint, self.model, self.parameters, self.optimizer if moments else None)

    def _optimizer(self) -> torch.optim.Optimizer:
        """Weight decay acts on matrices; norms and biases have none."""
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
        """Of the learning rate, for the next batch: (batches so far + 1) / warmup_steps, then by train.schedule.

        With x the share of the steps after the warmup that is over before this one: constant 1, linear
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
        """The next step's learning rate, which is returned."""
        lr = self.spec.train.lr * self.lr_share
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def forward(
        self, plan: Layout, *, temperature: float = 1.0, entropy_gradient: bool = False, hits: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability and entropy of every mask-1 token, float32 [M], and with `hits` whether it is the likeliest,
        see `token_scores`."""
        with autocast(self.device, self.dtype):
            return token_scores(
                self.causal, plan, temperature=temperature, entropy_gradient=entropy_gradient, hits=hits
            )

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds to the gradient; `last`: of this optimizer step."""
        loss.backward()

    def clip(self) -> Tensor:
        """Bound the norm of the gradient, which is summed over the ranks; returns it as it was."""
        self.gang.sum_gradients(self.parameters.values())
        return nn.utils.clip_grad_norm_(list(self.parameters.values()), self.spec.train.grad_clip)

    def finite(self, sums: Mapping[str, Tensor], advice: str) -> dict[str, float]:
        """Losses and norms of the step as numbers. Raises NonFinite if one is none: then `forget`, do not `apply`."""
        result = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
        if not all(abs(value) < float("inf") for value in result.values()):
            said = ", ".join(f"{name} {value}" for name, value in result.items())
            raise NonFinite(f"step refused after {self.steps} steps: {said}; the weights are unchanged. Try {advice}.")
        return result

    def apply(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forget(self) -> None:
        """The gradient."""
        self.optimizer.zero_grad()

    def remember(self) -> Callable[[], None]:
        """Returns what undoes the steps from here on."""
        memory = optimizer_state.remember(self.parameters, self.optimizer)
        return partial(optimizer_state.restore, memory, self.parameters, self.optimizer)

    @property
    def drops_out(self) -> bool:
        return self.spec.model.lora is not None and self.spec.model.lora.dropout > 0

    def dropout(self, *, on: bool) -> None:
        for module in self.dropouts:
            module.train(on)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What is saved, in the job's dtype: Hugging Face names without tied duplicates, or PEFT names."""
        return self._weights(frozen=True)

    def _weights(self, *, frozen: bool) -> Iterator[tuple[str, Tensor]]:
        """`frozen`: what never changes too, which is what a model sees with. It does not travel."""
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

    def snapshot(self, version: WeightVersion) -> transport.Snapshot:
        return transport.snapshot(version, self._weights(frozen=False), BUCKET_BYTES, probe=self.probe())

    def probe(self) -> Probe | None:
        """What the weights, without dropout, say of `probed`; nothing before the first batch."""
        if not self.probed:
            return None
        mask = np.arange(len(self.probed)) > 0
        plan = layout([np.array(self.probed)], [mask]).to(torch.device(self.device))
        self.dropout(on=False)
        with torch.no_grad():
            logprobs_M = self._forward_whole(plan)
        return Probe(ids=self.probed, logprobs=logprobs_M.tolist())

    def _forward_whole(self, plan: Layout) -> Tensor:
        """Log-probabilities [M], computed by whoever takes the snapshot."""
        return PolicyModel.forward(self, plan)[0]

    def save(self, directory: Path) -> None:
        """Model (or adapter) and tokenizer at the top, trainer state below `trainer/`."""
        self.write(directory, self.collect())

    def collect(self) -> Saved:
        """What a checkpoint holds."""
        tensors = optimizer_state.moments(self.parameters, self.optimizer)
        if self.has_masters:
            tensors |= {f"master/{name}": parameter.detach() for name, parameter in self.parameters.items()}
        return Saved(dict(self.named_weights()), tensors)

    def write(self, directory: Path, saved: Saved) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        optimizer_state.save_model(directory, self.model, saved.weights, self.dtype)
        self.tokenizer.save_pretrained(directory)
        if (sight := getattr(self.causal, SIGHT, None)) is not None:
            sight.save(directory)
        optimizer_state.save(directory, saved.state, self.steps, cuda=self.device == "cuda")

    @property
    def has_masters(self) -> bool:
        """What is saved as the model is narrower than what is trained."""
        return bool(self.dtype != torch.float32)

    def interrupt(self) -> None:
        """Takes effect at the next `go_on`."""
        self._interrupted.set()

    def go_on(self, *, changes: bool = True) -> None:
        """Asked between micro-batches. Raises Interrupted.

        Ranks that share weights or optimizer need each other to save what they have: there, work that changes anything
        is done to its end, and any other (`changes` false) is given up by all of them at the same place.
        """
        asked, shares = self._interrupted.is_set(), self.spec.train.parallel != "data"
        if shares:
            asked = not changes and bool(self.gang.most(int(asked)))
        if asked:
            raise Interrupted("the job was cancelled", alike=shares)

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Of a step that is interrupted nothing stays: no gradient, and the random state is as it was."""
        noise = optimizer_state.noise(cuda=self.device == "cuda")
        try:
            yield
        except Interrupted:
            self.forget()
            optimizer_state.put_noise(noise)
            raise

    def close(self) -> None:
        """There is nothing outside this process; a gang is left by whoever joined it."""
