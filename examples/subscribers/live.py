"""Print what happens in a job, as it happens: `python examples/subscribers/live.py JOB [URL]`."""

import asyncio
import sys

import nats

from opentinker import AsyncClient


async def main(job: str, url: str | None = None) -> None:
    async def show(message: nats.aio.msg.Msg) -> None:
        sys.stdout.write(f"{message.subject} {message.data.decode()}\n")
        sys.stdout.flush()

    while True:  # a credential lives a quarter of an hour: then there is another
        async with AsyncClient(url) as client:
            given = await client.stream_credentials(job)
        login = {"token": given["token"], "inbox_prefix": given["inbox"], "allow_reconnect": False}
        connection = await nats.connect(given["servers"], **login)
        for subject in given["subjects"].values():
            await connection.subscribe(subject, cb=show)
        while not connection.is_closed:  # noqa: ASYNC110
            await asyncio.sleep(1)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
