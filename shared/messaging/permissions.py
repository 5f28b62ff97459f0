"""Permissions of each service's user on NATS and Redis. Every right follows from a table; nothing else is allowed.

    subjects.py  senders and consumers    --> `nats_rights`: publish and subscribe, JetStream's API, acks, inboxes
    STREAM_USES  readers of a stream, and purges  --'
    subjects.py  the public subjects of a job --> `shown_of`: subscriptions of a credential for the job's streams
    REDIS_KEYS   readers and writers of keys     --> `redis_rules`

A service's replies arrive below its own inbox prefix, to which no other service may subscribe. Replies go to the
requesters' prefixes, whose ends are random, so a service can only reply to requests that it received.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from opentinker.shared.messaging import subjects
from opentinker.shared.messaging.subjects import (
    COMMANDS,
    ENV,
    EXAMS,
    GROUPS,
    HEALTH,
    KICK,
    LOGINS,
    LOGINS_ANSWERED,
    LOGS,
    METRICS,
    REFERENCE,
    ROLLOUT,
    SCHEDULER,
    SCORES,
    SERVICES,
    STREAMS,
    TICKETS,
    TIMELINES,
    TRAINER,
    Call,
    Pattern,
    Subject,
)

OPERATOR = "operator"
"""A user for people: everything. No service knows its password."""
SYSTEM = "scheduler-system"
"""The scheduler again, with its password, in the servers' own account: to close connections of others, and to ask
whether a server is healthy, which the supervisor does."""
TABLE: tuple[Pattern[Any], ...] = tuple(value for value in vars(subjects).values() if isinstance(value, Pattern))


class Use(Enum):
    """Uses of a stream other than publishing to it and consuming from it. The values are subjects of JetStream's
    API."""

    MAKE = ("STREAM.CREATE.{stream}", "STREAM.UPDATE.{stream}")
    COUNT = ("STREAM.INFO.{stream}",)
    LOOK = ("STREAM.MSG.GET.{stream}",)
    EMPTY = ("STREAM.PURGE.{stream}",)
    CONSUMERS = ("CONSUMER.LIST.{stream}", "CONSUMER.DELETE.{stream}.*")
    REPLAY = (
        "CONSUMER.CREATE.{stream}.*.{filter}", "CONSUMER.DELETE.{stream}.*", "CONSUMER.MSG.NEXT.{stream}.*",
    )  # fmt: skip


_CONSUME = (
    "CONSUMER.CREATE.{stream}.*.{filter}", "CONSUMER.DELETE.{stream}.*", "CONSUMER.INFO.{stream}.*",
    "CONSUMER.MSG.NEXT.{stream}.*",
)  # fmt: skip
STREAM_USES: dict[str, dict[str, tuple[Use, ...]]] = {
    SCHEDULER: {
        **{str(stream.name): (Use.MAKE, Use.COUNT, Use.EMPTY, Use.CONSUMERS) for stream in STREAMS},
        str(TICKETS.name): (Use.MAKE, Use.COUNT, Use.EMPTY, Use.CONSUMERS, Use.LOOK),
        str(EXAMS.name): (Use.MAKE, Use.COUNT, Use.EMPTY, Use.CONSUMERS, Use.LOOK),
        str(METRICS.name): (Use.MAKE, Use.COUNT, Use.EMPTY, Use.CONSUMERS, Use.LOOK, Use.REPLAY),
        str(LOGS.name): (Use.MAKE, Use.COUNT, Use.EMPTY, Use.CONSUMERS, Use.REPLAY),
        str(TIMELINES.name): (Use.MAKE, Use.COUNT, Use.EMPTY, Use.CONSUMERS, Use.REPLAY),
    },
    TRAINER: {
        str(GROUPS.name): (Use.EMPTY,),
        str(COMMANDS.name): (Use.LOOK, Use.EMPTY),
        str(EXAMS.name): (Use.LOOK, Use.EMPTY),
        str(METRICS.name): (Use.LOOK,),
    },
    REFERENCE: {str(SCORES.name): (Use.COUNT,)},
}


HISTORY = (METRICS.name, LOGS.name, TIMELINES.name)
"""Streams of live messages without acks; they store them for later readers."""


@dataclass(frozen=True)
class NatsRights:
    """Patterns of subjects, sorted."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def inbox(service: str) -> str:
    """Prefix of the subjects on which a service is answered."""
    return f"_INBOX.{service}"


def wide(pattern: str) -> str:
    """The pattern for any job, worker, ...: `ticket.{job}` is `ticket.*`."""
    return pattern.format_map(_Stars())


def shown_of(job: str) -> dict[str, str]:
    """Return the subjects of a job that a stream credential may subscribe to, by name. Subjects of other jobs differ in
    their second part."""
    at = _Stars(job=subjects.token(job))
    return {s.shown: s.pattern.format_map(at) for s in TABLE if isinstance(s, Subject) and s.shown}


def nats_rights(service: str) -> NatsRights:
    publish, subscribe = {"$JS.API.INFO"}, {inbox(service) + ".>"}
    if service == SCHEDULER:
        publish, subscribe = publish | {LOGINS_ANSWERED}, subscribe | {LOGINS}
    for subject in TABLE:
        if service in subject.by:
            publish.add(wide(subject.pattern))
        if service not in subject.to:
            continue
        stream = stream_of(subject)
        if stream is None or stream in HISTORY:
            subscribe.add(wide(subject.pattern))
            if isinstance(subject, Call):
                publish |= {inbox(asker) + ".>" for asker in subject.by}
        else:
            publish |= _api(_CONSUME, stream, wide(subject.pattern)) | {f"$JS.ACK.{stream}.>"}
    for stream, uses in STREAM_USES.get(service, {}).items():
        covered = next(str(s.subjects[0]) for s in STREAMS if s.name == stream and s.subjects)
        for use in uses:
            publish |= _api(use.value, stream, covered)
    publish |= {f"$JS.API.STREAM.INFO.{stream}" for stream in streams_of(service)}
    return NatsRights(tuple(sorted(publish)), tuple(sorted(subscribe)))


def system_rights() -> NatsRights:
    """Return the rights of SYSTEM, in the servers' account."""
    return NatsRights((HEALTH, KICK.format(server="*")), (inbox(SYSTEM) + ".>",))


def streams_of(service: str) -> list[str]:
    """Streams that a service cannot work without: what it stores is acknowledged, or it consumes from there."""
    used = {
        stream
        for subject in TABLE
        if service in subject.by + subject.to and (stream := stream_of(subject)) and stream not in HISTORY
    }
    return sorted(used | STREAM_USES.get(service, {}).keys())


def stream_of(subject: Pattern[Any]) -> str | None:
    """The stream that keeps what is sent there."""
    first = subject.pattern.split(".")[0]
    return next((s.name for s in STREAMS if s.subjects and s.subjects[0].split(".")[0] == first), None)


def _api(calls: tuple[str, ...], stream: str, filter: str) -> set[str]:
    return {"$JS.API." + call.format(stream=stream, filter=filter) for call in calls}


class _Stars(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "*"


# --- Redis ----------------------------------------------------------------------------------------------------------

_JOBS = ("job:*", "jobs:active", "jobs:ending")
_BEATS = ("worker:*", "workers")
_SAMPLES = (
    "tinker:answer:*", "tinker:draw:*", "tinker:waiting:*", "tinker:tokens:*", "tinker:reserved:*", "tinker:sizes",
    "tinker:bytes", "tinker:kept",
)  # fmt: skip
REDIS_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    SCHEDULER: (("*",), ()),
    TRAINER: ((*_JOBS, *_BEATS, "adm:*", "spent:*", "tinker:*"), ("leases",)),
    ROLLOUT: ((*_JOBS, *_BEATS, "adm:*", "circuit:*", "spent:*", *_SAMPLES), ("leases",)),
    REFERENCE: ((*_JOBS, *_BEATS), ()),
    ENV: (_BEATS, ()),
}
"""Service -> keys that it reads and writes, keys that it reads alone. The scheduler owns the state: all of it."""
assert REDIS_KEYS.keys() == set(SERVICES)

_CONNECT = (
    "hello",
    "auth",
    "ping",
    "select",
    "client|setname",
    "client|setinfo",
    "client|id",
    "script|load",
    "eval",
    "evalsha",
)
"""Scripts run with the rights of their caller."""
_STRINGS = ("get", "set", "del", "exists")
_HASHES = ("hget", "hmget", "hgetall", "hexists", "hkeys", "hlen", "hset", "hdel", "hincrby", "hincrbyfloat", "expire")
_SETS = ("sadd", "srem", "smembers")
_SORTED_SETS = ("zadd", "zrem", "zrange", "zrevrange", "zscore")
_COMMANDS: dict[str, tuple[str, ...]] = {
    TRAINER: (*_STRINGS, *_HASHES, *_SETS, *_SORTED_SETS, "zcard", "xadd", "multi", "exec", "mget"),
    ROLLOUT: (*_STRINGS, *_HASHES, *_SETS, "xadd", "zadd", "zrem", "zcard", "zrange", "incrby"),
    REFERENCE: (*_STRINGS, "hmget", "hgetall", "hset", *_SETS, "xadd"),
    ENV: ("get", "set", "del", *_SETS),
}


def redis_rules(service: str) -> str:
    """ACL rules of a user, without its name and its password."""
    write, read = REDIS_KEYS[service]
    keys = " ".join([*(f"~{key}" for key in write), *(f"%R~{key}" for key in read)])
    if service == SCHEDULER:  # it changes its state, not the server's and not all keys together
        commands = "+@read +@write +@transaction +time -@admin -@dangerous -@scripting"
    else:
        commands = " ".join("+" + name for name in _COMMANDS[service])
    return f"resetkeys resetchannels -@all {commands} {' '.join('+' + name for name in _CONNECT)} {keys}"


OPERATOR_RULES = "resetkeys allchannels +@all ~*"
COMMON_RULES = "on nopass resetkeys resetchannels -@all +ping"
"""Rights of an unauthenticated client: the supervisor's health probe."""
