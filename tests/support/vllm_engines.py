"""Helpers for tests of the vLLM engine: small models, the trainer's side of a swap, and reference values of
transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from opentinker.services.rollout_worker.engines.base import Completion, Engine, Sampling
from opentinker.shared.nn.buckets import Snapshot, snapshot
from opentinker.shared.nn.transport import WeightGroup, host_store
from opentinker.shared.spec import LoraSpec
from opentinker.shared.spec.rollout import AdapterServing
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.swap import SwapCommand

if TYPE_CHECKING:
    from opentinker.services.rollout_worker.engines.vllm import VllmEngine

MARKS = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("quiet_end"),
]
"""Of a file whose engines share an event loop."""
EOS = 1
LETTERS = "~$abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
PROMPT = [5, 9, 20, 33]
BUCKET = 16 << 10
TOLERANCE = 1e-4
GROUP_S = 60.0
"""Nobody waits so long for the others where the test passes."""


def build(directory: Path, *, tied: bool, head_dim: int = 32) -> Path:
    """A random 2-layer Qwen3 with peaked outputs that hardly ever ends by itself, and a character tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(LETTERS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=head_dim, max_position_embeddings=1024, tie_word_embeddings=tied,
        initializer_range=0.25, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        model.lm_head.weight[EOS] = 0.0
    model.generation_config = GenerationConfig(eos_token_id=[EOS], pad_token_id=0)
    model.save_pretrained(directory)
    letters = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(LETTERS)}, unk_token="~"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="$", pad_token="~").save_pretrained(directory)
    return directory


def other_weights(base: Path, seed: int) -> Any:
    """The same architecture with new random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0, 0.25)
        model.lm_head.weight[EOS] = 0.0
    return model.eval()


def vllm_engine(
    model: str,
    *,
    eos_ids: Collection[int] = (EOS,),
    lora: LoraSpec | None = None,
    max_adapters: int = 4,
    max_rank: int = 0,
    beside_rank: int = 0,
    serving: AdapterServing = "adapter",
    group_timeout_s: float = 10.0,
    **settings: Any,
) -> VllmEngine:
    """The first engine of a vLLM process. `beside_rank`: not 0 if adapters of this rank will be added to the base."""
    from opentinker.services.rollout_worker.engines.vllm import VllmEngine
    from opentinker.services.rollout_worker.engines.vllm_config import AdapterLimits
    from opentinker.services.rollout_worker.engines.vllm_process import VllmProcess

    rank = max_rank or beside_rank or (lora.rank if lora else 0)
    held = AdapterLimits(rank=rank, at_once=max_adapters, beside_base=beside_rank > 0, serving=serving)
    limits = held if rank else None
    process = VllmProcess(model, adapters=limits, **settings)
    return VllmEngine(process, eos_ids=eos_ids, lora=lora, group_timeout_s=group_timeout_s)


@asynccontextmanager
async def started(model: Path, **settings: Any) -> AsyncIterator[VllmEngine]:
    vllm = vllm_engine(str(model), **settings)
    try:
        await vllm.start()
        yield vllm
    finally:
        await vllm.close()


class Trainer:
    """Rank 0 of the weight group that it forms with some engines."""

    def __init__(self, *engines: Engine, generation: int = 1) -> None:
        self.engines, self.generation = engines, generation
        self.snap: Snapshot | None = None

    async def form(self, patience_s: float = GROUP_S) -> Trainer:
        world = len(self.engines) + 1
        store, port = host_store("127.0.0.1", world, patience_s)
        hosting = asyncio.create_task(
            asyncio.to_thread(
                WeightGroup.join, address="127.0.0.1", port=port, rank=0, world=world, device="cpu",
                timeout_s=patience_s, store=store,
            )
        )  # fmt: skip
        await asyncio.gather(
            *[
                engine.join(
                    SwapCommand(
                        job="job", epoch=0, action="join", generation=self.generation, address="127.0.0.1", port=port,
                        rank=rank, world=world,
                    )
                )
                for rank, engine in enumerate(self.engines, 1)
            ]
        )  # fmt: skip
        self.group = await hosting
        return self

    def command(self, version: WeightVersion, named: Any) -> SwapCommand:
        self.snap = snapshot(version, named, BUCKET)
        return SwapCommand(
            job="job", epoch=0, action="receive", generation=self.generation, version=version,
            manifest=self.snap.manifest, fingerprints=self.snap.fingerprints, bucket_bytes=BUCKET,
        )  # fmt: skip

    async def publish(self, version: WeightVersion, named: Any) -> dict[str, float]:
        command = self.command(version, named)
        assert self.snap is not None
        sending = asyncio.create_task(asyncio.to_thread(self.group.send, self.snap.buckets))
        seconds = await asyncio.gather(*[engine.receive(command) for engine in self.engines])
        await sending
        return seconds[0]


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities after temperature, then top_k, then top_p, as vLLM defines them."""
    logits = logits.double() / sampling.temperature
    if sampling.top_k:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1)
        drop = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        drop[..., -1] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
    return logits.log_softmax(-1)


def expected(model: Any, prompt: list[int], done: Completion, sampling: Sampling) -> torch.Tensor:
    """Logprobs of the completion's tokens by one full forward pass of transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + done.ids])).logits[0, len(prompt) - 1 : -1]
    return distribution(logits, sampling).gather(-1, torch.tensor(done.ids)[:, None])[:, 0]


def worst(done: Completion, logprobs: torch.Tensor, start: int = 0, end: int | None = None) -> float:
    return float((torch.tensor(done.logprobs).double() - logprobs)[start:end].abs().max())
