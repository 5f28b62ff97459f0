"""Fifty Harbor tasks of our own, as a load test plays them."""

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
