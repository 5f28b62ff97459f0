"""Selects and sorts a tenant's checkpoints for a list, as the request's query asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from opentinker.shared.api_types.artifacts import Ranked, RegisteredCheckpoint
from opentinker.shared.types.errors import SpecError

LONGEST = 200
"""Characters of a filter."""
LONGEST_SETTING = 2000
VAL = "val/"
CATEGORY = "val/task/"
INTERVAL = ("/low", "/high")
NAMED = 100
"""Metrics, and settings, that a list names."""
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
    words: tuple[str, ...] = ()
    published: str = "any"
    weights: str = "any"
    setting: str = ""
    sort: str = "created"

    @classmethod
    def of(cls, query: Mapping[str, str], *, published: str, weights: str) -> RegistryQuery:
        """Raises SpecError."""
        for name in ("search", "tag", "sort", *EQUAL):
            if len(query.get(name, "")) > LONGEST:
                raise SpecError.of(name, query[name][:100], f"must be {LONGEST} characters at most")
        if len(setting := query.get("setting", "")) > LONGEST_SETTING:
            raise SpecError.of("setting", setting[:100], f"must be {LONGEST_SETTING} characters at most")
        tags = frozenset(filter(None, (tag.strip() for tag in query.get("tag", "").split(","))))
        equal = tuple((name, query[name]) for name in EQUAL if query.get(name))
        words = tuple(query.get("search", "").lower().split())
        return cls(equal, tags, words, published, weights, setting, query.get("sort") or "created")

    def chosen(self, found: list[RegisteredCheckpoint]) -> list[RegisteredCheckpoint]:
        """Return the checkpoints that pass the filters, in order: the largest first, those without a value last.
        With a metric as the order each says its value in the setting by which they are sorted: that of the query, else
        the one in which most of them have the metric. `found`: newest first. Raises SpecError if no checkpoint was
        evaluated with the metric."""
        name, ascending = self.sort.removeprefix("-"), self.sort.startswith("-")
        known = metrics_of(found)
        if found and self.metric and self.metric not in known:
            some = f", or a metric: {', '.join(known[:METRICS_NAMED])}" if known else "; none was evaluated yet"
            problem = f"must be one of {', '.join(ORDERS)}{some}; a leading - reverses the order"
            raise SpecError.of("sort", self.sort[:100], problem)
        own = [one for one in found if self._passes(one)]
        passed: list[tuple[Any, RegisteredCheckpoint]]
        if order := ORDERS.get(name):
            passed = [(order(one), one) for one in own]
        else:
            ranked = ranked_by(own, self.metric, self.setting or next(iter(settings_of(own, self.metric)), ""))
            passed = [(one["ranked"] and one["ranked"]["value"], one) for one in ranked]
        valued = [pair for pair in passed if pair[0] is not None]
        valued.sort(key=itemgetter(0), reverse=not ascending)
        return [one for _, one in valued] + [one for value, one in passed if value is None]

    @property
    def metric(self) -> str:
        """val/* that sorts; empty if none does."""
        name = self.sort.removeprefix("-")
        return "" if name in ORDERS else VAL + name.removeprefix(VAL)

    def _passes(self, one: RegisteredCheckpoint) -> bool:
        return (
            all(wanted in EQUAL[name](one) for name, wanted in self.equal)
            and self.tags <= set(one["tags"])
            and all(word in _text(one) for word in self.words)
            and (self.published == "any" or YES_OR_NO[self.published] == bool(one["published"]))
            and self.weights in ("any", one["weights"])
            and (not self.setting or self.setting in one["compared"])
        )


def _text(one: RegisteredCheckpoint) -> str:
    """Return the text that a search matches."""
    found = (one["checkpoint"], one["job_name"], one["kind"], one["base_model"], one["lineage"][0], one["project"])
    return " ".join((*found, *one["tags"], *one["published"])).lower()


def ranked_by(found: Iterable[RegisteredCheckpoint], metric: str, setting: str) -> list[RegisteredCheckpoint]:
    """Return the checkpoints with the metric's value in the evaluation of this setting that counts. `metric`: val/*."""
    return [{**one, "ranked": _ranked(one, metric, setting)} for one in found]


def _ranked(one: RegisteredCheckpoint, metric: str, setting: str) -> Ranked | None:
    place = one["compared"].get(setting)
    value = None if place is None else one["evaluations"][place]["values"].get(metric)
    return None if value is None else {"metric": metric, "setting": setting, "value": value}


def settings_of(found: Iterable[RegisteredCheckpoint], metric: str = "") -> list[str]:
    """Return the settings in which checkpoints were evaluated, those of most checkpoints first. `metric`: only where
    they have it."""
    counts = Counter(
        setting
        for one in found
        for setting, place in one["compared"].items()
        if not metric or metric in one["evaluations"][place]["values"]
    )
    return sorted(counts, key=lambda setting: (-counts[setting], setting))[:NAMED]


def sortable(found: Iterable[RegisteredCheckpoint]) -> list[str]:
    """Return the metrics by which these checkpoints may be sorted, without the bounds of intervals and without val/.
    Those of categories come last: there may be more of them than a list names."""
    names = [name for name in metrics_of(found) if not name.endswith(INTERVAL)]
    return [name.removeprefix(VAL) for name in sorted(names, key=lambda name: name.startswith(CATEGORY))][:NAMED]


def metrics_of(found: Iterable[RegisteredCheckpoint]) -> list[str]:
    return sorted({name for one in found for evaluation in one["evaluations"] for name in evaluation["values"]})
