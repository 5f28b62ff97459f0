"""The row log: one line per step, of one lineage, in a file of bounded size."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from opentinker.envs.base import user
from opentinker.envs.registry import make
from opentinker.envs.runtime.env_runner import LocalEnvRunner
from opentinker.services.trainer.batch.assembler import Assembler
from opentinker.services.trainer.batch.row_plays import plays_of
from opentinker.services.trainer.rollout_log import RolloutLog
from opentinker.shared.data.row_log import NAME, Point, RowLog, RowPlays, RowStep, by_row, read, series
from opentinker.shared.types.core import Ending, Message, WeightVersion
from opentinker.shared.types.env_protocol import OpenSession
from opentinker.shared.types.trajectories import Group
from tests.support.factories import group_of, make_trajectory


def step(number: int, *rows: RowPlays, epoch: int = 1) -> RowStep:
    return RowStep(epoch=epoch, step=number, rows=list(rows))


def played(row: int, played: int = 4, solved: int = 1) -> RowPlays:
    return RowPlays(row, played, solved, float(solved))


def of_row(row: int | None, *rewards: float, seq: int = 0, seats: tuple[str, ...] = ("",), **changes: Any) -> Group:
    made = [
        make_trajectory(index=index, reward=reward, seat=seat, row=row, **changes)
        for index, reward in enumerate(rewards)
        for seat in seats
    ]
    return group_of(made, seq)


def test_a_resumed_trainer_replaces_the_steps_that_were_rolled_back(tmp_path: Path) -> None:
    log = RowLog(tmp_path)
    assert read(tmp_path, RowStep) == []
    log.add(step(1))
    assert not (tmp_path / NAME).exists(), "a job without rows has no file"
    for number in (1, 2, 3):
        log.add(step(number, played(number)))
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'{"epoch":1,"st')  # killed
    again = step(2, played(9), epoch=2)
    RowLog(tmp_path).add(again)
    assert read(tmp_path, RowStep) == [step(1, played(1)), again]


def test_the_file_stays_bounded_and_the_newest_steps_stay_single(tmp_path: Path) -> None:
    bound = 20_000
    log = RowLog(tmp_path, bound)
    for number in range(1, 2001):
        log.add(step(number, *(played(row % 50) for row in range(number, number + 4))))
        assert (tmp_path / NAME).stat().st_size <= bound
    found = read(tmp_path, RowStep)
    assert found[-1].step == 2000 and found[-1].first == 0
    covered = sum(one.played for line in found for one in line.rows)
    first = found[0].first or found[0].step
    assert covered == 4 * 4 * (2000 - first + 1), "merged lines hold the sums of their steps"
    assert found[0].cut == (first > 1)


def test_points_of_a_series_are_merged_to_few() -> None:
    points = [Point(number, 4, number % 2) for number in range(1, 11)]
    assert series(points, 32) == points
    merged = series(points, 4)
    assert merged == [Point(3, 12, 2), Point(6, 12, 1), Point(9, 12, 2), Point(10, 4, 0)]
    assert series([], 4) == []


def test_episodes_of_a_group_count_for_its_row() -> None:
    assert plays_of(of_row(None, 1.0, 0.0), 1.0) is None
    assert plays_of(of_row(7, 1.0, 0.0, 0.5), 0.5) == RowPlays(7, 3, 2, 1.5)
    teams = plays_of(of_row(7, 1.0, 0.5, seats=("a", "b")), 1.0)
    assert teams == RowPlays(7, 2, 1, 1.5), "the reward of an episode is the mean over the seats"
    assert by_row([played(1), played(2), played(1, 2, 2)]) == {1: played(1, 6, 3), 2: played(2)}


def test_discarded_groups_were_played_nevertheless() -> None:
    assembler = Assembler(1, 1, drop_zero_variance=True, solved_at=0.5)
    assembler.add(1, of_row(3, 1.0, 1.0, seq=1))
    assembler.add(2, of_row(4, 1.0, 0.0, seq=2))
    assembler.drop(0)
    assert assembler.pop_unlogged() == [RowPlays(3, 2, 2, 2.0)]
    assert assembler.pop_unlogged() == []
    assembler.add(3, of_row(5, 1.0, 0.0, seq=3, versions=[WeightVersion(1, 9)]))
    assembler.drop(0)
    assert assembler.pop_unlogged() == [], "tokens of rolled-back weights are not of this lineage"


async def test_rows_are_marked_whose_episodes_can_be_read(tmp_path: Path) -> None:
    said = [Message(role="user", content="?")]
    groups = [of_row(row, 1.0, 0.0, seq=row, transcript=said) for row in (3, 4)]
    plays = [found for group in groups if (found := plays_of(group, 1.0)) is not None]
    await RolloutLog(tmp_path, 2, MagicMock()).step(WeightVersion(1, 1), 0.0, groups, {}, plays=[*plays, played(3)])
    assert read(tmp_path, RowStep) == [step(1, RowPlays(3, 6, 2, 2.0, True), RowPlays(4, 2, 1, 1.0))]


@pytest.mark.parametrize(("environment", "row"), [("gsm8k", 7473 + 5), ("copy_digits", 3)])
async def test_an_open_says_which_row_is_played(environment: str, row: int) -> None:
    player = LocalEnvRunner("w", modules=False)
    request = OpenSession(job="j", session="s", environment=environment, config={}, row=row, seed=1, deadline_s=9.0)
    reply = await player.open(request)
    await player.close()
    rows = type(made := make(environment, {})).data_rows(made.config)
    if environment == "copy_digits":
        assert reply.row is None and rows is None
        return
    assert rows is not None and (len(rows), reply.row, rows.number(row)) == (7473, 5, 5)
    assert rows.prompt(5) == reply.messages and rows.place(5) == ""


async def test_a_row_without_a_valid_number_ends_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentinker.envs.builtin.gsm8k import Questions

    monkeypatch.setattr(Questions, "number", lambda _, row: row - 1)
    monkeypatch.setattr(Questions, "prompt", lambda *_: [user("?")])
    player = LocalEnvRunner("w", modules=False)
    request = OpenSession(job="j", session="s", environment="gsm8k", config={}, row=0, seed=1, deadline_s=9.0)
    reply = await player.open(request)
    assert reply.failure is Ending.ENV_BAD_REPLY and "number() must return an int from 0" in reply.error
