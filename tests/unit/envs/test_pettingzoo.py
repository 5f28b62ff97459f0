"""Real PettingZoo environments, turn-based and parallel, unmodified."""

from __future__ import annotations

import random

import pytest

from tests.support.playing import sit


async def test_tic_tac_toe_is_won_by_one_and_lost_by_the_other() -> None:
    table = await sit("pettingzoo", id="classic/tictactoe_v3")
    assert table.seat == "player_1"
    await table.say("0", "3", "1")
    assert table.seat == "player_2" and "2 2 .\n1 . .\n. . ." in table.seen
    step = await table.say("4", "2")
    assert step.done and not step.truncated and table.totals == {"player_1": 1.0, "player_2": -1.0}


async def test_an_agent_hears_only_its_own_observations() -> None:
    table = await sit("pettingzoo", id="classic/tictactoe_v3")
    await table.say("4")
    assert "You are player_2" in table.seen and ". 2 ." in table.seen
    await table.say("0")
    assert "You are" not in table.seen and "2 . .\n. 1 .\n. . ." in table.seen


async def test_a_seat_that_goes_on_with_illegal_moves_forfeits() -> None:
    table = await sit("pettingzoo", id="classic/tictactoe_v3", max_illegal=2)
    await table.say("4")
    step = await table.say("4")
    assert (step.seat, step.done, step.components) == ("player_2", False, {"illegal": -0.1})
    assert "4 is not possible now. Possible: 0, 1, 2, 3, 5" in table.seen
    step = await table.say("the middle")
    assert step.done and step.components == {"illegal": -0.1, "forfeit": -1.0}
    assert table.totals == pytest.approx({"player_1": 0.0, "player_2": -1.2})


async def test_connect_four_random_play_is_zero_sum() -> None:
    ends = set()
    for row in range(6):
        table, dice = await sit("pettingzoo", row, id="classic/connect_four_v3"), random.Random(row)
        while not table.steps or not table.steps[-1].done:
            open_columns = (
                table.seen.split("Possible: ")[-1].rstrip(".").split(", ") if "Possible" in table.seen else []
            )
            await table.say(dice.choice(open_columns or list("0123456")))
        assert sum(table.totals.values()) == 0.0
        assert table.steps[-1].metrics["illegal"] == 0.0
        ends.add(max(table.totals.values()))
    assert ends == {1.0}


@pytest.mark.parametrize("api", ["aec", "parallel"])
async def test_rock_paper_scissors_pays_every_round(api: str) -> None:
    table = await sit("pettingzoo", id="classic/rps_v2", api=api, kwargs={"max_cycles": 4})
    step = await table.say("rock", "paper")
    assert step.messages[0].text == "1" and not step.done
    step = await table.say("scissors", "paper", "rock", "rock", "Action: paper", "rock")
    assert step.done and step.truncated, "by max_cycles: nobody has lost"
    assert table.totals == {"player_0": 1.0, "player_1": -1.0}


async def test_the_other_does_not_see_what_was_chosen_in_the_same_round() -> None:
    table = await sit("pettingzoo", id="classic/rps_v2", api="parallel")
    await table.say("rock")
    assert table.seat == "player_1" and table.seen.splitlines()[-1] == "3"
