"""A vLLM engine that one job leaves to the next: the same process, with the weights of the next alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from opentinker.services.rollout_worker.engines.base import EngineError, Sampling
from opentinker.services.rollout_worker.engines.warm_engine import WarmEngine
from opentinker.services.rollout_worker.service import end_engine
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.trajectories import Span
from tests.conftest import soon
from tests.support.vllm_engines import (
    GROUP_S,
    MARKS,
    PROMPT,
    TOLERANCE,
    Trainer,
    build,
    expected,
    other_weights,
    vllm_engine,
    worst,
)

pytestmark = MARKS

DRAWN = Sampling(max_tokens=40, seed=1)
LONG = Sampling(max_tokens=400, seed=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return build(tmp_path_factory.mktemp("base"), tied=False)


@pytest_asyncio.fixture(loop_scope="module")
async def warm() -> AsyncIterator[WarmEngine]:
    held = WarmEngine(600.0, end_engine)
    yield held
    await held.close()


async def new_engine(base: Path, warm: WarmEngine, **settings: Any) -> Any:
    settings = {"context_length": 512, "max_concurrent": 16, "group_timeout_s": GROUP_S, "stays": True, **settings}
    engine = vllm_engine(str(base), warm=warm, **settings)
    await engine.start()
    return engine


def process_of(engine: Any) -> int:
    """Return the id of vLLM's engine process."""
    pid: int = engine._process.llm().engine_core.resources.engine_manager.processes[0].pid
    return pid


async def test_the_next_job_has_the_same_process_with_its_own_weights(base: Path, warm: WarmEngine) -> None:
    first = await new_engine(base, warm)
    trainer, old = await Trainer(first).form(), other_weights(base, 1)
    await trainer.publish(WeightVersion(0, 1), old.named_parameters())
    begun = asyncio.Event()
    running = asyncio.create_task(first.generate("long", PROMPT, LONG, lambda *_: begun.set()))
    await soon(begun.wait())
    pid = process_of(first)
    await first.close()
    with pytest.raises(EngineError):
        await soon(running)

    second = await new_engine(base, warm)
    assert process_of(second) == pid
    assert second.context_length == 512
    with pytest.raises(EngineError, match="no weights yet"):
        await second.generate("early", PROMPT, DRAWN)
    trainer, new = await Trainer(second).form(), other_weights(base, 2)
    await trainer.publish(WeightVersion(0, 1), new.named_parameters())
    done = await second.generate("long", PROMPT, DRAWN)
    assert done.spans == [Span(0, len(done.ids), WeightVersion(0, 1))]
    assert worst(done, expected(new, PROMPT, done, DRAWN)) < TOLERANCE
    assert worst(done, expected(old, PROMPT, done, DRAWN)) > 100 * TOLERANCE, "the two can be told apart"
    await second.close()

    other = await new_engine(base, warm, context_length=256)
    assert process_of(other) != pid, "other limits need another engine"
    await other.close()


async def test_a_merged_adapter_leaves_the_base_to_the_next_job(base: Path, warm: WarmEngine) -> None:
    from tests.e2e.vllm.test_engine_vllm_merged import adapted, set_adapter

    lora = LoraSpec(rank=4, alpha=8.0)
    start = partial(new_engine, base, warm, lora=lora, serving="merged")
    model, pids = adapted(base), []
    for seed in (3, 4):
        engine = await start()
        pids.append(process_of(engine))
        trainer = await Trainer(engine).form()
        await trainer.publish(WeightVersion(0, 0), set_adapter(model, seed).items())
        done = await engine.generate("drawn", PROMPT, DRAWN)
        assert worst(done, expected(model, PROMPT, done, DRAWN)) < TOLERANCE
        await engine.close()
    assert pids[0] == pids[1]


@pytest.mark.parametrize(
    "settings", [{"stays": False}, {"lora": LoraSpec(rank=4, alpha=8.0)}], ids=["given-weights", "lora-layers"]
)
@pytest.mark.nightly
async def test_what_cannot_be_left_ends_with_its_job(base: Path, warm: WarmEngine, settings: dict[str, Any]) -> None:
    """Weights that no trainer sends, and adapters that vLLM holds."""
    first = await new_engine(base, warm, **settings)
    pid = process_of(first)
    await first.close()
    second = await new_engine(base, warm, **settings)
    assert process_of(second) != pid
    await second.close()
