"""Gomoku for tiny models: a character per field, moves that are rated at once, and random turns."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from opentinker.envs.base import Opening
from opentinker.envs.builtin.gomoku import Gomoku
from opentinker.envs.builtin.gomoku_board import BLACK, WHITE, Board, bot
from opentinker.envs.builtin.gomoku_cells import FREE, OWN, RIVAL, CellsBoard
from opentinker.envs.builtin.gomoku_values import DISCOUNT, SHAPE_WORTH, move_values
from opentinker.envs.registry import check, make
from opentinker.shared.types.errors import SpecError
from tests.support import playing
from tests.support.playing import say

SELF: dict[str, Any] = {"size": 5, "win": 4, "opponent": "self", "context": "turn", "random_stones": 0}
opened = partial(playing.opened, Gomoku, 0, 0, **SELF, board="cells", rules=False)


NAMES = {f"{column}{row}" for column in "abcde" for row in range(1, 6)}
LOST = ("a1 c2 e5 b5", "b4 c4 d4 b1")
"""White threatens to win on either side of its three stones."""


def position(black: str, white: str) -> Board:
    """The board after these moves, by name."""
    board = Board(5, 4)
    for names in zip(black.split(), white.split(), strict=True):
        for name in names:
            field = board.field(name)
            assert field is not None
            board.place(field)
    return board


def rated(board: Board) -> dict[str, float]:
    return {board.name(field): value for field, value in move_values(board).items()}


async def test_cells_show_fields_and_owners_to_the_seat_that_acts() -> None:
    environment, opening = await opened()
    assert (opening.seat, opening.messages[0].text) == (BLACK, "abcdefghijklmnopqrstuvwxy:")
    first, second = await say(environment, "m", "y")
    assert (first.seat, first.stream, first.messages[0].text) == (WHITE, "1", "abcdefghijklνnopqrstuvwxy:")
    assert (second.seat, second.stream, second.messages[0].text) == (BLACK, "2", "abcdefghijklMnopqrstuvwxω:")
    assert (await say(environment, "M"))[-1].messages[0].text.startswith("no field was named")
    (last,) = await say(environment, "m")
    assert last.done and last.metrics["forfeit"] == 1.0
    _, explained = await playing.opened(Gomoku, 0, 0, **SELF, board="cells")
    assert explained.messages[0].text == (
        "gomoku 5x5, 4 in a row win. you have A to Y, the other α to ω. say a free field, a to y.\n"
        "abcdefghijklmnopqrstuvwxy:"
    )


def test_each_character_of_the_board_is_one_field_of_one_owner() -> None:
    assert len(set(FREE + OWN + RIVAL)) == 75
    draw, board = random.Random(0), CellsBoard(5, 4)
    while not board.over:
        fields = {**dict(enumerate(FREE))}
        own = OWN if board.next == BLACK else RIVAL
        rival = RIVAL if board.next == BLACK else OWN
        fields |= {field: own[field] for field, stone in enumerate(board.fields) if stone == BLACK}
        fields |= {field: rival[field] for field, stone in enumerate(board.fields) if stone == WHITE}
        assert str(board) == "".join(fields.values())
        field = draw.choice(board.free())
        assert board.read(f"it is {board.name(field).upper()}, not {board.name(field)}").field == field
        board.place(field)
        assert board.read(board.name(field)).problem == f"{board.name(field)} is taken"
    assert (CellsBoard(4, 3).read("z").problem, CellsBoard(4, 3).read("q").wrong) == ("no field was named", 0.75)


@pytest.mark.parametrize(
    ("black", "white", "best", "value"),
    [
        ("a1 b1 c1", "a5 b5 e3", {"d1"}, 1.0),  # wins at once
        (*LOST, NAMES - {*LOST[0].split(), *LOST[1].split()}, -DISCOUNT),
        ("b3 c3 a5", "b1 e4 e5", {"d3"}, DISCOUNT**2),  # open at both ends
    ],
)
def test_the_best_move_wins_or_delays(black: str, white: str, best: set[str], value: float) -> None:
    values = rated(position(black, white))
    top = max(values.values())
    assert top == pytest.approx(value)
    assert {name for name, found in values.items() if found == top} == best
    assert all(abs(found) <= SHAPE_WORTH or abs(found) >= DISCOUNT**8 for found in values.values())


def test_the_best_rated_moves_beat_the_bot_with_either_colour() -> None:
    draw, won = random.Random(0), {BLACK: 0, WHITE: 0}
    for colour in won:
        for _ in range(30):
            board = Board(5, 4)
            for field in draw.sample(board.free(), 2):
                board.place(field)
            while not board.over:
                values = move_values(board) if board.next == colour else {bot(board, draw, 0.0): 0.0}
                board.place(max(values, key=values.__getitem__))
            won[colour] += board.winner == colour
    assert won[BLACK] >= 25 and won[WHITE] >= 15


async def test_progress_pays_each_move_by_what_it_misses() -> None:
    environment, _ = await opened(progress=True, retries=0, illegal_penalty=1.0)
    before = (await say(environment, "a", "y", "b", "x", "c"))[-1]
    assert before.seat == WHITE
    block = max(move_values(environment.board).values())
    (missed,) = await say(environment, "w")
    assert abs(block) < SHAPE_WORTH and missed.reward == pytest.approx(-DISCOUNT - block), "d had to be taken"
    assert missed.components == {"progress": missed.reward, "illegal": 0.0}
    assert missed.rewards == {BLACK: {"progress": -missed.reward}}
    (won,) = await say(environment, "d")
    assert won.done and won.components == {"progress": 0.0, "illegal": 0.0} and won.metrics["black_won"] == 1.0
    environment, _ = await opened(progress=True, retries=0, illegal_penalty=1.0)
    *_, illegal = await say(environment, "a", "a")
    assert illegal.done and (illegal.reward, illegal.components["illegal"]) == (-2.0, -2.0)


async def test_random_turns_are_made_by_the_environment() -> None:
    begun, played = [], []
    for row in range(80):
        environment = make("gomoku", {**SELF, "board": "cells", "random_turns": 0.5})
        opening = await environment.open(row, 0)
        assert isinstance(opening, Opening)
        before = environment.board.played  # type: ignore[attr-defined]
        begun.append(before)
        name = environment.board.name(environment.board.free()[0])  # type: ignore[attr-defined]
        (step,) = await say(environment, name)
        after = environment.board.played  # type: ignore[attr-defined]
        assert step.done or step.seat == environment.board.next  # type: ignore[attr-defined]
        played.append(after - before)
    assert min(played) == 1 and max(played) > 1 and 1.3 < sum(played) / len(played) < 2.7
    assert min(begun) <= 2 and max(begun) >= 17 and 7 < sum(begun) / len(begun) < 13, "games begin anywhere"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"board": "cells", "size": 5, "win": 4}, "context = 'turn'"),
        ({"board": "cells", "size": 6, "context": "turn"}, "size = 5 or less"),
        ({"progress": True, "opponent": "self", "size": 9}, "size = 5 or less"),
        ({"progress": True, "size": 5, "win": 4}, "opponent = 'self'"),
        ({"random_turns": 0.5, "size": 5, "win": 4}, "opponent = 'self'"),
    ],
)
def test_what_does_not_fit_together_is_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        check("gomoku", config)
