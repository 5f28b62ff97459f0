"""Checks the models behind URLs that play seats of a job (`seats.NAME.url`): may jobs connect there, with that key.

Nothing is asked of the server: rollout workers do that, and connect by their own settings."""

from __future__ import annotations

from typing import Any

from opentinker.services.scheduler.jobs.check_seats import written_seats
from opentinker.services.scheduler.jobs.check_start_checkpoint import Mistakes
from opentinker.services.scheduler.jobs.disk_threads import on_disk
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.egress import Egress, EgressRefused
from opentinker.shared.security.model_keys import key_problem, read_model_keys
from opentinker.shared.spec import JobSpec


async def check_url_seats(ctx: Context, data: Any, spec: JobSpec | None, tenant: str) -> Mistakes:
    """`data`: the spec as it was sent. Raises SpecError if the file with the keys cannot be read."""
    seats = {seat: player for seat, player in written_seats(data, spec).items() if player.url is not None}
    if not seats:
        return []
    mistakes: Mistakes = []
    egress = Egress(tuple(ctx.settings.env_egress_allow))
    names_keys = any(player.key is not None for player in seats.values())
    keys = await on_disk(ctx, read_model_keys, ctx.settings.model_keys_file) if names_keys else {}
    known: dict[str, str] = {}
    for seat, player in seats.items():
        assert player.url is not None
        if player.url not in known:
            known[player.url] = await _refusal(egress, player.url)
        if problem := known[player.url]:
            mistakes.append({"field": f"seats.{seat}.url", "value": player.url, "problem": problem})
        if player.key is not None and (problem := key_problem(keys, player.key, player.url, tenant)):
            mistakes.append({"field": f"seats.{seat}.key", "value": player.key, "problem": problem})
    return mistakes


async def _refusal(egress: Egress, url: str) -> str:
    try:
        await egress.check(url)
    except EgressRefused as error:
        return str(error)
    return ""
