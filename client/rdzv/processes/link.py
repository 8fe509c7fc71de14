"""A wire to another process of the node, served by the launcher's event loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rdzv.processes.wire import Channel, Gone

if TYPE_CHECKING:
    from rdzv.processes.wire import Body


class Link:
    """Calls `on_body` for each message that arrives and, once, `on_gone` when the other side is gone (not after
    `close`). Both run in the loop's thread."""

    def __init__(self, sock: socket.socket, on_body: Callable[[Body], None], on_gone: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel = Channel(sock)
        self._fd = sock.fileno()
        self._on_body = on_body
        self._on_gone = on_gone
        self._open = True
        self._loop.add_reader(self._fd, self.read)

    def post(self, body: Body, fds: Sequence[int] = ()) -> None:
        """Send a message. What is sent to somebody who is gone is lost, and `on_gone` tells. Raises OSError for a
        descriptor that is not open, ValueError for a message that is too big."""
        if not self._open:
            return
        try:
            self._channel.post(body, fds)
        except Gone:
            self._end()
            return
        if self._channel.pending:
            self._loop.add_writer(self._fd, self._write)

    def read(self) -> bool:
        """Take what has arrived. Returns whether there was any."""
        if not self._open:
            return False
        try:
            frames = self._channel.receive()
        except Gone:
            self._end()
            return False
        for body, fds in frames:
            for fd in fds:
                os.close(fd)  # nobody sends us any
            self._on_body(body)
        return bool(frames)

    def close(self) -> None:
        """Idempotent. The other side reads the end of the stream."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._channel.close()

    def _write(self) -> None:
        try:
            self._channel.flush()
        except Gone:
            self._end()
            return
        if not self._channel.pending:
            self._loop.remove_writer(self._fd)

    def _end(self) -> None:
        self.close()
        self._loop.call_soon(self._on_gone)
