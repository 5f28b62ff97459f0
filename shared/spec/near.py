"""Which setting of a job spec was meant: by what other libraries call it, by where it stands, by its spelling."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel

from opentinker.shared.types.mistakes import UNKNOWN, nearest

BATCH = ("algorithm.groups_per_batch", "data.batch_size")
GROUP = ("algorithm.group_size", "evaluation.samples")
TOKENS = ("rollout.max_tokens",)
LENGTH = ("data.max_length", "rollout.context_length")
EVERY = ("validation.every", "data.validate_every")
ROWS = ("data.path",)
SYNONYMS: dict[str, tuple[str, ...]] = {
    "actor_learning_rate": ("train.lr",),
    "actor_lr": ("train.lr",),
    "adam_beta1": ("train.beta1",),
    "adam_beta2": ("train.beta2",),
    "adapter": ("model.lora",),
    "adv_estimator": ("algorithm.advantage",),
    "advantage_estimator": ("algorithm.advantage",),
    "async_level": ("algorithm.max_staleness",),
    "base_model": ("model.base",),
    "batch_size": BATCH,
    "beta": ("algorithm.kl_coef", "dpo.beta"),
    "checkpoint": ("start.from",),
    "checkpoint_interval": ("train.checkpoint_every",),
    "clip_eps": ("algorithm.clip_low",),
    "clip_grad": ("train.grad_clip",),
    "clip_range": ("algorithm.clip_low",),
    "clip_ratio": ("algorithm.clip_low",),
    "clip_ratio_high": ("algorithm.clip_high",),
    "cliprange": ("algorithm.clip_low",),
    "data_path": ROWS,
    "dataset": ROWS,
    "dataset_name": ROWS,
    "ent_coef": ("algorithm.entropy_coef",),
    "entropy_coeff": ("algorithm.entropy_coef",),
    "env": ("environment",),
    "env_config": ("environment.config",),
    "env_name": ("environment.name",),
    "epochs": ("data.epochs", "train.steps"),
    "epsilon": ("algorithm.clip_low",),
    "epsilon_high": ("algorithm.clip_high",),
    "eval": ("validation",),
    "eval_every": EVERY,
    "eval_interval": EVERY,
    "eval_steps": EVERY,
    "gradient_clipping": ("train.grad_clip",),
    "init_kl_coef": ("algorithm.kl_coef",),
    "kl_beta": ("algorithm.kl_coef",),
    "kl_coeff": ("algorithm.kl_coef",),
    "kl_loss_coef": ("algorithm.kl_coef",),
    "kl_penalty": ("algorithm.kl_coef",),
    "learning_rate": ("train.lr",),
    "logging_steps": EVERY,
    "lora": ("model.lora",),
    "lora_alpha": ("model.lora.alpha",),
    "lora_dropout": ("model.lora.dropout",),
    "lora_r": ("model.lora.rank",),
    "lora_rank": ("model.lora.rank",),
    "lora_target_modules": ("model.lora.target_modules",),
    "lr_scheduler": ("train.schedule",),
    "lr_scheduler_type": ("train.schedule",),
    "lr_warmup_steps": ("train.warmup_steps",),
    "max_checkpoints": ("train.keep_checkpoints",),
    "max_completion_length": TOKENS,
    "max_gen_len": TOKENS,
    "max_grad_norm": ("train.grad_clip",),
    "max_length": LENGTH,
    "max_model_len": LENGTH,
    "max_new_tokens": TOKENS,
    "max_off_policy_steps": ("algorithm.max_staleness",),
    "max_response_length": TOKENS,
    "max_seq_len": LENGTH,
    "max_seq_length": LENGTH,
    "max_steps": ("train.steps",),
    "max_tokens_per_gpu": ("train.tokens_per_micro_batch",),
    "model_name": ("model.base",),
    "model_name_or_path": ("model.base",),
    "model_path": ("model.base",),
    "n": GROUP,
    "n_gpus": ("resources.trainer_gpus",),
    "n_samples": GROUP,
    "n_samples_per_prompt": GROUP,
    "num_episodes": ("evaluation.episodes",),
    "num_epochs": ("data.epochs", "train.steps"),
    "num_generations": GROUP,
    "num_gpus": ("resources.trainer_gpus",),
    "num_samples": GROUP,
    "num_steps": ("train.steps",),
    "num_train_epochs": ("data.epochs", "train.steps"),
    "num_warmup_steps": ("train.warmup_steps",),
    "num_workers": ("resources.rollout_workers",),
    "off_policy_steps": ("algorithm.max_staleness",),
    "optim": ("train",),
    "optimizer": ("train",),
    "output_length": TOKENS,
    "path": ("model.base",),
    "per_device_train_batch_size": BATCH,
    "precision": ("model.dtype",),
    "pretrained": ("model.base",),
    "r": ("model.lora.rank",),
    "response_length": TOKENS,
    "resume_from_checkpoint": ("start.from",),
    "reward_model": ("reward_models",),
    "rollout_batch_size": BATCH,
    "rollout_n": GROUP,
    "sampling": ("rollout",),
    "sampling_params": ("rollout",),
    "samples_per_prompt": GROUP,
    "save_every": ("train.checkpoint_every",),
    "save_freq": ("train.checkpoint_every",),
    "save_interval": ("train.checkpoint_every",),
    "save_steps": ("train.checkpoint_every",),
    "save_total_limit": ("train.keep_checkpoints",),
    "scheduler": ("train.schedule",),
    "temp": ("rollout.temperature",),
    "test_freq": EVERY,
    "torch_dtype": ("model.dtype",),
    "total_epochs": ("data.epochs", "train.steps"),
    "total_steps": ("train.steps",),
    "total_training_steps": ("train.steps",),
    "train_batch_size": BATCH,
    "train_file": ROWS,
    "trainer": ("train",),
    "training": ("train",),
    "warmup": ("train.warmup_steps",),
    "wd": ("train.weight_decay",),
}
"""Names of TRL, verl, OpenRLHF, prime-rl, peft and transformers -> ours; the first that the kind of job has."""


def with_suggestions(
    mistakes: Iterable[dict[str, Any]], root: type[BaseModel], absent: set[str]
) -> list[dict[str, Any]]:
    """Unknown settings say which one was meant, where one is near. `absent`: parts that this kind of job lacks."""
    paths = [path for path in paths_of(root) if path.partition(".")[0] not in absent]
    return [_with_suggestion(mistake, paths) if mistake["problem"] == UNKNOWN else mistake for mistake in mistakes]


def _with_suggestion(mistake: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    near = meant(mistake["field"], paths)
    return mistake if near is None else {**mistake, "problem": f"{UNKNOWN}; did you mean {near}?", "suggestion": near}


def meant(field: str, paths: list[str]) -> str | None:
    """The path of the setting that `field` probably means. `paths`: all settings, without numbers of lists."""
    *above, key = field.split(".")
    part = ".".join(name for name in above if not name.isdecimal())
    prefix = f"{part}." if part else ""
    beside = {path.removeprefix(prefix): path for path in paths if path.startswith(prefix)}
    beside = {name: path for name, path in beside.items() if "." not in name}
    called = key.lower().replace("-", "_")
    if synonym := next((path for path in SYNONYMS.get(called, ()) if path in paths), None):
        return synonym
    if near := nearest(key, list(beside)):
        return beside[near]
    elsewhere: dict[str, str] = {}
    for path in paths:
        elsewhere.setdefault(path.rpartition(".")[2], path)
    near = nearest(key, list(elsewhere))
    return elsewhere[near] if near else None


def paths_of(kind: type[BaseModel], above: str = "") -> list[str]:
    """Return the path of every setting, tables included."""
    found = []
    for name, info in kind.model_fields.items():
        path = f"{above}{info.alias or name}"
        found.append(path)
        for inner in _tables(info.annotation):
            found += paths_of(inner, f"{path}.")
    return found


def _tables(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for inner in get_args(annotation) for table in _tables(inner)]
