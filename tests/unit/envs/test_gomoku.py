"""Gomoku: OpenSpiel's rules, two views of one board, and rewards that say who lost and why."""

from __future__ import annotations

import random
from functools import partial

import pyspiel
import pytest

from opentinker.envs.base import Opening, Step, play_gold
from opentinker.envs.builtin.gomoku import Gomoku
from opentinker.envs.builtin.gomoku_board import BLACK, WHITE, Board, bot, expert
from opentinker.envs.registry import check, make
from opentinker.shared.types.errors import SpecError
from tests.support import playing
from tests.support.playing import say

WON = {BLACK: [1.0, -1.0], WHITE: [-1.0, 1.0], "": [0.0, 0.0]}


@pytest.mark.parametrize(("size", "win", "games"), [(3, 3, 60), (4, 3, 60), (5, 4, 40), (9, 5, 30), (15, 5, 3)])
def test_rules_are_those_of_openspiel(size: int, win: int, games: int) -> None:
    """Random games, move by move: the same legal moves, player, end and winner."""
    rules = pyspiel.load_game(f"mnk(m={size},n={size},k={win})")
    draw, ends = random.Random(size), set()
    for _ in range(games):
        board, state = Board(size, win), rules.new_initial_state()
        while not board.over:
            assert not state.is_terminal()
            assert state.legal_actions() == board.free()
            assert state.current_player() == (0 if board.next == BLACK else 1)
            field = draw.choice(board.free())
            state.apply_action(field)
            board.place(field)
        assert state.is_terminal() and state.returns() == WON[board.winner]
        ends.add(board.winner)
        with pytest.raises(ValueError, match="the game is over"):
            board.place(0)
    assert {BLACK, WHITE} <= ends or games < 10


def test_boards_read_as_they_are_written() -> None:
    board = Board(11, 5)
    for name in ("a1", "k11", "c10"):
        field = board.field(name)
        assert field is not None and board.name(field) == name
        board.place(field)
    lines = str(board).splitlines()
    assert (lines[0], lines[1], lines[10], lines[11]) == (
        "   abcdefghijk",
        " 1 x..........",
        "10 ..x........",
        "11 ..........o",
    )
    assert [board.field(name) for name in ("l1", "a12", "a0")] == [None, None, None]


@pytest.mark.parametrize("colour", [BLACK, WHITE])
async def test_expert_beats_the_bot(colour: str) -> None:
    """Nearly always on the default board; a start may be lost where four in a row are enough."""
    for config, least in (({}, 19), ({"size": 5, "win": 4, "random_moves": 0.3}, 14)):
        games = [await play_gold(make("gomoku", {"colour": colour, **config}), 0, seed) for seed in range(20)]
        assert sum(game.reward == 1.0 for game in games) >= least
        assert all(game.metrics["exact"] == float(game.reward == 1.0) for game in games)


async def test_expert_against_itself_shares_one_outcome() -> None:
    games = [await play_gold(make("gomoku", {"opponent": "self", "size": 5, "win": 4}), 0, seed) for seed in range(10)]
    assert all(game.rewards[BLACK] == -game.rewards[WHITE] for game in games)
    assert {game.rewards[BLACK] for game in games} - {0.0}
    assert all(game.metrics["black_won"] == float(game.rewards[BLACK] == 1.0) for game in games)


async def test_outcomes_sum_to_zero_in_random_games_of_four_in_a_row_on_five_by_five() -> None:
    draw, endings = random.Random(1), set()
    for game in range(150):
        environment = make("gomoku", {"opponent": "self", "size": 5, "win": 4, "retries": 1})
        opening, totals = await environment.open(game, 0), {BLACK: 0.0, WHITE: 0.0}
        assert isinstance(opening, Opening)
        seat, step = opening.seat, Step()
        while not step.done:
            text = environment.board.name(draw.choice(environment.board.free()))  # type: ignore[attr-defined]
            (step,) = await say(environment, "pass" if draw.random() < 0.1 else text)
            totals[seat] += step.components["outcome"]
            for other_seat, parts in step.rewards.items():
                totals[other_seat] += parts["outcome"]
            seat = step.seat
        assert totals[BLACK] + totals[WHITE] == 0.0
        endings.add((totals[BLACK], step.metrics["forfeit"]))
    assert {(1.0, 0.0), (-1.0, 0.0), (0.0, 1.0)} <= endings


def test_the_bot_wins_blocks_and_follows_its_random_generator() -> None:
    for mine, theirs, expected in (("a1 b1", "a3 b3", "c1"), ("a1 e5", "a3 b3", "c3")):
        board = Board(5, 3)
        for one, two in zip(mine.split(), theirs.split(), strict=True):
            for name in (one, two):
                field = board.field(name)
                assert field is not None
                board.place(field)
        assert board.name(bot(board, random.Random(0), 0.0)) == expected
        assert board.name(expert(board)) == expected
    empty = Board(9, 5)
    assert len({bot(empty, random.Random(seed), 1.0) for seed in range(50)}) > 20
    assert {bot(empty, random.Random(seed), 0.0) for seed in range(20)} == {40}


opened = partial(playing.opened, Gomoku, 0, 0, size=3, win=3, random_stones=0)


async def test_each_seat_sees_the_board_and_what_the_other_played() -> None:
    environment, opening = await opened(opponent="self")
    assert environment.seats == (BLACK, WHITE) and opening.seat == BLACK
    rules = "gomoku 3x3, 3 in a row win. you are {}. say a free field like c3.\n"
    assert opening.messages[0].text == rules.format("x") + "  abc\n1 ...\n2 ...\n3 ...\nx:"
    first, second = await say(environment, "hm, a1 is worse than B2", "c1.")
    assert (first.seat, second.seat) == (WHITE, BLACK)
    assert first.messages[0].text == rules.format("o") + "x took b2.\n  abc\n1 ...\n2 .x.\n3 ...\no:"
    assert second.messages[0].text == "o took c1.\n  abc\n1 ..o\n2 .x.\n3 ...\nx:"


async def test_a_win_is_the_others_loss_and_a_full_board_nobodys() -> None:
    environment, _ = await opened(opponent="self")
    *_, last = await say(environment, "a1", "a2", "b1", "b2", "c1")
    assert (last.done, last.reward, last.rewards) == (True, 1.0, {WHITE: {"outcome": -1.0}})
    assert last.components == {"outcome": 1.0, "illegal": 0.0} and last.metrics["black_won"] == 1.0
    environment, _ = await opened(opponent="self")
    *_, last = await say(environment, "a1", "b1", "c1", "b2", "a2", "c2", "b3", "a3", "c3")
    assert (last.done, last.reward, last.rewards) == (True, 0.0, {WHITE: {"outcome": 0.0}})
    assert (last.metrics["draw"], last.metrics["moves"]) == (1.0, 9.0)


async def test_illegal_answers_cost_and_then_forfeit_without_a_winner() -> None:
    environment, _ = await opened(opponent="self", retries=2, illegal_penalty=0.25)
    good, taken, outside, again = await say(environment, "b2", "b2", "d1", "a1")
    assert (taken.seat, taken.messages[0].text, taken.reward) == (WHITE, "b2 is taken, 2 more.\no:", -0.25)
    assert outside.messages[0].text == "d1 is not on the board, 1 more.\no:"
    assert again.seat == BLACK, "a legal move takes the count back"
    assert [step.done for step in (good, taken, outside, again)] == [False] * 4
    *_, last = await say(environment, "", "dunno", "a10")
    assert (last.done, last.reward, last.rewards) == (True, -1.25, {WHITE: {"outcome": 0.0}})
    assert last.components == {"outcome": 0.0, "illegal": -1.25}
    assert (last.metrics["forfeit"], last.metrics["illegal"], last.metrics["draw"]) == (1.0, 5.0, 0.0)


async def test_what_is_nearly_a_move_costs_less_and_a_move_may_be_worth_something() -> None:
    environment, _ = await opened(opponent="self", retries=3, illegal_penalty=0.4, shaped=True, legal_reward=0.05)
    good, taken, beside, outside, last = await say(environment, "b2", "b2", "d1", "d10", "none")
    assert good.components == {"outcome": 0.0, "illegal": 0.0, "legal": 0.05}
    assert [step.reward for step in (good, taken, beside, outside, last)] == pytest.approx(
        [0.05, -0.1, -0.2, -0.3, -1.4]
    )
    assert last.done and last.rewards == {BLACK: {"outcome": 0.0}}


async def test_the_policy_loses_to_the_bot_and_gets_nothing_else() -> None:
    environment, opening = await opened(colour="white", random_moves=0.0)
    assert opening.seat == "" and opening.messages[0].text.endswith("x took b2.\n  abc\n1 ...\n2 .x.\n3 ...\no:")
    step = None
    while step is None or not step.done:
        free = environment.board.free()
        winning = environment.board.completes(BLACK)
        worst = next((field for field in free if field not in winning), free[0])
        (step,) = await say(environment, environment.board.name(worst))
    assert (step.reward, step.rewards, step.metrics["exact"]) == (-1.0, {}, 0.0)


async def test_colours_alternate_by_row_and_a_group_starts_from_one_position() -> None:
    starts = {}
    for row in range(4):
        environment = make("gomoku", {})
        assert isinstance(environment, Gomoku)
        starts[row] = (await environment.open(row, 7)).messages
        assert ("you are x" in starts[row][0].text) == (row % 2 == 0)
        assert starts[row] == (await make("gomoku", {}).open(row, 7)).messages  # type: ignore[union-attr]
    assert len({str(start) for start in starts.values()}) == 4


async def test_a_context_per_turn_begins_with_rules_and_board_each_time() -> None:
    environment, opening = await opened(opponent="self", context="turn")
    taken, moved = await say(environment, "z9", "b2")
    assert (opening.stream, taken.stream, moved.stream) == ("0", "0", "1"), "another try belongs to its turn"
    (third,) = await say(environment, "a1")
    assert (third.stream, third.seat) == ("2", BLACK) and third.messages[0].text.startswith("gomoku 3x3")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"size": 4}, "win=5 stones in a row do not fit on size=4"),
        ({"opponent": "self", "colour": "black"}, "colour: only with opponent = 'bot'"),
        ({"opponent": "self", "random_moves": 0.1}, "random_moves: only with"),
        ({"random_stones": 3}, "0, 2 or 4"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(config: dict[str, object], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        check("gomoku", config)
