"""Mathematical answers compared per second, by an env worker's graders.

python -m loadtest.grading [--comparisons 400]
"""

from __future__ import annotations

import argparse
import asyncio
import time

from opentinker.envs.grading import GRADERS, Graders

PAIRS = [
    ("\\frac{1}{2}", "so \\boxed{0.5}"),
    ("9\\pi", "the area is \\boxed{9\\pi}"),
    ("\\{-3, 3\\}", "\\boxed{\\{3, -3\\}}"),
    ("5\\sqrt{2}", "\\boxed{\\sqrt{50}}"),
]


async def measure(comparisons: int) -> None:
    graders = Graders()
    await asyncio.gather(*(graders.grade(*PAIRS[0]) for _ in range(2)))  # they are up
    began = time.perf_counter()
    grades = await asyncio.gather(*(graders.grade(*PAIRS[n % len(PAIRS)]) for n in range(comparisons)))
    seconds = time.perf_counter() - began
    assert all(grade.right for grade in grades)
    began = time.perf_counter()
    plain = [await graders.grade("42", "\\boxed{42}") for _ in range(comparisons)]
    at_once = time.perf_counter() - began
    assert all(grade.right for grade in plain)
    print(f"by math-verify   {comparisons / seconds:10,.0f} comparisons/s, {GRADERS} processes")
    print(f"plain numbers    {comparisons / at_once:10,.0f} comparisons/s, at once")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comparisons", type=int, default=400)
    asyncio.run(measure(parser.parse_args().comparisons))


if __name__ == "__main__":
    main()
