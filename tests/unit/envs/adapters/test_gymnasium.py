"""Real Gymnasium and MiniGrid environments, unmodified."""

from __future__ import annotations

import pytest
from minigrid.utils.baby_ai_bot import BabyAIBot

from tests.support.playing import sit

ICE = ["down", "down", "right", "right", "down", "right"]


async def test_frozen_lake_is_crossed() -> None:
    table = await sit("gymnasium", id="FrozenLake-v1", kwargs={"is_slippery": False})
    assert "[S]FFF\nFHFH\nFFFH\nHFFG" in table.prompt and "left, down, right, up" in table.prompt
    step = await table.say(*ICE)
    assert (step.done, step.reward, table.totals) == (True, 1.0, {"": 1.0})
    assert step.metrics == {"return": 1.0, "illegal": 0.0, "truncated": 0.0}
    assert "[F]FFH" in table.steps[1].messages[0].text


async def test_cliff_is_walked_round_in_thirteen_steps() -> None:
    table = await sit("gymnasium", id="CliffWalking-v1")
    step = await table.say("up", *["right"] * 11, "down")
    assert (step.done, table.totals[""]) == (True, -13.0)


async def test_a_step_limit_truncates_and_shows_what_was_left() -> None:
    table = await sit("gymnasium", id="FrozenLake-v1", kwargs={"is_slippery": False}, max_steps=2)
    step = await table.say("down", "down")
    assert (step.done, step.truncated, step.metrics["truncated"]) == (True, True, 1.0)
    assert "[F]FFH" in table.seen
    fallen = await (await sit("gymnasium", id="FrozenLake-v1", kwargs={"is_slippery": False})).say("right", "down")
    assert (fallen.done, fallen.truncated, fallen.messages) == (True, False, [])


async def test_blackjack_is_played_by_its_numbers() -> None:
    """Over 40 deals of a policy that sticks at 17 somebody wins and somebody loses, and every reward is -1, 0 or 1."""
    ends = set()
    for row in range(40):
        table = await sit("gymnasium", row, id="Blackjack-v1")
        while not table.steps or not table.steps[-1].done:
            mine = int(table.seen.splitlines()[-1].split(",")[0])
            await table.say("stick" if mine >= 17 else "hit")
        ends.add(table.totals[""])
    assert {-1.0, 1.0} <= ends <= {-1.0, 0.0, 1.0}


async def test_taxi_says_what_is_possible_and_refuses_the_rest() -> None:
    table = await sit("gymnasium", 1, 2, id="Taxi-v4")
    assert "Possible: north." in table.prompt and "The passenger is at G and wants to go to Y." in table.prompt
    step = await table.say("pickup")
    assert step.messages[0].text == "That is no action: pickup is not possible now. Possible: north."
    assert (step.reward, step.components, step.done) == (-0.1, {"illegal": -0.1}, False)
    assert (await table.say("north")).reward == -1.0
    assert not (await table.say("what?")).done
    assert (await table.say("")).done


async def test_taxi_brings_the_passenger_home() -> None:
    """From below G: the way of a policy that reads the map, which the environment pays as it always does."""
    table = await sit("gymnasium", 1, 2, id="Taxi-v4", max_illegal=99)
    way = ["north", "north", "east", "east", "north", "north", "east", "east", "pickup"]
    await table.say(*way)
    assert "The passenger is in the taxi" in table.seen, table.seen
    back = ["west", "west", "south", "south", "west", "west", "south", "south", "dropoff"]
    step = await table.say(*back)
    assert (step.done, step.reward) == (True, 20.0)


async def test_box_actions_are_numbers() -> None:
    table = await sit("gymnasium", id="Pendulum-v1", max_steps=2)
    assert "a number from -2 to 2" in table.prompt
    assert (await table.say("7")).components == {"illegal": -0.1}
    assert not (await table.say("1.5")).done
    step = await table.say("Action: [0.5]")
    assert step.done and step.metrics["truncated"] == 1.0


async def test_minigrid_is_told_in_words() -> None:
    table = await sit("gymnasium", id="MiniGrid-Empty-5x5-v0")
    assert "Mission: get to the green goal square" in table.prompt
    assert "a green goal 2 ahead and 2 to the right" in table.prompt
    step = await table.say("forward", "forward", "right", "forward", "forward")
    assert step.done and step.reward > 0.9


@pytest.mark.parametrize("level", ["GoToRedBall", "PickupLoc", "OpenDoor", "GoToSeq"])
async def test_babyai_missions_are_accomplished_by_its_own_expert(level: str) -> None:
    table = await sit("gymnasium", 1, 2, id=f"BabyAI-{level}-v0")
    plain = table.environment._environment.unwrapped
    assert f"Mission: {plain.mission}\n" in table.prompt
    expert, action = BabyAIBot(plain), None
    while not table.steps or not table.steps[-1].done:
        action = expert.replan(action)
        await table.say(action.name)
    assert table.totals[""] > 0.5 and table.steps[-1].metrics["illegal"] == 0.0


async def test_names_and_instruction_may_be_ones_own() -> None:
    table = await sit("gymnasium", id="CartPole-v1", actions=["L", "R"], instruction="", hint=False)
    assert table.prompt.startswith("[")
    assert (await table.say("l")).reward == 1.0
    with pytest.raises(ValueError, match=r"3 names of actions were given, and CartPole-v1 has 2"):
        await sit("gymnasium", id="CartPole-v1", actions=["a", "b", "c"])
