"""A process that compares mathematical answers, one after the other; killed and replaced when one takes too long.

    python -m opentinker.envs.grader SECONDS      (started by grading.py, never by hand)

Consumes lines of JSON [right answer, what was said] from stdin, produces a line of JSON per comparison on stdout;
waits for the next one; ends when its parent is gone. math-verify bounds each comparison by signals, which only work in
a main thread, and not always even there: hence a process.
"""

from __future__ import annotations

import sys

import orjson
from math_verify import parse, verify


def main() -> None:
    seconds = int(sys.argv[1])
    while line := sys.stdin.buffer.readline():
        answer, said = orjson.loads(line)
        sys.stdout.buffer.write(orjson.dumps(grade(answer, said, seconds)) + b"\n")
        sys.stdout.buffer.flush()


def grade(answer: str, said: str, seconds: int) -> dict[str, bool]:
    """`answered`: something in `said` reads as an answer. `right`: it is equal to `answer`, which is LaTeX or plain."""
    marked = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    wanted = parse(marked, parsing_timeout=seconds)
    found = parse(said, parsing_timeout=seconds)
    right = bool(wanted and found) and verify(wanted, found, timeout_seconds=seconds)
    return {"answered": bool(found), "right": bool(right)}


if __name__ == "__main__":
    main()
