"""Speed of games of several policies, measured by the load tests in processes of their own. A figure that is missed
while other work takes more than QUIET_CORES of the machine says nothing."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from loadtest import rounds, schedules
from tests.conftest import Figure

ROOT = Path(__file__).resolve().parents[3]
DISTURBED = re.compile(r"MISSED \(disturbed: .*\)")

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]


async def measured(*command: str) -> str:
    """Return what a load test prints once it has met its targets; skip if it could not tell."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        printed = (await asyncio.wait_for(process.communicate(), 1100))[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0 and (disturbed := DISTURBED.search(printed)):
        pytest.skip(disturbed[0])
    assert process.returncode == 0, printed
    return printed


async def test_a_round_of_four_seats_costs_one_seat_and_a_hand_over_three_milliseconds(figure: Figure) -> None:
    assert (rounds.OVERHEAD, rounds.HAND_OVER_MS) == (1.15, 3.0)
    printed = await measured("loadtest.rounds", "--only", "rounds", "--seats", "4", "--engine-ms", "100")
    assert printed.count("target: ") == printed.count(": met") == 3, printed
    (seen,) = re.findall(r"a round p50 (\d+\.\d) ms together", printed)
    assert 100.0 <= float(seen) <= 115.0
    figure(printed.splitlines()[0])


async def test_policies_of_1_and_3_seconds_learn_as_fast_as_their_schedule_says(figure: Figure) -> None:
    assert schedules.TOLERANCE == 0.05
    printed = await measured("loadtest.schedules", "--slow", "3", "--fast", "1", "--seconds", "30")
    rows = re.findall(r"^ *(\w+) +(slow|fast) \| .* ([+-]\d+\.\d) %", printed, re.MULTILINE)
    assert {(schedule, policy) for schedule, policy, _ in rows} == {
        (schedule, policy) for schedule in schedules.SCHEDULES for policy in ("slow", "fast")
    }
    assert all(abs(float(differ)) <= 5.0 for _, _, differ in rows), printed
    figure(printed)
