"""Where peers reach this host."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from rdzv.address import local_address
from rdzv.endpoints import Endpoint


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_is_told_to_peers_when_the_daemon_is_named_by_it(host: str) -> None:
    assert ipaddress.ip_address(local_address(Endpoint(host, 29400))).is_loopback


def test_a_host_that_calls_itself_loopback_tells_its_peers_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's /etc/hosts does. The look-up is the operating system's, so its answer is put in its place."""
    answer = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 29400))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    found = ipaddress.ip_address(local_address(Endpoint("head", 29400)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no address but loopback")
        assert str(found) == probe.getsockname()[0]


def test_a_name_that_nobody_has_is_said() -> None:
    with pytest.raises(OSError, match=r"cannot look up no-such-host\.invalid"):
        local_address(Endpoint("no-such-host.invalid", 29400))
