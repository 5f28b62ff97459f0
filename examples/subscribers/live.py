"""Print a job's metrics as they come: `python examples/subscribers/live.py JOB [URL]`; OPENTINKER_API_KEY has a key."""

import asyncio
import sys

import nats

from opentinker import AsyncClient


async def main(job: str, url: str | None = None) -> None:
    while True:  # a credential lives a quarter of an hour: then there is another
        async with AsyncClient(url) as client:
            given = await client.stream_credentials(job)
        connection = await nats.connect(given["servers"], token=given["token"], allow_reconnect=False)
        metrics = await connection.subscribe(given["subjects"]["metrics"])
        async for message in metrics.messages:
            print(message.subject, message.data.decode(), flush=True)


asyncio.run(main(*sys.argv[1:]))
