"""Two ranks do what one does: one learner of two processes for all tests here, given another job by each."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from opentinker.services.trainer.distributed import multi_rank_learner, rank_environment
from opentinker.services.trainer.distributed.multi_rank_learner import MultiRankRlLearner
from opentinker.services.trainer.distributed.rank_connections import RankLost
from opentinker.services.trainer.distributed.rank_processes import RankProcesses
from opentinker.services.trainer.distributed.rank_protocol import Gather
from opentinker.services.trainer.learners.base import NonFinite
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.nn.buckets import unpack
from opentinker.shared.nn.packing import share
from opentinker.shared.runtime.gpus import VISIBLE
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.errors import JobFailed, OpenTinkerError
from opentinker.shared.types.trajectories import Group, Span
from tests.conftest import until
from tests.support.factories import V0, group_of, trajectory_of, version
from tests.support.learning import LORA, random_groups, relative_gap, torch_spec

OF_TIME_OR_PLACE = {"step_seconds", "tokens/computed", "trainer/rank_imbalance"}
"""Metrics that two ranks may see otherwise: a prompt shared by both is computed by both."""
GAPS = {"float32": (1e-4, 1e-3), "bfloat16": (0.02, 0.1)}
"""Largest relative difference of a metric, and of how far all weights have moved, as a share of that way. A sum in
another order rounds otherwise, and Adam divides by the gradient: where that is rounding, so is the step."""


def two_ranks(base: Path, **parts: Any) -> JobSpec:
    return torch_spec(base, **{**parts, "resources": {"trainer_ranks": 2}})


class Pair:
    """A learner of two ranks, and one of one rank for the same job."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.multi_rank = MultiRankRlLearner(two_ranks(base), "cpu")

    def job(self, checkpoint: Path | None = None, **parts: Any) -> RlLearner:
        """Let the two ranks train this job from now on, and return a learner of one rank for it."""
        alone = self.alone(checkpoint, **parts)
        self.multi_rank.spec = two_ranks(self.base, **parts)
        self.multi_rank.load(checkpoint)
        return alone

    def alone(self, checkpoint: Path | None, **parts: Any) -> RlLearner:
        single = copy.deepcopy(parts)
        single.get("train", {}).pop("parallel", None)
        alone = RlLearner(torch_spec(self.base, **single))
        alone.load(checkpoint)
        self.start = {name: weights.clone() for name, weights in alone.named_weights()}
        return alone

    def close(self) -> None:
        self.multi_rank.close()

    def both_step(self, alone: RlLearner, groups: list[Group], step: int) -> dict[str, float]:
        """The same batch for both, which must say the same of it."""
        expected, found = alone.step(groups, version(step)), self.multi_rank.step(groups, version(step))
        assert found.keys() - expected.keys() == {"trainer/rank_imbalance"} and expected.keys() <= found.keys()
        largest, _ = GAPS[alone.spec.model.dtype]
        binned = {name for name in expected if name.startswith("histogram/ratio/")}
        for name in expected.keys() - OF_TIME_OR_PLACE - binned:
            assert found[name] == pytest.approx(expected[name], rel=largest, abs=largest / 10), name
        # a ratio beside the edge of a bin may fall on either side of it
        assert sum(found[name] for name in binned) == sum(expected[name] for name in binned) > 0
        return found

    def assert_same_weights(self, alone: RlLearner) -> None:
        snapshot = self.multi_rank.snapshot(version(9))
        found = dict(unpack(snapshot.manifest, snapshot.buckets))
        expected = dict(alone.named_weights())
        assert found.keys() == expected.keys()
        _, largest = GAPS[alone.spec.model.dtype]
        assert relative_gap(found, expected, self.start) < largest


@pytest.fixture(scope="module")
def pair(small: Path) -> Iterator[Pair]:
    with closing(Pair(small)) as pair:
        yield pair


SMALL_PASSES = {"lr": 1e-3, "weight_decay": 0.1, "tokens_per_micro_batch": 40}
"""Several passes per rank and step, not equally many of them."""
JOBS: dict[str, dict[str, Any]] = {
    "full": {"train": SMALL_PASSES},
    "lora": {"model": {"lora": LORA}, "algorithm": {"advantage": "rae"}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "two updates": {"algorithm": {"updates_per_batch": 2, "proximal": "recomputed"}},
    "critic": {"algorithm": {"name": "ppo", "critic_lr": 1e-3}},
    "zero1": {"train": {"parallel": "zero1", **SMALL_PASSES}},
    "zero2": {"train": {"parallel": "zero2", **SMALL_PASSES}},
    "zero2 lora": {"train": {"parallel": "zero2", "lr": 1e-3}, "model": {"lora": LORA, "dtype": "bfloat16"}},
    "zero3": {"train": {"parallel": "zero3", "gradient_checkpointing": True, **SMALL_PASSES}},
    "zero3 lora": {"train": {"parallel": "zero3", "lr": 1e-3}, "model": {"lora": LORA}},
    "zero3 bfloat16": {
        "train": {"parallel": "zero3", "lr": 1e-3},
        "model": {"dtype": "bfloat16", "fp32_head": True},
        "algorithm": {"updates_per_batch": 2, "proximal": "recomputed"},
    },
}


GUARDS = ("lora", "zero2", "critic")
NAMES = [name if name in GUARDS else pytest.param(name, marks=pytest.mark.nightly) for name in JOBS]
"""The whole matrix is nightly."""


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_learn_what_one_does(pair: Pair, name: str) -> None:
    parts = JOBS[name]
    usual = {"group_size": 4, "groups_per_batch": 4}
    alone = pair.job(**{**parts, "algorithm": {**usual, **parts.get("algorithm", {})}})
    for step in range(2):
        found = pair.both_step(alone, random_groups(step, reference=True), step)
        assert 1.0 <= found["trainer/rank_imbalance"] < 1.5
    pair.assert_same_weights(alone)


def test_two_ranks_start_from_the_checkpoint_of_another_job(pair: Pair, tmp_path: Path) -> None:
    first = pair.job(algorithm={"name": "ppo", "group_size": 4, "groups_per_batch": 4})
    for step in range(2):
        first.step(random_groups(step), version(step))
    first.save(tmp_path)
    for optimizer in (False, True):
        alone = RlLearner(first.spec)
        alone.start(tmp_path, optimizer=optimizer)
        pair.start = {name: weights.clone() for name, weights in alone.named_weights()}
        pair.multi_rank.start(tmp_path, optimizer=optimizer)
        pair.both_step(alone, random_groups(7), 0)
        pair.assert_same_weights(alone)


HELD = {"data": 3.0, "zero1": 2.5, "zero2": 2.5, "zero3": 2.0}
"""Between steps, by one of two ranks, in numbers per trained one: weights, masters where they stand apart, moments."""


@pytest.mark.parametrize("parallel", HELD)
def test_what_a_rank_holds_between_steps(pair: Pair, parallel: str) -> None:
    alone = pair.job(train={"lr": 1e-3, "parallel": parallel})
    pair.both_step(alone, random_groups(0), 0)
    probe, expected = pair.multi_rank.snapshot(version(1)).probe, alone.snapshot(version(1)).probe
    assert probe is not None and expected is not None and probe.ids == expected.ids
    assert probe.logprobs == pytest.approx(expected.logprobs, abs=1e-3), "what workers check the version by"
    own = pair.multi_rank.own
    tensors = [*own.parameters.values(), *own.optimizer.state]
    tensors += [p.ds_tensor for p in own.parameters.values() if hasattr(p, "ds_tensor")]
    tensors += [value for state in own.optimizer.state.values() for value in state.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    count = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(pair.base).parameters())
    assert sum(storages.values()) / 4 / count == pytest.approx(HELD[parallel], rel=0.02)


def one_answer() -> list[Group]:
    """A batch of which only one trajectory has sampled tokens."""
    spoken = trajectory_of([5, 6, 7, 8, 1], [0, 0, 1, 1, 1], reward=1.0)
    silent = trajectory_of([5, 6], [0, 0], reward=[], spans=[Span(2, 2, V0)])
    return [group_of([spoken, silent])]


@pytest.mark.parametrize("parallel", ["data", "zero2", "zero3"])
def test_a_rank_may_have_nothing_to_do(pair: Pair, parallel: str) -> None:
    alone = pair.job(algorithm={"group_size": 2, "groups_per_batch": 1}, train={"lr": 1e-3, "parallel": parallel})
    found = pair.both_step(alone, one_answer(), 0)
    assert found["trainer/rank_imbalance"] == 2.0
    pair.both_step(alone, random_groups(1), 1)
    pair.assert_same_weights(alone)


@pytest.mark.parametrize("parallel", ["data", "zero1", "zero3"])
def test_a_step_that_is_not_finite_is_refused_by_all_ranks_and_changes_nothing(pair: Pair, parallel: str) -> None:
    """What is not finite lies with the second update and the second rank alone."""
    alone = pair.job(algorithm={"updates_per_batch": 2}, train={"lr": 1e-3, "parallel": parallel})
    pair.both_step(alone, random_groups(0), 0)
    groups = random_groups(1)
    last = groups[3].trajectories
    nowhere = [trajectory_of(t.ids.tolist(), t.mask.tolist(), logprobs=float("nan"), reward=t.reward) for t in last]
    with pytest.raises(NonFinite, match="refused after 1 steps"):
        pair.multi_rank.step([*groups[:3], group_of(nowhere, 3)], version(1))
    pair.both_step(alone, random_groups(1), 1)
    pair.assert_same_weights(alone)


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "data": {},
    "data lora": {"model": {"lora": LORA, "dtype": "bfloat16"}},
    "zero1 lora": {"model": {"lora": LORA}, "train": {"lr": 1e-3, "parallel": "zero1"}},
    "zero2": {"train": {"lr": 1e-3, "parallel": "zero2"}},
    "zero3": {"model": {"dtype": "bfloat16"}, "train": {"lr": 1e-3, "parallel": "zero3"}},
}


@pytest.mark.parametrize("parts", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_checkpoint_fits_any_number_of_ranks(pair: Pair, tmp_path: Path, parts: dict[str, Any]) -> None:
    alone = pair.job(**parts)
    for step in range(2):
        pair.both_step(alone, random_groups(step), step)
    pair.multi_rank.save(tmp_path / "of two")
    alone.save(tmp_path / "of one")
    pair.multi_rank.save_weights(tmp_path / "weights")
    saved = {path.name for path in (tmp_path / "of two").iterdir()} - {"trainer"}
    assert {path.name for path in (tmp_path / "weights").iterdir()} == saved
    for path in (tmp_path / "weights").iterdir():
        assert path.read_bytes() == (tmp_path / "of two" / path.name).read_bytes(), path.name
    for checkpoint in ("of two", "of one"):
        resumed = pair.job(tmp_path / checkpoint, **parts)
        assert resumed.steps == pair.multi_rank.own.steps == 2
        pair.both_step(resumed, random_groups(2), 2)
        pair.assert_same_weights(resumed)


def test_what_all_ranks_refuse_fails_the_job_and_not_the_processes(pair: Pair, tmp_path: Path) -> None:
    pair.multi_rank.spec = two_ranks(tmp_path / "nothing")
    with pytest.raises(JobFailed, match="has no usable tokenizer"):
        pair.multi_rank.load(None)
    pair.both_step(pair.job(), random_groups(0), 0)


# --- losing a rank: the last test with these two --------------------------------------------------------------------


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.nightly
def test_a_stopped_rank_is_replaced_for_the_next_job(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP between two steps. Its silence is noticed whatever our own part waits for."""
    pair.job(train={"lr": 1e-3, "parallel": "zero2"})
    assert pair.multi_rank.ranks is not None
    pair.multi_rank.ranks.silent_s = 3.0
    (pid,) = pair.multi_rank.ranks.pids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankLost, match="rank 1 has been silent"):
        pair.multi_rank.step(random_groups(1), version(1))
    pair.multi_rank.close()
    assert gone(pid)
    pair.multi_rank.close()

    brief = partial(RankProcesses, start_s=2.0)  # it imports torch for longer, and uses its processor meanwhile
    monkeypatch.setattr(multi_rank_learner, "RankProcesses", brief)
    pair.multi_rank = MultiRankRlLearner(two_ranks(pair.base), "cpu")
    alone = pair.job(train={"lr": 1e-3, "parallel": "zero1"})
    pair.both_step(alone, random_groups(0), 0)


def test_the_cause_of_lost_ranks_is_not_hidden_by_a_stuck_part() -> None:
    stuck = threading.Event()

    def started() -> RankProcesses:
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return RankProcesses(2, lambda rank: path, close_s=0.1)

    lost = started()
    os.kill(lost.pids[0], signal.SIGKILL)
    with pytest.raises(RankLost, match="rank 1 was killed by signal 9"):
        lost.run(Gather(checkpoint=False), stuck.wait)
    lost.close(lambda: None)

    cancelled, begun = started(), threading.Event()

    def wait() -> None:
        begun.set()
        stuck.wait()

    def ask() -> None:
        with pytest.raises(RankLost, match="released"):
            cancelled.run(Gather(checkpoint=False), wait)

    asking = threading.Thread(target=ask)
    asking.start()
    begun.wait()
    with pytest.raises(OpenTinkerError, match="must be started again"):
        cancelled.close(lambda: None)
    stuck.set()
    asking.join()


def test_ranks_that_were_starting_when_the_job_was_let_go_end(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    multi_rank = MultiRankRlLearner(two_ranks(pair.base), "cpu")
    started: list[RankProcesses] = []

    def slowly(*arguments: Any) -> RankProcesses:
        started.append(RankProcesses(*arguments))
        multi_rank.close()
        return started[0]

    monkeypatch.setattr(multi_rank_learner, "RankProcesses", slowly)
    with pytest.raises(OpenTinkerError, match="released"):
        multi_rank.load(None)
    assert all(gone(pid) for pid in started[0].pids)


@pytest.mark.parametrize(
    ("told", "taken"), [(None, ["0", "1", "2"]), ("", ["", "", ""]), ("5", ["5", "", ""]), ("6,4,5", ["6", "4", "5"])]
)
def test_ranks_use_gpus_of_their_trainer(monkeypatch: pytest.MonkeyPatch, told: str | None, taken: list[str]) -> None:
    monkeypatch.setattr(rank_environment, "visible", list)
    monkeypatch.delenv(VISIBLE, raising=False)
    if told is not None:
        monkeypatch.setenv(VISIBLE, told)
    assert [rank_environment.rank_environment(1, rank)[VISIBLE] for rank in range(3)] == taken


@pytest.mark.nightly
async def test_ranks_end_with_a_trainer_that_is_killed() -> None:
    code = (
        "import sys; from opentinker.services.trainer.distributed.rank_processes import RankProcesses\n"
        "print(*RankProcesses(2, lambda rank: {}).pids, flush=True); sys.stdin.read()"
    )
    trainer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert trainer.stdout is not None
    pid = int(await trainer.stdout.readline())
    assert not gone(pid)
    trainer.kill()
    await trainer.wait()
    await until(lambda: gone(pid))


# --- which rank gets what -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 6))
def test_shares_are_neighbours_and_the_longest_is_as_short_as_can_be(lengths: list[int], count: int) -> None:
    shares = share(lengths, count)
    assert len(shares) == count and [i for run in shares for i in run] == list(range(len(lengths)))
    longest = max(sum(lengths[i] for i in run) for run in shares)
    best = [0, *[float("inf")] * len(lengths)]  # of the first n lengths, by as many ranks as the rounds so far
    for _ in range(count):
        best = [min(max(best[start], sum(lengths[start:end])) for start in range(end + 1)) for end in range(len(best))]
    assert longest == best[-1]


def test_with_fewer_trajectories_than_ranks_the_last_ranks_get_none() -> None:
    assert share([7], 3) == [range(0, 1), range(1, 1), range(1, 1)]
    assert share([], 2) == [range(0, 0), range(0, 0)]
