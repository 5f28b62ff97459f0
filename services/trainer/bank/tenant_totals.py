"""Sums by tenant, for those that were counted most recently: a bank outlives its jobs by far."""

from __future__ import annotations

MOST_TENANTS = 1024


class TenantTotals:
    def __init__(self, most: int = MOST_TENANTS) -> None:
        self._most = most
        self._totals: dict[str, float] = {}
        """The tenant counted last is at the end."""

    def add(self, tenant: str, value: float) -> None:
        self._totals[tenant] = self._totals.pop(tenant, 0) + value
        if len(self._totals) > self._most:
            del self._totals[next(iter(self._totals))]

    def __getitem__(self, tenant: str) -> float:
        return self._totals.get(tenant, 0)

    def __len__(self) -> int:
        return len(self._totals)
