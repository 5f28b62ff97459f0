"""Names of metrics that more than one part of the system reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

WIN_RATE = "val/winrate"
"""By opponent: `val/winrate/OPPONENT`. The names of its bounds end in `low` and `high`."""
RATING = "val/rating"
"""Its standard error is `val/rating/error`."""
_OF_OPPONENT = re.compile(r"((?:[^/]+/)?val/(?:winrate|wins|draws|losses|reward/against)/)([^/]+)(/low|/high)?")


def opponent_of(metric: str) -> str | None:
    """Return the opponent whose games a win rate is of, empty for all together; None for any other metric."""
    if metric == WIN_RATE:
        return ""
    opponent = metric.removeprefix(f"{WIN_RATE}/")
    return None if opponent == metric or opponent.rpartition("/")[2] in ("low", "high") else opponent


def with_opponents(metric: str, names: Mapping[str, str]) -> str:
    """Return a metric of an evaluation with another name for its opponent, if `names` has one."""
    found = _OF_OPPONENT.fullmatch(metric)
    if found is None or found[2] not in names:
        return metric
    return f"{found[1]}{names[found[2]]}{found[3] or ''}"


def split_policy(metric: str, policies: Collection[str]) -> tuple[str, str] | None:
    """Return the policy that a name has, and the metric without it: of `POLICY/METRIC`, as a job with [policies]
    reports it, and of `val/winrate/POLICY/OPPONENT` and `val/rating/POLICY`, which nothing reports; None for any
    other."""
    first, _, rest = metric.partition("/")
    if first in policies and rest:
        return first, rest
    for stem in (WIN_RATE, RATING):
        policy, _, rest = metric.removeprefix(f"{stem}/").partition("/")
        if not metric.startswith(f"{stem}/") or policy not in policies:
            continue
        if stem == WIN_RATE and rest not in ("", "low", "high"):  # else the policy is the opponent
            return policy, f"{stem}/{rest}"
        if stem == RATING and rest in ("", "error"):
            return policy, f"{stem}/{rest}".rstrip("/")
    return None


def meant_metric(metric: str, known: Collection[str]) -> str | None:
    """Return the one of the `known` names that was probably meant."""
    from opentinker.shared.types.mistakes import nearest  # loads pydantic, which commands do without

    found = split_policy(metric, {name.partition("/")[0] for name in known if "/" in name})
    if found is not None and (name := "/".join(found)) in known:
        return name
    return nearest(metric, sorted(known))
