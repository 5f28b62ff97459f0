"""Sizes of files, in lists of artifacts."""

from __future__ import annotations

import pytest

from opentinker.cli.artifacts import size_of


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0.0 kB"), (140_000, "140.0 kB"), (28_618_007, "28.6 MB"), (140_000_000, "140.0 MB"), (5 * 10**9, "5.0 GB")],
)
def test_sizes_keep_their_digits_below_the_next_unit(count: int, text: str) -> None:
    assert size_of(count) == text
