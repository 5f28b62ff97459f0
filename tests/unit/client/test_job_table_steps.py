"""How far a job is, and its newest metric, in lists of jobs."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.cli.views.job_table import last_of, step_of


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


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        ({}, ""),
        ({"step_seconds": 0.5}, ""),
        ({"step_seconds": 0.5, "reward/mean": 0.3125, "exact": 1.0}, "reward/mean 0.3125"),
        ({"policies": {"a": {"loss": 3.0}, "b": {}, "c": {"loss": 0.123456}}}, "a loss 3, c loss 0.1235"),
    ],
)
def test_the_first_metric_of_the_newest_step_is_listed(progress: dict[str, Any], text: str) -> None:
    job: Any = {"progress": progress}
    assert last_of(job) == text
