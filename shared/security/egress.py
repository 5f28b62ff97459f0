"""The guard at the way out: what a job names (a URL) may be reached only if the operator's machines are not behind it.

Used by every connection to an address that a user gave: remote environments, MCP servers over HTTP, OpenEnv. The
machine resolves a name, and the guard judges the address of the actual connection at the moment of connecting: a name
that resolves differently the next time (DNS rebinding) gains nothing. Redirects are not followed, and proxies of the
process's environment are not used.

    egress = Egress.of_process()
    await egress.check(url)                        # early, for a clear message
    async with egress.session(limit=64) as http:   # aiohttp; every connection of it is guarded
        async with http.post(url, json=...) as response: ...
    sock = await egress.connect(host, port)        # a connected socket, for libraries that take one

Refused unless `env_egress_allow` names their network: loopback, private, link-local (with the metadata services of
clouds), shared (100.64/10), multicast and reserved addresses, of IPv4 and IPv6, also where an IPv6 address holds such
an IPv4 one (mapped, compatible, 6to4, Teredo, NAT64); and ports below 1024 other than those of HTTP.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from opentinker.shared.types.errors import OpenTinkerError

if TYPE_CHECKING:
    import aiohttp

VARIABLE = "OPENTINKER_ENV_EGRESS_ALLOW"
LOOPBACK = ("127.0.0.0/8", "::1/128")
SCHEMES = {"http": 80, "https": 443, "ws": 80, "wss": 443}
PORTS = frozenset({80, 443})
"""Below 1024; who listens there is a service of the system, and rarely one that speaks HTTP."""
FIRST_FREE_PORT = 1024
CONNECT_S = 10.0
SHOWN = 200
"""Characters of what a server says that an error quotes."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_METADATA = frozenset(map(ipaddress.ip_address, ("168.63.129.16", "192.0.0.192", "fd00:ec2::254")))
"""Metadata services of clouds outside of link-local."""
_NAT64 = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48")))
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_SITE_LOCAL = ipaddress.IPv6Network("fec0::/10")


class EgressRefused(OpenTinkerError, OSError):
    """The address may not be connected to. An OSError too, so that HTTP libraries treat it as a failed connection."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.errno, self.strerror = errno.EACCES, problem

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True)
class Egress:
    """`allow`: networks, as text, that may be reached although they are not public."""

    allow: tuple[str, ...] = ()

    @classmethod
    def of_process(cls) -> Egress:
        """Return the operator's setting. Services put it into the environment of their process and of its children
        (`publish`), because environments are made where no settings are available."""
        return cls(tuple(networks(os.environ.get(VARIABLE, ""))))

    def publish(self) -> None:
        os.environ[VARIABLE] = ",".join(self.allow)

    @cached_property
    def _allowed(self) -> tuple[Network, ...]:
        return tuple(ipaddress.ip_network(text) for text in self.allow)

    # --- judging ------------------------------------------------------------------------------------------------

    def problem(self, address: str) -> str:
        """Return why this IP address may not be reached; empty if it may."""
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return f"{address!r} is no IP address"
        for inner in (found, *_held(found)):
            kind = _kind(inner)
            if kind and not any(inner in network for network in self._allowed if network.version == inner.version):
                return f"{address} is {kind}: the operator allows such networks by env_egress_allow"
        return ""

    def split(self, url: str) -> SplitResult:
        """The parts of a URL that is well formed and whose port may be reached. Raises Refused."""
        try:
            parts = urlsplit(url)
            port = parts.port or SCHEMES.get(parts.scheme, 0)
        except ValueError as error:
            raise EgressRefused(f"is not a URL: {error}") from None
        if parts.scheme not in SCHEMES or not parts.hostname:
            raise EgressRefused(f"is not a URL of the form {'|'.join(SCHEMES)}://HOST[:PORT][/PATH]")
        if parts.username is not None or parts.password is not None:
            raise EgressRefused("holds a user name: specs are stored and shown, so secrets have no place in them")
        if parts.fragment or any(ord(sign) <= 32 or ord(sign) == 127 for sign in url):
            raise EgressRefused("holds a fragment, blanks or control characters")
        if port < FIRST_FREE_PORT and port not in PORTS:
            raise EgressRefused(f"port {port} may not be reached: give 80, 443 or one from {FIRST_FREE_PORT} on")
        return parts

    async def check(self, url: str) -> None:
        """Resolve the URL's host and judge all its addresses. Raises Refused, saying what is wrong."""
        await asyncio.get_running_loop().run_in_executor(None, self.check_blocking, url)

    async def refusal(self, url: str) -> str:
        """Return what `check` says is wrong; empty if jobs may connect."""
        try:
            await self.check(url)
        except EgressRefused as error:
            return str(error)
        return ""

    def check_blocking(self, url: str) -> None:
        parts = self.split(url)
        assert parts.hostname is not None
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port or SCHEMES[parts.scheme], type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise EgressRefused(f"host {parts.hostname!r} cannot be resolved: {error}") from None
        problems = [self.problem(str(address[0])) for *_, address in found]
        if problems and all(problems):
            raise EgressRefused(problems[0])

    # --- connecting ---------------------------------------------------------------------------------------------

    def socket_to(self, info: tuple[Any, ...]) -> socket.socket:
        """A socket for an entry of getaddrinfo, in whose address it will be connected. Raises Refused."""
        family, kind, protocol, _, address = info
        if problem := self.problem(str(address[0])):
            raise EgressRefused(problem)
        if address[1] < FIRST_FREE_PORT and address[1] not in PORTS:
            raise EgressRefused(f"port {address[1]} may not be reached")
        return socket.socket(family, kind, protocol)

    def session(self, *, limit: int = 100, timeout: aiohttp.ClientTimeout | None = None) -> aiohttp.ClientSession:
        """Return a client session. `limit`: concurrent connections. A request that would follow a redirect raises
        EgressRefused: a WebSocket's handshake follows redirects and cannot be configured otherwise."""
        import aiohttp  # not at the top: settings, and so the command line, read this module

        tracing = aiohttp.TraceConfig()
        tracing.on_request_redirect.append(_refuse_redirect)
        connector = aiohttp.TCPConnector(limit=limit, socket_factory=self.socket_to)
        timeout = timeout or aiohttp.ClientTimeout(total=60.0, sock_connect=CONNECT_S)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False, trace_configs=[tracing])

    async def connect(self, host: str, port: int, timeout_s: float = CONNECT_S) -> socket.socket:
        """A connected non-blocking socket, to the first address that may be reached and answers. Raises OSError."""
        loop = asyncio.get_running_loop()
        failed: OSError | None = None
        async with asyncio.timeout(timeout_s):
            for info in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                try:
                    made = self.socket_to(info)
                except OSError as error:
                    failed = failed or error
                    continue
                try:
                    made.setblocking(False)
                    await loop.sock_connect(made, info[4])
                    return made
                except BaseException as error:
                    made.close()
                    if not isinstance(error, OSError):
                        raise
                    failed = error
        raise failed or EgressRefused(f"host {host!r} has no address")


def networks(text: str | Sequence[str]) -> list[str]:
    """Parse networks in CIDR form from a list or from text with commas. Raises ValueError naming the invalid one."""
    named = text.split(",") if isinstance(text, str) else text
    return [str(ipaddress.ip_network(part.strip())) for part in named if part.strip()]


async def _refuse_redirect(_: object, __: object, redirect: aiohttp.TraceRequestRedirectParams) -> None:
    answer = redirect.response
    where = answer.headers.get("Location", "nowhere")[:SHOWN]
    answer.close()
    raise EgressRefused(f"answered {answer.status}, a redirect to {where}, which is not followed: name that URL itself")


def _kind(address: Address) -> str:
    """Name the kind of a non-public address; empty for the public internet."""
    checks = {
        "a cloud's metadata service": address in _METADATA,
        "a loopback address": address.is_loopback,
        "a link-local address (metadata services are there)": address.is_link_local,
        "a multicast address": address.is_multicast,
        "an unspecified address": address.is_unspecified,
        "not a public address": not address.is_global or address.is_reserved or _is_site_local(address),
    }
    held = bool(_held(address))  # judged by what it holds
    return next((kind for kind, found in checks.items() if found and not (held and kind == "not a public address")), "")


def _is_site_local(address: Address) -> bool:
    return address.version == 6 and address in _SITE_LOCAL


def _held(address: Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses that an IPv6 one leads to."""
    if not isinstance(address, ipaddress.IPv6Address):
        return []
    held = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    low = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if any(address in network for network in _NAT64) or (address in _COMPATIBLE and int(address) > 1):
        held.append(low)
    return [one for one in held if one is not None]
