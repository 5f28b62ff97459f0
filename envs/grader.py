"""Worker process that compares mathematical answers one at a time; killed and replaced when a comparison times out.

    python -m opentinker.envs.grader SECONDS      (started by grading.py, never by hand)

Consumes lines of JSON [right answer, reply] from stdin, produces a line of JSON per comparison on stdout; waits for the
next line; ends at end of input, when its parent is gone. math-verify limits each comparison by signals, which only work
in a main thread, and not always there: hence a separate process.
"""

from __future__ import annotations

import sys

import orjson
from math_verify import parse, verify


def main() -> None:
    seconds = int(sys.argv[1])
    while line := sys.stdin.buffer.readline():
        answer, reply = orjson.loads(line)
        sys.stdout.buffer.write(orjson.dumps(grade(answer, reply, seconds)) + b"\n")
        sys.stdout.buffer.flush()


def grade(answer: str, reply: str, seconds: int) -> dict[str, bool]:
    """Return `answered`, whether `reply` contains something that parses as an answer, and `right`, whether that equals
    `answer` (LaTeX or plain)."""
    marked = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    wanted = parse(marked, parsing_timeout=seconds)
    found = parse(reply, parsing_timeout=seconds)
    right = bool(wanted and found) and verify(wanted, found, timeout_seconds=seconds)
    return {"answered": bool(found), "right": bool(right)}


if __name__ == "__main__":
    main()
