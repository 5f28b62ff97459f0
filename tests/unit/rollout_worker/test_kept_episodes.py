"""Evaluations keep full transcripts of the first episodes, and of some of each outcome."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.shared.evaluation.outcomes import choose_kept, outcomes_of
from opentinker.shared.spec import EvaluationSpec, parse_spec
from opentinker.shared.types.core import Message, WeightVersion
from opentinker.shared.types.evaluation import EvalEpisode, EvalResult
from tests.support.factories import V0, make_result
from tests.unit.rollout_worker.test_outcomes import GAME, runner_of

SAID = [Message(role="user", content="q")]


def result(index: int, reward: float, **changes: Any) -> EvalResult:
    return make_result(index, **{"reward": reward, "messages": SAID, **changes})


@pytest.mark.parametrize(
    ("reward", "outcome", "names"),
    [
        (0.5, None, ["solved"]),
        (0.25, None, ["unsolved"]),
        (0.5, 1.0, ["solved", "won"]),
        (0.0, 0.5, ["unsolved", "drawn"]),
        (0.0, 0.0, ["unsolved", "lost"]),
    ],
)
def test_an_episode_is_solved_or_not_and_a_game_has_a_result(
    reward: float, outcome: float | None, names: list[str]
) -> None:
    assert outcomes_of(reward, outcome, solved_at=0.5) == names


def test_the_first_episodes_are_kept_and_two_of_each_outcome() -> None:
    rewards = [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    results = [result(i, reward) for i, reward in enumerate(rewards)]
    kept = choose_kept(results, EvaluationSpec(episodes=8, transcripts=3))
    assert [one.index for one in kept] == [0, 1, 2, 4, 6]
    kept = choose_kept([*results[:4], result(4, 0.0, messages=[])], EvaluationSpec(episodes=8, transcripts=3))
    assert [one.index for one in kept] == [0, 1, 2], "nothing that was not sent"


def test_two_of_each_outcome_are_kept_against_each_opponent() -> None:
    """10 episodes against each of two opponents, of which the second always wins."""
    results = [result(i, 1.0, outcome=1.0) for i in range(10)]
    results += [result(10 + i, 0.0, outcome=0.0) for i in range(10)]
    kept = choose_kept(results, EvaluationSpec(episodes=10, transcripts=1), ["weak", "strong"])
    assert [one.index for one in kept] == [0, 1, 10, 11]


@pytest.mark.parametrize("transcripts", [1, 0])
def test_a_worker_sends_its_first_episodes_of_each_outcome_of_a_version(transcripts: int) -> None:
    against = [{"bot": "random"}, {"bot": "equilibrium"}]
    plan = {"every": 5, "episodes": 100, "transcripts": transcripts, "against": against}
    runner = runner_of(parse_spec({**GAME, "validation": plan}), "a")

    def sent(index: int, reward: float, outcome: float, version: WeightVersion = V0) -> bool:
        return runner._is_rare(EvalEpisode(job="j", version=version, index=index, seed=0), reward, outcome)

    won, lost = (1.0, 1.0), (-1.0, 0.0)
    found = [sent(7, *won), sent(8, *won), sent(9, *won), sent(10, *lost), sent(110, *won)]
    found += [sent(9, *won, WeightVersion(0, 1))]
    wanted = [True, True, False, True, True, True]
    assert found == (wanted if transcripts else [False] * 6)
