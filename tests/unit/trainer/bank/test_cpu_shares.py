"""Processor time of jobs that share a process."""

from __future__ import annotations

import pytest

from opentinker.services.trainer.cpu_shares import CpuShares


def test_jobs_share_the_time_of_their_process_by_tokens() -> None:
    used, tokens = [5.0], {"a": 0, "b": 0}
    shares = CpuShares(lambda: used[0])
    with shares.job("a") as one, shares.job("b") as other:
        one.tokens, other.tokens = lambda: tokens["a"], lambda: tokens["b"]
        used[0] += 2.0
        assert (shares.seconds("a"), shares.seconds("b")) == (1.0, 1.0), "no pass has ended"
        tokens.update(a=300, b=100)
        used[0] += 4.0
        assert (shares.seconds("a"), shares.seconds("b")) == (4.0, 2.0)
        tokens["b"] += 7
        used[0] += 1.0
    used[0] += 10.0
    assert (shares.seconds("a"), shares.seconds("b")) == (4.0, 3.0), "without a job the process works for none"
    with shares.job("a") as again:
        again.tokens = lambda: 5
        used[0] += 1.0
    assert shares.seconds("a") == pytest.approx(5.0)
