"""Where a daemon is: reading and writing `host:port`, for people, for gRPC and for environment variables."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

DEFAULT_PORT = 29400  # rendezvousd's, and that of torchrun's c10d backend

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_HOST_NAME_MAX = 253  # what DNS allows
_EXPECTED = "expected host, host:port, [IPv6] or [IPv6]:port"


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """A host name or literal IP address (IPv6 without brackets), and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return format_endpoint(self.host, self.port)


def parse_endpoint(text: str, default_port: int = DEFAULT_PORT, *, port_min: int = 1) -> Endpoint:
    """Reads `host`, `host:port`, an IPv4 or IPv6 address with or without port. ValueError: one sentence with `text`."""
    text = text.strip()
    if not text:
        raise ValueError(f"'{text}' is empty: {_EXPECTED}")
    if "/" in text:
        raise ValueError(f"'{text}' is a URL or a path: {_EXPECTED}, without scheme")
    host, port = _split(text)
    _check_host(text, host)
    return Endpoint(host, default_port if port is None else _port(text, port, port_min))


def parse_endpoints(text: str, *, port_min: int = 1) -> tuple[Endpoint, ...]:
    """Reads one or more endpoints separated by commas, without repetitions. ValueError as `parse_endpoint`."""
    items = text.split(",")
    if not all(item.strip() for item in items):
        raise ValueError(f"'{text}' has an empty item: {_EXPECTED}, several of them separated by commas")
    return tuple(dict.fromkeys(parse_endpoint(item, port_min=port_min) for item in items))


def format_endpoint(host: str, port: int) -> str:
    """`host:port`, with brackets round an IPv6 address. What `parse_endpoint` reads back."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def grpc_target(endpoint: Endpoint) -> str:
    """The endpoint as a gRPC channel target. Literal addresses are not looked up."""
    if ":" in endpoint.host:
        # A target is a URI: the % of a scope (fe80::1%eth0) must be escaped in it.
        return f"ipv6:[{endpoint.host.replace('%', '%25')}]:{endpoint.port}"
    if _is_ipv4(endpoint.host):
        return f"ipv4:{endpoint.host}:{endpoint.port}"
    return f"dns:///{endpoint.host}:{endpoint.port}"


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine by its very name. Looks nothing up."""
    if host.lower().rstrip(".") in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _split(text: str) -> tuple[str, str | None]:
    """Host without brackets, and the text of the port if there is one."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"'{text}' has unbalanced brackets: {_EXPECTED}")
        if ":" not in host:
            raise ValueError(f"'{text}' has brackets round something that is no IPv6 address: {_EXPECTED}")
        return host, rest[1:] if rest else None
    if text.count(":") > 1:
        return text, None
    host, colon, port = text.partition(":")
    return host, port if colon else None


def _check_host(text: str, host: str) -> None:
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"'{text}' is no IPv6 address: {_EXPECTED}") from None
        return
    if not host:
        raise ValueError(f"'{text}' has no host: {_EXPECTED}")
    if len(host) > _HOST_NAME_MAX or not _HOST_NAME.fullmatch(host):
        raise ValueError(f"'{text}' has a host that is no name and no address: {_EXPECTED}")
    last_label = host.rstrip(".").rpartition(".")[2]
    # A name of digits alone is read as an address by resolvers; 1.2.3 would silently become 1.2.0.3.
    if last_label.isdigit() and not _is_ipv4(host):
        raise ValueError(f"'{text}' is no IPv4 address: {_EXPECTED}")


def _is_ipv4(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _port(text: str, port: str, port_min: int) -> int:
    if not port:
        raise ValueError(f"'{text}' has no port after the colon: {_EXPECTED}")
    if not (port.isascii() and port.isdigit()):
        raise ValueError(f"'{text}' has the port '{port}', which is no number: {_EXPECTED}")
    if len(port) > 5 or not port_min <= int(port) <= 65535:
        raise ValueError(f"'{text}' has the port {port}: expected {port_min} to 65535")
    return int(port)
