"""The vLLM engine on this machine's CPU against transformers: what was sampled, by which weights, how likely."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch

from opentinker.services.rollout_worker.engines.base import EngineError, Sampling, SwapError
from opentinker.shared.spec import ToySpec
from opentinker.shared.types.core import StopReason, WeightVersion
from opentinker.shared.types.trajectories import Span
from tests.conftest import soon
from tests.support.learning import plain_logprobs
from tests.support.vllm_engines import (
    EOS,
    GROUP_S,
    LETTERS,
    MARKS,
    PROMPT,
    TOLERANCE,
    Trainer,
    build,
    expected,
    other_weights,
    started,
    worst,
)

pytestmark = MARKS


@pytest.fixture(scope="module", params=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return build(tmp_path_factory.mktemp(request.param), tied=request.param == "tied")


@pytest.fixture(scope="module", autouse=True)
def packed() -> Iterator[None]:
    """Pack small models as well: the engine process inherits it."""
    from opentinker.services.rollout_worker.engines import packed_layers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_layers, "SMALL_BYTES", 0)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(base: Path, packed: None) -> AsyncIterator[Any]:
    async with started(base, context_length=512, max_concurrent=32, stop_strings=True, group_timeout_s=GROUP_S) as vllm:
        yield vllm


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(engine: Any, base: Path) -> Trainer:
    trainer = await Trainer(engine).form()
    await trainer.publish(WeightVersion(0, 0), other_weights(base, 100).named_parameters())
    return trainer


@pytest_asyncio.fixture(loop_scope="module")
async def current(engine: Any, trainer: Trainer, base: Path) -> Any:
    """The transformers model with the weights that the engine has now, in a healthy group."""
    model = other_weights(base, 1)
    if engine._generation != trainer.generation:
        trainer.generation += 1
        await trainer.form()
    await trainer.publish(WeightVersion(1, 0), model.named_parameters())
    return model


async def test_a_swap_splits_a_completion_into_spans(engine: Any, trainer: Trainer, base: Path, current: Any) -> None:
    newer, sampling = other_weights(base, 2), Sampling(max_tokens=400, seed=7)
    for attempt in range(20):
        running = [asyncio.create_task(engine.generate(f"r{attempt}-{n}", PROMPT, sampling)) for n in range(4)]
        await asyncio.sleep(0.01 * (attempt + 1))
        await trainer.publish(WeightVersion(1, 1), newer.named_parameters())
        crossing = [done for done in await asyncio.gather(*running) if len(done.spans) == 2]
        if crossing:
            break
        await trainer.publish(WeightVersion(1, 0), current.named_parameters())
    done = crossing[0]
    old, new = done.spans
    assert (old.start, old.version, new.end, new.version) == (
        0,
        WeightVersion(1, 0),
        len(done.ids),
        WeightVersion(1, 1),
    )
    assert 0 < old.end == new.start < len(done.ids)
    assert worst(done, expected(current, PROMPT, done, sampling), 0, old.end) <= TOLERANCE
    assert worst(done, expected(newer, PROMPT, done, sampling), new.start) <= TOLERANCE
    assert worst(done, expected(current, PROMPT, done, sampling), new.start) > 0.1, "the weights should differ"


async def test_after_many_swaps_all_tokens_are_the_newest_weights(engine: Any, trainer: Trainer, base: Path) -> None:
    """Also the regression test of stale packed copies of a tied lm_head."""
    for step in range(3):
        model, sampling = other_weights(base, 10 + step), Sampling(max_tokens=40)
        seconds = await trainer.publish(WeightVersion(2, step), model.named_parameters())
        assert set(seconds) == {"pause", "transfer", "load", "resume"}
        done = await engine.generate(f"many-{step}", PROMPT, sampling)
        assert done.spans == [Span(0, len(done.ids), WeightVersion(2, step))]
        assert worst(done, expected(model, PROMPT, done, sampling)) <= TOLERANCE


async def test_prompt_logprobs_have_the_newest_weights(engine: Any, trainer: Trainer, base: Path, current: Any) -> None:
    """Beside requests under way; a swap that loads another tensor than it should is seen by it."""
    ids = [*PROMPT * 10, 7, 11]
    running = [asyncio.create_task(engine.generate(f"beside-{n}", PROMPT, Sampling(max_tokens=60))) for n in range(4)]
    scores = await engine.score(ids)
    assert scores.version == WeightVersion(1, 0)
    expected = plain_logprobs(current, ids)
    assert (torch.tensor(scores.logprobs) - expected).abs().max() <= TOLERANCE
    await asyncio.gather(*running)
    with torch.no_grad():
        current.model.layers[1].mlp.down_proj.weight[3] += 0.5
    await trainer.publish(WeightVersion(1, 1), current.named_parameters())
    wrong = await engine.score(ids)
    assert wrong.version == WeightVersion(1, 1)
    assert (torch.tensor(wrong.logprobs) - expected).abs().mean() > 1e-3


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 9},
    ],
    ids=str,
)
async def test_logprobs_are_of_the_sampled_distribution(engine: Any, current: Any, setting: dict[str, Any]) -> None:
    sampling = Sampling(max_tokens=48, seed=3, **setting)
    done, told = await asyncio.gather(
        engine.generate(f"d-{setting}", PROMPT, sampling),
        engine.generate(f"l-{setting}", PROMPT, msgspec.structs.replace(sampling, likely=20)),
    )
    assert worst(done, expected(current, PROMPT, done, sampling)) <= TOLERANCE
    # nor does it change them, for itself or others, if a request wants to know what else was likely
    assert done.likely == [] and told.ids == done.ids
    assert max(abs(a - b) for a, b in zip(done.logprobs, told.logprobs, strict=True)) <= TOLERANCE
    for id, logprob, likely in zip(told.ids, told.logprobs, told.likely, strict=True):
        assert 1 <= len(likely) <= (sampling.top_k or 20) and likely == sorted(likely, key=lambda pair: -pair[1])
        assert sum(math.exp(of) for _, of in likely) < 1 + TOLERANCE
        assert dict(likely).get(id, logprob) == logprob and (id in dict(likely) or logprob <= likely[-1][1])


async def test_a_seed_fixes_the_tokens(engine: Any, current: Any) -> None:
    async def ids(seed: int | None, name: str) -> list[int]:
        return list((await engine.generate(name, PROMPT, Sampling(max_tokens=30, temperature=2.0, seed=seed))).ids)

    one, same, other, free, free_too = await asyncio.gather(
        ids(5, "s1"), ids(5, "s2"), ids(6, "s3"), ids(None, "s4"), ids(None, "s5")
    )
    assert one == same != other and free != free_too


async def test_greedy_requests_take_the_likeliest_tokens_beside_others_that_draw(engine: Any, current: Any) -> None:
    prompts = [[5, 6 + n, 9] for n in range(6)]
    asked = [
        engine.generate(f"{t}{n}", prompt, Sampling(max_tokens=6, temperature=t))
        for t in (0.0, 1.0)
        for n, prompt in enumerate(prompts)
    ]
    for prompt, completion in zip(prompts, (await asyncio.gather(*asked))[:6], strict=True):
        with torch.no_grad():
            logits = current(torch.tensor([prompt + completion.ids])).logits[0, len(prompt) - 1 : -1]
        assert completion.ids == logits.argmax(-1).tolist()


async def test_endings_have_their_reason(engine: Any, trainer: Trainer, current: Any, base: Path) -> None:
    cut = await engine.generate("cut", PROMPT, Sampling(max_tokens=7, seed=1))
    assert (len(cut.ids), cut.stop) == (7, StopReason.LENGTH)
    full = await engine.generate("full", [7] * 500, Sampling(max_tokens=50, seed=1))
    assert (len(full.ids), full.stop) == (12, StopReason.CONTEXT)
    text = "".join(LETTERS[token] for token in cut.ids)
    stopped = await engine.generate("stop", PROMPT, Sampling(max_tokens=7, seed=1, stop=[text[2:4]]))
    assert stopped.stop == StopReason.STOP
    assert stopped.ids == cut.ids[: text.index(text[2:4]) + 2] and len(stopped.logprobs) == len(stopped.ids)
    with pytest.raises(EngineError, match="context holds 512"):
        await engine.generate("long", [7] * 512, Sampling(max_tokens=1))


async def test_end_of_turn_token_of_generation_config(engine: Any, trainer: Trainer, current: Any) -> None:
    with torch.no_grad():
        likely = int(current(torch.tensor([PROMPT])).logits[0, -1].argmax())
        rows = current.lm_head.weight
        rows[EOS] = 3 * rows[likely]  # as far above `likely` as that is above zero, whatever the model says next
    await trainer.publish(WeightVersion(3, 0), current.named_parameters())
    done = await engine.generate("eos", PROMPT, Sampling(max_tokens=9, top_k=1))
    assert (done.ids, done.stop) == ([EOS], StopReason.EOS)


async def test_a_corrupted_bucket_changes_nothing(engine: Any, trainer: Trainer, base: Path, current: Any) -> None:
    running = asyncio.create_task(engine.generate("through", PROMPT, Sampling(max_tokens=200, seed=2)))
    command = trainer.command(WeightVersion(1, 9), other_weights(base, 9).named_parameters())
    assert trainer.snap is not None
    trainer.snap.buckets[-1][3] ^= 1
    sending = asyncio.create_task(asyncio.to_thread(trainer.group.send, trainer.snap.buckets))
    with pytest.raises(SwapError, match="fingerprint"):
        await engine.receive(command)
    await sending
    assert engine.version == WeightVersion(1, 0)
    for done, sampling in (
        (await running, Sampling(max_tokens=200, seed=2)),
        (await engine.generate("after", PROMPT, Sampling(max_tokens=30)), Sampling(max_tokens=30)),
    ):
        assert done.spans == [Span(0, len(done.ids), WeightVersion(1, 0))]
        assert worst(done, expected(current, PROMPT, done, sampling)) <= TOLERANCE


async def test_a_silent_trainer_fails_the_swap_in_time_and_generation_goes_on(
    engine: Any, trainer: Trainer, base: Path, current: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = trainer.command(WeightVersion(1, 9), other_weights(base, 9).named_parameters())
    receiving = asyncio.create_task(engine.receive(command))
    during = await engine.generate("during", PROMPT, Sampling(max_tokens=100, seed=4))
    assert not receiving.done(), "generation must not wait for the transfer"
    trainer.group.close()
    with pytest.raises(SwapError, match="lost the weight group"):
        await receiving
    assert worst(during, expected(current, PROMPT, during, Sampling(max_tokens=100))) <= TOLERANCE
    with pytest.raises(SwapError, match="closed"):
        await engine.receive(command)
    trainer.generation += 1
    monkeypatch.setattr(engine, "_group_timeout_s", 3.0)
    await trainer.form()
    with pytest.raises(SwapError, match="lost the weight group"):
        await engine.receive(trainer.command(WeightVersion(1, 9), current.named_parameters()))
    monkeypatch.undo()
    trainer.generation += 1
    await trainer.form()
    await trainer.publish(WeightVersion(1, 1), current.named_parameters())
    assert engine.version == WeightVersion(1, 1)


async def test_a_late_engine_joins_the_next_group_and_gets_the_current_version(engine: Any, base: Path) -> None:
    from opentinker.services.rollout_worker.engines.toy import ToyEngine

    early = ToyEngine(ToySpec(), eos_id=EOS, vocab_size=64, context_length=64)
    model = other_weights(base, 4)
    alone = await Trainer(early, generation=40).form()
    await alone.publish(WeightVersion(4, 7), model.named_parameters())
    alone.group.close()
    together = await Trainer(early, engine, generation=41).form()
    await together.publish(WeightVersion(4, 7), model.named_parameters())
    assert early.version == engine.version == WeightVersion(4, 7)
    done = await engine.generate("late", PROMPT, Sampling(max_tokens=20))
    assert worst(done, expected(model, PROMPT, done, Sampling(max_tokens=20))) <= TOLERANCE
    with pytest.raises(SwapError, match="group 41, not 40"):
        await engine.receive(alone.command(WeightVersion(4, 8), model.named_parameters()))


async def test_abort_and_cancel_end_one_request_only(engine: Any, current: Any) -> None:
    sampling = Sampling(max_tokens=400, seed=1)
    begun = {name: asyncio.Event() for name in ("aborted", "cancelled", "kept")}
    aborted, cancelled, kept = [
        asyncio.create_task(engine.generate(name, PROMPT, sampling, lambda *_, event=event: event.set()))
        for name, event in begun.items()
    ]
    await soon(asyncio.gather(*(event.wait() for event in begun.values())))
    await engine.abort("aborted")
    cancelled.cancel()
    with pytest.raises(EngineError, match="abort"):
        await aborted
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert (await kept).ids
