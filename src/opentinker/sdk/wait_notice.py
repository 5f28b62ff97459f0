"""Tells a waiting user within three seconds which server is waited for: per call or stream, across all its tries.

`http.py` makes one for every call; streams (`client.py`, `observability.py`, `ws_client.py`) keep theirs while they
last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WORD_S = 2.5
"""Silence after which a server counts as waited for. A connection attempt fails before that (http.CONNECT_S)."""


def why(error: Exception) -> str:
    return str(error) or type(error).__name__


class Waiting:
    """Says once for what it waits, at the first try that failed or at one without an answer for `word_s`; and again if
    that comes after an answer."""

    def __init__(self, url: str, tell: Callable[[str], None], word_s: float = WORD_S) -> None:
        self._url, self._tell, self._word_s = url, tell, word_s
        self._told = False
        self._since: float | None = None
        self._stands: float | None = None
        """Since when the stream that was opened last does, or did."""

    @property
    def away_s(self) -> float:
        """Since the first try after the last answer."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    @property
    def cut_off(self) -> bool:
        """The last try opened a stream, and was not given up for its silence."""
        return self._stands is not None

    @contextmanager
    def for_answer(self) -> Iterator[None]:
        """Around a try, which ends with its answer."""
        self._since = time.monotonic() if self._since is None else self._since
        self._stands = None
        timer = asyncio.get_running_loop().call_later(self._word_s, self._say, f"no answer for {self._word_s:g} s")
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Wraps an open stream: while it is open nothing is waited for, unless it breaks without having sent
        anything."""
        self._stands = began = time.monotonic()
        try:
            yield
        except TimeoutError:
            self._stands = None
            raise
        finally:
            if self._since is not None and self._stands is not None:
                self._since += time.monotonic() - began

    def answered(self) -> None:
        """Something new came that was asked for."""
        self._told, self._since = False, None

    def heard(self) -> None:
        """Note a line of an open stream that brings nothing new, or its end. It counts as an answer if the stream has
        been open for a while: a server that breaks off after one line, each time, has not answered."""
        if self._stands is not None and time.monotonic() - self._stands >= self._word_s:
            self.answered()

    def failed(self, reason: Exception | str) -> None:
        self._say(reason if isinstance(reason, str) else why(reason))

    def _say(self, reason: str) -> None:
        if not self._told:
            self._told = True
            self._tell(f"waiting for {self._url} ({reason})")
