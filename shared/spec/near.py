"""Suggests the setting that was meant: by its name in other libraries, by its place in the spec, by its spelling; and a
line for a setting that is needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel

from opentinker.shared.types.mistakes import IS_NEEDED, NO_TABLE, UNKNOWN, nearest

BATCH = ["batch_size", "per_device_train_batch_size", "rollout_batch_size", "train_batch_size"]
GROUP = ["n", "n_samples", "n_samples_per_prompt", "num_generations", "num_samples", "rollout_n", "samples_per_prompt"]
LENGTH = ["max_length", "max_model_len", "max_seq_len", "max_seq_length"]
EVERY = ["eval_every", "eval_interval", "eval_steps", "logging_steps", "test_freq"]
SYNONYMS = {
    "algorithm.advantage": ["adv_estimator", "advantage_estimator"],
    "algorithm.clip_high": ["clip_ratio_high", "epsilon_high"],
    "algorithm.clip_low": ["clip_eps", "clip_range", "clip_ratio", "cliprange", "epsilon"],
    "algorithm.entropy_coef": ["ent_coef", "entropy_coeff"],
    "algorithm.group_size": GROUP,
    "algorithm.groups_per_batch": BATCH,
    "algorithm.kl_coef": ["beta", "init_kl_coef", "kl_beta", "kl_coeff", "kl_loss_coef", "kl_penalty"],
    "algorithm.max_staleness": ["async_level", "max_off_policy_steps", "off_policy_steps"],
    "data.batch_size": BATCH,
    "data.epochs": ["epochs", "num_epochs", "num_train_epochs", "total_epochs"],
    "data.max_length": LENGTH,
    "data.path": ["data_path", "dataset", "dataset_name", "train_file"],
    "dpo.beta": ["beta"],
    "environment": ["env"],
    "environment.config": ["env_config"],
    "environment.name": ["env_name"],
    "evaluation.episodes": ["num_episodes"],
    "evaluation.samples": GROUP,
    "model.base": ["base_model", "model_name", "model_name_or_path", "model_path", "path", "pretrained"],
    "model.dtype": ["precision", "torch_dtype"],
    "model.lora": ["adapter", "lora"],
    "model.lora.alpha": ["lora_alpha"],
    "model.lora.dropout": ["lora_dropout"],
    "model.lora.rank": ["lora_r", "lora_rank", "r"],
    "model.lora.target_modules": ["lora_target_modules"],
    "resources.rollout_workers": ["num_workers"],
    "resources.trainer_gpus": ["n_gpus", "num_gpus"],
    "reward_models": ["reward_model"],
    "rollout": ["sampling", "sampling_params"],
    "rollout.context_length": LENGTH,
    "rollout.max_tokens": [
        "max_completion_length",
        "max_gen_len",
        "max_new_tokens",
        "max_response_length",
        "output_length",
        "response_length",
    ],
    "rollout.temperature": ["temp"],
    "start.from": ["checkpoint", "resume_from_checkpoint"],
    "train": ["optim", "optimizer", "trainer", "training"],
    "train.beta1": ["adam_beta1"],
    "train.beta2": ["adam_beta2"],
    "train.checkpoint_every": ["checkpoint_interval", "save_every", "save_freq", "save_interval", "save_steps"],
    "train.grad_clip": ["clip_grad", "gradient_clipping", "max_grad_norm"],
    "train.keep_checkpoints": ["max_checkpoints", "save_total_limit"],
    "train.lr": ["actor_learning_rate", "actor_lr", "learning_rate"],
    "train.schedule": ["lr_scheduler", "lr_scheduler_type", "scheduler"],
    "train.steps": [
        "epochs",
        "max_steps",
        "num_epochs",
        "num_steps",
        "num_train_epochs",
        "total_epochs",
        "total_steps",
        "total_training_steps",
    ],
    "train.tokens_per_micro_batch": ["max_tokens_per_gpu"],
    "train.warmup_steps": ["lr_warmup_steps", "num_warmup_steps", "warmup"],
    "train.weight_decay": ["wd"],
    "validation": ["eval"],
    "validation.every": EVERY,
    "data.validate_every": EVERY,
}
"""Our settings -> what TRL, verl, OpenRLHF, prime-rl, peft and transformers call them; of two settings with one foreign
name, the first that the kind of job has is meant."""
EXAMPLES = {
    "name": 'name = "first run"',
    "model": 'model = { base = "Qwen/Qwen3-0.6B" }',
    "environment": 'environment = { name = "gsm8k" }',
    "train": "train = { steps = 100 }",
    "data": 'data = { path = "rows.jsonl" }',
    "model.base": 'base = "Qwen/Qwen3-0.6B"',
    "environment.name": 'name = "gsm8k"',
    "train.steps": "steps = 100",
    "data.path": 'path = "rows.jsonl"',
    "start.from": 'from = "j-0123456789@latest"',
}
"""Example lines of TOML for required settings."""


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
    """The path of the setting that `field` probably means. `paths`: all settings, without numbers of lists and names of
    policies, seats and pools."""
    *above, key = field.split(".")
    part: list[str] = []
    for name in above:
        part += [name] if ".".join([*part, name]) in paths else []
    prefix = "".join(f"{name}." for name in part)
    beside = [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]
    beside = [name for name in beside if "." not in name]
    called = key.lower().replace("-", "_")
    if synonym := next((path for path, names in SYNONYMS.items() if called in names and path in paths), None):
        of_policy = above[:2] if above[:1] == ["policies"] and f"policies.{synonym}" in paths else []
        return ".".join([*of_policy, synonym])
    if near := nearest(key, beside):
        return ".".join([*above, near])
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


def with_example(one: dict[str, Any]) -> dict[str, Any]:
    """Add an example to a mistake about a missing field."""
    example = EXAMPLES.get(one["field"])
    if example is None or not one["problem"].startswith((IS_NEEDED, NO_TABLE)):
        return one
    return {**one, "problem": f"{one['problem']}, e.g. {example}", "suggestion": example}
