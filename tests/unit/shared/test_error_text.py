"""A reason is the sentence that helps: of a traceback its error, never a frame of asterisks or half a line."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable

import pytest

from opentinker.shared.types.error_text import error_sentence, error_tail

NLTK = """
**********************************************************************
  Resource 'words' not found.
  Please use the NLTK Downloader to obtain the resource:

  >>> nltk.download('words')

  Searched in:
    - '/root/nltk_data'
**********************************************************************
"""


def traceback_of(call: Callable[[], object]) -> str:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - whatever it raises
        return "".join(traceback.format_exception(error, limit=-4))
    raise AssertionError("it raised nothing")


def raises(error: BaseException) -> Callable[[], object]:
    def call() -> object:
        raise error

    return call


async def in_a_task_group() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(raises(ValueError("no deck\nof cards"))))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (traceback_of(raises(LookupError(NLTK))), "LookupError: Resource 'words' not found."),
        (traceback_of(raises(ValueError("one\ntwo\nthree"))), "ValueError: one"),
        (traceback_of(raises(SystemExit())), "SystemExit"),
        (traceback_of(lambda: compile("f(", "game.py", "exec")), "SyntaxError: '(' was never closed"),
        (traceback_of(lambda: asyncio.run(in_a_task_group())), "ValueError: no deck"),
        ("usage: play [-h]\n****", "usage: play [-h]"),
        ("the episode's 5 s were over", "the episode's 5 s were over"),
        ("****\n----", ""),
        ("", ""),
    ],
)
def test_sentence_of_an_error_is_its_type_and_first_line(text: str, said: str) -> None:
    assert error_sentence(text) == said


def test_tail_of_a_long_error_begins_with_its_sentence() -> None:
    text = traceback_of(raises(LookupError(NLTK + "  - '/a/place'\n" * 100)))
    cut = error_tail(text, 500)
    assert len(cut) == 500
    assert cut.startswith("LookupError: Resource 'words' not found.\n...")
    assert cut.endswith(text[-100:])
    assert error_sentence(cut) == "LookupError: Resource 'words' not found."
    assert error_tail("short", 500) == "short"
