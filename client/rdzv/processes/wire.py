"""Frames between two processes of a node: a JSON object and, with it, open descriptors.

A frame on the wire is an 8-byte header (length of the body, number of descriptors), then the body. The descriptors ride
on the frame's first byte. The socket is a stream: a datagram or SOCK_SEQPACKET socket cuts what is bigger than its
buffer, and environments are.

This file is read by interpreters that have no site-packages; it uses the standard library alone, and little of that.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections import deque

TYPE_CHECKING = False  # as in typing, which costs milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, TypeAlias

    Body: TypeAlias = dict[str, Any]

HEADER = struct.Struct("!IHxx")
# Seconds of CLOCK_BOOTTIME on the pipe to a keeper: so few bytes are written, and read, at once or not at all.
INSTANT = struct.Struct("=d")
# execve takes at most 6 MiB of arguments and environment, and JSON writes a byte with at most 6 characters.
BODY_MAX = 40 << 20
# stdin, stdout, stderr and what a helper is handed; the kernel's own bound is 253.
FDS_MAX = 32
# One read: a socket buffer's default size is about three of these.
READ_BYTES = 64 << 10


class Gone(ConnectionError):
    """The other side has closed its end or died, or what it sends makes no sense: there is nobody to talk to."""


class Channel:
    """One end of a connected stream socket, made non-blocking. Whoever owns it waits for `fileno()` to be ready."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._in = bytearray()
        self._in_fds: deque[int] = deque()
        # Bounded by the callers: each of them awaits an answer before it asks for more.
        self._out: deque[tuple[memoryview, tuple[int, ...]]] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def pending(self) -> bool:
        """Something waits to be written: call `flush` when the socket is writable."""
        return bool(self._out)

    def post(self, body: Body, fds: Sequence[int] = ()) -> None:
        """Send a frame, or queue what the socket does not take now. The descriptors are copied: the caller keeps,
        and may close, its own. Raises Gone, OSError for a descriptor that is not open, ValueError for a frame too big.
        """
        data = json.dumps(body, separators=(",", ":")).encode()
        if len(data) > BODY_MAX or len(fds) > FDS_MAX:
            raise ValueError(f"a frame of {len(data)} bytes and {len(fds)} descriptors is too big")
        copies: list[int] = []
        try:
            for fd in fds:
                copies.append(os.dup(fd))  # noqa: PERF401  the first ones are to be closed when a later one fails
        except OSError:
            _close(copies)
            raise
        self._out.append((memoryview(HEADER.pack(len(data), len(fds)) + data), tuple(copies)))
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes without blocking. Raises Gone."""
        while self._out:
            data, fds = self._out[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as broken:
                raise Gone(str(broken)) from broken
            _close(fds)
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = (data[sent:], ())

    def receive(self) -> list[tuple[Body, list[int]]]:
        """The frames that one read completes, maybe none. Their descriptors (close-on-exec) are the caller's to close.
        Raises Gone at the end of the stream and when it breaks (a peer that dies with messages unread resets it)."""
        room = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(READ_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except OSError as broken:
            raise Gone(str(broken)) from broken
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._in_fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise Gone("descriptors were lost on the way: is the limit of open files reached?")
        if not data:
            raise Gone("the other side is gone")
        self._in += data
        return list(self._frames())

    def _frames(self) -> Iterator[tuple[Body, list[int]]]:
        while len(self._in) >= HEADER.size:
            length, fd_count = HEADER.unpack_from(self._in)
            if length > BODY_MAX:
                raise Gone(f"a frame of {length} bytes: the stream is out of step")
            end = HEADER.size + length
            if len(self._in) < end:
                return
            body = json.loads(self._in[HEADER.size : end])
            del self._in[:end]
            yield body, [self._in_fds.popleft() for _ in range(fd_count)]

    def close(self) -> None:
        """Close the socket and every descriptor on its way in or out. Idempotent."""
        for _, fds in self._out:
            _close(fds)
        _close(self._in_fds)
        self._out.clear()
        self._in_fds.clear()
        self._sock.close()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def to_text(value: str) -> str:
    """An argument or environment string as text that JSON carries byte for byte, whatever either side's locale."""
    return os.fsencode(value).decode("latin-1")


def to_bytes(text: str) -> bytes:
    """The bytes that `to_text` was given."""
    return text.encode("latin-1")
