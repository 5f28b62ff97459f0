"""A model plays against its own past versions, with vLLM and torch: the words of a member are those of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.models.make_tiny import make_tiny
from opentinker.shared.spec import parse_spec
from opentinker.shared.types.core import part_id
from tests.support.cluster import Cluster

STEPS, EVERY, BATCH = 12, 3, 4
TOLERANCE = 2e-3
"""Of a logprob; those in the files have four decimals."""

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]


def weights(base: Path, checkpoint: Path | None, lora: bool) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if checkpoint is None or lora:
        model = AutoModelForCausalLM.from_pretrained(base)
        return model if checkpoint is None else PeftModel.from_pretrained(model, checkpoint)
    return AutoModelForCausalLM.from_pretrained(checkpoint)


def sampled(model: Any, tokens: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the logprobs of the sampled tokens: as the engine told, and by one forward pass."""
    with torch.no_grad():
        found = model(torch.tensor([tokens["ids"]])).logits[0].double().log_softmax(-1)
    places = [place for place, mask in enumerate(tokens["mask"]) if mask]
    return [tokens["logprobs"][at] for at in places], [float(found[at - 1, tokens["ids"][at]]) for at in places]


@pytest.mark.parametrize("lora", [False, True])
async def test_a_member_speaks_with_the_weights_of_its_checkpoint(tmp_path: Path, lora: bool) -> None:
    tiny = make_tiny(tmp_path / "tiny", norm_scale=3.0)
    model: dict[str, Any] = {"base": str(tiny), "chat_template": "plain"}
    spec = parse_spec(
        {
            "name": "game",
            "model": model | ({"lora": {"rank": 8, "alpha": 16.0}} if lora else {}),
            "environment": {"name": "matching_pennies", "config": {"rules": False}},
            "algorithm": {"group_size": 8, "groups_per_batch": BATCH, "max_staleness": 1},
            "rollout": {"max_tokens": 2, "transcripts": 16},
            "train": {"steps": STEPS, "lr": 2e-3, "checkpoint_every": EVERY, "keep_checkpoints": 20},
            "policies": {"player": {}},
            "seats": {"even": "player", "odd": {"pool": "past"}},
            "pools": {"past": {"policy": "player", "every": EVERY, "latest": 0.2}},
            "match": {"rotate": True},
        }
    )
    async with Cluster(tmp_path, heavy=True) as cluster:
        job = await cluster.run(spec, 600.0)
        part = part_id(job, "player")
        root = cluster.data / "jobs" / part
        manifest = cluster.manifest(part)
        await cluster.trained(job, spec, "player")
    assert [member.version.step for member in manifest.pools["past"]] == [0, 3, 6, 9]
    views = [view for one in cluster.episodes(part) for view in one["views"] if view["policy"].startswith("past@")]
    loaded: dict[int, Any] = {}
    worst: dict[int, float] = {}
    for view in views:
        step = int(view["policy"].rpartition(".")[2])
        if step not in loaded:
            loaded[step] = weights(tiny, root / "checkpoints" / f"step-{step:06d}" if step else None, lora)
        told, computed = sampled(loaded[step], view["tokens"])
        gaps = [abs(one - other) for one, other in zip(told, computed, strict=True)]
        worst[step] = max(worst.get(step, 0.0), *gaps)
    assert len(worst) >= 3 and max(worst.values()) <= TOLERANCE, worst
    assert {view["seat"] for view in views} == {"even", "odd"}
    others = [sampled(loaded[0], view["tokens"]) for view in views if not view["policy"].endswith(".0")]
    assert max(abs(a - b) for told, computed in others for a, b in zip(told, computed, strict=True)) > 20 * TOLERANCE
