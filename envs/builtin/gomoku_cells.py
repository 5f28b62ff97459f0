"""A board of m,n,k games in one line, with a character per field: for models that learn from random weights."""

from __future__ import annotations

import string

from opentinker.envs.builtin.gomoku_board import Board, ParsedMove

LARGEST_SIZE = 5
FREE, OWN = string.ascii_lowercase[: LARGEST_SIZE**2], string.ascii_uppercase[: LARGEST_SIZE**2]
RIVAL = "".join(map(chr, range(ord("α"), ord("ω") + 1)))
"""25 letters, as the final sigma is one of them."""


class CellsBoard(Board):
    """Fields are a to y, row by row. As text, as the side that moves next sees it: free fields, own stones A to Y, and
    the other side's α to ω."""

    def name(self, field: int) -> str:
        return FREE[field]

    def field(self, name: str) -> int | None:
        field = FREE.find(name)
        return field if 0 <= field < len(self.fields) else None

    def read(self, text: str) -> ParsedMove:
        named = [character for character in text if character in FREE]
        if not named:
            return ParsedMove(None, "no field was named", 1.0)
        field = self.field(named[-1])
        if field is None:
            return ParsedMove(None, f"{named[-1]} is not on the board", 0.75)
        return ParsedMove(None, f"{named[-1]} is taken", 0.25) if self.fields[field] else ParsedMove(field)

    def __str__(self) -> str:
        return "".join(
            (FREE if not stone else OWN if stone == self.next else RIVAL)[field]
            for field, stone in enumerate(self.fields)
        )
