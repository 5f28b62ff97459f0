"""How long a tenant waits while the bank works for other jobs."""

from __future__ import annotations

import asyncio
import time

import pytest

from opentinker.services.trainer.bank.bank_commands import BankCommand
from opentinker.services.trainer.bank.fair_queue import Waiting
from opentinker.services.trainer.bank.job_waits import JobWaits


def head(tenant: str, waited_s: float) -> Waiting[BankCommand]:
    loop = asyncio.new_event_loop()
    command = BankCommand(answer=loop.create_future(), sent_at=time.monotonic() - waited_s)
    loop.close()
    return Waiting(tenant, tenant, command, [1])


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=20.0)


def test_policies_of_a_job_wait_for_other_jobs_and_not_for_each_other() -> None:
    waits, began = JobWaits(), time.monotonic() - 400.0
    heads = [head("j.first", 1000.0), head("j.second", 100.0), head("other", 1000.0)]
    with waits.one_job(["j.first", "j.second"]):
        waits.count(heads, began, {"j.first": 100.0})
        assert (waits["j.first"], waits["j.second"]) == (0.0, 0.0) and waits["other"] == near(400.0)
        waits.count(heads, began, {"j.first": 100.0, "other": 300.0})
        assert waits["j.second"] == near(75.0), "three quarters of the time since it was sent"
        waits.count(heads, began, {"other": 1.0})
        assert waits["j.first"] == near(400.0) and waits["j.second"] == near(175.0)
        assert waits["other"] == near(400.0), "it took part in the last two"
    waits.count(heads, began, {"j.first": 1.0})
    assert waits["j.second"] == near(275.0), "the job is over, and with it what they had in common"
