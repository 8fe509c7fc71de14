"""Bidirectional gRPC streams over a bare HTTP/2 connection, for a load that costs less than what is loaded.

grpc.aio spends as much on a message in the client as in the server, so thousands of its streams in one process measure
that process. This is as much of HTTP/2 (RFC 9113) and of gRPC over it as the load needs: requests without compression,
what the server says in headers is not looked at, and it may send as much as it likes.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import cast

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
INITIAL_WINDOW = 4  # the setting
WINDOW = 65_535  # bytes a side may send before it is told that it may send more, unless told otherwise
WINDOW_MAX = 2**31 - 1
FRAME_HEAD = 9
MESSAGE_HEAD = struct.Struct(">BI")  # compressed or not, length
U32 = struct.Struct(">I")
STREAM_MASK = 2**31 - 1

Heard = Callable[[bytes], None]
Ended = Callable[[str], None]


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    return U32.pack(len(body) << 8 | kind) + bytes([flags]) + U32.pack(stream) + body


def request_headers(authority: str, method: str) -> bytes:
    """The header block of a gRPC call (HPACK, RFC 7541): entries of the static table, and literals not to be kept."""

    def literal(text: str) -> bytes:
        assert len(text) < 127
        return bytes([len(text)]) + text.encode()

    post, http, path, host, content_type, other = b"\x83", b"\x86", b"\x04", b"\x01", b"\x0f\x10", b"\x00"
    fields = [path + literal(method), host + literal(authority), content_type + literal("application/grpc")]
    return b"".join([post, http, *fields, other + literal("te") + literal("trailers")])


class Connection(asyncio.Protocol):
    """Many streams to one server."""

    def __init__(self, authority: str) -> None:
        self._authority = authority
        self._transport: asyncio.Transport | None = None
        self._unread = b""
        self._heard: dict[int, Heard] = {}
        self._ended: dict[int, Ended] = {}
        self._parts: dict[int, bytes] = {}  # of messages that are not all there yet
        self._windows: dict[int, int] = {}  # what we may send: on each stream, and (0) on all together
        self._stream_window = WINDOW
        self._next = 1
        self._waiting: deque[tuple[int, bytes]] = deque()  # frames for which the window is too small

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self._windows[0] = WINDOW
        settings = struct.pack(">HI", INITIAL_WINDOW, WINDOW_MAX)
        all_streams = U32.pack(WINDOW_MAX - WINDOW)
        transport.write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, all_streams))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_all(f"connection lost: {exc}")

    def open(self, method: str, heard: Heard, ended: Ended) -> int:
        """Begin a call. `heard` gets each message, `ended` the reason if it ends. Returns what `send` wants."""
        stream, self._next = self._next, self._next + 2
        self._heard[stream], self._ended[stream], self._windows[stream] = heard, ended, self._stream_window
        self._write(frame(HEADERS, END_HEADERS, stream, request_headers(self._authority, method)))
        return stream

    def send(self, stream: int, message: bytes) -> None:
        """Send a message now, or when the server takes more."""
        data = frame(DATA, 0, stream, MESSAGE_HEAD.pack(0, len(message)) + message)
        if self._waiting or not self._may_send(stream, len(data)):
            self._waiting.append((stream, data))
        else:
            self._write(data)

    def close(self) -> None:
        """Hang up."""
        self._ended.clear()
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        buffer, at = self._unread + data, 0
        while len(buffer) - at >= FRAME_HEAD:
            (head,) = U32.unpack_from(buffer, at)
            end = at + FRAME_HEAD + (head >> 8)
            if end > len(buffer):
                break
            (stream,) = U32.unpack_from(buffer, at + 5)
            self._frame(head & 0xFF, buffer[at + 4], stream & STREAM_MASK, buffer[at + FRAME_HEAD : end])
            at = end
        self._unread = buffer[at:]

    def _frame(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == DATA:
            self._data(stream, body)
        elif kind == WINDOW_UPDATE:
            self._windows[stream] = self._windows.get(stream, 0) + U32.unpack(body)[0]
            self._resume()
        elif kind == PING and not flags & ACK:
            self._write(frame(PING, ACK, 0, body))
        elif kind == SETTINGS and not flags & ACK:
            self._settings(body)
        elif kind == GOAWAY:
            self._end_all(f"GOAWAY: {body[8:].decode(errors='replace')}")
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self._end(stream, f"the server ended the call: {body!r}")

    def _data(self, stream: int, body: bytes) -> None:
        buffer, at = self._parts.pop(stream, b"") + body, 0
        heard = self._heard.get(stream)
        while heard is not None and len(buffer) - at >= MESSAGE_HEAD.size:
            end = at + MESSAGE_HEAD.size + MESSAGE_HEAD.unpack_from(buffer, at)[1]
            if end > len(buffer):
                break
            heard(buffer[at + MESSAGE_HEAD.size : end])
            at = end
        if at < len(buffer):
            self._parts[stream] = buffer[at:]

    def _settings(self, body: bytes) -> None:
        for setting, value in struct.iter_unpack(">HI", body):
            if setting == INITIAL_WINDOW:
                more, self._stream_window = value - self._stream_window, value
                for stream in self._heard:
                    self._windows[stream] += more
        self._write(frame(SETTINGS, ACK, 0))
        self._resume()

    def _may_send(self, stream: int, size: int) -> bool:
        """Take a frame of `size` bytes, head included, off the windows, if they are that large."""
        size -= FRAME_HEAD
        if min(self._windows[0], self._windows[stream]) < size:
            return False
        self._windows[0] -= size
        self._windows[stream] -= size
        return True

    def _resume(self) -> None:
        while self._waiting and self._may_send(self._waiting[0][0], len(self._waiting[0][1])):
            self._write(self._waiting.popleft()[1])

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(data)

    def _end(self, stream: int, why: str) -> None:
        self._heard.pop(stream, None)
        ended = self._ended.pop(stream, None)
        if ended is not None:
            ended(why)

    def _end_all(self, why: str) -> None:
        for stream in list(self._ended):
            self._end(stream, why)


async def connect(host: str, port: int) -> Connection:
    """Open a connection. Raises OSError."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(f"{host}:{port}"), host, port)
    return connection
