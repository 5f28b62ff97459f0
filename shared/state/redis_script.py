"""Lua scripts of ours on the Redis server: what must be decided and changed in one act."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from redis.client import NEVER_DECODE
from redis.exceptions import NoScriptError

from opentinker.shared.types.errors import Fenced, NotFound

UNFENCED = -1
"""Stands for a leadership number where no leadership is required."""
LED = """
local function led_by_another(epoch)
  return tonumber(epoch) >= 0 and tonumber(epoch) ~= tonumber(redis.call('GET', 'leader:epoch') or '0')
end
"""
"""Common beginning of the leading scheduler's scripts (see lease_table.py)."""
LED_BY_ANOTHER = "another scheduler leads now"


class Script:
    def __init__(self, redis: Any, text: str, *, binary: bool = False) -> None:
        """`binary`: the answer stays bytes."""
        self._redis, self._text = redis, text
        self._options = {NEVER_DECODE: True} if binary else {}
        self._sha = hashlib.sha1(text.encode()).hexdigest()

    async def __call__(self, *, keys: Sequence[str], args: Sequence[Any] = ()) -> Any:
        try:
            return await self._redis.execute_command("EVALSHA", self._sha, len(keys), *keys, *args, **self._options)
        except NoScriptError:
            # The server has restarted. One command loads and runs the script: with two, as in redis-py's Script,
            # another restart in between would raise this error again.
            return await self._redis.execute_command("EVAL", self._text, len(keys), *keys, *args, **self._options)


async def read_hashes(redis: Any, keys: Iterable[str]) -> list[dict[str, str]]:
    """Return the hashes under these keys, in their order; an absent one is empty."""
    pipe = redis.pipeline(transaction=False)
    for key in keys:
        pipe.hgetall(key)
    return list(await pipe.execute())


async def read_field(redis: Any, keys: Iterable[str], field: str) -> list[str | None]:
    """Return one field of the hashes under these keys, in their order."""
    pipe = redis.pipeline(transaction=False)
    for key in keys:
        pipe.hget(key, field)
    return list(await pipe.execute())


async def newest(redis: Any, key: str, limit: int, before: str, what: str) -> list[str]:
    """Return ids of a sorted set, the highest first; those that follow `before` if it is given. Raises NotFound if the
    set does not contain `before`. `what`: job | sweep."""
    start = 0
    if before:
        rank = await redis.zrevrank(key, before)
        if rank is None:
            raise NotFound(f"no {what} {before!r}")
        start = int(rank) + 1
    return list(await redis.zrevrange(key, start, start + limit - 1))


class LeadersScript:
    """A script of the leading scheduler, executed atomically. ARGV[1] in its text is the number of its leadership."""

    def __init__(self, redis: Any, text: str) -> None:
        self._script = Script(redis, LED + f"if led_by_another(ARGV[1]) then return '{_LED}' end\n" + text)

    async def __call__(self, *, leader: int, keys: Sequence[str], args: Sequence[Any] = ()) -> Any:
        """Raises Fenced: another scheduler leads by now, and nothing was changed."""
        answer = await self._script(keys=keys, args=[leader, *args])
        if answer == _LED:
            raise Fenced(LED_BY_ANOTHER)
        return answer


_LED = "led by another"
