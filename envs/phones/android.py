"""Plays tasks of AndroidWorld on phones behind HTTP servers, one episode at a time on each.

    open: lease -> the task is set up      step: /execute_action -> screen      close: /task/tear_down -> release

The servers are AndroidWorld's own (its container), or `opentinker.envs.phones.android_server` where its library is
installed. This package needs neither.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Annotated, Self

import aiohttp
from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from opentinker.envs.adapters.library import check_known, episode_seed
from opentinker.envs.base import ELSEWHERE, BadReply, Unreachable
from opentinker.envs.data import in_event_loop
from opentinker.envs.import_clock import ImportClock
from opentinker.envs.phones import leases
from opentinker.envs.phones.actions import TYPES, PhoneAction
from opentinker.envs.phones.android_client import PhoneServer
from opentinker.envs.phones.android_screen import ScreenView
from opentinker.envs.phones.phone import Phone, PhoneConfig
from opentinker.envs.phones.screen import Screen
from opentinker.envs.remote_server import RemoteFailed
from opentinker.shared.security.egress import Egress, EgressRefused

WAIT_S = 0.25
PROBE_S = 10.0
FAILURES = (Unreachable, RemoteFailed, BadReply)


class AndroidWorld(ImportClock, Phone):
    """One seat, one leased phone. Reward: the task's own check, from 0 to 1, once the policy says `status` or
    `answer`; otherwise 0."""

    class Config(PhoneConfig):
        phones: Annotated[list[str], Field(min_length=1, max_length=256)]
        """URLs of the phones' servers, http://HOST:PORT."""
        tasks: Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=1000)] = []  # noqa: RUF012
        """Names of tasks; default: all that the phone's server has. The row of an episode selects one; its row and seed
        decide the parameters."""
        family: Annotated[str, Field(min_length=1, max_length=100)] = "android_world"
        """The family of tasks, as AndroidWorld names them."""
        go_home: bool = True
        """Begin on the home screen, as most tasks ask; false for the family `miniwob`, whose tasks open their app."""
        max_side: Annotated[int, Field(ge=64, le=4096)] = 800
        """Longest side of a screenshot: both sides are divided by the least whole number that makes them fit. Positions
        are pixels of the smaller screen, with or without a picture."""
        request_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 120.0
        """Timeout of one request, such as setting up a task or waiting for a still screen."""

        @field_validator("phones")
        @classmethod
        def _are_servers(cls, phones: list[str]) -> list[str]:
            egress = Egress.of_process()
            urls = [url.rstrip("/") for url in phones]
            for url in urls:
                try:
                    parts = egress.split(url)
                except EgressRefused as error:
                    raise ValueError(f"{url!r} {error}") from None
                if parts.scheme not in ("http", "https") or parts.query:
                    raise ValueError(f"{url!r} must be http(s)://HOST:PORT, without a query")
            if twice := sorted({url for url in urls if urls.count(url) > 1}):
                raise ValueError(f"{', '.join(twice)}: a phone stands there twice, and can play one episode at a time")
            return urls

        @model_validator(mode="after")
        def _phones_can_do_it(self, info: ValidationInfo) -> Self:
            if not (info.context or {}).get(ELSEWHERE) and not in_event_loop():
                asyncio.run(_probe(self))
            return self

    config: Config
    possible = frozenset(TYPES)

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        self._lease: leases.PhoneLease | None = None
        self._http: aiohttp.ClientSession | None = None
        self._name = ""
        """The task, once the phone is set up for it."""

    async def _begin(self, row: int, seed: int) -> str:
        config = self.config
        self._http = Egress.of_process().session(limit=2)
        drawn = episode_seed(row, seed)
        lost: dict[str, str] = {}
        while True:
            self._lease = await self._take(lost)
            phone = self._phone = PhoneServer(self._http, self._lease.url, config.request_timeout_s)
            try:
                await phone.draw(config.family, drawn)
                names = config.tasks or sorted(await phone.tasks())
                name = names[row % len(names)]
                goal = await phone.begin(name, config.go_home)
            except Unreachable as error:
                lost[self._lease.url] = str(error)
                self._lease.release()
                if len(lost) == len(config.phones):
                    raise Unreachable(f"no phone answers: {next(iter(lost.values()))}") from None
            else:
                self._name = name
                return goal

    async def _take(self, lost: dict[str, str]) -> leases.PhoneLease:
        """Return a free phone that is not lost, waiting for one as long as it takes. The wait does not count towards
        the episode's time."""
        place = leases.home()
        phones = [url for url in self.config.phones if url not in lost]
        Random().shuffle(phones)  # which one it is makes no difference to the episode
        while True:
            for url in phones:
                if (lease := leases.take(url, place)) is not None:
                    return lease
            with self.importing():
                await asyncio.sleep(WAIT_S)

    async def _look(self) -> Screen:
        config = self.config
        self._seen: ScreenView = await self._phone.look(
            elements=config.shows_elements, picture=config.shows_picture, max_side=config.max_side
        )
        return self._seen.screen

    async def _act(self, action: PhoneAction) -> None:
        if action.action_type == "status":
            return
        await self._phone.post("/execute_action", self._seen.fields(action))

    async def _score(self) -> float:
        return await self._phone.score(self._name)

    def _task_name(self) -> str:
        return self._name if len(self.config.tasks) != 1 else ""

    async def close(self) -> None:
        """Undo the task on the phone, and let the next episode have it."""
        try:
            if self._name:
                await self._phone.post("/task/tear_down", task_type=self._name, task_idx=0)
        except FAILURES:
            pass  # the next episode sets the phone up again, or finds that it is gone
        finally:
            if self._lease is not None:
                self._lease.release()
            if self._http is not None:
                await self._http.close()


async def _probe(config: AndroidWorld.Config) -> None:
    """Ask all phones concurrently for their features. Raise ValueError if one lacks something that the job needs, or if
    none answers; a phone that is down may come back."""
    async with Egress.of_process().session(limit=0) as http:
        phones = [PhoneServer(http, url, PROBE_S) for url in config.phones]
        found = await asyncio.gather(*(_lacks(phone, config) for phone in phones), return_exceptions=True)
    for problem in found:
        if isinstance(problem, BaseException) and not isinstance(problem, Unreachable):
            raise ValueError(str(problem)) from None
    if all(isinstance(problem, Unreachable) for problem in found):
        raise ValueError(f"no phone answers: {found[0]}")


async def _lacks(phone: PhoneServer, config: AndroidWorld.Config) -> None:
    """Raise Unreachable, RemoteFailed or BadReply; ValueError if the phone lacks something."""
    await phone.get("/health")
    if config.shows_elements and not await phone.tells_elements():
        raise ValueError(
            f"{phone.url} shows pixels alone (it has no /state): use observation = 'screenshot' with a vision model, "
            "or serve the phone by opentinker.envs.phones.android_server"
        )
    if config.tasks and config.family == "android_world":
        known = await phone.tasks()
        for task in config.tasks:
            check_known(f"task on {phone.url} as tasks", task, known)
