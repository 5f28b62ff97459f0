"""Named lists of seats in `[algorithm]`: which list a seat is in."""

from __future__ import annotations

from opentinker.shared.spec.seat_lists import list_of


def test_a_seat_is_in_the_list_with_its_own_name_or_else_in_the_first_pattern() -> None:
    lists = {"red": ["r*"], "captains": ["r1", "b1"], "rest": ["*"]}
    assert [list_of(lists, seat) for seat in ("r1", "r2", "b1", "b2")] == ["captains", "red", "captains", "rest"]
    assert list_of({"red": ["r*"]}, "b1") is None and list_of({}, "") is None
