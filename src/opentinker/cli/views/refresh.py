"""`--watch` of commands that print a list: the same output again and again, in its place on a terminal."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import NoReturn, TextIO

import typer

POLL_S = 2.0
AGE = re.compile(r" *\d+ (?:s|min|h|d)\b(?: ago)?")
"""Text that changes with time alone."""


def refresh(show: Callable[[], object], *, poll_s: float = POLL_S) -> NoReturn:
    """Call `show` until Ctrl-C, and exit with status 130. On a terminal each output replaces the one before; in a pipe
    it is printed when more than an age has changed."""
    try:
        if sys.stdout.isatty():
            _in_place(show, poll_s)
        seen = None
        while True:
            text = _printed(show, sys.stdout)
            if (now := AGE.sub("", text)) != seen:
                seen = now
                sys.stdout.write(text)
                sys.stdout.flush()
            time.sleep(poll_s)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _in_place(show: Callable[[], object], poll_s: float) -> NoReturn:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            room = max(2, console.size.height - 2)
            lines = [f"{time.strftime('%H:%M:%S')}; Ctrl-C ends", *_printed(show, sys.__stdout__).splitlines()]
            cut = lines if len(lines) <= room else [*islice(lines, room - 1), f"... {len(lines) - room + 1} more lines"]
            live.update(Text("\n".join(cut), no_wrap=True, overflow="crop"), refresh=True)
            time.sleep(poll_s)


class _Paper(io.StringIO):
    """Takes what is printed, and is a terminal if the true output is one: tables are fitted to it."""

    def __init__(self, of: TextIO | None) -> None:
        super().__init__()
        self._is_terminal = of is not None and of.isatty()

    def isatty(self) -> bool:
        return self._is_terminal


def _printed(show: Callable[[], object], out: TextIO | None) -> str:
    with contextlib.redirect_stdout(_Paper(out)) as paper:
        show()
    return paper.getvalue()
