"""Forms a trainer group from its lead: calls the other trainers, whose ranks then connect to this one.

    call_members   consumes nothing; produces one RANKS per member, repeated until the member has its lease; waits for
                   the answers

Nothing is held while a trainer waits for another: the scheduler has granted all leases of the group in one act.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from opentinker.services.trainer.distributed.rank_connections import RankLost
from opentinker.services.trainer.distributed.rank_listener import RankListener
from opentinker.shared.asyncio_tools import cancel_and_wait, gather_all, sleep
from opentinker.shared.messaging.bus import NoReply
from opentinker.shared.messaging.subjects import RANKS
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.codec import WireError
from opentinker.shared.types.core import Lease
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trainer_group import JoinRanks, RankShare

log = structlog.get_logger()

CALL_S = 30.0
"""A member connects its ranks within this time, or is called again."""
RETRY_S = 0.25
MEET_S = 120.0
"""Time in which a member must have taken its lease and answered."""


def spec_of_group(spec: JobSpec, lease: Lease) -> JobSpec:
    """Return the spec with as many ranks as the group has; a single one has nothing to share."""
    if not lease.group:
        return spec
    world = sum(share.ranks for share in lease.group)
    resources = spec.resources.model_copy(update={"trainer_ranks": world})
    train = spec.train.model_copy(update={"parallel": "data"}) if world == 1 else spec.train
    return spec.model_copy(update={"resources": resources, "train": train})


@asynccontextmanager
async def formed(ctx: Context, lease: Lease) -> AsyncIterator[RankListener | None]:
    """Call the members of the lease's group during the block, and yield where their ranks connect; None without a
    group."""
    if len(lease.group) < 2:
        yield None
        return
    host = ctx.settings.advertise_host
    try:
        listener = await asyncio.to_thread(RankListener, host, lease.group)
    except OSError as error:
        raise JobFailed(f"cannot listen on {host}: {error}; see the setting advertise_host") from error
    calling = asyncio.create_task(call_members(ctx, lease, listener))
    try:
        yield listener
    finally:
        listener.close()
        await cancel_and_wait(calling)


async def call_members(ctx: Context, lease: Lease, listener: RankListener) -> None:
    missing = {share.worker for share in lease.group[1:]}

    async def call(share: RankShare) -> None:
        await _call(ctx, lease, listener, share)
        missing.discard(share.worker)

    try:
        async with asyncio.timeout(MEET_S):
            await gather_all([call(share) for share in lease.group[1:]])
    except TimeoutError:
        who = ", ".join(sorted(missing))
        listener.fail(RankLost(f"trainers of its group did not take their ranks within {MEET_S:g} s: {who}"))


async def _call(ctx: Context, lease: Lease, listener: RankListener, share: RankShare) -> None:
    call = JoinRanks(
        job=lease.job, epoch=lease.epoch, address=listener.host, port=listener.port, token=listener.token
    )  # fmt: skip
    while True:
        try:
            reply = await ctx.bus.request(RANKS, call, CALL_S, worker=share.worker)
        except (NoReply, WireError) as error:
            log.debug("member_called_again", member=share.worker, why=str(error))
        else:
            if not reply.error:
                return
            if not reply.later:
                listener.fail(RankLost(f"{share.worker} {reply.error}", share.worker))
                return
        await sleep(RETRY_S)
