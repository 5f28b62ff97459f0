"""Completes jobs, sweeps and environments on the command line, with what the server lists. Without an answer at once
nothing is offered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from opentinker.client import Client

ANSWER_S = 1.5
"""Time in which the server must have answered: a person waits."""
OFFERED = 50
Offer = tuple[str, str]
"""A value, and what explains it; shells that can do so show both."""


def jobs(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return ids of the newest jobs, with their names."""
    return _asked(ctx, incomplete, lambda api: ((one["id"], _told(one)) for one in api.jobs(OFFERED)))


def sweeps(ctx: typer.Context, incomplete: str) -> list[Offer]:
    return _asked(ctx, incomplete, lambda api: ((one["id"], _told(one)) for one in api.sweeps(OFFERED)))


def jobs_and_sweeps(ctx: typer.Context, incomplete: str) -> list[Offer]:
    return [*jobs(ctx, incomplete), *sweeps(ctx, incomplete)]


def environments(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return names of environments as a spec has them."""

    def found(api: Client) -> Iterator[Offer]:
        known = api.all_environments()
        yield from ((name, known.get("summaries", {}).get(name, "built in")) for name in known["built_in"])
        yield from ((f"upload:{one['name']}", f"version {one['version']}") for one in known["environments"])

    return _asked(ctx, incomplete, found)


def pushed_environments(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return names of environments that were pushed, as `env show` and `env delete` take them."""
    return _asked(
        ctx, incomplete, lambda api: ((one["name"], f"version {one['version']}") for one in api.environments())
    )


def local_environments(incomplete: str) -> list[str]:
    """Return names of built-in environments, without asking a server."""
    from opentinker.local.env_trial import built_in_names

    return [name for name in built_in_names() if name.startswith(incomplete)]


def _told(one: Any) -> str:
    """`my job, running`, without what a shell takes for a separator."""
    return " ".join(f"{one['name']}, {one['state']}".replace(":", " ").split())


def _asked(ctx: typer.Context, incomplete: str, find: Callable[[Client], Iterable[Offer]]) -> list[Offer]:
    from opentinker.cli.common import server_url
    from opentinker.client import Client
    from opentinker.shared.types.errors import OpenTinkerError

    try:
        url = server_url(ctx.params.get("url"))
        with Client(url, wait_s=0.0, timeout_s=ANSWER_S, on_wait=lambda _: None) as api:
            offers = list(find(api))
    except (OpenTinkerError, OSError):
        return []
    return [(value, help) for value, help in offers if value.startswith(incomplete)]
