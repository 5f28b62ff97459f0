"""A vLLM engine whose model is divided among two ranks, next to one that has it whole."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from opentinker.services.rollout_worker.engines.base import EngineLost, Sampling
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trajectories import Span
from tests.conftest import soon, until
from tests.support.learning import plain_logprobs
from tests.support.vllm_engines import (
    MARKS,
    PROMPT,
    TOLERANCE,
    Trainer,
    build,
    expected,
    other_weights,
    started,
    vllm_engine,
    worst,
)

pytestmark = MARKS

IDS = [*PROMPT * 8, 7, 11]
SETTINGS: dict[str, Any] = {"context_length": 512, "max_concurrent": 8, "group_timeout_s": 60.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its one key-value head is on both ranks, and its 63 letters are not divided evenly."""
    torch.manual_seed(0)
    return build(tmp_path_factory.mktemp("untied"), tied=False)


def rank_sums(logs: Sequence[Any]) -> list[list[list[int]]]:
    return [line["rank_sums"] for line in logs if line["event"] == "weights_loaded" and line["rank_sums"]]


def gap(one: Sequence[float], other: Sequence[float]) -> float:
    return float((torch.tensor(one) - torch.tensor(other)).abs().max())


async def test_two_ranks_compute_what_one_computes_before_and_after_swaps(base: Path) -> None:
    models = [other_weights(base, seed) for seed in (1, 2)]
    sampling = Sampling(max_tokens=40, seed=3)
    async with started(base, **SETTINGS) as alone, started(base, tensor_parallel=2, **SETTINGS) as divided:
        trainer = await Trainer(alone, divided).form()
        with capture_logs() as logs:
            for step, model in enumerate((models[0], models[1], models[0])):
                version = WeightVersion(0, step)
                running = asyncio.create_task(divided.generate(f"{step}", PROMPT, Sampling(max_tokens=400, seed=step)))
                if step:
                    await until(lambda: divided._process.users[0] > 0)
                else:
                    await asyncio.gather(running, return_exceptions=True)  # it has no weights yet
                seconds = await trainer.publish(version, model.named_parameters())
                assert set(seconds) == {"transfer", "pause", "load", "resume"}
                scores = [await engine.score(IDS) for engine in (alone, divided)]
                assert [one.version for one in scores] == [version] * 2
                assert gap(scores[0].logprobs, scores[1].logprobs) <= TOLERANCE
                assert gap(scores[1].logprobs, plain_logprobs(model, IDS).tolist()) <= TOLERANCE
                said = [await engine.generate(f"s{step}", PROMPT, sampling) for engine in (alone, divided)]
                assert said[0].ids == said[1].ids and said[1].spans == [Span(0, len(said[1].ids), version)]
                assert gap(said[0].logprobs, said[1].logprobs) <= TOLERANCE
                assert worst(said[1], expected(model, PROMPT, said[1], sampling)) <= TOLERANCE
                if step:
                    done = await running
                    assert [span.version.step for span in done.spans] in ([step - 1, step], [step])
                    assert done.spans[-1].end == len(done.ids)
    first, second, again = rank_sums(logs)
    assert len(first) == 2 and first[0] != first[1], "each rank has a part"
    assert first == again and first != second


@pytest.mark.nightly
async def test_a_request_in_flight_continues_with_the_next_version_on_both_ranks(base: Path) -> None:
    older, newer = (other_weights(base, seed) for seed in (1, 2))
    sampling = Sampling(max_tokens=460, seed=7)
    async with started(base, tensor_parallel=2, **SETTINGS) as vllm:
        trainer = await Trainer(vllm).form()
        await trainer.publish(WeightVersion(0, 0), older.named_parameters())
        seen: list[int] = []
        running = asyncio.create_task(vllm.generate("r", PROMPT, sampling, lambda ids, *_: seen.extend(ids)))
        await until(lambda: len(seen) > 1)
        await trainer.publish(WeightVersion(0, 1), newer.named_parameters())
        done = await soon(running)
        old, new = done.spans
        assert (old.start, old.version, new.version, new.end) == (
            0,
            WeightVersion(0, 0),
            WeightVersion(0, 1),
            len(done.ids),
        )
        assert 1 < old.end == new.start < len(done.ids)
        assert worst(done, expected(older, PROMPT, done, sampling), 0, old.end) <= TOLERANCE
        assert worst(done, expected(newer, PROMPT, done, sampling), new.start) <= TOLERANCE
        assert worst(done, expected(older, PROMPT, done, sampling), new.start) > 0.1, "the weights should differ"


@pytest.mark.nightly
async def test_a_rank_that_loads_something_else_loses_the_engine(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked from this process, with what it has patched."""
    from opentinker.services.rollout_worker.engines.shards import SharedBuckets

    seen = SharedBuckets.map

    def wrong(self: SharedBuckets, place: str, sizes: Sequence[int]) -> list[torch.Tensor]:
        buckets = [bucket.clone() for bucket in seen(self, place, sizes)]
        buckets[-1][-4] ^= 1  # one bit of a weight that this rank uses
        return buckets

    monkeypatch.setattr(SharedBuckets, "map", wrong)
    async with started(base, tensor_parallel=2, **SETTINGS) as vllm:
        trainer = await Trainer(vllm).form()
        with pytest.raises(EngineLost, match=r"rank 1|2 ranks together do not hold the weights that were sent"):
            await trainer.publish(WeightVersion(0, 0), other_weights(base, 1).named_parameters())
        assert vllm.version is None


@pytest.mark.nightly
async def test_an_adapter_is_served_by_two_ranks(base: Path) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    lora = LoraSpec(rank=4, alpha=8.0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    async with started(base, tensor_parallel=2, lora=lora, **SETTINGS) as vllm:
        trainer = await Trainer(vllm).form()
        for step in (1, 2):
            torch.manual_seed(step)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if "lora_B" in name:
                        weight.normal_(0, 0.1 * step)
            await trainer.publish(WeightVersion(0, step), get_peft_model_state_dict(model).items())
            scores = await vllm.score(IDS)
            assert scores.version == WeightVersion(0, step)
            assert gap(scores.logprobs, plain_logprobs(model, IDS).tolist()) <= TOLERANCE


async def test_an_engine_of_two_ranks_reads_a_checkpoint_and_is_lost_with_one_of_them(
    base: Path, tmp_path: Path
) -> None:
    model = other_weights(base, 4)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    async with started(base, tensor_parallel=2, **SETTINGS) as vllm:
        with capture_logs() as logs:
            await vllm.load(WeightVersion(1, 4), tmp_path)
        assert len(rank_sums(logs)) == 1
        assert gap((await vllm.score(IDS)).logprobs, plain_logprobs(model, IDS).tolist()) <= TOLERANCE
        ranks = [pid for pid in descendants() if "Worker_TP" in command(pid)]
        assert len(ranks) == 2
        watching = asyncio.create_task(vllm.watch())
        running = asyncio.create_task(vllm.generate("running", PROMPT, Sampling(max_tokens=400, seed=1)))
        await until(lambda: vllm._process.users[0] > 0)
        os.kill(ranks[1], signal.SIGKILL)
        with pytest.raises(EngineLost, match="dead"):
            await soon(watching)
        with pytest.raises(EngineLost, match="dead"):
            await soon(running)
    await until(lambda: not any("Worker_TP" in command(pid) for pid in descendants()))


async def test_a_model_that_cannot_be_divided_is_refused_by_name(base: Path) -> None:
    with pytest.raises(JobFailed, match="has 2 attention heads, which 3 ranks cannot share equally"):
        await vllm_engine(str(base), tensor_parallel=3).start()


def descendants() -> list[int]:
    found, waiting = [], [os.getpid()]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            try:
                children = [int(pid) for pid in task.read_text().split()]
            except OSError:  # it has ended meanwhile
                continue
            found += children
            waiting += children
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
