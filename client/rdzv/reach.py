"""Finding out whether a bootstrap store can be reached."""

from __future__ import annotations

import asyncio
import socket

from rdzv.aside import aside
from rdzv.endpoints import Endpoint

REACH_S = 5.0  # for the round's bootstrap store to be reached; it listens before it is announced
REACH_ONCE_S = 2.0
REACH_AGAIN_S = 0.2


async def reach(where: Endpoint) -> str:
    """Return an empty text once somebody takes connections there; else, after REACH_S, what is wrong, for people."""
    loop = asyncio.get_running_loop()
    until = loop.time() + REACH_S
    while True:
        try:
            await aside(lambda: _connect(where), within_s=REACH_ONCE_S)
        except OSError as error:  # TimeoutError is one
            why = error.strerror or "no answer"
        else:
            return ""
        if loop.time() >= until:
            return (
                f"cannot reach the bootstrap store at {where} ({why}): does a firewall close port {where.port}? "
                "--rdzv-conf master_port_range=FIRST-LAST keeps to ports that are open. If its host has several "
                "networks, start the launcher there with the --local-addr that its peers reach"
            )
        await asyncio.sleep(REACH_AGAIN_S)


def _connect(where: Endpoint) -> None:
    socket.create_connection((where.host, where.port), timeout=REACH_ONCE_S).close()
