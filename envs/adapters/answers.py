"""Filters answers of a policy that a library would evaluate, and limits the time of scoring.

reasoning-gym passes answers of the data sets below to `eval` or to sympy's `parse_expr`, which calls `eval`. A policy
trained on the score would eventually exploit that, so only plain values and plain formulas are passed on.
"""

from __future__ import annotations

import ast
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LONGEST = 10_000
"""Maximum characters of an answer."""
ANSWER_S = 2.0
EVALUATED = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
"""Data sets that evaluate answers as Python."""
SUMS = {"countdown", "puzzle24"}
"""Data sets that evaluate formulas of the four operations."""
FORMULAS = {"intermediate_integration", "polynomial_multiplication", "simple_integration"}
"""Data sets that evaluate formulas with powers and functions."""
_SUM = re.compile(r"[\d\s+\-*/().]*")
_FUNCTIONS = {"sin", "cos", "tan", "exp", "log", "ln", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "tanh", "sec",
              "csc", "cot", "pi", "Abs"}  # fmt: skip
_NAME = re.compile(r"[A-Za-z]{2,}")
_POWER = re.compile(r"(?:\*\*|\^)(?!\s*\(?\s*-?\s*\d{1,2}(?:\s*/\s*\d{1,2})?(?!\d|\.|\s*(?:\*\*|\^)))")
MOST_POWERS = 50
LONGEST_NUMBER = 30
_LONG_NUMBER = re.compile(rf"\d{{{LONGEST_NUMBER}}}")


def harmless(dataset: str, answer: str) -> bool:
    """Return whether the data set may score the answer."""
    if len(answer) > LONGEST or "\0" in answer:
        return False
    if dataset in EVALUATED:
        return _plain_value(answer)
    if dataset in SUMS:
        return _SUM.fullmatch(answer) is not None and "**" not in answer and _LONG_NUMBER.search(answer) is None
    if dataset in FORMULAS:
        return _plain_formula(answer)
    return True


def _plain_value(answer: str) -> bool:
    """Return whether it is a literal, a single name, or not Python at all, which `eval` can only refuse."""
    try:
        tree = ast.parse(answer.strip(), mode="eval")
        if not isinstance(tree.body, ast.Name):
            ast.literal_eval(tree)
    except SyntaxError:
        return True
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _plain_formula(answer: str) -> bool:
    """Return whether it has only numbers, single letters, + - * / ^ and brackets, known functions, and powers of at
    most two digits."""
    names = set(_NAME.findall(answer))
    powers = answer.count("**") + answer.count("^")
    return (
        re.fullmatch(r"[\w\s+\-*/^().]*", answer, re.ASCII) is not None
        and "_" not in answer
        and names <= _FUNCTIONS
        and re.search(r"\.(?!\d)|(?<!\d)\.", answer) is None
        and powers <= MOST_POWERS
        and _POWER.search(answer) is None
        and _LONG_NUMBER.search(answer) is None
    )


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after the given time. Main thread only; a previous alarm and its handler are
    restored."""

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not done within {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, handler)
