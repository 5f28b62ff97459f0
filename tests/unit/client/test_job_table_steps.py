"""How far a job is, in lists of jobs."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.cli.views.job_table import step_of


@pytest.mark.parametrize(
    ("kind", "step", "steps", "text"),
    [
        ("rl", 3, 100, "3/100"),
        ("sft", 3, 0, "3/?"),
        ("tinker", 0, 0, "serves"),
        ("tinker", 60, 0, "60"),
        ("inference", 0, 0, "serves"),
    ],
)
def test_jobs_without_an_end_have_no_number_of_steps(kind: str, step: int, steps: int, text: str) -> None:
    job: Any = {"kind": kind, "step": step, "steps": steps}
    assert step_of(job) == text
