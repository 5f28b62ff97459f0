"""One message to each recipient of a sweep's [[notify]] when the sweep ends. Its jobs send none, unless
`sweep.notify_jobs` asks for theirs too."""

from __future__ import annotations

import time
from typing import Any

from opentinker.shared.runtime.service import Context
from opentinker.shared.spec.notify import NotifySpec
from opentinker.shared.state.notifications import Message, Notifications
from opentinker.shared.types.sweeps import SweepRecord


async def tell_end(ctx: Context, sweep: SweepRecord) -> None:
    """Keep the messages about the end of a sweep; the notifier sends them. Called again, it adds none that is kept."""
    if messages := _messages(sweep, ctx.settings.public_url):
        await Notifications(ctx.store.redis).add(sweep.id, messages, {}, time.time())


def _messages(sweep: SweepRecord, public_url: str) -> list[Message]:
    occasion = sweep.state.value
    told = [NotifySpec.model_validate(entry) for entry in sweep.base.get("notify") or []]
    page = f"{public_url.rstrip('/')}/#/sweeps/{sweep.id}" if public_url else ""
    body = {"occasion": occasion, "time": sweep.finished or time.time(), "sweep": _about(sweep), "page": page}
    return [
        Message(
            id=f"{sweep.id}/end/{place}", job=sweep.id, tenant=sweep.tenant, entry=place, occasion=occasion, body=body
        )
        for place, entry in enumerate(told)
        if entry.wants(occasion)
    ]


def _about(sweep: SweepRecord) -> dict[str, Any]:
    done = sweep.progress
    best = None if done.best is None else {"number": done.best, "value": done.value, "settings": done.settings}
    return {
        "id": sweep.id,
        "name": sweep.name,
        "project": sweep.project,
        "tags": sweep.tags,
        "kind": sweep.kind,
        "state": sweep.state.value,
        "reason": sweep.reason,
        "metric": sweep.metric,
        "goal": sweep.goal,
        "planned": sweep.planned,
        "trials": done.states,
        "jobs": done.jobs,
        "best": best,
    }
