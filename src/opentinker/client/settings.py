"""Translates the configs of published programs (dict, OmegaConf, namespace) into a job spec.

Every key that says how to train is used, or named in `unused` and so told to the user; none is silently dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opentinker.client.utils.utils import tolerant_merge_dicts

MISSING = object()
VALIDATION = 50
"""Episodes of an evaluation."""
PRESETS = {"gae": "ppo", "ppo": "ppo", "grpo": "grpo", "grpo_per_step": "grpo", "rloo": "rloo"} | {
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp",  # with the mean of its group taken off, see _algorithm
}
"""`adv_estimator` -> our preset."""
KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
TALK = frozenset(
    {"project_name", "experiment_name", "logger_backends", "scheduler_url", "scheduler_api_key"}
    | {"wandb_key", "num_gpus"}
    | {
        "enable_tracing",
        "weave_project",
        "num_workers",
        "agent_num_workers",
        "interaction",
        "env_endpoint",
        "env_shards",
    }
    | {"num_steps", "num_epochs", "save_freq", "test_freq", "max_steps", "data_path", "val_data_path", "data_paths"}
    | {"val_data_paths", "game", "hydra", "board_size", "max_total_steps", "game_kwargs"}
)
"""Keys that are read elsewhere, or say nothing about training."""


def pick(config: Any, path: str, default: Any = None) -> Any:
    """`config.a.b`, by item or by attribute; `default` where something on the way is missing or None."""
    at = config
    for name in path.split("."):
        at = _child(at, name)
        if at is MISSING or at is None:
            return default
    return at


def _child(at: Any, name: str) -> Any:
    if isinstance(at, Mapping) or hasattr(at, "keys"):
        return at.get(name, MISSING)
    return getattr(at, name, MISSING)


def plain(value: Any) -> Any:
    """Mappings of any make as dicts."""
    return {str(name): plain(value[name]) for name in value} if hasattr(value, "keys") else value


def names_of(config: Any) -> list[str]:
    if isinstance(config, Mapping) or hasattr(config, "keys"):
        return [str(name) for name in config]
    return list(vars(config)) if hasattr(config, "__dict__") else []


class Settings:
    """One program's settings: what was submitted to the scheduler, overlaid by what `set_config` was given."""

    def __init__(self, *configs: Any) -> None:
        self.configs = [config for config in reversed(configs) if config is not None]
        self.read: set[str] = set()
        self.notes: list[str] = []
        """Sentences for the user: what is done otherwise than a setting says."""

    def get(self, path: str, default: Any = None) -> Any:
        self.read.add(path)
        return self.said(path, default)

    def said(self, path: str, default: Any = None) -> Any:
        """As `get`, and it stays unread."""
        for config in self.configs:
            if (found := pick(config, path, MISSING)) is not MISSING:
                return found
        return default

    def first(self, paths: Iterable[str], default: Any = None) -> Any:
        """Return the first set value among several names of one setting (0 is "none"); others with a different value
        stay unread, and are reported to the user."""
        said = {path: self.said(path) for path in paths}
        given = [value for value in said.values() if value is not None]
        taken = next((value for value in given if value), given[0] if given else default)
        self.read |= {path for path, value in said.items() if not value or value == taken}
        return taken

    def overrides(self) -> dict[str, Any]:
        """Return the settings under `opentinker` of all configs; later ones override earlier ones."""
        self.read.add("opentinker")
        merged: dict[str, Any] = {}
        for config in reversed(self.configs):
            merged = tolerant_merge_dicts(merged, plain(pick(config, "opentinker", {})))
        return merged

    def unused(self) -> list[str]:
        """Return names, and names of parts, that were never read."""
        return sorted({path for config in self.configs for path in self._unread(config)})

    def _unread(self, config: Any) -> list[str]:
        found: list[str] = []
        for name in names_of(config):
            parts = {path for path in self.read if path.startswith(f"{name}.")}
            if name in TALK or name in self.read:
                continue
            inner = [f"{name}.{part}" for part in names_of(pick(config, name))] if parts else [name]
            found += [path for path in inner if path not in self.read]
        return found


def spec_of(
    settings: Settings,
    environment: dict[str, Any],
    *,
    steps: int,
    save_freq: int,
    test_freq: int,
    first_too: bool,
    turns: int = 1,
    val_rows: int | None = VALIDATION,
) -> dict[str, Any]:
    """The job spec as data. `turns`, `val_rows`: where no setting says; None: there is nothing to validate on.

    Raises ValueError naming what is missing or wrong.
    """
    base = settings.first(("model_path", "tokenizer_path"))
    if not base:
        raise ValueError("tokenizer_path is missing: it names the model that is trained")
    spec: dict[str, Any] = {
        "name": str(settings.get("experiment_name") or "game"),
        "kind": "rl",
        "model": {"base": str(base), **_lora(settings)},
        "environment": environment,
        "algorithm": _algorithm(settings),
        "rollout": _rollout(settings, turns),
        "train": {"steps": steps, **_checkpoints(steps, save_freq), **_optimizer(settings)},
    }
    settings.read.add("val_batch_size")
    if test_freq > 0 and val_rows and (episodes := int(settings.get("val_batch_size", val_rows))):
        validation = {"every": test_freq, "episodes": min(episodes, val_rows), "at_start": first_too}
        spec["validation"] = validation | {"config": {"split": "val"}}
    return tolerant_merge_dicts(spec, settings.overrides())


def _lora(settings: Settings) -> dict[str, Any]:
    rank = settings.first(("lora.lora_rank", "lora.rank", "lora_rank"), 0)
    if not rank:
        settings.read |= {"lora.lora_alpha", "lora.alpha", "lora.target_modules"}
        return {}
    lora: dict[str, Any] = {"rank": int(rank), "alpha": float(settings.first(("lora.lora_alpha", "lora.alpha"), 16))}
    targets = settings.get("lora.target_modules", "all-linear")
    if targets != "all-linear":
        lora["target_modules"] = [targets] if isinstance(targets, str) else list(targets)
    return {"lora": lora}


def _algorithm(settings: Settings) -> dict[str, Any]:
    named = "algorithm.adv_estimator" if names_of(settings.said("algorithm")) else "algorithm"
    if settings.said(named) == "agent_loop":  # what the published configs call the way of rolling out
        estimator = str(settings.get("adv_estimator", "gae"))
        settings.read.add(named)
    else:
        estimator = str(settings.first(("adv_estimator", named), "gae"))
    if estimator not in PRESETS:
        raise ValueError(f"adv_estimator = {estimator!r}: must be one of {', '.join(PRESETS)}")
    algorithm: dict[str, Any] = {"name": PRESETS[estimator], "groups_per_batch": int(settings.get("batch_size", 16))}
    if estimator == "reinforce_plus_plus_baseline":
        algorithm["advantage"] = "reinforce_pp_baseline"
    grouped = PRESETS[estimator] in ("grpo", "rloo") or "advantage" in algorithm
    algorithm["group_size"] = int(settings.get("rollout_n", 8)) if grouped else 1
    if settings.said("rollout_n") == algorithm["group_size"]:
        settings.read.add("rollout_n")
    if estimator == "grpo_per_step":
        algorithm["advantage"] = "per_turn"
    kl = settings.first(("kl.kl_loss_coef", "kl.kl_coef"), 0.0)
    if kl:
        in_loss = bool(settings.get("kl.use_kl_loss", PRESETS[estimator] != "ppo"))
        kind = str(settings.first(("kl.kl_loss_type", "kl.kl_penalty"), "low_var_kl"))
        if kind not in KL:
            raise ValueError(f"kl: {kind!r} must be one of {', '.join(KL)}")
        algorithm |= {"kl_coef": float(kl), "kl_in": "loss" if in_loss else "reward", "kl_estimator": KL[kind]}
    return algorithm


def _rollout(settings: Settings, turns: int) -> dict[str, Any]:
    new = int(settings.get("max_new_tokens", 1024))
    said = settings.first(("multi_turn.max_assistant_turns", "multi_turn.max_user_turns"))
    rollout: dict[str, Any] = {
        "max_tokens": new,
        "max_turns": int(said or turns),
        "temperature": float(settings.get("temperature", 1.0)),
        "top_p": float(settings.get("top_p", 1.0)),
    }
    if prompt := settings.get("max_prompt_tokens"):
        rollout["context_length"] = int(prompt) + new
    if per_turn := settings.get("multi_turn.max_tokens_per_turn"):
        rollout["max_tokens_per_turn"] = min(int(per_turn), new)
        if int(per_turn) > new:
            settings.notes.append(
                f"multi_turn.max_tokens_per_turn = {per_turn} is more than max_new_tokens: a turn has {new} at most"
            )
    return rollout


def _checkpoints(steps: int, save_freq: int) -> dict[str, Any]:
    """0 and below: as often as jobs do by themselves. The last step is always saved."""
    return {"checkpoint_every": min(save_freq, steps)} if save_freq > 0 else {}


def _optimizer(settings: Settings) -> dict[str, Any]:
    lr = settings.first(("lr", "actor_lr", "lora.lr"))
    return {} if lr is None else {"lr": float(lr)}
