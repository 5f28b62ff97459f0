"""The scheduler process: HTTP API, placement, admission. It keeps nothing: all it knows is in Redis and NATS.

    api         consumes HTTP requests; produces jobs and cancellations
    lead        decides which scheduler does the next ten, see `leader_election.py`
    reconcile   consumes jobs, heartbeats, leases; produces leases; woken by WAKE "scheduler"
    autoscale   consumes what the queue lacks; produces trainers and rollout workers, where a launcher is set
    clean       consumes jobs that have ended; removes their messages
    evaluate    consumes eval jobs and results of episodes; produces EXAM, METRIC
    archive     consumes artifacts of jobs; puts them into the artifact store and applies retention
    sweep       consumes sweeps that run, and metrics of their jobs; produces jobs and cancellations
    tickets     consumes admission's room; produces TICKET; woken by WAKE "admission"
    measure     consumes ledgers, heartbeats and stream sizes; produces METRIC
    feed        consumes jobs' logs of events; produces EVENT
    notify      consumes events and metrics of jobs that notify; produces webhooks and e-mails
    callout     authenticates NATS clients that have a credential for the streams of a job
    disconnect  closes connections of such credentials whose key or job has ended
    keys        closes open requests of revoked and expired keys
    served      produces heartbeats of connected processes that serve environments
    tinker      hears of answers to clients of the Tinker API; deletes their expired checkpoints
    replicas    answers rollout workers of inference jobs that ask which requests are still wanted

After a kill and restart it continues where it was; running jobs do not notice.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Any

from opentinker.services.scheduler.artifacts.archiver import Archiver
from opentinker.services.scheduler.autoscaler.autoscaler import Autoscaler, launcher_of
from opentinker.services.scheduler.environments.served_gateway import Gateway
from opentinker.services.scheduler.http.auth import AuthMiddleware, register_operator
from opentinker.services.scheduler.http.server import listening
from opentinker.services.scheduler.inference.router import InferenceRouter
from opentinker.services.scheduler.jobs.cleanup import JobCleaner
from opentinker.services.scheduler.jobs.eval_coordinator import EvalCoordinator
from opentinker.services.scheduler.jobs.scheduler_metrics import SchedulerMetrics
from opentinker.services.scheduler.jobs.tickets import TicketIssuer
from opentinker.services.scheduler.notifications.notifier import Notifier
from opentinker.services.scheduler.placement.leader_election import Leadership
from opentinker.services.scheduler.placement.reconciler import Reconciler
from opentinker.services.scheduler.streams.disconnect import StreamDisconnector
from opentinker.services.scheduler.streams.event_feed import EventFeed
from opentinker.services.scheduler.streams.nats_auth import NatsAuthCallout
from opentinker.services.scheduler.sweeps.controller import SweepController
from opentinker.services.scheduler.tinker.gateway import TinkerGateway
from opentinker.shared.runtime.service import Context, first_failure

SWITCH_S = 0.001
"""A thread that plans placement or searches a list gives way to requests so soon; by default after 5 ms, which every
answer of Redis would wait for."""


async def serve(ctx: Context, gateway: Gateway | None = None, replicas: InferenceRouter | None = None) -> None:
    sys.setswitchinterval(SWITCH_S)
    await register_operator(ctx)
    gate, gateway, replicas = AuthMiddleware(ctx), gateway or Gateway(ctx), replicas or InferenceRouter(ctx)

    tinker = TinkerGateway(ctx)
    launcher = launcher_of(ctx.settings)

    def leading(leadership: int) -> dict[str, Coroutine[Any, Any, None]]:
        launching = None if launcher is None else Autoscaler(ctx, launcher)
        return {
            "reconcile": Reconciler(ctx, leadership, None if launching is None else launching.starting).run(),
            **({} if launching is None else {"autoscale": launching.run()}),
            "clean": JobCleaner(ctx, leadership).run(),
            "evaluate": EvalCoordinator(ctx, leadership).run(),
            "sweep": SweepController(ctx, leadership).run(),
            "tickets": TicketIssuer(ctx, leadership).run(),
            "archive": Archiver(ctx, leadership).run(),
            "measure": SchedulerMetrics(ctx).run(),
            "feed": EventFeed(ctx).run(),
            "notify": Notifier(ctx).run(),
        }

    async with listening(ctx, gate, gateway, replicas, tinker):
        ctx.ready()
        await first_failure(
            {
                "lead": Leadership(ctx).run(leading),
                "keys": gate.run(),
                "callout": NatsAuthCallout(ctx).run(),
                "disconnect": StreamDisconnector(ctx).run(),
                "served": gateway.run(),
                "replicas": replicas.run(),
                "tinker": tinker.run(),
                "stop": ctx.stopping.wait(),
            }
        )
