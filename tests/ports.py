"""Ports for tests that must know one before anything listens there.

They lie below those that Linux hands out itself (32768), so no outgoing connection takes one meanwhile. Tests side by
side have ports of their own, and none is handed out again before all others were: what was killed may come back to it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket

FIRST, WORKERS, EACH = 20000, 16, 750


def own_ports() -> range:
    """Those of this process, among the workers of pytest-xdist."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", f"gw{WORKERS - 1}").removeprefix("gw")) % WORKERS
    return range(FIRST + worker * EACH, FIRST + (worker + 1) * EACH)


_turn = itertools.cycle(random.SystemRandom().sample(own_ports(), EACH))


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens, none of them twice."""
    found: list[int] = []
    while len(found) < count:
        port = next(_turn)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found
