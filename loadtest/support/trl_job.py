"""Trains the job of an example with TRL's GRPOTrainer: `python -m loadtest.support.trl_job EXAMPLE STEPS TARGET LOG`.

The same model, prompts, rewards, group size, groups per batch, rate and sampling, in one process. LOG gets a JSON line
per step: `time`, `exact` and `tokens` (sampled). It ends after STEPS, or when the mean `exact` of ten steps is TARGET.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import orjson
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from opentinker.envs.base import Action
from opentinker.envs.registry import make
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import StopReason

with mock.patch("trl.import_utils.is_vllm_available", return_value=False):  # generation is transformers' own
    from trl import GRPOConfig, GRPOTrainer

WINDOW = 10
"""Steps that the target is a mean of, as in `train.target`."""


class Task:
    """An environment of one turn as prompts and a reward function."""

    def __init__(self, spec: JobSpec, tokenizer: Any) -> None:
        self._spec, self._tokenizer = spec, tokenizer
        self.__name__ = "reward"
        self.exact: float = 0.0
        self.tokens = 0

    def prompts(self, count: int) -> Dataset:
        return Dataset.from_list([{"prompt": self._text(row), "row": row} for row in range(count)])

    def _text(self, row: int) -> str:
        messages: Any = asyncio.run(self._environment().open(row, 0))
        if self._spec.model.chat_template == "plain":
            return "".join(message.content for message in messages)
        chat = [{"role": message.role, "content": message.content} for message in messages]
        return str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    def _environment(self) -> Any:
        return make(self._spec.environment.name, self._spec.environment.config)

    def __call__(self, completion_ids: Sequence[list[int]], row: Sequence[int], **others: object) -> list[float]:
        """Return the rewards and keep the mean of `exact`, and how many tokens were sampled."""
        played = asyncio.run(self._play(completion_ids, row))
        self.exact = sum(exact for _, exact in played) / len(played)
        self.tokens = sum(map(len, completion_ids))
        return [reward for reward, _ in played]

    async def _play(self, answers: Sequence[list[int]], rows: Sequence[int]) -> list[tuple[float, float]]:
        seen = []
        for ids, row in zip(answers, rows, strict=True):
            environment = self._environment()
            await environment.open(row, 0)
            ended = bool(ids) and ids[-1] == self._tokenizer.eos_token_id
            said = self._tokenizer.decode(ids[:-1] if ended else ids)
            stop = StopReason.EOS if ended else StopReason.LENGTH
            step = await environment.step(Action(text=said, stop=stop, turn=0))
            seen.append((step.reward, float(step.metrics.get("exact", 0.0))))
        return seen


class Log(TrainerCallback):  # type: ignore[misc]
    """Writes a line per step and ends the training at the target."""

    def __init__(self, task: Task, path: Path, target: float) -> None:
        self._task, self._path, self._target = task, path, target
        self._lines: list[Mapping[str, float]] = []

    def on_step_end(self, _args: object, _state: object, control: Any, **_: object) -> None:
        self._lines.append({"time": time.time(), "exact": self._task.exact, "tokens": self._task.tokens})
        with self._path.open("ab") as file:
            file.write(orjson.dumps(self._lines[-1]) + b"\n")
        last = [line["exact"] for line in self._lines[-WINDOW:]]
        control.should_training_stop |= len(last) == WINDOW and sum(last) / WINDOW >= self._target


def adapter_of(spec: JobSpec) -> Any:
    from peft import LoraConfig

    lora = spec.model.lora
    if lora is None:
        return None
    return LoraConfig(r=lora.rank, lora_alpha=int(lora.alpha), target_modules="all-linear", task_type="CAUSAL_LM")


def main() -> None:
    example, steps, target, log = sys.argv[1:]
    spec = parse_spec(tomllib.loads(Path(example).read_text()))
    tokenizer = AutoTokenizer.from_pretrained(spec.model.base)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    task = Task(spec, tokenizer)
    algorithm, train = spec.algorithm, spec.train
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            max_steps=int(steps),
            per_device_train_batch_size=algorithm.group_size * algorithm.groups_per_batch,
            num_generations=algorithm.group_size,
            max_completion_length=spec.rollout.max_tokens,
            temperature=spec.rollout.temperature,
            learning_rate=train.lr,
            warmup_steps=train.warmup_steps,
            lr_scheduler_type="constant_with_warmup",
            adam_beta1=train.beta1,
            adam_beta2=train.beta2,
            weight_decay=train.weight_decay,
            max_grad_norm=train.grad_clip,
            beta=0.0,
            seed=0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(spec.model.base, dtype="float32"),
            reward_funcs=task,
            args=config,
            train_dataset=task.prompts(int(steps) * algorithm.groups_per_batch),
            processing_class=tokenizer,
            peft_config=adapter_of(spec),
            callbacks=[Log(task, Path(log), float(target))],
        )
        trainer.train()


if __name__ == "__main__":
    main()
