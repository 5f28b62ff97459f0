"""Screens of AndroidWorld's own server, which are JSON lists of numbers: read while they arrive, and made smaller."""

from __future__ import annotations

import math

import numpy as np

from opentinker.envs.base import BadReply

BEGIN, END = b'{"pixels":[[[', b"]]]}"
MAX_NUMBERS = 3 * 4096 * 4096
PIECE_BYTES = 1 << 14
CHANNELS = 3


class PixelReader:
    """Reads `{"pixels": [[[r, g, b], ...], ...]}` piece by piece, in a byte per number instead of the thirty that
    parsed JSON takes. A piece costs about a millisecond, so an event loop stays responsive."""

    def __init__(self) -> None:
        self._numbers: list[np.ndarray] = []
        self._count = self._rows = 0
        self._rest = b""
        self._begun = False

    def feed(self, piece: bytes) -> None:
        """Raise BadReply."""
        text = self._rest + piece.translate(None, b" \t\r\n")
        if not self._begun:
            if len(text) < len(BEGIN):
                self._rest = text
                return
            if not text.startswith(BEGIN):
                raise _bad("it does not begin like a screen")
            self._begun, text = True, text[len(BEGIN) :]
        end = text.rfind(b",")
        while end > 0 and text[end - 1 : end] == b"]":  # a row's end is read as a whole
            end = text.rfind(b",", 0, end)
        end = max(end, 0)
        self._rest = text[end:]
        if len(self._rest) > 2 * PIECE_BYTES:
            raise _bad("there is something other than numbers in it")
        self._read(text[:end])

    def _read(self, text: bytes) -> None:
        self._rows += text.count(b"]],[[")
        plain = text.translate(None, b"[]").strip(b",")
        if not plain:
            return
        try:
            numbers = np.array(plain.split(b","), dtype=np.int64)
        except ValueError:
            raise _bad("there is something other than numbers in it") from None
        if numbers.min() < 0 or numbers.max() > 255:
            raise _bad("a number is not from 0 to 255")
        self._numbers.append(numbers.astype(np.uint8))
        self._count += len(numbers)
        if self._count > MAX_NUMBERS:
            raise _bad(f"it has more than {MAX_NUMBERS // CHANNELS:,} pixels")

    def finish(self) -> np.ndarray:
        """Return the pixels, of shape (height, width, 3). Raise BadReply."""
        if not self._rest.endswith(END):
            raise _bad("it does not end like a screen")
        self._read(self._rest[: -len(END)])
        height = self._rows + 1
        width, odd = divmod(self._count, height * CHANNELS)
        if odd or not width:
            raise _bad("its rows are not of one length")
        pixels: np.ndarray = np.concatenate(self._numbers).reshape(height, width, CHANNELS)
        return pixels


def _bad(why: str) -> BadReply:
    return BadReply(f"a screenshot is no JSON object with pixels: {why}")


def shrink(pixels: np.ndarray, max_side: int) -> np.ndarray:
    """Return the picture with sides divided by the least whole number that makes them fit, each pixel the mean of
    those in its place."""
    factor = math.ceil(max(pixels.shape[:2]) / max_side)
    if factor <= 1:
        return pixels
    height, width = (side // factor for side in pixels.shape[:2])
    cut = pixels[: height * factor, : width * factor].reshape(height, factor, width, factor, CHANNELS)
    smaller: np.ndarray = cut.mean(axis=(1, 3)).round().astype(np.uint8)
    return smaller
