"""Counts how long tenants of a bank wait while it works for other jobs, of which a tenant may be one policy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentinker.services.trainer.bank.fair_queue import Waiting
from opentinker.services.trainer.bank.tenant_totals import TenantTotals

if TYPE_CHECKING:
    from opentinker.services.trainer.bank.bank_commands import BankCommand


class JobWaits:
    def __init__(self) -> None:
        self._seconds = TenantTotals()
        self._jobs: dict[str, frozenset[str]] = {}
        """By tenant: all tenants of its job, if they are several."""

    def __getitem__(self, tenant: str) -> float:
        """Return the seconds for which commands of the tenant have waited for other jobs."""
        return self._seconds[tenant]

    @contextmanager
    def one_job(self, tenants: Iterable[str]) -> Iterator[None]:
        """Count these tenants as one job: its policies wait for each other, and that is no wait for another job."""
        tenants = frozenset(tenants)
        self._jobs |= dict.fromkeys(tenants, tenants)
        try:
            yield
        finally:
            for tenant in tenants:
                self._jobs.pop(tenant, None)

    def count(self, heads: Iterable[Waiting[BankCommand]], began: float, work: Mapping[str, float]) -> None:
        """Count the time since `began` (monotonic). `heads`: the first command of every adapter. `work`: what the bank
        has done meanwhile, by tenant, in tokens or commands; who took part in it has not waited."""
        whole, now = sum(work.values()) or 1.0, time.monotonic()
        for one in heads:
            if one.tenant not in work:
                own = self._jobs.get(one.tenant, frozenset())
                share = sum(amount for tenant, amount in work.items() if tenant not in own) / whole
                self._seconds.add(one.tenant, share * max(0.0, now - max(began, one.command.sent_at)))
