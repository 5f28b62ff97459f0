"""Recipes of tinker-cookbook, unmodified and with arguments alone, against a cluster: torch trains, vLLM samples."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, shared_fixture
from tests.support.tinker import cookbook, environments
from tests.support.tinker.sdk_clients import called, serve

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
]

cluster = shared_fixture(Cluster, heavy=True, bank_jobs=2, bank_tokens=2048)

DRAWS = {"groups_per_batch": 4, "group_size": 4, "max_tokens": 8, "lora_rank": 8, "eval_every": 0}
GAME = {"renderer_name": "role_colon", "batch_size": 2, "group_size": 2, "max_tokens": 8, "eval_every": 0}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "supervised": ("sl_loop", {"batch_size": 8, "lora_rank": 8, "learning_rate": 3e-3}),
    "rl": ("rl_loop", {"batch_size": 4, "group_size": 4, "max_tokens": 8, "lora_rank": 8}),
    "preference": ("preference.dpo.train", {"batch_size": 8}),
    "distillation": (
        "distillation.on_policy_distillation", {**DRAWS, "dataset": "deepmath", "teacher_model": cookbook.NAME}
    ),
    "math": ("math_rl.train", {**DRAWS, "env": "gsm8k"}),
    "game": ("multiplayer_rl.guess_number.train", GAME),
}  # fmt: skip
"""Module and arguments of each; two steps."""


@pytest.fixture
def place(tiny: Path, tmp_path: Path) -> Path:
    return cookbook.working_directory(tmp_path / "place", tiny)


async def cook(cluster: Cluster, base: Path, place: Path, module: str, log: Path, **arguments: Any) -> list[Any]:
    """Run a recipe in its working directory, and return the metrics of its steps."""
    await serve(cluster, base, name=cookbook.NAME, context_length=2048)
    python = await asyncio.to_thread(environments.python_with_cookbook)
    settings = {"model_name": cookbook.NAME, "log_path": log, **arguments}
    argv = ["-m", f"tinker_cookbook.recipes.{module}", *(f"{name}={value}" for name, value in settings.items())]
    await called(cluster.client.url, str(python), *argv, of=place, timeout_s=900.0)
    return list(cookbook.records(log / "metrics.jsonl"))


@pytest.mark.parametrize("recipe", RECIPES)
async def test_a_recipe_trains_and_saves_with_arguments_alone(
    cluster: Cluster, tiny: Path, place: Path, tmp_path: Path, recipe: str
) -> None:
    module, arguments = RECIPES[recipe]
    steps = await cook(cluster, tiny, place, module, tmp_path / "log", max_steps=2, **arguments)
    assert [one["step"] for one in steps][:2] == [0, 1]
    *_, last = cookbook.records(tmp_path / "log" / "checkpoints.jsonl")
    assert last["state_path"].startswith("tinker://") and last["sampler_path"].endswith("sampler_weights/final")
    if recipe == "supervised":
        assert steps[1]["train_mean_nll"] < steps[0]["train_mean_nll"]


async def test_an_asynchronous_recipe_goes_on_from_its_last_checkpoint(
    cluster: Cluster, tiny: Path, place: Path, tmp_path: Path
) -> None:
    options = {**DRAWS, "env": "arithmetic", "max_steps_off_policy": 2, "behavior_if_log_dir_exists": "resume"}
    log = tmp_path / "log"
    first = await cook(cluster, tiny, place, "math_rl.train", log, save_every=1, max_steps=2, **options)
    both = await cook(cluster, tiny, place, "math_rl.train", log, save_every=1, max_steps=4, **options)
    assert first and first[-1]["step"] <= 2 and both[: len(first)] == first and both[-1]["step"] > first[-1]["step"]
    saved = list(cookbook.records(tmp_path / "log" / "checkpoints.jsonl"))
    assert len({one["state_path"].split("/")[2] for one in saved}) == 2, "the second run has a model of its own"
