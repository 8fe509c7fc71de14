"""The bootstrap stores of a node whose process has torch anyway: a fresh one for each offer, none ever used again."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from rdzv.plugin.stock import torch_version
from rdzv.processes.stores import QUIET_S, listen

# torch's libuv server takes over a listening socket since 2.8; before, only the older server does.
LIBUV_TAKES_SOCKETS = (2, 8)
CONNECT = timedelta(seconds=60)  # our own connection to the store that we serve, through the loopback


class Stores:
    """The stores of one node, by offer."""

    def __init__(self, port_range: tuple[int, int] | None) -> None:
        self._range = port_range
        self._open: dict[str, tuple[int, Any]] = {}
        self._quiet: dict[int, float] = {}  # port that was used → until when it is left alone

    def open(self, offer_id: str) -> int:
        """Serve a fresh store, on all interfaces; return its port. Blocks for some ms. Raises NoPort, RuntimeError."""
        now = time.monotonic()
        self._quiet = {port: until for port, until in self._quiet.items() if until > now}
        with listen(self._range, frozenset(self._quiet)) as listener:
            port: int = listener.getsockname()[1]
            store = TCPStore(
                "127.0.0.1",
                port,
                None,
                True,
                timeout=CONNECT,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),  # the store closes it
                use_libuv=torch_version() >= LIBUV_TAKES_SOCKETS,
            )
        self._open[offer_id] = (port, store)
        return port

    def drop(self, offer_id: str) -> None:
        """Let a store go: its connections end, and its port is left alone for a while. Unknown: no-op."""
        port, store = self._open.pop(offer_id, (0, None))
        if store is not None:
            self._quiet[port] = time.monotonic() + QUIET_S

    def close(self) -> None:
        """Let all of them go."""
        self._open.clear()
