"""Requests of the Tinker API in Redis: which were asked, their answers, how many wait, and how many tokens they had.

Redis keys:
    tinker:asked:{model}           hash: number of a command -> digest of its body, of the last KEPT_DIGESTS
    tinker:open:{model}            sorted set of the numbers of commands without an answer, by themselves
    tinker:answer:{request}        the Answer as JSON; expires, a large one soon after it was first read
    tinker:draw:{request}          hash of a request for samples: digest of its body, tenant, job, number of times that
                                   it was lost, and, where tokens are counted, minute, prompt and reserved tokens;
                                   expires with its answer
    tinker:waiting:{job}:{tenant}  sorted set of the tenant's requests for samples without an answer, by their time; one
                                   that is not in the stream yet leaves it after UNSENT_S
    tinker:tokens:{job}:{tenant}:{minute}    tokens that the tenant's requests had in this minute; expires
    tinker:reserved:{job}:{tenant}:{minute}  those of them that requests without an answer may need; expires
    tinker:owed:{job}:{tenant}     hash: tokens that a command had beyond the limit, and of which minute; expires
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from opentinker.shared.state.redis_script import Script
from opentinker.shared.state.tinker import held_bytes
from opentinker.shared.state.tinker.held_bytes import HELD_KEYS, HeldBytes, TooManyWaiting, too_many_bytes
from opentinker.shared.state.tinker.request_scripts import ANSWER, ANSWER_SAMPLE, ASK, ASK_SAMPLE, LEAVE_OUT
from opentinker.shared.types import codec
from opentinker.shared.types.errors import Conflict, OpenTinkerError
from opentinker.shared.types.tinker import ANSWER_KEPT_S, SMALL_RESULT, Answer, Failed, Sampled, bytes_in

T = TypeVar("T")

TRAINED = ":train:"
"""In the id of a model, and not in that of a sampler."""
MAX_WAITING = 256
"""Commands of a model without an answer."""
KEPT_DIGESTS = 10_000
"""Numbers below the lowest that no command has had whose digests are kept; of those before them, each counts as one
that a command has had."""
READ_KEPT_S = 900
"""Seconds for which a large answer can be read again; more than DEDUP_S, because samples that are asked for again later
are drawn again."""
LARGE_ANSWER = 1 << 16
"""Bytes of its arrays."""
MAX_WAITING_SAMPLES = 1024
"""Requests for samples of a tenant on one server without an answer."""
MINUTES_CHARGED = 3
"""Later minutes of a tenant that a large command can use up: clients send a refused one again for five minutes."""
UNSENT_S = 60.0
"""A request for samples that could not be sent counts as one that waits for this time."""


class TokensSpent(OpenTinkerError):
    """The requests of this minute have had as many tokens as allowed."""


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """Counts the tokens of a tenant's requests to a job in one minute."""

    job: str
    tenant: str
    minute: int
    limit: int | None = None
    """None: they are not counted."""

    @property
    def key(self) -> str:
        return f"tinker:tokens:{self.job}:{self.tenant}:{self.minute}"

    @property
    def reserved(self) -> str:
        return f"tinker:reserved:{self.job}:{self.tenant}:{self.minute}"

    @property
    def owed(self) -> str:
        return f"tinker:owed:{self.job}:{self.tenant}"


class AskedSample(NamedTuple):
    state: Literal["new", "known", "again"]
    """`again`: it is known, and its forgotten answer was that it was lost."""
    lost: int
    """How often it was."""


class Losses(NamedTuple):
    """Workers that were lost while they drew a request."""

    beside: int = 0
    """While they drew others, too."""
    alone: int = 0


class TinkerRequests(HeldBytes):
    def __init__(self, redis: Any) -> None:
        super().__init__(redis)
        self._ask, self._answer = Script(redis, ASK), Script(redis, ANSWER)
        self._leave_out = Script(redis, LEAVE_OUT)
        self._ask_sample = Script(redis, ASK_SAMPLE)
        self._answer_sample = Script(redis, ANSWER_SAMPLE)

    # --- commands -----------------------------------------------------------------------------------------------

    async def ask(
        self, model: str, seq: int, digest: str, *, tokens: int = 0, quota: Quota | None = None, size: int = 0,
        bounded: bool = True,
    ) -> bool:  # fmt: skip
        """Note the body of a command, count its bytes (`size`) until it has its answer, and count its tokens, those
        beyond the limit in the next minutes; return whether it is new. A repeated one counts nothing.

        Raises Conflict if this number was used with another body, TooManyWaiting if MAX_WAITING commands have no answer
        yet or MAX_HELD_BYTES are kept for the tenant, unless all commands of the model wait for this one or it is not
        `bounded`, TokensSpent if the limit is reached."""
        counted = quota is not None and quota.limit is not None and tokens > 0
        counts = quota or Quota(job=model, tenant="", minute=0)
        known = await self._ask(
            keys=[f"tinker:asked:{model}", f"tinker:model:{model}", f"tinker:open:{model}", counts.key, counts.reserved,
                  counts.owed, *HELD_KEYS],
            args=[str(seq), digest, str(MAX_WAITING if bounded else 1 << 53), str(tokens),
                  str(counts.limit) if counted else "", str(counts.minute), str(MINUTES_CHARGED), f"{model}#{seq}",
                  size if bounded else 0, counts.tenant, held_bytes.MAX_HELD_BYTES, time.time(), KEPT_DIGESTS],
        )  # fmt: skip
        if not known:
            raise Conflict(f"seq_id {seq} of model {model} was used for another request")
        if known == -1:
            raise TooManyWaiting(f"{MAX_WAITING} commands of model {model} wait; send more when some have an answer")
        if known == -2:
            raise TokensSpent(_spent(quota))
        if known == -3:
            raise too_many_bytes(counts.tenant)
        return bool(known == 2)

    async def leave_out(self, model: str, last: int) -> None:
        """Note that a model waits for no number up to `last`: the trainer has given up what had not come."""
        keys = [f"tinker:{key}:{model}" for key in ("asked", "model", "open")]
        await self._leave_out(keys=keys, args=[str(last), KEPT_DIGESTS])

    async def was_answered(self, request: str) -> bool:
        """Return whether a request that was asked has had its answer, which may have expired since."""
        owner, _, number = request.partition("#")
        if TRAINED in owner:
            return await self._redis.zscore(f"tinker:open:{owner}", number) is None
        tenant, job = await self._redis.hmget(_draw_key(request), "tenant", "job")
        return tenant is not None and await self._redis.zscore(_waiting(job, tenant), request) is None

    async def was_asked(self, request: str) -> bool:
        """Return whether a request is known, or was within ANSWER_KEPT_S if it is for samples."""
        owner, _, number = request.partition("#")
        if TRAINED in owner:
            if await self._redis.hexists(f"tinker:asked:{owner}", number):
                return True
            return int(number) < int(await self._redis.hget(f"tinker:model:{owner}", "next") or 0) - KEPT_DIGESTS
        return bool(await self._redis.exists(_draw_key(request)))

    # --- requests for samples -----------------------------------------------------------------------------------

    async def ask_sample(
        self, request: str, digest: str, quota: Quota, *, prompt: int = 0, drawn: int = 0, answer: int = 0
    ) -> AskedSample:
        """Note the body of a request for samples, and count its tokens: those of the prompt, and `drawn`, which the
        samples may have; its answer corrects them. The prompt's bytes count while the request waits, and those that its
        answer may have (`answer`), if that is a large one, until it is there. `sent` must follow within UNSENT_S.

        Raises Conflict if its number was used with another body, TooManyWaiting if MAX_WAITING_SAMPLES requests of the
        tenant have no answer on this server or MAX_HELD_BYTES are kept for it, TokensSpent if the limit is reached."""
        most = answer if answer > LARGE_ANSWER else 0
        asked = await self._note_sample(request, digest, quota, prompt, drawn, most, again=False)
        if asked.state == "new" or await self.answer_size(request) > SMALL_RESULT:  # samples: it was not lost
            return asked
        known = await self.answered(request)
        if known is None or not isinstance(known.result, Failed) or not known.result.lost:
            return asked
        asked = await self._note_sample(request, digest, quota, prompt, drawn, most, again=True)
        return asked._replace(state="again") if asked.state == "new" else asked

    async def _note_sample(
        self, request: str, digest: str, quota: Quota, prompt: int, drawn: int, most: int, *, again: bool
    ) -> AskedSample:
        known, lost = await self._ask_sample(
            keys=[_draw_key(request), _answer_key(request), _waiting(quota.job, quota.tenant), quota.key,
                  quota.reserved, quota.owed, *HELD_KEYS],
            args=[request, digest, time.time(), ANSWER_KEPT_S, MAX_WAITING_SAMPLES, quota.tenant, quota.job,
                  quota.minute, prompt, prompt + drawn, "" if quota.limit is None else quota.limit, int(again),
                  UNSENT_S, 4 * prompt, held_bytes.MAX_HELD_BYTES, most],
        )  # fmt: skip
        if not known:
            raise Conflict(f"the number of {request} was used for another request")
        if known == -1:
            raise TooManyWaiting(
                f"{MAX_WAITING_SAMPLES} requests for samples of tenant {quota.tenant} wait on {quota.job}; send more "
                "when some have an answer, or ask for several samples of a prompt in one request (num_samples)"
            )
        if known == -2:
            raise TokensSpent(_spent(quota))
        if known == -3:
            raise too_many_bytes(quota.tenant)
        return AskedSample("new" if known == 2 else "known", int(lost))

    async def sent(self, request: str, job: str, tenant: str) -> None:
        """Note that a request for samples is in the stream: it waits until it has an answer, and one that is given up
        until a worker has taken it."""
        now = time.time()
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.zadd(_waiting(job, tenant), {request: now}, xx=True)
            ends = dict.fromkeys((request, _draw_key(request)), now + ANSWER_KEPT_S)
            pipe.zadd("tinker:kept", ends, xx=True)
            await pipe.execute()

    async def drop_sample(self, request: str) -> None:
        """Note that a worker has taken a request for samples that had its answer: it waits no longer."""
        tenant, job = await self._redis.hmget(_draw_key(request), "tenant", "job")
        if tenant is not None:
            await self._redis.zrem(_waiting(job, tenant), request)
            await self.release(request)

    async def losses(self, request: str) -> Losses:
        """Return how often the drawing of a request has begun, without an answer since and without being handed back:
        asked before it begins, how many workers were lost."""
        beside, alone = await self._redis.hmget(_draw_key(request), "beside", "alone")
        return Losses(int(beside or 0), int(alone or 0))

    async def begin_draw(self, request: str, *, alone: bool) -> None:
        await self._count_draw(request, alone, 1)

    async def hand_back(self, request: str, *, alone: bool) -> None:
        """Take the last `begin_draw` back: another worker will draw the request, and this one was not lost."""
        await self._count_draw(request, alone, -1)

    async def _count_draw(self, request: str, alone: bool, change: int) -> None:
        key = _draw_key(request)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hincrby(key, "alone" if alone else "beside", change)
            pipe.expire(key, ANSWER_KEPT_S)
            await pipe.execute()

    # --- answers ------------------------------------------------------------------------------------------------

    async def answer(self, answer: Answer, *, cancelled: bool = False) -> bool:
        """Keep an answer; the bytes of a large one count until it is read. Return False, and change nothing, if the
        request has one. The tokens of samples that were not drawn are given back; of those that the client has
        `cancelled` they stay counted, and the request waits until a worker has taken it."""
        key, (owner, _, number) = _answer_key(answer.request), answer.request.partition("#")
        size, expires = bytes_in(answer.result), time.time() + ANSWER_KEPT_S
        text = codec.to_json(answer) if size <= SMALL_RESULT else await asyncio.to_thread(codec.to_json, answer)
        held = size if size > LARGE_ANSWER else 0
        if TRAINED in owner:
            keys = [key, f"tinker:open:{owner}", *HELD_KEYS]
            args = [text, str(ANSWER_KEPT_S), number, answer.request, held, expires]
            return bool(await self._answer(keys=keys, args=args))
        draw = _draw_key(answer.request)
        tenant, job, minute, prompt, reserved = await self._redis.hmget(
            draw, "tenant", "job", "minute", "prompt", "reserved"
        )
        if tenant is None:  # nothing is noted of it
            return bool(await self._redis.set(key, text, ex=ANSWER_KEPT_S, nx=True))
        reserves, change = "", ""
        if minute and not cancelled:
            reserves, change = reserved, str(_tokens_of(answer, int(prompt)) - int(reserved))
        then, now = [Quota(job=job, tenant=tenant, minute=one) for one in (int(minute or 0), int(time.time() // 60))]
        return bool(await self._answer_sample(
            keys=[key, draw, _waiting(job, tenant), then.key, then.reserved, now.key, *HELD_KEYS],
            args=[text, ANSWER_KEPT_S, answer.request, reserves, change, int(not cancelled), held, tenant, expires],
        ))  # fmt: skip

    async def answer_size(self, request: str) -> int:
        """Return the bytes of a request's answer as it is stored; 0 if it has none."""
        return int(await self._redis.strlen(_answer_key(request)))

    async def answered(self, request: str) -> Answer | None:
        return await self._read(Answer, _answer_key(request))

    async def note_read(self, answer: Answer) -> None:
        """Keep an answer that a client reads for READ_KEPT_S alone if it is large, for its retries, and count its bytes
        no longer."""
        if bytes_in(answer.result) > LARGE_ANSWER:
            await self._redis.expire(key := _answer_key(answer.request), READ_KEPT_S, lt=True)
            await self.release(key)

    async def which_answered(self, requests: Sequence[str]) -> set[str]:
        """Return those of these requests that have an answer."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for request in requests:
                pipe.exists(_answer_key(request))
            found = await pipe.execute()
        return {request for request, there in zip(requests, found, strict=True) if there}

    async def release_answered(self) -> None:
        """Count the bytes of requests with an answer no longer: trainers and rollout workers of earlier releases, which
        are replaced after the scheduler, do not release them."""
        names = [name async for name, _ in self._redis.hscan_iter(HELD_KEYS[0], count=1000)]
        requests = [name.removeprefix(_draw_key("")) for name in names if not name.startswith(_answer_key(""))]
        for start in range(0, len(requests), 500):
            some = requests[start : start + 500]
            async with self._redis.pipeline(transaction=False) as pipe:
                for request in some:
                    pipe.hmget(_draw_key(request), "tenant", "job")
                of = await pipe.execute()
            async with self._redis.pipeline(transaction=False) as pipe:
                for request, (tenant, job) in zip(some, of, strict=True):
                    owner, _, number = request.partition("#")
                    is_command = TRAINED in owner
                    pipe.zscore(*(f"tinker:open:{owner}", number) if is_command else (_waiting(job, tenant), request))
                waits = await pipe.execute()
            for request in {request for request, since in zip(some, waits, strict=True) if since is None}:
                await self.release(request)
                await self.release(_draw_key(request))
        await self._redis.delete("tinker:held")  # the sums of earlier releases

    async def tokens(self, job: str, tenant: str, minute: int) -> int:
        """Return how many tokens the tenant's requests to a job had in this minute."""
        return int(await self._redis.get(Quota(job=job, tenant=tenant, minute=minute).key) or 0)

    async def _read(self, kind: type[T], key: str) -> T | None:
        text = await self._redis.get(key)
        if not text:
            return None
        is_small = len(text) <= SMALL_RESULT
        return codec.from_json(kind, text) if is_small else await asyncio.to_thread(codec.from_json, kind, text)


def _answer_key(request: str) -> str:
    return f"tinker:answer:{request}"


def _draw_key(request: str) -> str:
    return f"tinker:draw:{request}"


def _waiting(job: str, tenant: str) -> str:
    return f"tinker:waiting:{job}:{tenant}"


def _spent(quota: Quota | None) -> str:
    assert quota is not None
    return f"{quota.limit} a minute of tenant {quota.tenant} on {quota.job}"


def _tokens_of(answer: Answer, prompt: int) -> int:
    """Return the tokens of a request for samples that has this answer; none if it has failed."""
    result = answer.result
    return prompt + sum(len(one.tokens) // 4 for one in result.sequences) if isinstance(result, Sampled) else 0
