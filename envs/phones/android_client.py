"""Client of one phone's server: the HTTP routes of AndroidWorld's own server, and those that ours adds.

AndroidWorld's server shows pixels alone. `opentinker.envs.phones.android_server` also tells the elements of a screen
(`GET /state`), for models that do not see.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import numpy as np

from opentinker.envs.base import BadReply, Unreachable
from opentinker.envs.phones.android_screen import PhoneState, ScreenView, seen_of
from opentinker.envs.phones.pixels import PIECE_BYTES, PixelReader, shrink
from opentinker.envs.phones.screen import Screen
from opentinker.envs.png import png
from opentinker.envs.remote_server import RemoteFailed, check_status, object_of, read_limited
from opentinker.shared.security.egress import EgressRefused

CONNECT_S = 5.0
STATE = "/state"
STATE_BYTES = 32 << 20
Parameters = dict[str, str | int | bool]


class PhoneServer:
    """The phone behind `url`. Every method raises Unreachable if no server answers, RemoteFailed if the server refuses,
    fails or is late, and BadReply if its answer is invalid."""

    def __init__(self, http: aiohttp.ClientSession, url: str, timeout_s: float) -> None:
        self._http = http
        self.url = url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)

    async def get(self, route: str, **parameters: str | int | bool) -> dict[str, Any]:
        return await self._ask("GET", route, parameters)

    async def post(self, route: str, body: dict[str, Any] | None = None, **parameters: str | int | bool) -> None:
        await self._ask("POST", route, parameters, body)

    async def draw(self, family: str, seed: int) -> None:
        """Draw the parameters of all tasks of a family from the seed."""
        await self.get("/suite/reinitialize", n_task_combinations=1, seed=seed, task_family=family)

    async def begin(self, task: str, go_home: bool) -> str:
        """Set the phone up for a drawn task, and return its goal."""
        goal = (await self.get("/task/goal", task_type=task, task_idx=0)).get("goal")
        if not isinstance(goal, str):
            raise BadReply(f"{self.url}/task/goal must give goal, a string")
        await self.post("/task/initialize", task_type=task, task_idx=0)
        await self.post("/reset", go_home=go_home)
        return goal

    async def score(self, task: str) -> float:
        score = (await self.get("/task/score", task_type=task, task_idx=0)).get("score")
        if not isinstance(score, int | float) or not 0.0 <= score <= 1.0:
            raise BadReply(f"{self.url}/task/score must give score, a number from 0 to 1, not {score!r:.60}")
        return float(score)

    async def tasks(self) -> list[str]:
        found = (await self.get("/suite/task_list", max_index=-1)).get("task_list")
        if not isinstance(found, list) or not found or not all(isinstance(name, str) for name in found):
            raise BadReply(f"{self.url}/suite/task_list must give task_list, the names of tasks")
        return found

    async def tells_elements(self) -> bool:
        paths = (await self.get("/openapi.json")).get("paths")
        return isinstance(paths, dict) and STATE in paths

    async def look(self, *, elements: bool, picture: bool, max_side: int) -> ScreenView:
        """`max_side`: the longest side of the picture; without one, of the screen that positions refer to."""
        if elements:
            return await self._state(picture, max_side)
        pixels = await self._screenshot()
        return await asyncio.to_thread(_seen, pixels, max_side)

    async def _screenshot(self) -> Any:
        reader = PixelReader()
        async with self._answer("GET", "/screenshot", {"wait_to_stabilize": True}) as response:
            async for piece in response.content.iter_chunked(PIECE_BYTES):
                reader.feed(piece)
                await asyncio.sleep(0)  # other episodes go on in between
        return reader.finish()

    async def _state(self, picture: bool, max_side: int) -> ScreenView:
        asked: Parameters = {"wait_to_stabilize": True, "picture": picture, "max_side": max_side}
        async with self._answer("GET", STATE, asked) as response:
            raw = await read_limited(response, STATE_BYTES)
        try:
            seen = seen_of(msgspec.json.decode(raw, type=PhoneState), max_side)
        except msgspec.DecodeError as error:
            raise BadReply(f"{self.url}{STATE}: {error}") from None
        if picture and not seen.screen.picture:
            raise BadReply(f"{self.url}{STATE} must give the picture that was asked for")
        return seen

    async def _ask(
        self, method: str, route: str, parameters: Parameters, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        async with self._answer(method, route, parameters, body) as response:
            return object_of(await read_limited(response), f"{self.url}{route}")

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, route: str, parameters: Parameters, body: dict[str, Any] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Give the response, if it is no refusal; failures of the network are told as ours."""
        url = f"{self.url}{route}"
        query = {
            name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in parameters.items()
        }
        asked: dict[str, Any] = {"params": query, "json": body, "timeout": self._timeout, "allow_redirects": False}
        try:
            async with self._http.request(method, url, **asked) as response:
                if response.status != 200:
                    check_status(url, response.status, await read_limited(response))
                yield response
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            refused = isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, EgressRefused)
            late = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
            why = "no answer in time" if late else str(error) or repr(error)
            ours = RemoteFailed if late or refused or isinstance(error, EgressRefused) else Unreachable
            raise ours(f"{url}: {why}") from None


def _seen(pixels: np.ndarray, max_side: int) -> ScreenView:
    smaller = shrink(pixels, max_side)
    height, width, _ = smaller.shape
    screen = Screen(width=width, height=height, picture=png(smaller))
    return ScreenView(screen=screen, scale=float(pixels.shape[1] // width), numbers=[])
