"""Requests over NATS that are answered in several messages: `ask` sends one and yields them, `answer` serves them.

They are live messages, not kept anywhere: what is lost on the way, with a connection, is noticed by the asker (`seq` of
the nouns, and silence), who then asks again or gives up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from opentinker.shared.messaging.bus import Bus, NoReply, NoResponders, TooLarge
from opentinker.shared.messaging.consumer import AWAY, CLOSED
from opentinker.shared.messaging.subjects import Call
from opentinker.shared.types import codec

T = TypeVar("T")
R = TypeVar("R")
log = structlog.get_logger()

Send = Callable[[R], Awaitable[None]]


async def ask(bus: Bus, call: Call[T, R], noun: T, *, silence_s: float, **keys: str) -> AsyncGenerator[R, None]:
    """Yield every answer until the generator is closed. Raises NoReply after `silence_s` without one, immediately
    NoResponders if no process serves the subject or TooLarge if the server refuses the message's size, and WireError
    for an answer that is not an R."""
    subject, inbox = call.at(**keys), bus.nc.new_inbox()
    request = _fitting(bus, subject, noun)
    arrived: asyncio.Queue[Msg] = asyncio.Queue()

    async def receive(msg: Msg) -> None:
        arrived.put_nowait(msg)

    try:
        subscription = await bus.nc.subscribe(inbox, cb=receive)
    except (*AWAY, *CLOSED) as error:
        raise NoReply(f"{subject}: {type(error).__name__}") from None
    try:
        await bus.nc.publish(subject, request, reply=inbox)
        while True:
            async with asyncio.timeout(silence_s):
                msg = await arrived.get()
            if not msg.data and (msg.headers or {}).get("Status") == "503":
                raise NoResponders(f"{subject}: no process serves it")
            yield codec.decode(call.reply, msg.data)
    except (TimeoutError, *AWAY, *CLOSED) as error:
        raise NoReply(f"{subject}: {type(error).__name__}") from None
    finally:
        if not bus.nc.is_closed:
            await subscription.unsubscribe()


async def answer(bus: Bus, call: Call[T, R], begin: Callable[[T, Send[R]], None], **keys: str) -> Subscription:
    """Call `begin` with each request and a function that sends the requester a message; `begin` must not block. Sending
    raises TooLarge immediately, before anything else is done.

    Undecodable requests, and those that say not where the answer goes, are logged and left unanswered.
    """

    async def receive(msg: Msg) -> None:
        async def send(noun: R) -> None:
            payload = _fitting(bus, msg.reply, noun)
            try:
                await bus.nc.publish(msg.reply, payload)
            except (*AWAY, *CLOSED) as error:
                log.warning("answer_dropped", subject=msg.subject, error=type(error).__name__)

        try:
            noun = codec.decode(call.kind, msg.data)
        except codec.WireError as error:
            log.warning("bad_request", subject=msg.subject, error=str(error))
            return
        if not msg.reply:
            log.warning("bad_request", subject=msg.subject, error="it names no place for the answer")
            return
        begin(noun, send)

    return await bus.nc.subscribe(call.at(**keys), cb=receive)


def _fitting(bus: Bus, subject: str, noun: object) -> bytes:
    payload = codec.encode(noun)
    if len(payload) > bus.nc.max_payload:
        raise TooLarge(subject, len(payload), bus.nc.max_payload)
    return payload
