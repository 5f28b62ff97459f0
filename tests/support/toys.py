"""Models and games that toy engines take. The load test uses them too, so nothing here imports conftest.py, which sets
the tests' own API key for the whole process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from opentinker.shared.spec import JobSpec, parse_spec


def toy_model(directory: Path) -> Path:
    """A model directory without weights: a character tokenizer is all that the toy engine needs."""
    directory.mkdir(parents=True)
    characters = ["<eos>", "<unk>", *"0123456789abcdefghijklmnopqrstuvwxyz =?.,:"]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<eos>", "<unk>"])
    core.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = {"eos_token": "<eos>", "unk_token": "<unk>", "chat_template": template}
    (directory / "tokenizer_config.json").write_bytes(orjson.dumps(config))
    (directory / "config.json").write_bytes(orjson.dumps({"model_type": "qwen3"}))
    return directory


def toy_game(model: Path, **changes: Any) -> JobSpec:
    """A job of a speaker and a listener; `changes` take the place of whole parts."""
    spec: dict[str, Any] = {
        "name": "game",
        "model": {"base": str(model), "chat_template": "plain"},
        "environment": {"name": "signalling", "config": {"rules": False}},
        "algorithm": {"group_size": 2, "groups_per_batch": 2, "max_staleness": 1},
        "rollout": {"engine": "toy", "max_tokens": 4, "transcripts": 2},
        "train": {"learner": "simulated", "steps": 6, "simulated_step_s": 0.02, "checkpoint_every": 3},
    }
    return parse_spec({**spec, **changes})


def toy_evaluation(game: JobSpec, **changes: Any) -> JobSpec:
    """Six episodes of what such a job plays, all of them kept."""
    told = game.model_dump(mode="json")
    spec: dict[str, Any] = {
        "name": "evaluation",
        "kind": "eval",
        "model": told["model"],
        "environment": told["environment"],
        "rollout": {"engine": "toy", "max_tokens": 4},
        "evaluation": {"episodes": 6, "transcripts": 6},
    }
    return parse_spec({**spec, **changes})
