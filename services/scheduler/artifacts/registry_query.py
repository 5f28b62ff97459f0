"""Selects and sorts a tenant's checkpoints for a list, as the request's query asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from opentinker.shared.api_types.artifacts import RegisteredCheckpoint
from opentinker.shared.types.errors import SpecError

LONGEST = 200
"""Characters of a filter."""
VAL = "val/"
METRICS_NAMED = 8
"""Metrics that the refusal of an unknown one names."""
ORDERS: dict[str, Callable[[RegisteredCheckpoint], Any]] = {
    "created": lambda one: one["created"],
    "step": lambda one: one["step"],
    "bytes": lambda one: one["bytes"],
}
"""By the name of `sort`: the largest first. Other names are metrics."""
EQUAL: dict[str, Callable[[RegisteredCheckpoint], Iterable[str]]] = {
    "job": lambda one: (one["job"],),
    "project": lambda one: (one["project"],),
    "model": lambda one: (one["base_model"], one["lineage"][0]),
}
"""Filters by one value, and the values of a checkpoint with which it is compared."""
YES_OR_NO = {"yes": True, "no": False}


class RegistryQuery(NamedTuple):
    equal: tuple[tuple[str, str], ...] = ()
    tags: frozenset[str] = frozenset()
    published: str = "any"
    weights: str = "any"
    sort: str = "created"

    @classmethod
    def of(cls, query: Mapping[str, str], *, published: str, weights: str) -> RegistryQuery:
        """Raises SpecError."""
        for name in ("tag", "sort", *EQUAL):
            if len(query.get(name, "")) > LONGEST:
                raise SpecError.of(name, query[name][:100], f"must be {LONGEST} characters at most")
        tags = frozenset(filter(None, (tag.strip() for tag in query.get("tag", "").split(","))))
        equal = tuple((name, query[name]) for name in EQUAL if query.get(name))
        return cls(equal, tags, published, weights, query.get("sort") or "created")

    def chosen(self, found: list[RegisteredCheckpoint]) -> list[RegisteredCheckpoint]:
        """Return the checkpoints that pass the filters, in order: the largest first, those without a value last.
        `found`: newest first. Raises SpecError if no checkpoint was evaluated with the metric."""
        name, ascending = self.sort.removeprefix("-"), self.sort.startswith("-")
        known = metrics_of(found)
        if found and name not in ORDERS and VAL + name.removeprefix(VAL) not in known:
            some = f", or a metric: {', '.join(known[:METRICS_NAMED])}" if known else "; none was evaluated yet"
            problem = f"must be one of {', '.join(ORDERS)}{some}; a leading - reverses the order"
            raise SpecError.of("sort", self.sort[:100], problem)
        order: Callable[[RegisteredCheckpoint], Any] = ORDERS.get(name) or partial(value_of, metric=name)
        passed = [(order(one), one) for one in found if self._passes(one)]
        valued = [pair for pair in passed if pair[0] is not None]
        valued.sort(key=itemgetter(0), reverse=not ascending)
        return [one for _, one in valued] + [one for value, one in passed if value is None]

    def _passes(self, one: RegisteredCheckpoint) -> bool:
        return (
            all(wanted in EQUAL[name](one) for name, wanted in self.equal)
            and self.tags <= set(one["tags"])
            and (self.published == "any" or YES_OR_NO[self.published] == bool(one["published"]))
            and self.weights in ("any", one["weights"])
        )


def value_of(one: RegisteredCheckpoint, metric: str) -> float | None:
    """Return the metric (`val/` may be left out) in the newest evaluation that has it."""
    name = VAL + metric.removeprefix(VAL)
    return next((found["values"][name] for found in one["evaluations"] if name in found["values"]), None)


def metrics_of(found: Iterable[RegisteredCheckpoint]) -> list[str]:
    return sorted({name for one in found for evaluation in one["evaluations"] for name in evaluation["values"]})
