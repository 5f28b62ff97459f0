from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from opentinker.services.rollout_worker.engines.base import EngineError, Sampling, SwapError
from opentinker.services.rollout_worker.engines.toy import ToyEngine
from opentinker.shared.nn.buckets import snapshot
from opentinker.shared.nn.transport import WeightGroup, host_store
from opentinker.shared.spec import LoraSpec, ToySpec
from opentinker.shared.types.core import StopReason, WeightVersion
from opentinker.shared.types.swap import SwapCommand
from opentinker.shared.types.trajectories import Span
from tests.conftest import soon

EOS = 1
DIGITS = frozenset(range(10, 20))
PROMPT = [5, 12, 3, 14, 17, 6]
V0, V1 = WeightVersion(0, 0), WeightVersion(0, 1)


def engine(**spec: float) -> ToyEngine:
    return ToyEngine(ToySpec(**spec), eos_id=EOS, vocab_size=32, context_length=64, echo_ids=DIGITS)


def simulated(action: str, version: WeightVersion | None = None, generation: int = 1) -> SwapCommand:
    return SwapCommand(job="j", epoch=0, action=action, generation=generation, device="none", version=version)


async def ready(toy: ToyEngine) -> ToyEngine:
    await toy.start()
    await toy.join(simulated("join"))
    await toy.receive(simulated("receive", V0))
    return toy


async def test_a_skilled_engine_echoes_the_last_digits_and_ends() -> None:
    toy = await ready(engine(skill=1.0))
    done = await toy.generate("a", PROMPT, Sampling(max_tokens=8, seed=3))
    assert done.ids == [14, 17, EOS] and done.stop == StopReason.EOS
    assert done.spans == [Span(0, 3, V0)] and len(done.logprobs) == 3


async def test_tokens_depend_on_prompt_and_seed_alone() -> None:
    one, two = await ready(engine(skill=0.5)), await ready(engine(skill=0.5, seconds_per_token=0.0001))
    for seed in range(20):
        sampling = Sampling(max_tokens=6, seed=seed)
        assert (await one.generate("a", PROMPT, sampling)).ids == (await two.generate("b", PROMPT, sampling)).ids
    greedy = [await one.generate("a", PROMPT, Sampling(max_tokens=6, seed=seed, temperature=0.0)) for seed in range(20)]
    assert len({tuple(answer.ids) for answer in greedy}) == 1


async def test_skill_is_the_share_of_echoes() -> None:
    toy = await ready(engine(skill=0.7))
    answers = [await toy.generate("a", PROMPT, Sampling(max_tokens=8, seed=seed)) for seed in range(1000)]
    assert 640 < sum(answer.ids == [14, 17, EOS] for answer in answers) < 760


async def test_budgets_cut_and_say_which() -> None:
    toy = await ready(engine(skill=1.0))
    cut = await toy.generate("a", PROMPT, Sampling(max_tokens=2))
    assert cut.ids == [14, 17] and cut.stop == StopReason.LENGTH
    cut = await toy.generate("a", [12] * 60, Sampling(max_tokens=60))
    assert len(cut.ids) == 4 and cut.stop == StopReason.CONTEXT
    with pytest.raises(EngineError, match="context holds 64"):
        await toy.generate("a", [12] * 64, Sampling(max_tokens=1))


async def test_nothing_is_generated_before_the_first_version() -> None:
    with pytest.raises(EngineError, match="no weights yet"):
        await engine().generate("a", PROMPT, Sampling(max_tokens=2))


async def test_a_swap_inside_a_generation_gives_two_spans() -> None:
    toy = await ready(engine(skill=1.0, seconds_per_token=0.05, swap_seconds=0.05))
    begun = asyncio.Event()
    running = asyncio.create_task(toy.generate("a", [10] * 20, Sampling(max_tokens=40), lambda *_: begun.set()))
    await soon(begun.wait())
    seconds = await toy.receive(simulated("receive", V1))
    done = await running
    assert [span.version for span in done.spans] == [V0, V1]
    assert done.spans[0].start == 0 and done.spans[0].end == done.spans[1].start and done.spans[1].end == len(done.ids)
    assert seconds["load"] >= 0.05 and set(seconds) == {"pause", "transfer", "load", "resume"}


async def test_many_generations_take_the_time_of_one() -> None:
    toy = await ready(engine(skill=1.0, seconds_per_token=0.01))
    async with asyncio.timeout(50):
        await asyncio.gather(*[toy.generate(f"r{n}", [10] * 19, Sampling(max_tokens=20)) for n in range(500)])


async def test_abort_ends_one_request() -> None:
    toy = await ready(engine(skill=1.0, seconds_per_token=0.2))
    doomed = asyncio.create_task(toy.generate("doomed", PROMPT, Sampling(max_tokens=8)))
    other = asyncio.create_task(toy.generate("other", PROMPT, Sampling(max_tokens=8)))
    await asyncio.sleep(0.01)
    await toy.abort("doomed")
    await toy.abort("unknown")
    with pytest.raises(EngineError, match="aborted"):
        await doomed
    assert (await other).stop == StopReason.EOS


async def test_a_sibling_has_versions_of_its_own() -> None:
    toy = await ready(engine())
    other = toy.sibling([EOS], LoraSpec(rank=4))
    assert (other.version, other.context_length) == (None, toy.context_length)
    await other.join(simulated("join"))
    await other.receive(simulated("receive", V1))
    assert (toy.version, other.version) == (V0, V1)
    sampling = Sampling(max_tokens=8, seed=3)
    done, others = [await one.generate("r", [4, 5], sampling) for one in (toy, other)]
    assert (done.ids, done.spans[0].version) == (others.ids, V0)
    assert others.spans[0].version == V1
    await toy.close()


async def test_a_receive_for_another_generation_is_refused() -> None:
    toy = await ready(engine())
    with pytest.raises(SwapError, match="group 1, not 2"):
        await toy.receive(simulated("receive", V1, generation=2))
    assert toy.version == V0


@pytest.mark.parametrize("corrupt", [False, True])
async def test_with_a_real_group_the_bytes_are_verified(corrupt: bool) -> None:
    import torch

    toy = engine()
    store, port = host_store("127.0.0.1", 2, 60)
    with ThreadPoolExecutor(1) as pool:
        hosting = pool.submit(
            WeightGroup.join, address="127.0.0.1", port=port, rank=0, world=2, device="cpu", timeout_s=60, store=store
        )
        await toy.join(
            SwapCommand(job="j", epoch=0, action="join", generation=1, address="127.0.0.1", port=port, rank=1, world=2)
        )
        group = hosting.result()
        snap = snapshot(V0, [("w", torch.randn(1000))], 1 << 20)
        sending = pool.submit(group.send, snap.buckets)
        command = SwapCommand(
            job="j", epoch=0, action="receive", generation=1, version=V0, manifest=snap.manifest,
            fingerprints=[snap.fingerprints[0] ^ corrupt], bucket_bytes=1 << 20,
        )  # fmt: skip
        if corrupt:
            with pytest.raises(SwapError, match="fingerprints"):
                await toy.receive(command)
            assert toy.version is None
        else:
            await toy.receive(command)
            assert toy.version == V0
        sending.result()
        group.close()
    await toy.close()


async def test_tokens_that_a_request_names_end_it_in_the_place_of_the_end_of_turn() -> None:
    toy = await ready(engine(skill=1.0))
    for stop_ids, ends in ((None, StopReason.EOS), ([17], StopReason.EOS), ([], StopReason.LENGTH)):
        done = await toy.generate("a", PROMPT, Sampling(max_tokens=8, seed=3, stop_ids=stop_ids))
        assert done.stop == ends and len(done.ids) == (3 if stop_ids is None else 2 if stop_ids else 8)
        assert done.ids[:3] == [14, 17, EOS][: len(done.ids)]


async def test_a_prompt_is_as_likely_as_any_other_and_the_likeliest_are_refused() -> None:
    toy = await ready(engine(skill=1.0))
    done = await toy.generate("a", PROMPT, Sampling(max_tokens=2, likely_prompt=0))
    assert done.prompt_logprobs == [done.logprobs[0]] * (len(PROMPT) - 1)
    assert (await toy.generate("a", PROMPT, Sampling(max_tokens=2))).prompt_logprobs == []
    for asked in (Sampling(max_tokens=2, likely_prompt=1), Sampling(max_tokens=2, likely=1)):
        with pytest.raises(EngineError, match="draws from no distribution"):
            await toy.generate("a", PROMPT, asked)


async def test_a_dropped_adapter_is_gone() -> None:
    toy = await ready(engine(skill=1.0))
    await toy.add("mine", V1, Path("/anywhere"))
    assert (await toy.generate("a", PROMPT, Sampling(max_tokens=8, adapter="mine"))).spans == [Span(0, 3, V1)]
    await toy.drop("mine")
    with pytest.raises(EngineError, match="no adapter 'mine'"):
        await toy.generate("a", PROMPT, Sampling(max_tokens=8, adapter="mine"))
