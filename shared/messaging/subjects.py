"""Every subject and stream, with type, senders and consumers. No other module contains a subject string.

scheduler --TICKET--> rollout worker --ENV_OPEN/ENV_SESSION--> env worker
rollout worker --GROUP--> trainer            (or --SCORE--> reference-forward --GROUP--> trainer)
trainer --SWAP--> rollout worker             (the tensors travel by torch.distributed)
trainer --RANKS--> trainer                   (those that share the ranks of a job; then over connections of the ranks)
trainer --EXAM--> rollout worker --EXAM_RESULT--> trainer    (validation; of eval jobs it is the scheduler that asks)
scheduler --GENERATE--> rollout worker       (inference jobs)
scheduler --COMMAND--> trainer, scheduler --SAMPLE--> rollout worker; both --ANSWERED--> scheduler (Tinker API)
every service --METRIC, LOG, TIMELINE, EVENT, ROLLOUTS--> subscribers; every service --WAKE--> a sleeping loop
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from nats.js.api import DiscardPolicy, PersistMode, RetentionPolicy, StorageType, StreamConfig

from opentinker.shared.openai.inference import CancelGenerate, GenerateChunk, GenerateRequest, InFlight
from opentinker.shared.types import codec
from opentinker.shared.types.core import Ticket
from opentinker.shared.types.env_protocol import (
    CloseSession,
    EnvCheck,
    EnvCheckReply,
    EnvRows,
    EnvRowsReply,
    OpenSession,
    ServedBack,
    SessionReply,
    StepSession,
)
from opentinker.shared.types.evaluation import EvalAck, EvalEpisode, EvalResult
from opentinker.shared.types.swap import SwapCommand, SwapReply
from opentinker.shared.types.telemetry import JobEvent, KeptStep, LogLine, MetricPoint, TimelinePart
from opentinker.shared.types.tinker import ANSWER_KEPT_S, Answered, Command, SampleRequest
from opentinker.shared.types.trainer_group import JoinRanks, JoinReply
from opentinker.shared.types.trajectories import Group

T = TypeVar("T")
R = TypeVar("R")

_TOKEN = re.compile(r"^[A-Za-z0-9_-]{1,64}$")


def token(name: str) -> str:
    """One subject token for any name: the name itself if it may stand in a subject, else a hash of it."""
    return name if _TOKEN.match(name) else "x" + hashlib.sha256(name.encode()).hexdigest()[:20]


SCHEDULER, TRAINER, ROLLOUT = "scheduler", "trainer", "rollout-worker"
REFERENCE, ENV = "reference-forward", "env-worker"
SERVICES = (SCHEDULER, TRAINER, ROLLOUT, REFERENCE, ENV)
"""The services' names: of their processes, and of their users on NATS and Redis. What each may do there is made of the
table below (permissions.py): a service that is not named at a subject is refused it."""


@dataclass(frozen=True)
class Pattern(Generic[T]):
    """A subject pattern with the type it carries. `at(job=...)` fills the pattern."""

    pattern: str
    kind: type[T]
    by: tuple[str, ...] = field(default=(), kw_only=True)
    """Services that send it, or ask."""
    to: tuple[str, ...] = field(default=(), kw_only=True)
    """Services that consume it, or answer."""

    def at(self, **keys: str) -> str:
        return self.pattern.format(**{key: value if value == "*" else token(value) for key, value in keys.items()})


@dataclass(frozen=True)
class Subject(Pattern[T]):
    json: bool = False
    """JSON instead of msgpack: for what dashboards read."""
    shown: str = ""
    """For data that dashboards may receive with a stream credential (`stream_credentials.py`): its name there, and the
    last part of the route that returns its history."""

    def encode(self, noun: T) -> bytes:
        return codec.to_json(noun) if self.json else codec.encode(noun)

    def decode(self, data: bytes) -> T:
        """Raises WireError."""
        return codec.from_json(self.kind, data) if self.json else codec.decode(self.kind, data)


@dataclass(frozen=True)
class Call(Pattern[T], Generic[T, R]):
    """A request/reply subject: carries T, answered by R."""

    reply: type[R]


TICKET = Subject("ticket.{job}", Ticket, by=(SCHEDULER,), to=(ROLLOUT,))
"""Scheduler (admission loop) -> one rollout worker of the job. Acknowledged when the group is stored."""
SCORE = Subject("score.{job}", Group, by=(ROLLOUT,), to=(REFERENCE,))
"""Rollout worker -> one reference-forward, for jobs that need reference logprobs. Acknowledged when passed on."""
GROUP = Subject("group.{job}", Group, by=(ROLLOUT, REFERENCE), to=(TRAINER,))
"""Rollout worker or reference-forward -> the job's trainer. Kept until a checkpoint covers it."""
EXAM = Subject("exam.{job}", EvalEpisode, by=(TRAINER, SCHEDULER), to=(ROLLOUT,))
"""Trainer, or the scheduler for an eval job -> one rollout worker of the job: play a validation episode. Acknowledged
when who asked has its result."""
METRIC = Subject("metric.{job}.{source}", MetricPoint, json=True, by=SERVICES, shown="metrics")
"""Every service -> dashboards, CLI. Live and as history."""
LOG = Subject("log.{job}.{level}", LogLine, json=True, by=SERVICES, to=(SCHEDULER,), shown="logs")
"""Every service -> the job's log. Live and as history, by level: many small words cannot push out a grave one."""
EVENT = Subject("event.{job}", JobEvent, json=True, by=(SCHEDULER,), shown="events")
"""The leading scheduler -> dashboards: what has come into a job's log of events, in order, once or (when another one
leads) twice; ids are those of the log."""
ROLLOUTS = Subject("rollouts.{job}", KeptStep, json=True, by=(TRAINER,), shown="rollouts")
"""Trainer -> dashboards: episodes that a step was trained on can be read now. Live alone; the words are in files."""
TIMELINE = Subject(
    "timeline.{job}.{worker}", TimelinePart, json=True, by=(TRAINER, ROLLOUT, REFERENCE, ENV), shown="timeline"
)
"""Workers of a job -> dashboards: their activity, at most once a second. Live and as history."""
WAKE = Subject("wake.{who}", dict, json=True, by=(SCHEDULER, TRAINER, ROLLOUT), to=(SCHEDULER, TRAINER, ROLLOUT))
"""Any process -> a loop that sleeps: run a round now. A hint; every loop also polls."""

ENV_OPEN = Call("env.open.{environment}", OpenSession, SessionReply, by=(ROLLOUT, SCHEDULER), to=(ENV,))
"""Rollout worker -> any env worker that serves the environment (queue group)."""
ENV_STEP = Call("env.step.{worker}", StepSession, SessionReply, by=(ROLLOUT, SCHEDULER), to=(ENV, SCHEDULER))
"""Rollout worker -> the env worker that holds the session."""
ENV_CLOSE = Call("env.close.{worker}", CloseSession, SessionReply, by=(ROLLOUT, SCHEDULER), to=(ENV, SCHEDULER))
"""Rollout worker -> the env worker that holds the session: it is given up."""
ENV_CHECK = Call("env.check", EnvCheck, EnvCheckReply, by=(SCHEDULER,), to=(ENV,))
"""Scheduler -> any env worker (queue group "env"), when a job is submitted."""
SANDBOX_OPEN = Call("env.sandboxed.open", OpenSession, SessionReply, by=(ROLLOUT, SCHEDULER), to=(ENV,))
"""Rollout worker -> any env worker that has sandboxes (queue group): ENV_OPEN of sessions that need one."""
SANDBOX_CHECK = Call("env.sandboxed.check", EnvCheck, EnvCheckReply, by=(SCHEDULER,), to=(ENV,))
"""Scheduler -> any env worker that has sandboxes: ENV_CHECK of what is played in one."""
ENV_ROWS = Call("env.rows", EnvRows, EnvRowsReply, by=(SCHEDULER,), to=(ENV,))
"""Scheduler -> any env worker (queue group "env"), when someone looks at the rows of a job."""
SANDBOX_ROWS = Call("env.sandboxed.rows", EnvRows, EnvRowsReply, by=(SCHEDULER,), to=(ENV,))
"""Scheduler -> any env worker that has sandboxes: ENV_ROWS of what is played in one."""
SERVED_OPEN = Call(
    "env.served.open.{tenant}.{environment}", OpenSession, SessionReply, by=(ROLLOUT, SCHEDULER), to=(SCHEDULER,)
)
"""Rollout worker -> the scheduler that holds a connection of a process that serves it (queue group): ENV_OPEN of
environments that their users serve, whose names are a tenant's own. Steps and closes go to the scheduler too, under the
address of that process."""
SERVED_CHECK = Call(
    "env.served.check.{tenant}.{environment}", EnvCheck, EnvCheckReply, by=(SCHEDULER,), to=(SCHEDULER,)
)
"""Scheduler -> a scheduler that holds such a connection: ENV_CHECK of such an environment."""
SERVED_BACK = Subject("env.served.back.{worker}", ServedBack, by=(SCHEDULER,), to=(SCHEDULER,))
"""Scheduler -> the one that held the connection of this process before: it is here now."""
EXAM_RESULT = Call("examined.{job}", EvalResult, EvalAck, by=(ROLLOUT,), to=(TRAINER, SCHEDULER))
"""Rollout worker -> who asked: the job's trainer, or the scheduler that leads."""
SWAP = Call("swap.{worker}", SwapCommand, SwapReply, by=(TRAINER,), to=(ROLLOUT,))
"""Trainer -> one rollout worker: join the weight group, or receive a version through it."""
RANKS = Call("ranks.{worker}", JoinRanks, JoinReply, by=(TRAINER,), to=(TRAINER,))
"""Trainer that leads a trainer group -> one of its members. The ranks then talk over their own connections."""
GENERATE = Call("generate.ask.{worker}", GenerateRequest, GenerateChunk, by=(SCHEDULER,), to=(ROLLOUT,))
"""Scheduler -> one rollout worker of an inference job, by its address. Answered in pieces (streaming.py)."""
ABANDON = Subject("generate.abandon.{worker}", CancelGenerate, by=(SCHEDULER,), to=(ROLLOUT,))
"""Scheduler -> the rollout worker that it has asked."""
WANTED = Call("generate.wanted.{asker}", InFlight, InFlight, by=(ROLLOUT,), to=(SCHEDULER,))
"""Rollout worker -> the scheduler that has asked it: schedulers die, and messages get lost."""
COMMAND = Subject("command.{job}", Command, by=(SCHEDULER,), to=(TRAINER,))
"""Scheduler (Tinker API) -> the trainer of the job. Kept until the stored states of its models cover it."""
SAMPLE = Subject("sample.{job}.{tenant}", SampleRequest, by=(SCHEDULER,), to=(ROLLOUT,))
"""Scheduler (Tinker API) -> one rollout worker of the job, in an order for each tenant. Acknowledged when its answer is
stored."""
ANSWERED = Subject("answered.{job}", Answered, by=(TRAINER, ROLLOUT), to=(SCHEDULER,))
"""Trainer or rollout worker -> the schedulers, of which one may wait for it: the answer can be read now."""

LOGINS, LOGINS_ANSWERED = "$SYS.REQ.USER.AUTH", "$SYS._INBOX.>"
"""nats-server -> scheduler: may this client, which is not a service, connect? The answer goes to the subject that the
server names."""
HEALTH = "$SYS.REQ.SERVER.PING.HEALTHZ"
"""The supervisor -> nats-server, in that one's own account: do you and your JetStream work?"""
KICK = "$SYS.REQ.SERVER.{server}.KICK"
"""A scheduler -> nats-server, in that one's own account: close the connection of this client."""

MIB = 1024**2
DEDUP_S = 600.0


def _work(name: str, subject: str) -> StreamConfig:
    """Messages that an acknowledgement removes."""
    return StreamConfig(
        name=name,
        subjects=[subject],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        duplicate_window=DEDUP_S,
    )


def _history(name: str, subject: str, **limits: Any) -> StreamConfig:
    """Messages of which the oldest go at a limit."""
    return StreamConfig(
        name=name,
        subjects=[subject],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        persist_mode=PersistMode.ASYNC,
        **limits,
    )


TICKETS = _work("TICKETS", "ticket.*")
SCORES = _work("SCORES", "score.*")
EXAMS = _work("EXAMS", "exam.*")
GROUPS = StreamConfig(
    name="GROUPS",
    subjects=["group.*"],
    retention=RetentionPolicy.LIMITS,
    storage=StorageType.FILE,
    discard=DiscardPolicy.NEW,
    duplicate_window=DEDUP_S,
)
"""Acks remove nothing here: a job's messages are deleted when a checkpoint before the one from which it would resume
covers them, all of them when it ends. There is no limit per job: at a limit the trainer would wait for groups and never
reach the checkpoint that makes room. Admission bounds the groups in flight. Disk use is bounded by two checkpoint
intervals per job, three with several policies (the trainer shortens them beyond a GiB), and for all streams together by
the server's `max_file_store`, by default three quarters of the free space at its start: beyond it publishers wait."""
COMMANDS = StreamConfig(
    name="COMMANDS",
    subjects=["command.*"],
    retention=RetentionPolicy.LIMITS,
    storage=StorageType.FILE,
    discard=DiscardPolicy.NEW,
    duplicate_window=DEDUP_S,
)
"""Like GROUPS: acks remove nothing. The trainer deletes what the stored states of a job's models cover."""
SAMPLES = _work("SAMPLES", "sample.*.*").evolve(max_age=float(ANSWER_KEPT_S))
"""One that no worker has taken goes when its bytes count no longer for its tenant, and nothing is known of it: a server
that is paused for days does not collect them."""
METRICS = _history("METRICS", "metric.*.*", max_msgs_per_subject=100_000, max_bytes=352 * MIB, duplicate_window=DEDUP_S)
"""May forget: the oldest points of all jobs go when it is full, so that history never takes the
room of work. One worker's point a second is about 50 MB a day. The server sets `max_bytes` aside when it makes the
stream, and makes none if its store is smaller. The trainer's steps are in the job's metrics.jsonl as well, from where
`GET /v1/jobs/JOB/metrics` reads those that were dropped here."""
LOGS = _history("LOGS", "log.*.*", max_msgs_per_subject=5_000, max_bytes=128 * MIB, max_age=30 * 86400.0)
"""May forget, like METRICS: the oldest lines go, of a job's level beyond 5,000 of them, of all jobs when it is full."""
TIMELINES = _history("TIMELINES", "timeline.*.*", max_msgs_per_subject=3_600, max_bytes=32 * MIB, max_age=7 * 86400.0)
"""May forget, like METRICS: of each worker of a job the last hour stays, less if all jobs' is more than there is
room for."""
STREAMS = (TICKETS, EXAMS, SCORES, GROUPS, COMMANDS, SAMPLES, METRICS, LOGS, TIMELINES)
