"""A proposer writes an addition and solvers answer it: who is asked what, and what each earns."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from opentinker.services.trainer.algorithm.credit_assignment import assign
from opentinker.shared.spec import parse_spec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.spec.matches.seats import SeatTable, mistakes_in_seats
from tests.support.factories import group_of, trajectory_of
from tests.support.playing import sit

SOLVERS = ("solver_1", "solver_2", "solver_3", "solver_4")
CUT_OUT = ("12,345 + 1", "1.5 + 2", "-5 + 3", "\u22125 + 3", "1 + 2.5", "1 + 2,500", "1 + 25.5")
"""A part of each would be an addition."""
table = partial(sit, "proposed_sums")


@pytest.mark.parametrize(("right", "paid"), [(0, 0.0), (1, 0.75), (2, 1.0), (3, 0.75), (4, 0.0)])
async def test_the_proposer_earns_most_where_half_of_the_solvers_are_right(right: int, paid: float) -> None:
    game = await table()
    assert game.seat == "proposer" and "at most 4 digits" in game.prompt
    await game.say("Let us try 12 + 34, please.")
    assert tuple(game.prompts) == SOLVERS
    assert {prompt.messages[-1].text for prompt in game.prompts.values()} == {"12 + 34 ="}
    answers = ["10 + 36 is 46"] * right + ["47", "46 or 45", "no idea", "460"][: 4 - right]
    step = await game.say_all(*answers)
    assert step.done and step.metrics == {"valid": 1.0, "solved": right / 4, "digits": 2.0}
    assert game.totals == {"proposer": paid, **{seat: float(n < right) for n, seat in enumerate(SOLVERS)}}


@pytest.mark.parametrize("text", ["", "12 * 34", "12345 + 1", "1 + 12345", "+ 3", "12 + x", "١٢ + ١", *CUT_OUT])
async def test_what_is_no_addition_ends_the_match_without_solvers(text: str) -> None:
    game = await table()
    step = await game.say(text)
    assert step.done and step.metrics == {"valid": 0.0} and game.totals == dict.fromkeys(("proposer", *SOLVERS), 0.0)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("1,046", 1.0),
        ("1046.0", 1.0),
        ("**1,046.00**.", 1.0),
        ("1000 + 46 = 1046, I think", 1.0),
        ("-1046", 0.0),
        ("\u22121046", 0.0),
        ("1046.5", 0.0),
        ("11,046", 0.0),
        ("10,46", 0.0),
        ("1046,45", 0.0),
        ("1046 - no, 1045", 0.0),
        ("\u0661\u0660\u0664\u0666", 0.0),
    ],
)
async def test_answers_are_read_as_numbers_are_written(answer: str, right: float) -> None:
    game = await table(solvers=2)
    await game.say("1000 + 46")
    await game.say_all(answer, "46.0")
    assert (game.totals["solver_1"], game.totals["solver_2"]) == (right, 0.0)


async def test_settings_decide_seats_and_sizes() -> None:
    game = await table(solvers=2, digits=1)
    assert game.environment.seats == ("proposer", "solver_1", "solver_2") and "at most 1 digits" in game.prompt
    assert (await game.say("12 + 3")).done
    rows = {(await table(row)).prompt for row in range(20)}
    assert len(rows) > 10, "groups differ"
    assert (await table(3)).prompt == (await table(3)).prompt


JOB: dict[str, Any] = {
    "name": "sums",
    "model": {"base": "m"},
    "environment": {"name": "proposed_sums"},
    "algorithm": {"name": "dr_grpo"},
    "train": {"steps": 10},
    "policies": {"proposer": {}, "solver": {"algorithm": {"episode_peers": {"solvers": ["solver_*"]}}}},
    "seats": {"proposer": "proposer", "solver_*": "solver"},
}


async def test_solvers_are_compared_within_a_match_and_proposers_over_the_group() -> None:
    spec = parse_spec(JOB)
    assert mistakes_in_seats(SeatTable.of(spec), (await table()).environment.seats) == []
    trajectories = []
    for match, right in enumerate((1, 2, 4)):
        game = await table()
        await game.say("12 + 34")
        await game.say_all(*["46"] * right, *["47"] * (4 - right))
        trajectories += [
            trajectory_of([5, 6], [0, 1], reward=reward, index=match, seat=seat, policy=seat.partition("_")[0])
            for seat, reward in game.totals.items()
        ]
    group = group_of(trajectories)

    def advantages(policy: str) -> list[float]:
        credit = assign([group.of(policy)], spec_of(spec, policy).algorithm)
        return [float(values[0]) for values in credit.advantages_S]

    solved = [0.25] * 4 + [0.5] * 4 + [1.0] * 4
    rights = [float(n < right) for right in (1, 2, 4) for n in range(4)]
    assert advantages("solver") == [right - mean for right, mean in zip(rights, solved, strict=True)]
    mean = (0.75 + 1.0 + 0.0) / 3
    assert advantages("proposer") == pytest.approx([0.75 - mean, 1.0 - mean, 0.0 - mean])
