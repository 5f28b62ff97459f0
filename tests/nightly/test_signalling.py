"""Two policies learn a code from nothing, with vLLM and torch: together they understand each other, exchanged they do
not."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.models.make_tiny import make_tiny
from opentinker.shared.spec import parse_spec
from opentinker.shared.types.core import part_id
from tests.support.cluster import Cluster

ROOT = Path(__file__).parents[2]
SYMBOLS = "01234567"
JOB_S = 1200.0

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1500)]


def most_likely(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        return str(tokenizer.decode([int(model(ids).logits[0, -1].argmax())]))


def understood(speaker: tuple[Any, Any], listener: tuple[Any, Any]) -> float:
    """Share of the symbols that the listener names after the speaker's likeliest word for them."""
    said = {symbol: most_likely(*speaker, f"{symbol}>") for symbol in SYMBOLS}
    return sum(most_likely(*listener, f"{word}<") == symbol for symbol, word in said.items()) / len(SYMBOLS)


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_a_speaker_and_a_listener_agree_on_a_code(tmp_path: Path, seed: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = tomllib.loads((ROOT / "examples" / "signalling.toml").read_text())
    spec["model"]["base"] = str(make_tiny(tmp_path / "tiny", seed=seed))
    async with Cluster(tmp_path, heavy=True) as cluster:
        job = await cluster.submit(parse_spec(spec))
        await cluster.succeeds(job, JOB_S)
        pair = {}
        for name in ("speaker", "listener"):
            lines = cluster.lines(part_id(job, name))
            exact = [line["exact"] for line in lines[-10:]]
            assert sum(exact) / len(exact) >= 0.9, f"{name}, seed {seed}: {exact}"
            target = await cluster.client.download(part_id(job, name), tmp_path / name)
            pair[name] = (AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target))
        print(f"seed {seed}: {len(lines)} steps")
        assert understood(pair["speaker"], pair["listener"]) >= 0.9
        assert understood(pair["listener"], pair["speaker"]) <= 0.25, "exchanged, they are strangers"
