"""URLs in a job may lead only to allowed addresses: the address that is connected to decides, whatever its name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from opentinker.shared.security.egress import VARIABLE, Egress, EgressRefused, networks
from tests.support.http_server import http_server

LOOPBACK = Egress(("127.0.0.0/8",))
PUBLIC = "93.184.215.14"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254",
        "168.63.129.16", "192.0.0.192", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
        "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:0:127.0.0.1", "fe80::1",
        "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1", "100::1",
        "2002:7f00:1::", "2002:a00:1::", "64:ff9b::a00:1", "64:ff9b::7f00:1", "2001:0:7f00:1::", "localhost", "",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert Egress().problem(address)


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_may_be_reached(address: str) -> None:
    assert Egress().problem(address) == ""


def test_the_operator_allows_networks_and_no_more() -> None:
    egress = Egress(("127.0.0.0/8", "10.2.0.0/16", "fd00::/8"))
    for address in ("127.0.0.1", "::ffff:127.0.0.1", "10.2.9.9", "fd12::1"):
        assert egress.problem(address) == ""
    for address in ("10.3.0.1", "::1", "fe80::1", "169.254.169.254"):
        assert "env_egress_allow" in egress.problem(address)


def test_networks_are_read_from_text_and_travel_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert Egress.of_process().problem("127.0.0.1")
    Egress(tuple(networks("127.0.0.0/8, ::1"))).publish()
    assert Egress.of_process() == Egress(("127.0.0.0/8", "::1/128"))
    with pytest.raises(ValueError, match="has host bits set"):
        networks("127.0.0.1/8")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://example.org/", "form"),
        ("http:///reset", "form"),
        ("http://example.org:99999/", "not a URL"),
        ("http://user:secret@example.org/", "user name"),
        ("http://example.org/#part", "fragment"),
        ("http://example.org/a b", "blanks"),
        ("http://example.org/\r\nHost: evil", "blanks"),
        ("http://example.org:22/", "port 22"),
        ("ws://example.org:25/", "port 25"),
        ("http://127.0.0.1/", "loopback"),
        ("http://[::1]:8000/", "loopback"),
        ("http://0x7f.1/", "loopback"),
        ("http://2130706433/", "loopback"),
        ("http://localhost:8000/", "loopback"),
        ("http://no..dots/", "resolved"),
    ],
)
async def test_urls_that_lead_nowhere_good_are_refused_in_words(url: str, problem: str) -> None:
    with pytest.raises(EgressRefused, match=problem):
        await Egress().check(url)


@asynccontextmanager
async def server(*routes: web.RouteDef) -> AsyncIterator[int]:
    async with http_server(*routes) as url:
        yield int(url.rpartition(":")[2])


class Counting:
    def __init__(self) -> None:
        self.requests = 0

    async def answer(self, _: web.Request) -> web.Response:
        self.requests += 1
        return web.Response(text="inside")


async def test_an_allowed_server_is_reached_by_name_by_address_and_by_socket() -> None:
    counting = Counting()
    async with server(web.get("/", counting.answer)) as port, LOOPBACK.session() as http:
        for host in ("127.0.0.1", "localhost"):
            await LOOPBACK.check(f"http://{host}:{port}/")
            async with http.get(f"http://{host}:{port}/") as response:
                assert await response.text() == "inside"
        with await LOOPBACK.connect("localhost", port) as connected:
            assert connected.getpeername() == ("127.0.0.1", port)
        assert counting.requests == 2


async def test_a_literal_address_is_judged_too() -> None:
    counting = Counting()
    async with server(web.get("/", counting.answer)) as port, Egress().session() as http:
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]"):
            with pytest.raises(aiohttp.ClientConnectionError, match="env_egress_allow"):
                await http.get(f"http://{host}:{port}/")
        with pytest.raises(EgressRefused, match="loopback"):
            await Egress().connect("127.0.0.1", port)
        assert counting.requests == 0


async def test_a_name_that_resolves_differently_later_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting()
    answers = [PUBLIC, "127.0.0.1"]

    def rebinding(host: Any, port: Any, *_: Any, **__: Any) -> list[Any]:
        address = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, int(port or 0)))]

    async with server(web.get("/", counting.answer)) as port, Egress().session() as http:
        monkeypatch.setattr(socket, "getaddrinfo", rebinding)
        url = f"http://rebinding.example:{port}/"
        await Egress().check(url)
        with pytest.raises(aiohttp.ClientConnectionError, match="loopback"):
            await http.get(url)
        assert counting.requests == 0


async def test_a_redirect_is_not_followed_wherever_it_leads() -> None:
    target = Counting()

    async def away(_: web.Request) -> web.Response:
        raise web.HTTPFound("/there")

    async with server(web.get("/", away), web.get("/there", target.answer)) as port, LOOPBACK.session() as http:
        async with http.get(f"http://127.0.0.1:{port}/", allow_redirects=False) as response:
            assert response.status == 302
        with pytest.raises(EgressRefused, match="a redirect to /there, which is not followed"):
            await http.get(f"http://127.0.0.1:{port}/")
        with pytest.raises(EgressRefused, match="a redirect to /there, which is not followed"):
            await http.ws_connect(f"ws://127.0.0.1:{port}/")
    assert target.requests == 0


async def test_proxies_of_the_process_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    target, proxy = Counting(), Counting()
    async with server(web.get("/", target.answer)) as port, server(web.get("/{any:.*}", proxy.answer)) as by:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{by}")
        async with LOOPBACK.session() as http, http.get(f"http://127.0.0.1:{port}/"):
            pass
    assert (target.requests, proxy.requests) == (1, 0)


async def test_connecting_waits_no_longer_than_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", never)
    with pytest.raises(TimeoutError):
        await LOOPBACK.connect("127.0.0.1", 8000, timeout_s=0.05)
