"""Tic-tac-toe: two views of one board, a perfect bot, and rewards that sum to zero."""

from __future__ import annotations

import random
from functools import partial

import pytest

from opentinker.envs.base import Opening, Step, play_gold
from opentinker.envs.builtin.gomoku_board import BLACK
from opentinker.envs.builtin.tictactoe import TicTacToe, cells, positions
from opentinker.envs.registry import check, make
from opentinker.shared.types.errors import SpecError
from tests.support import playing
from tests.support.playing import say

opened = partial(playing.opened, TicTacToe)


def sums_to_zero(step: Step) -> bool:
    return step.reward + sum(sum(parts.values()) for parts in step.rewards.values()) == 0.0


async def test_each_seat_sees_the_board_in_a_new_context() -> None:
    environment, opening = await opened()
    rules = "tic-tac-toe, 3 in a row win. you are {}. say the number of a free field.\n"
    assert (opening.seat, opening.stream) == ("first", "0")
    assert opening.messages[0].text == rules.format("x") + "123\n456\n789\nx:"
    first, second = await say(environment, "not 1 but 5", "9")
    assert (first.seat, first.stream, second.seat, second.stream) == ("second", "1", "first", "2")
    assert first.messages[0].text == rules.format("o") + "123\n4x6\n789\no:"
    assert second.messages[0].text == rules.format("x") + "123\n4x6\n78o\nx:"
    _, bare = await opened(rules=False)
    assert bare.messages[0].text == "123\n456\n789\nx:"


async def test_wins_and_draws_are_paid_to_both_seats() -> None:
    environment, _ = await opened()
    *_, last = await say(environment, "1", "4", "2", "5", "3")
    assert (last.done, last.reward, last.rewards) == (True, 1.0, {"second": {"outcome": -1.0}})
    assert (last.metrics["first_won"], last.metrics["moves"]) == (1.0, 5.0)
    environment, _ = await opened()
    *_, last = await say(environment, "1", "2", "3", "5", "4", "6", "8", "7", "9")
    assert (last.done, last.reward, last.rewards) == (True, 0.0, {"second": {"outcome": 0.0}})
    assert (last.metrics["draw"], last.metrics["first_won"], last.metrics["forfeit"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("text", ["", "0", "10", "55", "no", "5"])
async def test_an_illegal_answer_loses_to_the_other_seat(text: str) -> None:
    environment, _ = await opened()
    _, last = await say(environment, "5", text)
    assert (last.done, last.reward, last.rewards) == (True, -1.0, {"first": {"outcome": 1.0}})
    assert (last.metrics["forfeit"], last.metrics["first_won"], last.metrics["draw"]) == (1.0, 1.0, 0.0)


async def test_rewards_sum_to_zero_in_random_games() -> None:
    draw, endings = random.Random(0), set()
    for game in range(200):
        environment, _ = await opened(game, random_stones=draw.choice((0, 2, 4)))
        step = Step()
        while not step.done:
            (step,) = await say(environment, str(draw.choice(range(1, 10))) if draw.random() < 0.3 else
                                str(1 + draw.choice(environment.board.free())))  # fmt: skip
            assert sums_to_zero(step)
        endings.add((step.metrics["first_won"], step.metrics["draw"], step.metrics["forfeit"]))
    assert len(endings) == 5, "either seat wins, by stones or by forfeit, or none does"


async def test_perfect_play_never_loses() -> None:
    for seed in range(100):
        for expert, rival in (("first", "second"), ("second", "first")):
            played = await play_gold(make("tictactoe", {}), 0, seed, bots={rival: "random"})
            assert played.rewards[expert] >= 0.0
            against = await play_gold(make("tictactoe", {}), 0, seed, bots={rival: "perfect"})
            assert against.rewards == {expert: 0.0, rival: 0.0}
    assert (await play_gold(make("tictactoe", {}), 0, 0)).rewards == {"first": 0.0, "second": 0.0}


async def test_games_start_alike_within_a_group_only() -> None:
    starts = {
        (row, seed): (await opened(row, seed, random_stones=4))[1].messages for row in range(4) for seed in (0, 1)
    }
    again = {key: (await opened(*key, random_stones=4))[1].messages for key in starts}
    assert again == starts
    assert len({str(start) for start in starts.values()}) > 5


def test_stones_come_in_pairs() -> None:
    with pytest.raises(SpecError, match="0, 2 or 4"):
        check("tictactoe", {"random_stones": 1})


async def test_progress_pays_every_move_what_it_changes_and_adds_up_to_the_outcome() -> None:
    environment, _ = await opened(progress=True)
    mistake, punished, *_ = await say(environment, "1", "2")
    assert (mistake.reward, mistake.components) == (0.0, {"progress": 0.0})
    assert (punished.reward, punished.rewards) == (-1.0, {"first": {"progress": 1.0}}), "2 loses to perfect play"
    draw = random.Random(1)
    for game in range(100):
        environment, _ = await opened(game, progress=True)
        total, step = 0.0, Step(seat="first")
        while not step.done:
            mover = step.seat
            (step,) = await say(environment, str(1 + draw.choice(environment.board.free())))
            assert sums_to_zero(step)
            total += step.reward if mover == "first" else step.rewards["first"]["progress"]
        assert total == 2 * step.metrics["first_won"] + step.metrics["draw"] - 1


async def test_an_illegal_answer_costs_progress_even_where_the_game_is_lost() -> None:
    environment, _ = await opened(progress=True)
    assert (await say(environment, "x"))[-1].reward == -2.0
    environment, _ = await opened(progress=True)
    *_, lost = await say(environment, "1", "2", "5", "none")
    assert (lost.done, lost.reward, lost.metrics["forfeit"]) == (True, -1.0, 1.0)


async def test_random_moves_are_made_for_both_seats_and_paid_by_the_outcome_alone() -> None:
    movers, draw = set(), random.Random(2)
    for game in range(200):
        environment, step = await opened(game, random_moves=0.5)
        last: Opening | Step = step
        while isinstance(last, Opening) or not last.done:
            movers.add((last.seat, environment.board.played % 2))
            (last,) = await say(environment, str(1 + draw.choice(environment.board.free())))
            assert sums_to_zero(last)
        outcome = last.reward if last.rewards.keys() == {"second"} else last.rewards["first"]["outcome"]
        assert outcome == 2 * last.metrics["first_won"] + last.metrics["draw"] - 1
    assert movers == {("first", 0), ("second", 1)}, "games begin with either seat"
    begun = [(await opened(game, random_moves=0.9))[0].board.played for game in range(50)]
    assert set(begun) == {0, 1, 2, 3, 4}


async def test_cells_show_both_seats_the_same_view() -> None:
    environment, opening = await opened(rules=False, board="cells")
    assert opening.messages[0].text == "123456789:"
    second, first = await say(environment, "5", "9")
    assert second.messages[0].text == "1234n6789:"
    assert first.messages[0].text == "1234e678r:"
    assert (await say(environment, "5"))[-1].metrics["forfeit"] == 1.0
    _, explained = await opened(board="cells")
    assert explained.messages[0].text.endswith("\n123456789:")


def test_positions_are_those_in_which_a_move_can_be_made() -> None:
    found = positions()
    assert len(set(found)) == len(found) == 4520
    assert (("x",) * 9, BLACK) not in found and (("",) * 9, BLACK) in found
    assert len({cells(fields, mover) for fields, mover in found}) == 4520
