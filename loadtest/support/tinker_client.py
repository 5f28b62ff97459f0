"""A client of the Tinker API on the wire, as far as load tests need one: no SDK, no threads."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class TinkerClient:
    """A session, and one model of it. Use it after `create`."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str) -> None:
        self._http, self._url = http, f"{url}/api/v1"
        self._headers = {"X-API-Key": f"tml-{key}"}
        self._numbers = itertools.count(1)
        self.session = self.model = ""

    async def call(self, path: str, body: Any = None, *, raw: bytes = b"") -> Any:
        """Return the answer to a POST, as JSON. Raises RuntimeError for a refusal."""
        kind = {"Content-Type": "application/x-protobuf"} if raw else {}
        sent: dict[str, Any] = {"data": raw} if raw else {"json": body}
        async with self._http.post(f"{self._url}/{path}", headers={**self._headers, **kind}, **sent) as response:
            if response.status == 408:
                return None
            if response.status >= 400:
                raise RuntimeError(f"{path}: {response.status} {await response.text()}")
            return await response.json()

    async def result(self, promise: Any) -> Any:
        while (found := await self.call("retrieve_future", {"request_id": promise["request_id"]})) is None:
            pass
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    async def open(self) -> None:
        opened = await self.call("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})
        self.session = opened["session_id"]

    async def create(self, base: str, rank: int = 16, seed: int = 0) -> None:
        await self.open()
        lora = {"rank": rank, "seed": seed, "train_unembed": False, "train_mlp": True, "train_attn": True}
        asked = {"session_id": self.session, "model_seq_id": 0, "base_model": base, "lora_config": lora}
        self.model = (await self.result(await self.call("create_model", asked)))["model_id"]

    def number(self) -> int:
        """Return the number of the model's next command."""
        return next(self._numbers)

    async def step(self, body: bytes, lr: float = 1e-4) -> Any:
        """Send a prepared forward_backward and an optim_step, and wait for both. Returns the first one's answer."""
        forward = await self.call("forward_backward", raw=self.numbered(body))
        asked = {"model_id": self.model, "seq_id": self.number(), "adam_params": {"learning_rate": lr}}
        stepped = await self.call("optim_step", asked)
        found, _ = await asyncio.gather(self.result(forward), self.result(stepped))
        return found

    def numbered(self, body: bytes) -> bytes:
        """Put the model and the next number before a request without them: protobuf messages may be joined."""
        from opentinker.services.scheduler.tinker.schema import ForwardBackwardRequest

        head = ForwardBackwardRequest(model_id=self.model, seq_id=self.number())
        return bytes(head.SerializeToString()) + body


def cross_entropy(sequences: list[Ids]) -> bytes:
    """Return a forward_backward without model and number: each token is learned but the first."""
    from opentinker.services.scheduler.tinker.schema import FLOAT32, INT32, ForwardBackwardRequest

    request = ForwardBackwardRequest(loss_fn="cross_entropy")
    for ids in sequences:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = ids[:-1].astype("<i4").tobytes()
        for name, values, dtype in (
            ("target_tokens", ids[1:].astype("<i4"), INT32),
            ("weights", np.ones(len(ids) - 1, "<f4"), FLOAT32),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = values.tobytes(), dtype
            tensor.shape.append(len(values))
    return bytes(request.SerializeToString())


async def timed(call: Any) -> float:
    """Await it and return its seconds."""
    began = time.perf_counter()
    await call
    return time.perf_counter() - began
