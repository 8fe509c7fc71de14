"""Where the peers of this host reach it, and where it reaches a daemon."""

from __future__ import annotations

import ipaddress
import socket

from rdzv.endpoints import Endpoint, is_loopback

# An address nobody has (TEST-NET-1, RFC 5737). Connecting a datagram socket to it sends nothing; it only asks the
# routing table from which address a packet to the outside would leave.
_OUTSIDE = ("192.0.2.1", 9)


def local_address(endpoint: Endpoint) -> str:
    """Return the address of this host towards the daemon: a literal IP, without brackets. Blocks. OSError: none found.

    It is a loopback address only if the daemon is named by one: a host whose own name stands for 127.0.1.1 in its
    /etc/hosts would otherwise tell its peers to connect to themselves.
    """
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)
    except socket.gaierror as error:
        raise OSError(f"cannot look up {endpoint.host}: {error.strerror}") from error
    problem: OSError = OSError(f"{endpoint.host} has no address")
    # IPv4 first: what both ends have, the older libraries of a training stack can use.
    for family, _, _, _, remote in sorted(found, key=lambda info: info[0] != socket.AF_INET):
        try:
            local = _towards(family, remote)
        except OSError as error:
            problem = error
            continue
        if _is_loopback(local) and not is_loopback(endpoint.host):
            return _outward() or local
        return local
    raise problem


def addresses(endpoint: Endpoint) -> tuple[Endpoint, ...]:
    """Return the endpoint by each literal address its host has, or as it is if there is one at most. A name of this
    host itself stays a name. Blocks."""
    if is_loopback(endpoint.host):
        return (endpoint,)
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError:
        return (endpoint,)  # whoever connects will say why
    literal = tuple(dict.fromkeys(Endpoint(str(remote[0]), endpoint.port) for *_, remote in found))
    return literal if len(literal) > 1 else (endpoint,)


def _towards(family: int, remote: tuple[object, ...]) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(remote)
        return str(probe.getsockname()[0])


def _outward() -> str | None:
    try:
        local = _towards(socket.AF_INET, _OUTSIDE)
    except OSError:
        return None
    return None if _is_loopback(local) else local


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
