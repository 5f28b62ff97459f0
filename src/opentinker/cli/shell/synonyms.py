"""Words of other command lines, turned into ours before a command is looked up: `get jobs`, `ls`, `stop JOB`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WORDS = {
    "list": "jobs", "ls": "jobs", "ps": "jobs", "get": "job", "describe": "job", "show": "job", "stop": "cancel",
    "checkpoint": "checkpoints", "environment": "env", "environments": "env", "key": "keys", "worker": "status",
    "workers": "status", "model": "models", "metric": "metrics", "log": "logs", "event": "events",
}  # fmt: skip
"""A single word -> the command."""
BELOW = {"ls": "list", "get": "show", "describe": "about"}
"""Words below `env` and `keys` -> the command there, if it has one."""
VERBS = ("list", "ls", "get", "describe", "show")


class Kind(NamedTuple):
    every: tuple[str, ...]
    """Command that lists all of the kind."""
    one: tuple[str, ...]
    """Command that shows one."""


KINDS = {
    "job": Kind(("jobs",), ("job",)),
    "sweep": Kind(("sweeps",), ("sweep",)),
    "checkpoint": Kind(("checkpoints",), ("checkpoints",)),
    "model": Kind(("checkpoints",), ("checkpoints",)),
    **{
        name: Kind((f"{name}s",), (f"{name}s",))
        for name in ("artifact", "distribution", "event", "failure", "log", "metric", "rollout", "row", "transcript")
    },
    "published": Kind(("published",), ("published",)),
    "usage": Kind(("usage",), ("usage",)),
    "environment": Kind(("env", "list"), ("env", "about")),
    "env": Kind(("env", "list"), ("env", "about")),
    "key": Kind(("keys", "list"), ("keys", "list")),
    "worker": Kind(("status",), ("status",)),
}
GROUPS = ("env", "keys")
"""Commands with commands below them, whose words are left to them."""


def as_ours(words: Sequence[str]) -> list[str]:
    """Return the words of a command line as those of ours: `get jobs -n 3` as `jobs -n 3`, `describe sweep s-1` as
    `sweep s-1`, `checkpoint list` as `checkpoints`; others as they are."""
    first, *rest = words or [""]
    for verb, noun, more in ((first, rest[0] if rest else "", rest[1:]), (rest[0] if rest else "", first, rest[1:])):
        kind = KINDS.get(noun.removesuffix("s"))
        if verb in VERBS and kind is not None and first not in GROUPS:
            named = bool(more) and not more[0].startswith("-")
            return [*(kind.one if named else kind.every), *more]
    return [WORDS.get(first, first), *rest] if words else []
