"""Load tests that check their own figures: fifty Harbor tasks, and the endpoint that captures what agents ask."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Figure

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_fifty_tasks_give_1_to_their_solutions_and_0_to_nothing(figure: Figure) -> None:
    argv = [sys.executable, "-m", "loadtest.harbor", "--commands", "10"]
    ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    figure(ran.stdout)
    assert "solution 1.0 in 50 of 50, nothing 0.0 in 50 of 50" in ran.stdout, ran.stdout + ran.stderr
    assert ran.returncode == 0, ran.stdout


@pytest.mark.nightly
def test_the_capturing_endpoint_adds_less_than_two_milliseconds(figure: Figure) -> None:
    argv = [sys.executable, "-m", "loadtest.capture"]
    for tries_left in (2, 1, 0):  # a busy machine costs a try, a slow endpoint all of them
        ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        if ran.returncode == 0 or not tries_left:
            break
    figure(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
