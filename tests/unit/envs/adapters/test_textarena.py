"""Real TextArena games, unmodified: they reseed the generators of the whole process, and must not be felt."""

from __future__ import annotations

import random

import pytest

from opentinker.envs.registry import make
from opentinker.shared.types.errors import SpecError
from tests.support.playing import sit, transcript


async def test_tic_tac_toe_has_two_seats() -> None:
    table = await sit("textarena", id="TicTacToe-v0", players=2)
    assert table.environment.seats == ("0", "1") and table.seat == "0"
    await table.say("[4]")
    assert table.seat == "1" and "You are Player 1" in table.seen and "[Player 0] [4]" in table.seen
    await table.say("[0]")
    assert "[Player 0]" not in table.seen and "[Player 1] [0]" in table.seen
    step = await table.say("[2]", "[1]", "[6]")
    assert step.done and table.totals == {"0": 1.0, "1": -1.0}
    assert step.metrics == {"turns": 5.0, "invalid": 0.0}


async def test_the_game_itself_answers_invalid_moves() -> None:
    table = await sit("textarena", id="TicTacToe-v0", players=2)
    await table.say("[4]", "[4]")
    assert table.seat == "1" and "already occupied" in table.seen
    step = await table.say("[9]")
    assert step.done and step.metrics["invalid"] == 1.0 and table.totals == {"0": 1.0, "1": -1.0}


async def test_a_number_is_found_by_halving() -> None:
    for row in range(8):
        table = await sit("textarena", row, id="GuessTheNumber-v0")
        low, high, done = 1, 20, False
        while not done:
            guess = (low + high) // 2
            done = (await table.say(f"I say [{guess}]")).done
            low, high = (guess + 1, high) if "higher" in str(table.steps[-1].messages) else (low, guess - 1)
        assert table.totals == {"": 1.0}


async def test_frozen_lake_shows_the_whole_board_each_time() -> None:
    table = await sit("textarena", id="FrozenLake-v0-train")
    await table.say("right")
    assert table.seen.count("Current Board") == 1 and "Welcome to Frozen Lake" in table.seen


async def test_kuhn_poker_sums_to_zero() -> None:
    table = await sit("textarena", id="KuhnPoker-v0", players=2)
    while not table.steps or not table.steps[-1].done:
        await table.say("[call]" if "'[call]'" in table.seen.split("[GAME]")[-1] else "[check]")
    assert sum(table.totals.values()) == 0.0


async def test_global_seeding_stays_within_an_episode() -> None:
    import textarena

    random.seed(5)
    game = textarena.make("GuessTheNumber-v0")
    expected = random.Random(5).random()
    game.reset(num_players=1, seed=1)
    assert random.random() != expected, "TextArena no longer reseeds the process: this test tests nothing"
    before = random.getstate()
    await transcript("textarena", ["[3]", "[4]"], id="GuessTheNumber-v0")
    assert random.getstate() == before


async def test_episodes_in_one_process_do_not_disturb_each_other() -> None:
    """Bandit draws its rewards from the global generator in every turn."""
    alone = await transcript("textarena", ["[red]"] * 8, 1, id="Bandit-v0")
    table, other = await sit("textarena", 1, id="Bandit-v0"), await sit("textarena", 2, id="Bandit-v0")
    for _ in range(8):
        await other.say("[blue]")
        await table.say("[red]")
    assert [table.prompt, *table.steps] == alone


async def test_a_wrong_number_of_players_is_the_games_own_error() -> None:
    with pytest.raises(AssertionError, match="number of players has to be 2"):
        await sit("textarena", id="TicTacToe-v0", players=3)


RPS = {"id": "IteratedRockPaperScissors-v0", "players": 2, "simultaneous": True, "kwargs": {"num_rounds": 3}}


async def test_players_of_a_simultaneous_game_act_in_rounds() -> None:
    table = await sit("textarena", **RPS)
    assert list(table.prompts) == ["0", "1"] and "You are Player 1" in table.said_to("1")
    await table.say_all("[rock]", "[paper]")
    assert list(table.prompts) == ["0", "1"]
    assert table.said_to("0") == table.said_to("1") == "[GAME] Round result: Player 1 wins!"
    await table.say_all("[rock]", "[scissors]")
    step = await table.say_all("[rock]", "[scissors]")
    assert step.done and table.totals == {"0": 1.0, "1": -1.0}


async def test_rounds_and_turns_of_a_simultaneous_game_come_to_the_same() -> None:
    texts = [("[rock]", "[paper]"), ("[scissors]", "[paper]"), ("[paper]", "[scissors]")]
    together = await sit("textarena", **RPS)
    in_turn = await sit("textarena", **{**RPS, "simultaneous": False})
    for pair in texts:
        one, other = await together.say_all(*pair), await in_turn.say(*pair)
    assert one.done and other.done and one.metrics == other.metrics
    assert together.totals == in_turn.totals == {"0": -1.0, "1": 1.0}


@pytest.mark.parametrize("wrong", [0, 1])
async def test_a_player_whose_action_is_not_accepted_is_asked_again_alone(wrong: int) -> None:
    table = await sit("textarena", **RPS)
    texts = ["[rock]", "[rock]"]
    texts[wrong] = "lizard"
    await table.say_all(*texts)
    assert list(table.prompts) == [str(wrong)] and "Move not recognized" in table.said_to(str(wrong))
    await table.say_all("[rock]")
    assert list(table.prompts) == ["0", "1"] and "Draw" in table.said_to("0")
    await table.say_all(*texts)
    step = await table.say_all("lizard")
    assert step.done and table.totals[str(wrong)] == -1.0 == -table.totals[str(1 - wrong)]


async def test_an_eliminated_player_gets_no_more_rounds() -> None:
    table = await sit("textarena", id="PublicGoodsGame-v0", players=3, simultaneous=True,
                      kwargs={"num_rounds": 2, "communication_turns": 1})  # fmt: skip
    await table.say_all("{hello}", "{hi}", "{ho}")
    assert list(table.prompts) == ["0", "1", "2"] and "Player 0: hello" in table.said_to("2")
    await table.say_all("nothing", "[5]", "[5]")
    for _ in range(2):
        assert list(table.prompts) == ["0"]
        await table.say_all("nothing")
    assert "eliminated" in table.said_to("0"), "this game asks once more all the same"
    await table.say_all("[0]")
    assert list(table.prompts) == ["1", "2"]


def test_one_player_cannot_act_at_the_same_time_as_others() -> None:
    with pytest.raises(SpecError, match="needs players >= 2"):
        make("textarena", {"id": "Wordle-v0", "simultaneous": True})
