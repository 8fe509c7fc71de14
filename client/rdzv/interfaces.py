"""The network interface that workers are to use where this host's name leads them to loopback.

gloo and TensorPipe look up the host name for their own address. Debian and others have "127.0.1.1 NAME" in /etc/hosts;
workers then tell their peers on other hosts an address that leads each of these to itself.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Callable, Iterable, Mapping

# What names the interface to the library, if it is set.
VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")

# From linux/netlink.h, linux/rtnetlink.h and linux/if_addr.h
_GETADDR, _NEWADDR, _ERROR, _DONE = 22, 20, 2, 3
_REQUEST, _DUMP = 0x1, 0x300
_ADDRESS, _LOCAL = 1, 2
_HEADER, _MESSAGE, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")
_NETLINK_S = 1.0  # for the kernel to answer
_READ_BYTES = 1 << 16


def interface_variables(environ: Mapping[str, str], address: str) -> dict[str, str]:
    """Return what to add to the environment of workers on a host that its peers reach at `address`; empty: nothing.
    Blocks."""
    unset = [name for name in VARIABLES if not environ.get(name)]
    if not unset or not address or not _name_leads_to_loopback():
        return {}
    found = interface_of(address)
    return dict.fromkeys(unset, found) if found else {}


def leads_to_loopback(addresses: Iterable[str], is_ours: Callable[[str], bool]) -> bool:
    """Return whether a library that takes the first of its host name's addresses that it can listen at takes one of
    loopback. Without any it falls back to loopback, too."""
    first = next((it for it in addresses if is_ours(it)), None)
    return first is None or ipaddress.ip_address(first.partition("%")[0]).is_loopback


def interface_of(address: str) -> str:
    """Return the name of the interface that has this address, a literal IP or a name; empty: none, or it is
    loopback's. Blocks."""
    try:
        literal = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0]
        wanted = ipaddress.ip_address(str(literal).partition("%")[0])
        if wanted.is_loopback:
            return ""
        index = next((i for i, packed in _interface_addresses() if packed == wanted.packed), None)
        return "" if index is None else socket.if_indextoname(index)
    except (OSError, ValueError, struct.error):
        return ""  # a sandbox without netlink


def _name_leads_to_loopback() -> bool:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    return leads_to_loopback([str(it[4][0]) for it in found], _is_ours)


def _is_ours(address: str) -> bool:
    """Return whether this host can listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _interface_addresses() -> list[tuple[int, bytes]]:
    """Return each address of this host, packed, with the index of its interface. Raises OSError."""
    request = _HEADER.pack(_HEADER.size + _MESSAGE.size, _GETADDR, _REQUEST | _DUMP, 1, 0)
    found: list[tuple[int, bytes]] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(_NETLINK_S)
        kernel.send(request + _MESSAGE.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
        while True:
            for kind, body in _split(kernel.recv(_READ_BYTES), _HEADER):
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    raise OSError("netlink refuses to list addresses")
                if kind == _NEWADDR:
                    index = _MESSAGE.unpack_from(body)[4]
                    attributes = dict(_split(body[_MESSAGE.size :], _ATTRIBUTE))
                    if (packed := attributes.get(_LOCAL, attributes.get(_ADDRESS))) is not None:
                        found.append((index, packed))


def _split(data: bytes, header: struct.Struct) -> list[tuple[int, bytes]]:
    """Return the kind and body of each part. A header begins with the length of its part, itself included, and the
    kind."""
    parts, at = [], 0
    while at + header.size <= len(data):
        length, kind, *_ = header.unpack_from(data, at)
        if length < header.size:
            break
        parts.append((kind, data[at + header.size : at + length]))
        at += (length + 3) & ~3
    return parts
