"""Real PettingZoo environments, turn-based and parallel, unmodified."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Discrete

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


async def test_rock_paper_scissors_in_turn_pays_every_round() -> None:
    table = await sit("pettingzoo", id="classic/rps_v2", kwargs={"max_cycles": 4})
    step = await table.say("rock", "paper")
    assert step.messages[0].text == "1" and not step.done
    step = await table.say("scissors", "paper", "rock", "rock", "Action: paper", "rock")
    assert step.done and step.truncated, "by max_cycles: nobody has lost"
    assert table.totals == {"player_0": 1.0, "player_1": -1.0}


async def test_agents_of_a_parallel_environment_act_at_the_same_time() -> None:
    table = await sit("pettingzoo", id="classic/rps_v2", api="parallel", kwargs={"max_cycles": 4})
    assert list(table.prompts) == ["player_0", "player_1"]
    assert all("You are " + seat in table.said_to(seat) for seat in table.prompts)
    step = await table.say_all("rock", "paper")
    assert step.rewards == {"player_0": {"reward": -1.0}, "player_1": {"reward": 1.0}} and not step.done
    assert (table.said_to("player_0"), table.said_to("player_1")) == ("1", "0"), "what the other has chosen"
    for texts in (("scissors", "paper"), ("rock", "rock"), ("Action: paper", "rock")):
        step = await table.say_all(*texts)
    assert step.done and step.truncated, "by max_cycles: nobody has lost"
    assert table.totals == {"player_0": 1.0, "player_1": -1.0}
    assert step.metrics == {"illegal": 0.0, "return/player_0": 1.0, "return/player_1": -1.0}


async def test_an_illegal_action_is_asked_again_while_the_others_are_held() -> None:
    table = await sit("pettingzoo", id="classic/rps_v2", api="parallel", max_illegal=3, penalty=0.5)
    step = await table.say_all("rock", "spock")
    assert list(table.prompts) == ["player_1"] and "one of: rock" in table.said_to("player_1")
    assert step.rewards == {"player_1": {"illegal": -0.5}}
    step = await table.say_all("scissors")
    assert step.rewards == {"player_0": {"reward": 1.0}, "player_1": {"reward": -1.0}}
    assert list(table.prompts) == ["player_0", "player_1"]
    await table.say_all("lizard", "lizard")
    step = await table.say_all("lizard", "lizard")
    assert step.done and step.rewards["player_1"] == {"illegal": -0.5, "forfeit": -1.0}
    assert step.rewards["player_0"] == {"illegal": -0.5}


class Shrinking:
    """PettingZoo's parallel API: an agent that says 1 is out, and gets 1 for each that is still in."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.possible_agents = ["x", "y", "z"]
        self.agents: list[str] = []

    def action_space(self, agent: str) -> Any:
        return Discrete(2)

    observation_space = action_space

    def reset(self, seed: int) -> Any:
        self.agents = list(self.possible_agents)
        return dict.fromkeys(self.agents, 0), {
            agent: {"action_mask": np.array([1, 1], dtype=np.int8)} for agent in self.agents
        }

    def step(self, actions: dict[str, int]) -> Any:
        assert list(actions) == self.agents
        out = {agent: bool(action) for agent, action in actions.items()}
        left = [agent for agent in self.agents if not out[agent]]
        rewards = {agent: float(len(left)) if out[agent] else 0.0 for agent in self.agents}
        observations = dict.fromkeys(self.agents, len(left) % 2)
        infos = {agent: {"action_mask": np.array([1, agent != "x"], dtype=np.int8)} for agent in self.agents}
        cut = dict.fromkeys(self.agents, False)
        self.agents = left
        return observations, rewards, out, cut, infos

    def close(self) -> None:
        pass


async def test_agents_that_are_out_are_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pettingzoo.make", lambda *_, **__: Shrinking())
    monkeypatch.setattr("pettingzoo.spec", lambda *_: None)
    table = await sit("pettingzoo", id="shrinking", api="parallel")
    step = await table.say_all("0", "1", "0")
    assert list(table.prompts) == ["x", "z"] and step.rewards["y"] == {"reward": 2.0}
    await table.say_all("1", "0")
    assert list(table.prompts) == ["x"], "its mask allows 0 alone; z is held"
    step = await table.say_all("0")
    assert not step.done and list(table.prompts) == ["x", "z"]
    step = await table.say_all("0", "1")
    assert step.rewards["z"] == {"reward": 1.0} and list(table.prompts) == ["x"]
    assert not step.truncated and table.totals == {"x": -0.1, "y": 2.0, "z": 1.0}
