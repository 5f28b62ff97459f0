"""Listening at an advertised address, and finding the address of this machine that another one can reach."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from errno import EADDRNOTAVAIL

import structlog

log = structlog.get_logger()

SIOCGIFADDR = 0x8915
"""Address of a network interface: see netdevice(7)."""
INTERFACES6 = "/proc/net/if_inet6"


def listen_on(address: str, backlog: int) -> socket.socket:
    """Listen on a free port of that address; of all addresses of this machine where others may know it by another one:
    a name of several addresses, or of one that is for us alone (127.0.1.1), and an address that is not of this machine,
    as behind a translation."""
    infos = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    (family, where), *others = dict.fromkeys((family, where) for family, *_, where in infos)
    if address in (where[0], "localhost") or not (others or ipaddress.ip_address(where[0]).is_loopback):
        try:
            return socket.create_server(where, family=family, backlog=backlog)
        except OSError as error:
            if error.errno != EADDRNOTAVAIL:
                raise
    log.warning("listening_on_all_addresses", advertise_host=address, known_as=sorted({info[4][0] for info in infos}))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def own_address(address: str, port: int, timeout_s: float) -> str:
    """Return the address of this machine that the host at `address` can reach. Raises OSError if nothing listens
    there."""
    with socket.create_connection((address, port), timeout_s) as probe:
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the name of the network interface with this address; empty if none is found (Linux)."""
    try:
        if ":" in address:
            return _interface6(ipaddress.IPv6Address(address.partition("%")[0]))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                if _address4(probe, name) == address:
                    return name
    except OSError:
        pass
    return ""


def _address4(probe: socket.socket, interface: str) -> str:
    try:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:  # it has none
        return ""
    return socket.inet_ntoa(answer[20:24])


def _interface6(address: ipaddress.IPv6Address) -> str:
    with open(INTERFACES6) as lines:
        for line in lines:
            digits, *_, name = line.split()
            if ipaddress.IPv6Address(bytes.fromhex(digits)) == address:
                return name
    return ""
