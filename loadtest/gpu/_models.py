"""Random models in the shapes of known ones, batches for them, and their learners.

Weights are drawn on the device and written as bfloat16 in Hugging Face layout: what trains or serves them opens a
directory, as in a job.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.models.make_tiny import tiny_tokenizer
from loadtest.gpu._bench import Bench, Skipped
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import Ending, StopReason, WeightVersion
from opentinker.shared.types.trajectories import Group, Span, Trajectory, Turn

VERSION = WeightVersion(1, 0)
FIRST_ID = 3
"""Below are special tokens."""


class Shape(NamedTuple):
    """Dimensions of a Qwen3 model with tied embeddings."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int

    @property
    def matrix_parameters(self) -> int:
        """Weights that each token is multiplied with: those of the layers and of the output head."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.hidden * self.vocabulary

    def operations(self, lengths: list[int]) -> float:
        """Return the floating-point operations of a forward and backward pass: 6 per weight and token, and 12 per head
        dimension and pair of tokens in causal attention, of which half is computed."""
        pairs = sum(length * length for length in lengths) / 2
        return 6.0 * self.matrix_parameters * sum(lengths) + 12.0 * self.layers * self.heads * self.head * pairs


TINY = Shape("tiny", 64, 128, 2, 4, 2, 16, 64)
HALF = Shape("0.5B", 896, 4864, 24, 14, 2, 64, 151_936)
ONE_AND_A_HALF = Shape("1.5B", 1536, 8960, 28, 12, 2, 128, 151_936)
FOUR = Shape("4B", 2560, 9728, 36, 32, 8, 128, 151_936)


def made(bench: Bench, shape: Shape) -> Path:
    """Write a random model of this shape, unless it is there, and return its directory. Raises Skipped if the disk is
    too small for it."""
    directory = bench.place / f"model-{shape.name}"
    if directory.exists():
        return directory
    size, free = 2 * shape.matrix_parameters, shutil.disk_usage(bench.place).free
    if size > 0.95 * free:
        raise Skipped(f"a {shape.name} model takes {size / 1e9:.1f} GB of disk; {free / 1e9:.1f} are free")
    directory.mkdir()
    config = Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head, max_position_embeddings=8192, tie_word_embeddings=True, dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"], bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        names = {name: p.shape for name, p in Qwen3ForCausalLM(config).named_parameters()}
    drawn = torch.Generator(bench.device).manual_seed(0)
    weights = {}
    for name, size in names.items():
        if len(size) == 1:
            weights[name] = torch.ones(size, dtype=torch.bfloat16)
        else:
            normal = torch.randn(size, generator=drawn, device=bench.device, dtype=torch.float32)
            weights[name] = normal.mul_(0.02).bfloat16().cpu()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config.to_dict()))
    tiny_tokenizer(8192).save_pretrained(directory)
    return directory


def batch(shape: Shape, groups: int, size: int, prompt: int, answer: int, seed: int = 0) -> list[Group]:
    """Groups with a shared prompt of about that many tokens, and answers of mixed length up to `answer`."""
    dice = np.random.default_rng(seed)
    found = []
    for g in range(groups):
        start = dice.integers(FIRST_ID, shape.vocabulary, prompt - g % 2)
        rows = []
        for index in range(size):
            said = dice.integers(FIRST_ID, shape.vocabulary, int(dice.integers(answer // 2, answer + 1)))
            rows.append(trajectory([*start, *said], len(start), float(index % 2), shape.vocabulary, index))
        found.append(Group(job="gpu", seq=g, environment="copy_digits", worker="r", trajectories=rows))
    return found


def trajectory(ids: Any, start: int, reward: float, vocabulary: int, index: int, logprobs: Any = None) -> Trajectory:
    """Return one turn that begins at `start`; without `logprobs`, as if it had been drawn evenly."""
    mask = np.arange(len(ids)) >= start
    sampled = np.where(mask, -np.log(vocabulary), 0.0) if logprobs is None else np.r_[np.zeros(start), logprobs]
    return Trajectory(
        index=index,
        attempt=f"a{index}",
        ids_T=np.asarray(ids, dtype="<i4").tobytes(),
        mask_T=mask.astype("u1").tobytes(),
        logprobs_T=sampled.astype("<f4").tobytes(),
        spans=[Span(start, len(ids), VERSION)],
        turns=[Turn(start=start, end=len(ids), stop=StopReason.EOS, reward=reward)],
        ending=Ending.ENV_DONE,
        reward=reward,
    )


def spec_of(bench: Bench, base: Path, **parts: dict[str, Any]) -> JobSpec:
    """Return the spec of a job that trains `base` on the device, with fields of its parts replaced."""
    usual: dict[str, dict[str, Any]] = {
        "model": {"base": str(base), "dtype": "bfloat16"},
        "algorithm": {"loss": "ppo", "group_size": 4, "groups_per_batch": 2},
        "train": {"steps": 100, "lr": 1e-5, "tokens_per_micro_batch": 4096},
        "resources": {"trainer_gpus": int(bench.on_gpu)},
    }
    merged = {name: usual.get(name, {}) | parts.get(name, {}) for name in usual | parts}
    return parse_spec({"name": "gpu", "environment": {"name": "copy_digits"}, **merged})


def learner_of(bench: Bench, base: Path, **parts: dict[str, Any]) -> RlLearner:
    learner = RlLearner(spec_of(bench, base, **parts), bench.device)
    learner.load(None)
    return learner
