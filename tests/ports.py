"""Ports for tests that must know one before anything listens there."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens, none of them twice. They lie below those that Linux hands out itself (32768), so
    no outgoing connection takes one meanwhile, and tests side by side hardly ever draw the same."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = random.SystemRandom().randrange(20000, 32000)
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
    return found
