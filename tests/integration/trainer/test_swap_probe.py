"""After each swap the engine computes what the trainer computed of a few tokens: a version that was not loaded as it
was sent is noticed, behind too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from opentinker.services.rollout_worker.engines.base import EngineError, Sampling, Scores
from opentinker.services.rollout_worker.engines.toy import ToyEngine
from opentinker.services.rollout_worker.weight_receiver import WeightReceiver
from opentinker.services.trainer.learners.rl import PROBE_TOKENS, RlLearner, choose_probe
from opentinker.services.trainer.mismatch_alarm import MismatchAlarm
from opentinker.shared.nn.buckets import unpack
from opentinker.shared.spec import ToySpec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Pool, WeightVersion
from opentinker.shared.types.swap import SIMULATED, SwapCommand, SwapReply
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import soon, until
from tests.support.factories import group_of, make_spec, trajectory_of
from tests.support.learning import plain_logprobs, random_groups, torch_learner

JOB = "j-probe"


class Loading(ToyEngine):
    """Loads what it is sent into a model of transformers, or something that differs a little."""

    def __init__(self, base: Path) -> None:
        super().__init__(ToySpec(), eos_id=1, vocab_size=64, context_length=512)
        self.model = AutoModelForCausalLM.from_pretrained(base).eval()
        self.sent: dict[str, torch.Tensor] = {}
        self.perturbed = ""
        """Name of a tensor that arrives otherwise than it was sent."""
        self.hangs, self.fails = False, False
        self.asked = asyncio.Event()

    async def receive(self, command: SwapCommand) -> dict[str, float]:
        tensors = {name: tensor.clone() for name, tensor in self.sent.items()}
        if self.perturbed:
            tensors[self.perturbed] += 0.05 * torch.randn_like(tensors[self.perturbed])
        self.model.load_state_dict(tensors, strict=False)
        return await super().receive(command)

    async def score(self, ids: list[int]) -> Scores | None:
        self.asked.set()
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails:
            raise EngineError("no room")
        return Scores(self.version, plain_logprobs(self.model, ids).tolist())


class Swaps:
    """A learner's versions on their way to one worker."""

    def __init__(self, store: Store, learner: RlLearner | None, engine: ToyEngine) -> None:
        async def taken(_: dict[str, float]) -> None: ...

        info = WorkerInfo(id="rollout-0", incarnation="1", pool=Pool.ROLLOUT, host="h", pid=1, cores=1)
        self.learner, self.engine = learner, engine
        self.taker = WeightReceiver(store, info, JOB, 1, engine, asyncio.get_running_loop().create_future(), taken)

    async def join(self) -> None:
        command = SwapCommand(job=JOB, epoch=1, action="join", generation=1, device=SIMULATED)
        assert (await self.taker.answer(command)).ok

    async def send(self, step: int) -> SwapReply:
        """A step of the learner, and its weights; returns when the engine has said what it makes of them."""
        probe = None
        version = WeightVersion(1, step)
        if self.learner is not None and isinstance(self.engine, Loading):
            groups = random_groups(step, groups=2)
            self.learner.step(groups, WeightVersion(1, step - 1))
            snapshot = self.learner.snapshot(version)
            self.engine.sent, probe = dict(unpack(snapshot.manifest, snapshot.buckets)), snapshot.probe
        command = SwapCommand(
            job=JOB, epoch=1, action="receive", generation=1, device=SIMULATED, version=version, probe=probe
        )
        reply = await self.taker.answer(command)
        assert reply.ok, reply.error
        task = self.taker._probing
        if task is not None and isinstance(self.engine, Loading) and self.engine.hangs:
            await soon(self.engine.asked.wait())
        elif task is not None:
            await until(task.done)
        return reply


@pytest.fixture
async def job(store: Store) -> Store:
    await store.create_job(id=JOB, spec=make_spec().model_dump(mode="json"), tenant="default")
    return store


@pytest.fixture
def learner(tiny: Path) -> RlLearner:
    return torch_learner(tiny, algorithm={"groups_per_batch": 2})


async def test_a_wrong_swap_rings_the_alarm_with_the_next_version(job: Store, tiny: Path, learner: RlLearner) -> None:
    engine, alarm = Loading(tiny), MismatchAlarm()
    swaps = Swaps(job, learner, engine)
    await swaps.join()
    assert (await swaps.send(1)).mismatch is None, "nothing was compared before"
    for step in range(2, 9):
        found = (await swaps.send(step)).mismatch
        assert found is not None and found < 1e-5
        assert alarm.update({"swap/mismatch": found}) == []
    engine.perturbed = "model.layers.0.mlp.down_proj.weight"
    right = (await swaps.send(9)).mismatch
    assert right is not None and right < 1e-5, "of the version before"
    engine.perturbed = ""
    wrong = (await swaps.send(10)).mismatch
    assert wrong is not None and alarm.update({"swap/mismatch": wrong}) == ["swap/mismatch"]
    healed = (await swaps.send(11)).mismatch
    assert healed is not None and healed < 1e-5


async def test_a_probe_that_comes_to_nothing_holds_up_no_swap(job: Store, tiny: Path, learner: RlLearner) -> None:
    engine = Loading(tiny)
    swaps = Swaps(job, learner, engine)
    await swaps.join()
    engine.hangs = True
    await swaps.send(1)
    hanging = swaps.taker._probing
    assert hanging is not None and not hanging.done()
    engine.hangs, engine.fails = False, True
    assert (await swaps.send(2)).mismatch is None and hanging.cancelled()
    engine.fails = False
    assert (await swaps.send(3)).mismatch is None
    assert (await swaps.send(4)).mismatch is not None
    engine.hangs = True
    engine.asked.clear()
    await swaps.send(5)
    await swaps.taker.end()
    assert swaps.taker._probing is not None and swaps.taker._probing.cancelled()


async def test_an_engine_without_a_model_compares_nothing(job: Store) -> None:
    swaps = Swaps(job, None, ToyEngine(ToySpec(), eos_id=1, vocab_size=64, context_length=512))
    await swaps.join()
    assert [(await swaps.send(step)).mismatch for step in range(3)] == [None] * 3


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0, "dropout": 0.5}])
def test_a_snapshot_says_what_its_weights_compute(tiny: Path, lora: dict[str, Any] | None) -> None:
    """Of the last batch's first tokens, without dropout, and without drawing from the random state."""
    learner = torch_learner(tiny, model={"lora": lora})
    assert learner.snapshot(WeightVersion(1, 0)).probe is None
    groups = random_groups(0)
    learner.step(groups, WeightVersion(1, 0))
    state = torch.get_rng_state()
    probe = learner.snapshot(WeightVersion(1, 1)).probe
    assert torch.equal(torch.get_rng_state(), state)
    assert probe is not None and probe.ids == groups[0].trajectories[0].ids[:-1].tolist()
    if lora is None:
        reference = AutoModelForCausalLM.from_pretrained(tiny)
        reference.load_state_dict(dict(learner.named_weights()), strict=False)
        torch.testing.assert_close(
            torch.tensor(probe.logprobs), plain_logprobs(reference, probe.ids), atol=1e-4, rtol=0
        )
    assert learner.snapshot(WeightVersion(1, 1)).probe == probe


def test_every_version_is_compared(tiny: Path) -> None:
    learner = torch_learner(tiny)
    for step in range(1, 6):
        groups = random_groups(step)
        learner.step(groups, WeightVersion(1, step - 1))
        probe = learner.snapshot(WeightVersion(1, step)).probe
        assert probe is not None and probe.ids == choose_probe(groups)


def test_a_probe_is_short_and_leaves_room_for_a_token() -> None:
    def said(length: int) -> list[int]:
        return choose_probe(
            [group_of([trajectory_of(list(range(3, 3 + length)), [0] + [1] * (length - 1), reward=0.0)])]
        )

    assert len(said(500)) == PROBE_TOKENS and len(said(10)) == 9 and said(2) == []


async def test_engine_that_sleeps_generates_nothing_until_it_is_woken_or_another_trainer_comes(job: Store) -> None:
    engine = ToyEngine(ToySpec(), eos_id=1, vocab_size=8, context_length=64, sleeps=True)
    swaps = Swaps(job, None, engine)

    async def told(action: str) -> SwapReply:
        return await swaps.taker.answer(SwapCommand(job=JOB, epoch=1, action=action, generation=1, device=SIMULATED))

    await swaps.join()
    await swaps.send(1)
    for waking in ("wake", "join"):
        reply = await told("sleep")
        assert reply.ok and reply.sleeps
        asked = asyncio.create_task(engine.generate(waking, [2, 3], Sampling(max_tokens=4)))
        await asyncio.sleep(0.1)  # without the sleep it would have answered at once
        assert not asked.done()
        assert (await told(waking)).ok
        assert (await soon(asked)).ids
