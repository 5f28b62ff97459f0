"""Which rows enter the next pass: deficit round robin by tokens over tenants.

Source: Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit Round Robin", SIGCOMM 1995. A tenant in turn may
send `quantum` tokens more; its remainder is kept until its next turn. A unit (a row, or rows that belong together) is
never split. Pure Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Generic, TypeVar

from opentinker.services.trainer.bank.tenant_totals import MOST_TENANTS

T = TypeVar("T")


@dataclass
class Waiting(Generic[T]):
    """A command in the queue."""

    tenant: str
    adapter: str
    command: T
    units: list[int]
    """Tokens of each unit. Empty: it is not part of a pass (an optimizer step) and its adapter's later ones wait."""
    alone: bool = False
    """Whether each of its units has a pass to itself."""
    taken: int = 0
    """Units that have entered a pass."""

    @property
    def tokens_left(self) -> int:
        return sum(self.units[self.taken :])


@dataclass
class _Tenant(Generic[T]):
    adapters: dict[str, deque[Waiting[T]]] = field(default_factory=dict)
    """Commands of each adapter in order; adapters in their turn."""
    deficit: int = 0
    in_turn: bool = False

    def heads(self) -> list[Waiting[T]]:
        return [commands[0] for commands in self.adapters.values()]


class FairQueue(Generic[T]):
    """The commands of an adapter are taken in order, those of different adapters are not."""

    def __init__(self, largest: int, quantum: int | None = None) -> None:
        """`largest`: tokens of the largest unit. `quantum`: of a turn; default: `largest`, so that every turn takes
        something."""
        self.largest, self.quantum = largest, quantum or largest
        self._tenants: dict[str, _Tenant[T]] = {}
        """Tenants with commands, in their turn."""
        self._due: list[str] = []
        """Tenants whose units could not share the last pass. They had their turns in it and spend them now."""
        self._choices = 0
        self._last_steps: dict[str, int] = {}
        """Number of the last choice of steps that each tenant was part of, for the latest tenants."""

    def __len__(self) -> int:
        return sum(len(commands) for one in self._tenants.values() for commands in one.adapters.values())

    def __iter__(self) -> Iterator[Waiting[T]]:
        """Yield all commands."""
        for tenant in list(self._tenants.values()):
            for commands in list(tenant.adapters.values()):
                yield from list(commands)

    def push(self, waiting: Waiting[T]) -> None:
        if any(unit > self.largest for unit in waiting.units):
            raise ValueError(f"a unit of more than {self.largest} tokens")
        tenant = self._tenants.setdefault(waiting.tenant, _Tenant())
        tenant.adapters.setdefault(waiting.adapter, deque()).append(waiting)

    def tokens(self, tenant: str | None = None) -> int:
        """Return the tokens that wait, of one tenant or of all."""
        chosen = [one for name, one in self._tenants.items() if tenant in (None, name)]
        return sum(w.tokens_left for one in chosen for commands in one.adapters.values() for w in commands)

    def tenants(self) -> list[str]:
        """Return those with tokens that wait."""
        return [name for name in self._tenants if self.tokens(name)]

    def commands(self, tenant: str) -> int:
        """Return the number of a tenant's commands."""
        one = self._tenants.get(tenant)
        return sum(map(len, one.adapters.values())) if one else 0

    def last(self, tenant: str, adapter: str) -> Waiting[T] | None:
        """Return the command of an adapter that came last."""
        one = self._tenants.get(tenant)
        return one.adapters[adapter][-1] if one and adapter in one.adapters else None

    def heads(self) -> Iterator[Waiting[T]]:
        """Yield the first command of every adapter, tenant by tenant in their turn."""
        for tenant in list(self._tenants.values()):
            yield from tenant.heads()

    def finish(self, waiting: Waiting[T]) -> None:
        """Remove the first command of an adapter, once it has been carried out or refused; the tenant's other adapters
        are next."""
        tenant = self._tenants[waiting.tenant]
        commands = tenant.adapters.pop(waiting.adapter)
        if commands.popleft() is not waiting:
            raise ValueError("commands of an adapter end in order")
        if commands:
            tenant.adapters[waiting.adapter] = commands
        if not tenant.adapters:
            del self._tenants[waiting.tenant]  # and with it what was left of its turn

    def steps(self, most: int) -> list[Waiting[T]]:
        """Choose first commands without tokens: one of each tenant, then a second one of each, and so on. Tenants whose
        last turn is the longest ago come first."""
        self._choices += 1
        ready = {name: [one for one in tenant.heads() if not one.units] for name, tenant in self._tenants.items()}
        turns = [ready[name] for name in sorted(ready, key=lambda name: self._last_steps.get(name, 0))]
        chosen = [one for round_ in zip_longest(*turns) for one in round_ if one is not None][:most]
        for one in chosen:
            self._last_steps.pop(one.tenant, None)
            self._last_steps[one.tenant] = self._choices
        for name in list(self._last_steps)[:-MOST_TENANTS]:
            del self._last_steps[name]
        return chosen

    def take(self, tokens: int, adapters: int) -> list[tuple[Waiting[T], int]]:
        """Choose what enters a pass: commands with the number of their next units.

        `tokens`: the most in the pass; a larger unit has one to itself. `adapters`: the most that may be in it. Tenants
        whose units could not share this pass have the next ones, then come those that found no slot, then the one whose
        turn the pass ended.
        """
        if (alone := self._due_unit()) is not None:
            return [(alone, 1)]
        chosen: dict[int, tuple[Waiting[T], int]] = {}
        room, names = tokens, set[str]()
        order, no_slot, exhausted = deque(self._tenants), deque[str](), deque[str]()
        due: dict[str, None] = {}
        while order:
            name = order[0]
            tenant = self._tenants[name]
            if not tenant.in_turn:
                tenant.deficit, tenant.in_turn = tenant.deficit + self.quantum, True
            found = self._next_unit(tenant, names, adapters)
            if found is None or found.units[found.taken] > tenant.deficit:
                tenant.in_turn = False
                order.popleft()
                if found is not None:
                    order.append(name)
                    continue
                waits = any(one.taken < len(one.units) for one in tenant.heads())
                tenant.deficit = min(tenant.deficit, self.largest if waits else self.quantum)
                (no_slot if waits else exhausted).append(name)
                continue
            if found.alone and chosen:
                due[name] = None
                if len(due) == len(order):
                    break
                tenant.in_turn = False
                order.rotate(-1)
                continue
            size = found.units[found.taken]
            if size > room and chosen:
                break
            room, tenant.deficit = room - size, tenant.deficit - size
            found.taken += 1
            chosen[id(found)] = (found, chosen.get(id(found), (found, 0))[1] + 1)
            names.add(found.adapter)
            if found.alone:
                break
        self._due = list(due)
        self._tenants = {name: self._tenants[name] for name in [*no_slot, *order, *exhausted]}
        return list(chosen.values())

    def _due_unit(self) -> Waiting[T] | None:
        """Take a unit of the tenants whose turn has come and that could share no pass."""
        while self._due:
            tenant = self._tenants.get(self._due[0], _Tenant[T]())
            found = self._next_unit(tenant, set(), 1)
            if found is not None and found.alone and (size := found.units[found.taken]) <= tenant.deficit:
                tenant.deficit -= size
                found.taken += 1
                return found
            self._due.pop(0)
        return None

    def _next_unit(self, tenant: _Tenant[T], names: set[str], adapters: int) -> Waiting[T] | None:
        """Return the first command in the tenant's order with a unit that may enter the pass."""
        for waiting in tenant.heads():
            fits = waiting.alone or waiting.adapter in names or len(names) < adapters
            if fits and waiting.taken < len(waiting.units):
                return waiting
        return None
