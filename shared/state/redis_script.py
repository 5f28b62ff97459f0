"""Lua scripts of ours on the Redis server: what must be decided and changed in one act."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError

from opentinker.shared.types.errors import Fenced

UNFENCED = -1
"""In the place of the number of a leadership: nobody leads."""
LED = """
local function led_by_another(epoch)
  return tonumber(epoch) >= 0 and tonumber(epoch) ~= tonumber(redis.call('GET', 'leader:epoch') or '0')
end
"""
"""What scripts of the scheduler that leads begin with (see lease_table.py)."""


class Script:
    def __init__(self, redis: Any, text: str) -> None:
        self._redis, self._text = redis, text
        self._sha = hashlib.sha1(text.encode()).hexdigest()

    async def __call__(self, *, keys: Sequence[str], args: Sequence[Any] = ()) -> Any:
        try:
            return await self._redis.evalsha(self._sha, len(keys), *keys, *args)
        except NoScriptError:
            # The server has started anew. One command makes the script known and runs it: were they two, as in
            # redis-py's Script, another restart between them would end in this error again.
            return await self._redis.eval(self._text, len(keys), *keys, *args)


class LeadersScript:
    """What the scheduler that leads decides and changes in one act. In the text ARGV[1] is the number of its
    leadership."""

    def __init__(self, redis: Any, text: str) -> None:
        self._script = Script(redis, LED + f"if led_by_another(ARGV[1]) then return '{_LED}' end\n" + text)

    async def __call__(self, *, leader: int, keys: Sequence[str], args: Sequence[Any] = ()) -> Any:
        """Raises Fenced: another scheduler leads by now, and nothing was changed."""
        answer = await self._script(keys=keys, args=[leader, *args])
        if answer == _LED:
            raise Fenced("another scheduler leads now")
        return answer


_LED = "led by another"
