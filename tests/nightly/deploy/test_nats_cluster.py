"""Streams on a cluster of three nats-servers: one is lost, and nothing with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from opentinker.local.embedded import nats_binary
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import STREAMS, TICKET
from opentinker.shared.types.errors import OpenTinkerError
from tests.conftest import Server, free_port, nats_conf, soon, until
from tests.support.factories import make_ticket


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    ports, routes = [free_port() for _ in range(3)], [free_port() for _ in range(3)]
    started = []
    for number, port in enumerate(ports):
        home = tmp_path / f"n{number}"
        home.mkdir()
        conf = nats_conf(home, port, sync_interval="2m")
        others = ", ".join(f"nats-route://127.0.0.1:{route}" for route in routes if route != routes[number])
        cluster = f'cluster {{ name: c, listen: "127.0.0.1:{routes[number]}", routes: [{others}] }}'
        conf.write_text(f"{conf.read_text()}\nserver_name: n{number}\n{cluster}\n")
        started.append(Server([str(nats_binary()), "-c", str(conf)], port, f"nats://127.0.0.1:{port}"))
    yield started
    for server in started:
        server.kill()


async def test_a_server_of_three_may_be_lost(servers: list[Server]) -> None:
    async with Bus.connect(servers[0].url, "test") as bus:
        await soon(made(bus))
        found = {stream.name: (await bus.js.stream_info(stream.name)).config.num_replicas for stream in STREAMS}
        assert set(found.values()) == {3}
        for seq in range(20):
            await soon(bus.publish(TICKET, make_ticket(job="j", seq=seq), f"j/{seq}", job="j"))
        cluster = (await bus.js.stream_info("TICKETS")).cluster
        assert cluster is not None and cluster.leader is not None
        servers[int(cluster.leader[1:])].kill()
        await soon(bus.publish(TICKET, make_ticket(job="j", seq=20), "j/20", job="j"))
        await until(lambda: bus.count("TICKETS", TICKET.at(job="j")), lambda found: found == 21)


async def made(bus: Bus) -> None:
    """The servers have to find each other first."""
    while True:
        try:
            return await bus.ensure_streams(3)
        except OpenTinkerError:
            await asyncio.sleep(0.1)


async def test_more_copies_than_servers_are_refused_with_what_to_do(own_server: Server) -> None:
    async with Bus.connect(own_server.url, "test") as bus:
        with pytest.raises(OpenTinkerError, match=r"nats_replicas = 3.*needs that many servers"):
            await bus.ensure_streams(3)
