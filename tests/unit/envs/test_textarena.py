"""Real TextArena games, unmodified: they reseed the generators of the whole process, and must not be felt."""

from __future__ import annotations

import random

import pytest

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
