"""A cable between a launcher and the daemon that a test can plug in, and cut without anybody being told."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class Relay:
    """Carries bytes both ways. While it is `cut` nothing gets through, nor does the end of a connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._loop = asyncio.get_running_loop()

    def cut(self) -> None:
        """From now on nothing gets through."""
        self._loop.call_soon_threadsafe(self._whole.clear)

    def mend(self) -> None:
        """What was held up, and all that follows, gets through."""
        self._loop.call_soon_threadsafe(self._whole.set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with contextlib.suppress(OSError, asyncio.CancelledError):
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                with contextlib.suppress(OSError):
                    await asyncio.gather(self._carry(reader, back), self._carry(there, writer))
                await self._whole.wait()
            finally:
                back.close()
                writer.close()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await self._whole.wait()
            sink.write(data)
            await sink.drain()
        await self._whole.wait()
        sink.close()


@contextlib.contextmanager
def relay(to_port: int, at_port: int) -> Iterator[Relay]:
    """Whatever connects to `at_port` on the loopback reaches `to_port`, in this scope."""
    ready: list[tuple[Relay, asyncio.AbstractEventLoop, asyncio.Event]] = []
    listening = threading.Event()

    async def serve() -> None:
        made, over = Relay(to_port), asyncio.Event()
        server = await asyncio.start_server(made.serve, "127.0.0.1", at_port)
        ready.append((made, asyncio.get_running_loop(), over))
        listening.set()
        async with server:
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="relay", daemon=True)
    thread.start()
    assert listening.wait(30), "the relay does not listen"
    made, loop, over = ready[0]
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
