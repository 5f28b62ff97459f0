"""vLLM and the trainer on the same images: logprobs, before and after weights or an adapter have travelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from opentinker.sdk.merge_adapter import merge
from opentinker.services.rollout_worker.engines.base import Completion, Engine, Sampling
from opentinker.services.rollout_worker.renderer import Renderer, images_of
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.core import Message, WeightVersion
from tests.support.factories import V0
from tests.support.learning import loaded, torch_spec
from tests.support.seeing import Plain, ask, make, picture, shown, together
from tests.support.vllm_engines import GROUP_S, MARKS, TOLERANCE, Trainer, started

pytestmark = MARKS
OTHERS = [pytest.param(family, marks=pytest.mark.nightly) for family in ("llava", "qwen2_vl", "qwen3_vl")]
CHATS = [
    ask(picture(1, 90, 60), "what is it? "),
    ask(picture(2), "what is it? "),
    ask("this: ", picture(2), " that: ", picture(1, 90, 60), " and once more ", picture(2)),
    [Message(role="user", content="what is it? ")],
]
"""Alike in their tokens, apart in what they show."""


@pytest.fixture(scope="module", params=["parts", "qwen2_5_vl", *OTHERS])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("seeing"), request.param)


def engine_of(base: Path, lora: LoraSpec | None = None) -> Any:
    return started(base, context_length=256, max_concurrent=8, lora=lora, group_timeout_s=GROUP_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(base: Path) -> AsyncIterator[Any]:
    async with engine_of(base) as vllm:
        yield vllm


def learner_of(base: Path, **model: Any) -> RlLearner:
    """One step further than the base."""
    spec = torch_spec(
        base, model={"base": str(base), **model}, train={"lr": 3e-3}, algorithm={"group_size": 2, "groups_per_batch": 1}
    )
    learner = loaded(RlLearner(spec))
    eyes = Renderer.load(str(base), "model")
    answers = ([5, 9, 30], [8, 7, 6])
    learner.step([together([shown(eyes, CHATS[0], said, index=n, reward=n) for n, said in enumerate(answers)])], V0)
    return learner


async def answers(engine: Engine, base: Path, name: str) -> list[Completion]:
    """To all at once, and to the first again."""
    eyes = Renderer.load(str(base), "model")

    async def answer(number: int, chat: list[Message]) -> Completion:
        ids = eyes.prompt(chat)
        pictures = eyes.shown(eyes.pictures(chat, ids), images_of(chat))
        return await engine.generate(f"{name}-{number}", ids, Sampling(max_tokens=12, seed=number), shown=pictures)

    return await asyncio.gather(*(answer(number, chat) for number, chat in enumerate([*CHATS, CHATS[0]])))


def worst(plain: Plain, said: list[Completion]) -> float:
    """Return the largest difference between the engine's logprobs and those of transformers."""
    rows = zip([*CHATS, CHATS[0]], said, strict=True)
    return max(
        float((torch.tensor(done.logprobs) - torch.from_numpy(plain.logprobs(chat, done.ids))).abs().max())
        for chat, done in rows
    )


async def test_vllm_and_trainer_agree_before_and_after_a_swap(base: Path, engine: Engine, tmp_path: Path) -> None:
    await engine.serve(WeightVersion(0, 0))
    first = await answers(engine, base, "first")
    assert worst(Plain(base), first) < TOLERANCE
    learner = await asyncio.to_thread(learner_of, base)
    trainer = await Trainer(engine).form()
    await trainer.publish(WeightVersion(1, 1), learner._weights(frozen=False))
    learner.save(tmp_path / "c")
    plain = Plain(tmp_path / "c")
    then = await answers(engine, base, "then")
    assert worst(plain, then) < TOLERANCE < worst(plain, first)
    assert {span.version for done in then for span in done.spans} == {WeightVersion(1, 1)}

    eyes = Renderer.load(str(base), "model")
    group = together(
        [
            shown(eyes, chat, done.ids, logprobs=[0.0] * len(eyes.prompt(chat)) + done.logprobs, index=n, reward=n % 2)
            for n, (chat, done) in enumerate(zip(CHATS, then, strict=False))
        ]
    )
    assert learner.step([group], V0)["mismatch/max"] < TOLERANCE


@pytest.mark.nightly
async def test_a_trained_tower_travels_while_its_images_are_in_use(base: Path, engine: Engine, tmp_path: Path) -> None:
    """vLLM keeps what its tower made of an image: the new tower must not answer with it."""
    await engine.serve(WeightVersion(0, 0))
    first = await answers(engine, base, "seen")
    learner = await asyncio.to_thread(partial(learner_of, base, train_vision=True))
    trainer = await Trainer(engine, generation=2).form()
    await trainer.publish(WeightVersion(2, 1), learner._weights(frozen=False))
    learner.save(tmp_path / "c")
    then = await answers(engine, base, "again")
    assert worst(Plain(tmp_path / "c"), then) < TOLERANCE < worst(Plain(tmp_path / "c"), first)


@pytest.mark.parametrize(
    "base", ["qwen2_5_vl", pytest.param("parts", marks=pytest.mark.nightly), *OTHERS], indirect=True
)
async def test_an_adapter_travels_to_a_model_that_sees(base: Path, tmp_path: Path) -> None:
    lora = LoraSpec(rank=4, alpha=64.0)
    async with engine_of(base, lora) as vllm:
        learner = await asyncio.to_thread(learner_of, base, lora=lora.model_dump())
        trainer = await Trainer(vllm).form()
        await trainer.publish(WeightVersion(1, 1), learner._weights(frozen=False))
        said = await answers(vllm, base, "adapted")
    learner.save(tmp_path / "adapter")
    for file in (tmp_path / "adapter" / "trainer").iterdir():
        file.unlink()
    (tmp_path / "adapter" / "trainer").rmdir()  # a download has none
    merge(tmp_path / "adapter", tmp_path / "merged")
    assert worst(Plain(tmp_path / "merged"), said) < TOLERANCE < worst(Plain(base), said)
