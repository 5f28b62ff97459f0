"""Ranks of two trainers: the lead's learner here, and the processes of a member, which connect by TCP."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import structlog

from opentinker.services.trainer.distributed.member_ranks import MemberRanks
from opentinker.services.trainer.distributed.multi_rank_learner import MultiRankRlLearner
from opentinker.services.trainer.distributed.rank_connections import RankLost
from opentinker.services.trainer.distributed.rank_listener import RankListener
from opentinker.shared.types.core import Lease, Pool
from opentinker.shared.types.trainer_group import JoinRanks, RankShare
from tests.conftest import WAIT_S
from tests.integration.trainer.test_ranks import JOBS, Pair, two_ranks
from tests.support.factories import version
from tests.support.learning import random_groups
from tests.support.listening import living

HERE = "127.0.0.1"
RANK = "-m\0opentinker.services.trainer.distributed.rank_main"
"""In the command of a rank."""
SHARES = (RankShare("trainer-0", "a", 1), RankShare("trainer-1", "b", 1))
"""The lead is this process."""


def lease_of(place: int) -> Lease:
    share = SHARES[place]
    return Lease(
        job="j-a", worker=share.worker, incarnation=share.incarnation, epoch=1, pool=Pool.TRAINER, group=SHARES
    )


def call(listener: RankListener, **changes: object) -> JoinRanks:
    fields = {"job": "j-a", "epoch": 1, "address": HERE, "port": listener.port, "token": listener.token}
    return JoinRanks(**{**fields, **changes})  # type: ignore[arg-type]


class TwoTrainers(Pair):
    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.listener = RankListener(HERE, SHARES)
        self.multi_rank = MultiRankRlLearner(two_ranks(base), "cpu", self.listener)
        self.member = MemberRanks(lease_of(1))
        assert self.member.start(call(self.listener)) == ""

    @property
    def pid(self) -> int:
        """Of the member's rank."""
        (pid,) = [pid for pid, parent in living() if parent == os.getpid() and RANK in command_of(pid)]
        return pid

    def member_ends(self) -> bool:
        assert self.member._thread is not None
        self.member._thread.join(WAIT_S)
        return not self.member._thread.is_alive()


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture(scope="module")
def trainers(small: Path) -> Iterator[TwoTrainers]:
    with closing(TwoTrainers(small)) as trainers:
        yield trainers


GUARDS = ("full", "zero3")
NAMES = [name if name in GUARDS else pytest.param(name, marks=pytest.mark.nightly) for name in JOBS]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_of_two_trainers_learn_what_one_does(trainers: TwoTrainers, name: str) -> None:
    parts = JOBS[name]
    usual = {"group_size": 4, "groups_per_batch": 4}
    alone = trainers.job(**{**parts, "algorithm": {**usual, **parts.get("algorithm", {})}})
    for step in range(2):
        trainers.both_step(alone, random_groups(step, reference=True), step)
    trainers.assert_same_weights(alone)


def test_the_loss_of_a_member_is_noticed_and_names_it(trainers: TwoTrainers) -> None:
    """The last test with these two."""
    trainers.job()
    with structlog.testing.capture_logs() as said:
        os.kill(trainers.pid, signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 on trainer-1 has closed") as lost:
            trainers.multi_rank.step(random_groups(0), version(0))
        assert lost.value.worker == "trainer-1"
        trainers.multi_rank.close()
        assert trainers.member_ends()
    assert [line["why"] for line in said if line["event"] == "rank_lost"] == ["rank 1 was killed by signal 9"]


def test_the_ranks_of_a_member_end_with_the_lead(small: Path) -> None:
    with closing(TwoTrainers(small)) as trainers:
        trainers.multi_rank.load(None)
    assert trainers.member_ends()
