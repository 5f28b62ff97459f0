"""Measures a training step: our learner against a plain torch + transformers (+ peft) loop, in one process.

    python -m loadtest.trainer_cost [--groups 4] [--size 8] [--repeats 3] [--lora] [--dtype bfloat16] [--device cuda]

One GRPO step (clipped ratio, AdamW, gradient clipping) on the same batch and the same weights, four ways:

    plain padded    micro-batches of 16 shuffled samples, prompts padded left and answers right, as trainers commonly do
    plain packed    a token budget, sequences one after the other, one causal attention call for each
    ours packed     our learner without shared prefixes
    ours shared     our learner as it is: a group's prompt is computed once

Lengths are those of GSM8K's training rows, four characters a token: a group has one question, and as answers the
worked solutions of other questions. Prints tokens of the batch per CPU-second (per second on a GPU, synchronised),
medians over interleaved repetitions, and their ratios; exit status 1 if a target is missed. All of them get the same
gradient norm (to a thousandth; to a tenth in bfloat16), and losses that differ by no more than that, or the script
fails.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from examples.models.make_tiny import tiny_tokenizer
from loadtest.support.machine import verdict
from opentinker.envs.builtin import gsm8k
from opentinker.services.trainer.batch import micro_batch
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.nn.layout import layout
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.trajectories import Group, Trajectory
from tests.support.factories import group_of, trajectory_of

CHARACTERS_PER_TOKEN = 4
VOCABULARY = 16_384
BUDGET = 4096
"""Tokens per micro-batch of what packs."""
ROWS = 16
"""Samples per micro-batch of what pads."""
TARGETS = {"plain packed": 1.0, "plain padded": 1.5}
"""Of `ours shared`, in tokens per second."""
VERSION = WeightVersion(1, 0)


def make_model(directory: Path) -> Path:
    """A random Qwen3 of 16M parameters: small, but with a vocabulary and layers that cost what they should."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def make_batch(groups: int, size: int) -> list[Group]:
    """Random ids of GSM8K's lengths, rewards of 0 and 1; logprobs of about a random model's."""
    dice, rows = np.random.default_rng(0), gsm8k.read("train")

    def tokens(text: str) -> list[int]:
        count = max(1, len(text) // CHARACTERS_PER_TOKEN)
        return dice.integers(3, VOCABULARY, count).tolist()  # type: ignore[no-any-return]

    made = []
    for g in range(groups):
        prompt = tokens(f"{rows[dice.integers(len(rows))].question}\n\n{gsm8k.INSTRUCTION}")
        trajectories = []
        for index in range(size):
            answer = tokens(rows[dice.integers(len(rows))].answer)
            mask = [0] * len(prompt) + [1] * len(answer)
            reward = float(dice.integers(2))
            trajectories.append(
                trajectory_of([*prompt, *answer], mask, reward=reward, logprobs=-9.7, version=VERSION, index=index)
            )
        made.append(group_of(trajectories, g))
    return made


class Plain:
    """The loop that one would write: AutoModelForCausalLM, logits where needed, AdamW. `step` gives (loss, norm)."""

    def __init__(self, spec: JobSpec, device: str, *, packed: bool) -> None:
        self.packed, self.device = packed, device
        self.half = spec.model.dtype == "bfloat16"
        lora = spec.model.lora
        dtype = torch.bfloat16 if self.half and lora is not None else torch.float32
        torch.manual_seed(spec.train.seed)
        model: Any = AutoModelForCausalLM.from_pretrained(spec.model.base, dtype=dtype).to(device)
        model.set_attn_implementation(PER_SEQUENCE if packed else "sdpa")
        if lora is not None:
            config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, config)
        self.model = model.eval()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=spec.train.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, groups: list[Group]) -> tuple[float, float]:
        samples = [(t, a) for group in groups for t, a in zip(group.trajectories, _advantages(group), strict=True)]
        count = sum(int(t.mask.sum()) for t, _ in samples)
        total = 0.0
        for part in self._micro_batches(samples):
            with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.half):
                logprobs, old, advantages = (self._pack if self.packed else self._pad)(part)
            ratio = (logprobs - old).exp()
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm.item()

    def _micro_batches(self, samples: list[tuple[Trajectory, float]]) -> Iterator[list[tuple[Trajectory, float]]]:
        if not self.packed:
            order = np.random.default_rng(0).permutation(len(samples))
            for start in range(0, len(samples), ROWS):
                yield [samples[i] for i in order[start : start + ROWS]]
            return
        part: list[tuple[Trajectory, float]] = []
        for sample in samples:
            if sum(len(t.ids) for t, _ in part) + len(sample[0].ids) > BUDGET:
                yield part
                part = []
            part.append(sample)
        yield part

    def _pad(self, part: list[tuple[Trajectory, float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of every answer position; padding is taken out at the end."""
        answers = [int(t.mask.sum()) for t, _ in part]
        left, right = max(len(t.ids) - n for (t, _), n in zip(part, answers, strict=True)), max(answers)
        ids, seen, asked = (torch.zeros(len(part), left + right, dtype=torch.long) for _ in range(3))
        old, advantages = torch.zeros(len(part), right), torch.zeros(len(part), right)
        for i, ((t, advantage), n) in enumerate(zip(part, answers, strict=True)):
            start = left - (len(t.ids) - n)
            ids[i, start : left + n] = torch.from_numpy(t.ids.astype(np.int64))
            seen[i, start : left + n] = 1
            asked[i, left : left + n] = 1
            old[i, :n] = torch.from_numpy(t.logprobs[-n:].copy())
            advantages[i, :n] = advantage
        ids, seen, wanted = ids.to(self.device), seen.to(self.device), asked[:, left:].bool().to(self.device)
        places = (seen.cumsum(1) - 1).clamp(min=0)
        logits = self.model(
            input_ids=ids, attention_mask=seen, position_ids=places, use_cache=False, logits_to_keep=right + 1
        ).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, left:, None])[..., 0]
        return logprobs[wanted], old.to(self.device)[wanted], advantages.to(self.device)[wanted]

    def _pack(self, part: list[tuple[Trajectory, float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lengths = [len(t.ids) for t, _ in part]
        ids = torch.from_numpy(np.concatenate([t.ids for t, _ in part]).astype(np.int64)).to(self.device)
        mask = torch.from_numpy(np.concatenate([t.mask for t, _ in part]).astype(bool))
        places = torch.cat([torch.arange(n) for n in lengths]).to(self.device)
        targets = mask.nonzero()[:, 0].to(self.device)
        logits = self.model(
            input_ids=ids[None], position_ids=places[None], use_cache=False, logits_to_keep=targets - 1, lengths=lengths
        ).logits[0]
        logprobs = logits.float().log_softmax(-1).gather(-1, ids[targets][:, None])[:, 0]
        old = torch.from_numpy(np.concatenate([t.logprobs for t, _ in part]))[mask].to(self.device)
        spread = torch.cat([torch.full((int(t.mask.sum()),), a) for t, a in part]).to(self.device)
        return logprobs, old, spread


PER_SEQUENCE = "plain_per_sequence"


def per_sequence(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    parts = zip(*(x.split(options["lengths"], 2) for x in (query, key, value)), strict=True)
    attended = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options["scaling"], enable_gqa=True)
        for q, k, v in parts
    ]
    return torch.cat(attended, 2).transpose(1, 2), None


AttentionInterface.register(PER_SEQUENCE, per_sequence)


def _advantages(group: Group) -> list[float]:
    rewards = torch.tensor([t.reward for t in group.trajectories])
    return ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()  # type: ignore[no-any-return]


class Ours:
    def __init__(self, spec: JobSpec, device: str, *, share: bool) -> None:
        self.layout = functools.partial(layout, share_prefixes=share)
        self.learner = RlLearner(spec, device)
        self.learner.load(None)

    def step(self, groups: list[Group]) -> tuple[float, float]:
        with mock.patch.object(micro_batch, "layout", self.layout):
            metrics = self.learner.step(groups, VERSION)
        return metrics["loss/policy"], metrics["grad_norm"]


def seconds_of(device: str) -> float:
    """CPU time of this process; with a GPU, time once it is idle."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(spec: JobSpec, groups: list[Group], device: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of each step, by way; the first step of each is not counted but compared."""
    ways: dict[str, Plain | Ours] = {
        "plain padded": Plain(spec, device, packed=False),
        "plain packed": Plain(spec, device, packed=True),
        "ours packed": Ours(spec, device, share=False),
        "ours shared": Ours(spec, device, share=True),
    }
    found = {name: way.step(groups) for name, way in ways.items()}
    tolerance = 1e-3 if spec.model.dtype == "float32" else 0.1
    for name, (loss, norm) in found.items():
        first, size = found["plain padded"]
        if abs(loss - first) > tolerance * max(1.0, abs(first)) or abs(norm - size) > tolerance * size:
            raise AssertionError(
                f"{name} does other work: loss {loss}, gradient norm {norm} instead of {first}, {size}"
            )
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            began = seconds_of(device)
            way.step(groups)
            seconds[name].append(seconds_of(device) - began)
    return seconds


def report(seconds: dict[str, list[float]], groups: list[Group], device: str) -> bool:
    trajectories = [t for group in groups for t in group.trajectories]
    tokens, sampled = sum(len(t.ids) for t in trajectories), sum(int(t.mask.sum()) for t in trajectories)
    lengths = [len(t.ids) for t in trajectories]
    print(
        f"{len(trajectories)} trajectories, {tokens:,} tokens, {sampled:,} of them sampled; "
        f"length {min(lengths)} to {max(lengths)}, mean {tokens / len(lengths):.0f}"
    )
    unit = "CPU-second" if device == "cpu" else "GPU-second"
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{'':<14} {'s/step':>8} {f'tokens/{unit}':>18} {'x padded':>9} {'x packed':>9}")
    ratios: dict[str, dict[str, float]] = {}
    for name, values in seconds.items():
        ratios[name] = {
            base: statistics.median(b / v for b, v in zip(seconds[base], values, strict=True))
            for base in ("plain padded", "plain packed")
        }
        ours = "".join(f" {ratio:>9.2f}" for ratio in ratios[name].values())
        print(f"{name:<14} {medians[name]:>8.3f} {tokens / medians[name]:>18,.0f}{ours}")
    good = all(ratios["ours shared"][base] >= target for base, target in TARGETS.items())
    wanted = " and ".join(f">= {target} x {base}" for base, target in TARGETS.items())
    return verdict(f"ours shared {wanted}", good)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--size", type=int, default=8, help="trajectories per group")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--lora", action="store_true", help="rank 16 on all linear layers instead of all weights")
    parser.add_argument("--model", help="a model directory; default: a random Qwen3 of 16M parameters")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        base = options.model or str(make_model(Path(directory) / "model"))
        spec = parse_spec(
            {
                "name": "cost",
                "model": {"base": base, "dtype": options.dtype, "lora": {"rank": 16} if options.lora else None},
                "environment": {"name": "gsm8k"},
                "algorithm": {"loss": "ppo", "group_size": options.size, "groups_per_batch": options.groups},
                "train": {"steps": 100, "lr": 1e-6, "tokens_per_micro_batch": BUDGET},
            }
        )
        groups = make_batch(options.groups, options.size)
        seconds = measure(spec, groups, options.device, options.repeats)
    sys.exit(0 if report(seconds, groups, options.device) else 1)


if __name__ == "__main__":
    main()
