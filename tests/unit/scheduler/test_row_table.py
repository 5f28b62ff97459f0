"""Pages of rows by how they were played, of data sets of any length."""

from __future__ import annotations

import random

import pytest

from opentinker.services.scheduler.data_rows.row_table import ORDERS, RowChoice, RowCounts, page_of
from opentinker.shared.data.row_log import Point


def counts(played: int, solved: int, reward: float) -> RowCounts:
    found = RowCounts()
    found.add(Point(1, played, solved), reward, kept=False)
    return found


@pytest.mark.parametrize("order", [f"{sign}{name}" for name in ORDERS for sign in ("", "-")])
def test_pages_are_parts_of_the_whole_order(order: str) -> None:
    draw = random.Random(order)
    for _ in range(50):
        count = draw.randint(1, 12)
        played = {row: counts(4, draw.randint(0, 4), draw.random()) for row in range(14) if draw.random() < 0.5}
        rows = draw.choice([range(count), sorted(draw.sample(range(count), draw.randint(0, count)))])
        choice = RowChoice(order=order, low=draw.choice([None, 0.25]), high=draw.choice([None, 0.75]))
        total, whole = page_of(rows, played, choice, 0, 100)
        assert total == len(whole) == len(set(whole)) and set(whole) <= set(rows)
        if choice.low is choice.high is None:
            assert set(whole) == set(rows)
        size = draw.randint(1, 5)
        pages = [page_of(rows, played, choice, at, size)[1] for at in range(0, count + size, size)]
        assert [row for page in pages for row in page] == whole
        shares = [played[row].share for row in whole if row in played]
        if order.endswith("solved"):
            assert shares == sorted(shares, reverse=order.startswith("-"))
            assert [row in played for row in whole] == sorted((row in played for row in whole), reverse=True)


def test_a_huge_data_set_takes_no_longer() -> None:
    played = {0: counts(4, 4, 4.0), 2**39: counts(4, 1, 1.0), 7: counts(4, 0, 0.0)}
    rows = range(2**40)
    assert page_of(rows, played, RowChoice(order="solved"), 0, 5) == (2**40, [7, 2**39, 0, 1, 2])
    assert page_of(rows, played, RowChoice(order="-solved"), 2**39, 3)[1] == [2**39 - 1, 2**39 + 1, 2**39 + 2]
    assert page_of(rows, played, RowChoice(order="-row"), 2**40 - 1, 3)[1] == [0]
    assert page_of(rows, played, RowChoice(order="row", high=0.5), 0, 3) == (2, [7, 2**39])
    assert page_of(rows, played, RowChoice(order="played"), 2**40, 3)[1] == []
