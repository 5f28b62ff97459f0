"""Pages of rows by how they were played, of data sets of any length."""

from __future__ import annotations

import random

import numpy as np
import pytest

from opentinker.services.scheduler.data_rows.row_table import ORDERS, Bounds, PlayedRows, RowChoice, page_of


def counted(played: dict[int, tuple[int, int, float]]) -> PlayedRows:
    entries = [(row, *counts, False) for row, counts in played.items()]
    return PlayedRows([1] * len(entries), np.array(entries, dtype=np.float64).reshape(-1, 5))


@pytest.mark.parametrize("order", [f"{sign}{name}" for name in ORDERS for sign in ("", "-")])
def test_pages_are_parts_of_the_whole_order(order: str) -> None:
    draw = random.Random(order)
    for _ in range(50):
        count = draw.randint(1, 12)
        solved = {row: draw.randint(0, 4) for row in range(14) if draw.random() < 0.5}
        played = counted({row: (4, won, draw.random()) for row, won in solved.items()})
        rows = draw.choice([range(count), sorted(draw.sample(range(count), draw.randint(0, count)))])
        least, above, below = draw.choice([None, 0.25]), draw.choice([None, 0.0]), draw.choice([None, 1.0])
        bounds = Bounds(least=least, most=draw.choice([None, 0.75]), above=above, below=below)
        choice = RowChoice(order=order, solved=bounds)
        total, whole = page_of(rows, played, choice, 0, 100)
        assert total == len(whole) == len(set(whole)) and set(whole) <= set(rows)
        if not bounds:
            assert set(whole) == set(rows)
        size = draw.randint(1, 5)
        pages = [page_of(rows, played, choice, at, size)[1] for at in range(0, count + size, size)]
        assert [row for page in pages for row in page] == whole
        shares = [solved[row] for row in whole if row in solved]
        if order.endswith("solved"):
            assert shares == sorted(shares, reverse=order.startswith("-"))
            assert [row in solved for row in whole] == sorted((row in solved for row in whole), reverse=True)


def test_a_huge_data_set_takes_no_longer() -> None:
    played = counted({0: (4, 4, 4.0), 2**39: (4, 1, 1.0), 7: (4, 0, 0.0)})
    rows = range(2**40)
    assert page_of(rows, played, RowChoice(order="solved"), 0, 5) == (2**40, [7, 2**39, 0, 1, 2])
    assert page_of(rows, played, RowChoice(order="-solved"), 2**39, 3)[1] == [2**39 - 1, 2**39 + 1, 2**39 + 2]
    assert page_of(rows, played, RowChoice(order="-row"), 2**40 - 1, 3)[1] == [0]
    assert page_of(rows, played, RowChoice(order="row", solved=Bounds(most=0.5)), 0, 3) == (2, [7, 2**39])
    assert page_of(rows, played, RowChoice(order="played"), 2**40, 3)[1] == []


def test_rows_solved_once_or_all_but_once_are_sometimes_solved() -> None:
    played = counted({0: (200, 0, 0.0), 1: (200, 1, 1.0), 2: (200, 199, 199.0), 3: (200, 200, 200.0)})
    choice = RowChoice(order="row", solved=Bounds(above=0.0, below=1.0))
    assert page_of(range(9), played, choice, 0, 9) == (2, [1, 2])
