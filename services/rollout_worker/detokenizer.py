"""Decodes tokens as they are sampled -> the text that no later token can change."""

from __future__ import annotations

from collections.abc import Sequence

from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.shared.openai.answers import cut

REPLACEMENT = "\ufffd"
"""U+FFFD, to which an incomplete character decodes."""
MAX_WINDOW = 32
"""Tokens that may wait for the rest of a character, which has four bytes at most."""
TAIL = 8
"""Number of the last of these tokens that are searched for a boundary between two characters."""


class Detokenizer:
    """The growing text of one answer. Incomplete characters and possible beginnings of a stop string are held back."""

    def __init__(self, renderer: Renderer, stops: Sequence[str]) -> None:
        self._renderer, self._stops = renderer, stops
        self._ids: list[int] = []
        self._from, self._read = 0, 0
        """Tokens are decoded from `_from` on, so that they have before them what they need; those up to `_read` are
        out."""
        self._held = ""
        self._stopped = False

    def add(self, ids: Sequence[int]) -> str:
        """Add tokens; return the new text that later tokens cannot change."""
        self._ids += ids
        before = self._renderer.text(self._ids[self._from : self._read])
        now = self._renderer.text(self._ids[self._from :])
        end = len(self._ids)
        if len(now) <= len(before) or now.endswith(REPLACEMENT):
            if end - self._read <= MAX_WINDOW:
                return ""
            if now == before:  # e.g. special tokens
                del self._ids[self._read :]
                return ""
            end = self._between(now)
            now = self._renderer.text(self._ids[self._from : end])
        self._from, self._read = self._read, end
        return self._certain(now[len(before) :])

    def _between(self, now: str) -> int:
        """Return a place near the end where the waiting tokens can be cut between two characters. Bytes that form no
        character would otherwise wait without end."""
        last = len(self._ids)
        for cut_at in range(last - 1, last - TAIL, -1):
            head, tail = self._ids[self._from : cut_at], self._ids[cut_at:]
            if self._renderer.text(head) + self._renderer.text(tail) == now:
                return cut_at
        return last - TAIL

    def _certain(self, more: str) -> str:
        if self._stopped:
            return ""
        self._held += more
        whole = cut(self._held, self._stops)
        if len(whole) < len(self._held):
            self._stopped = True
            return whole
        begun = max((_begun(whole, stop) for stop in self._stops), default=0)
        certain, self._held = whole[: len(whole) - begun], whole[len(whole) - begun :]
        return certain


class TextOffsets:
    """Computes the text offset of each token of an answer; the tokens of one character share its offset."""

    def __init__(self, renderer: Renderer) -> None:
        self._text = Detokenizer(renderer, ())
        self._at = 0
        self._found: list[int] = []

    def add(self, ids: Sequence[int]) -> list[int]:
        """Return the text offsets of the next tokens."""
        before = len(self._found)
        for id in ids:
            self._found.append(self._at)
            self._at += len(self._text.add([id]))
        return self._found[before:]

    def of(self, ids: Sequence[int]) -> list[int]:
        """Return the offsets of all tokens, the first of which were added before."""
        self.add(ids[len(self._found) :])
        return self._found


def _begun(text: str, stop: str) -> int:
    """Return the length of the longest end of the text that begins the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
