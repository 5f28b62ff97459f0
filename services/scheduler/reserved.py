"""Places on this machine that a job may not name: what the server keeps in data_dir, but for the user's own jobs there,
and the files with its keys and passwords.

Every text of a submitted spec is looked at, whatever field it stands in: which of them is a path is known to whoever
reads it, an environment for example. The answer is the same for what is there and what is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opentinker.services.scheduler.stores import directory_of
from opentinker.shared.config import Settings
from opentinker.shared.service import Context

KEPT = ("artifacts", "audit", "environments", "fetched", "jobs", "logs", "nats", "run", "staged", "valkey")
"""In data_dir; whatever else is there is not the server's."""
JOBS = "jobs"
LONGEST = 4096
"""Of a path."""
Mistakes = list[dict[str, Any]]


async def mistakes_in(ctx: Context, data: Any, tenant: str) -> Mistakes:
    """`data`: a spec as it was sent."""
    found = await asyncio.to_thread(_reserved, data, ctx.settings)
    jobs = {job for _, _, job in found if job}
    own = {job.id for job in await ctx.store.jobs(sorted(jobs)) if job.tenant == tenant} if jobs else set()
    problem = "is kept by the server: of its directories only those of your own jobs may be named"
    return [{"field": field, "value": text, "problem": problem} for field, text, job in found if job not in own]


def _reserved(data: Any, settings: Settings) -> list[tuple[str, str, str]]:
    """Blocking. (field, text, id of the job in whose directory it is, or nothing)."""
    home = settings.data_dir.resolve()
    kept = [home / name for name in KEPT]
    if place := directory_of(settings):
        kept.append(place.resolve())
    secret = [settings.admin_key_file, settings.nats_password_file, settings.redis_password_file]
    secret.append(settings.artifacts_s3_credentials_file)
    files = [file.resolve() for file in secret if file is not None]
    here = Path.cwd()
    found = []
    for field, text in _texts(data, ""):
        path = _path(text, here)
        if path is None:
            continue
        if any(path.is_relative_to(place) for place in kept):
            parts = path.relative_to(home).parts if path.is_relative_to(home) else ("",)
            found.append((field, text, parts[1] if parts[0] == JOBS and len(parts) > 1 else ""))
        elif any(path == file for file in files):
            found.append((field, text, ""))
    return found


def _path(text: str, here: Path) -> Path | None:
    """Where it leads; None if it is no path, or that of a file beside us."""
    if len(text) > LONGEST or "\0" in text or ("/" not in text and not (here / text).is_symlink() and text != ".."):
        return None
    try:
        return (here / Path(text.removeprefix("file://")).expanduser()).resolve()
    except (OSError, RuntimeError):  # no such user's home; a ring of links
        return None


def _texts(value: Any, field: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{field}.{number}")
