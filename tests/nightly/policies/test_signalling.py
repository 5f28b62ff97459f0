"""Two policies learn a code from nothing, with vLLM and torch: together they understand each other, exchanged they do
not, and a listener alone cannot learn from a speaker who does not."""

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

ROOT = Path(__file__).parents[3]
SYMBOLS = "01234567"
JOB_S = 1200.0
ALONE_STEPS = 120
"""As many as two that learn together need."""

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1500)]


def most_likely(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        return str(tokenizer.decode([int(model(ids).logits[0, -1].argmax())]))


def understood(speaker: tuple[Any, Any], listener: tuple[Any, Any]) -> float:
    """Share of the symbols that the listener names after the speaker's likeliest word for them."""
    said = {symbol: most_likely(*speaker, f"{symbol}>") for symbol in SYMBOLS}
    return sum(most_likely(*listener, f"{word}<") == symbol for symbol, word in said.items()) / len(SYMBOLS)


def best_guess(speaker: Any, tokenizer: Any) -> float:
    """Share of the symbols that no listener can exceed who hears one sampled word: sum over words of the largest
    p(word | symbol), over the number of symbols."""
    prompts = [tokenizer(f"{symbol}>", return_tensors="pt").input_ids for symbol in SYMBOLS]
    with torch.no_grad():
        said_SV = torch.stack([speaker(ids).logits[0, -1].double().softmax(-1) for ids in prompts])
    return float(said_SV.max(dim=0).values.sum()) / len(SYMBOLS)


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_a_speaker_and_a_listener_agree_on_a_code(tmp_path: Path, seed: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = tomllib.loads((ROOT / "examples" / "signalling.toml").read_text())
    spec["model"]["base"] = str(make_tiny(tmp_path / "tiny", seed=seed))
    async with Cluster(tmp_path, heavy=True) as cluster:
        job = await cluster.run(parse_spec(spec), JOB_S)
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


async def test_a_listener_learns_little_from_a_speaker_who_is_not_trained(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = tomllib.loads((ROOT / "examples" / "signalling.toml").read_text())
    bases = [make_tiny(tmp_path / f"tiny-{seed}", seed=seed) for seed in (0, 1, 2)]
    for base in bases:
        bound = best_guess(AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base))
        assert 1 / len(SYMBOLS) < bound < 0.5, "whatever the listener does"
    spec["model"]["base"] = str(bases[0])
    spec["policies"]["speaker"] = {"train": {"lr": 0.0}}
    spec["train"]["steps"] = ALONE_STEPS
    async with Cluster(tmp_path, heavy=True) as cluster:
        job = await cluster.run(parse_spec(spec), JOB_S)
        exact = [line["exact"] for line in cluster.lines(part_id(job, "listener"))]
    assert len(exact) == ALONE_STEPS
    print(f"untrained speaker: exact {sum(exact[-20:]) / 20:.3f} in the last 20 steps, at most {max(exact):.3f}")
    assert sum(exact[-20:]) / 20 < 0.5
