"""Messages to the recipients of a sweep's [[notify]]: one when it ends, and one when its best trial first reaches the
target. Its jobs send none, unless `sweep.notify_jobs` asks for theirs too."""

from __future__ import annotations

import time
from typing import Any

from opentinker.shared.runtime.service import Context
from opentinker.shared.spec.notify import NotifySpec, TargetSpec
from opentinker.shared.state.notifications import Message, Notifications
from opentinker.shared.types.sweeps import SweepRecord


async def tell_end(ctx: Context, sweep: SweepRecord) -> None:
    """Keep the messages about the end of a sweep; the notifier sends them. Called again, it adds none that is kept."""
    occasion = sweep.state.value
    told = [place for place, entry in enumerate(_recipients(sweep)) if entry.wants(occasion)]
    if told:
        messages = [_message(ctx, sweep, "end", place, occasion) for place in told]
        await Notifications(ctx.store.redis).add(sweep.id, messages, {}, time.time())


async def tell_target(ctx: Context, sweep: SweepRecord) -> None:
    """Keep a message for each target that the best trial has reached for the first time."""
    value = sweep.progress.value
    reached = [
        place
        for place, entry in enumerate(_recipients(sweep))
        if value is not None and entry.target is not None
        if _is_of_sweep(entry.target, sweep) and entry.target.reached(value)
    ]
    if not reached:
        return
    kept = Notifications(ctx.store.redis)
    (seen,) = await kept.seen([sweep.id])
    if new := [place for place in reached if _mark(place) not in seen]:
        messages = [_message(ctx, sweep, "target", place, "target") for place in new]
        await kept.add(sweep.id, messages, {_mark(place): "reached" for place in new}, time.time())


def _is_of_sweep(target: TargetSpec, sweep: SweepRecord) -> bool:
    """Return whether a target is of the best trial. With `notify_jobs` some may be of its jobs alone: those of other
    metrics, and those from which the best trial only moves away."""
    if not sweep.table["notify_jobs"]:
        return True
    return target.metric == sweep.metric and (target.above is not None) == (sweep.goal == "maximize")


def _mark(place: int) -> str:
    return f"target:{place}"


def _recipients(sweep: SweepRecord) -> list[NotifySpec]:
    return [NotifySpec.model_validate(entry) for entry in sweep.base.get("notify") or []]


def _message(ctx: Context, sweep: SweepRecord, event: str, place: int, occasion: str) -> Message:
    url = ctx.settings.public_url
    body = {
        "occasion": occasion,
        "time": sweep.finished or time.time(),
        "sweep": _about(sweep),
        "page": f"{url.rstrip('/')}/#/sweeps/{sweep.id}" if url else "",
    }
    return Message(
        id=f"{sweep.id}/{event}/{place}",
        job=sweep.id, tenant=sweep.tenant, entry=place, occasion=occasion, body=body,
    )  # fmt: skip


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
