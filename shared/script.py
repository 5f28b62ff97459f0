"""Lua scripts of ours on the Redis server: what must be decided and changed in one act."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError


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
