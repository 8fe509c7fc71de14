"""What workers write, on its way to the console: one thread reads all of it and never waits for anybody.

    worker ──pipe──→ ┐                ┌──→ Outlet of stdout     prefix and whole lines, if several speak
    worker ──pty───→ ├── the thread ──┼──→ Outlet of stderr
    worker ──file──→ ┘  (tail -f)     └──→ the last bytes, kept for the day the worker dies

A pipe holds a mebibyte: that is what a worker may be ahead of the thread. Nothing else holds it up: a console that does
not keep up loses lines (see Outlet), and a worker with a log file writes that itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import BinaryIO, TypeVar

from rdzv.lines import Lines
from rdzv.outlet import Outlet

READ_MAX = 256 << 10  # bytes of one read
# Between two rounds of reading, so that a torrent of lines comes in big pieces: 100,000 lines a second then cost a
# tenth of a core instead of half of one.
NAP_S = 0.005
TICK_S = 0.05  # how often files, and lines that rewrite themselves, are looked at
# A line that goes back to its beginning and is not complete after so long is a progress bar, and shown as far as it is.
LIVE_S = 1.0
TERMINAL_READS = 64  # of a pseudo-terminal at a time: each yields 4 KiB at most
PIPE_BYTES = 1 << 20  # what any user may ask for
# What a drain reads at most of a stream that somebody goes on writing to; more than a pipe holds.
DRAIN_MAX = 4 << 20
DRAIN_S = 5.0  # for a drain; it takes milliseconds, unless a file system hangs
JOIN_S = 1.0  # for the thread to end once it has been told to; it takes microseconds
TAIL_BYTES = 16 << 10  # kept of each stream's end: the longest traceback that is passed on, and what is around it


T = TypeVar("T")


class Through:
    """One stream, passed on as it comes. For a worker that speaks alone."""

    def __init__(self) -> None:
        self._skipping = False  # the rest of a line whose beginning was dropped

    def show(self, chunk: bytes, outlet: Outlet) -> None:
        if self._skipping:
            chunk = chunk[chunk.find(b"\n") + 1 :] if b"\n" in chunk else b""
        if chunk:
            self._skipping = not outlet.put(chunk, self) and not chunk.endswith(b"\n")


class Copy:
    """A file that gets the lines which contain one of some texts. Shared by the streams of all workers."""

    def __init__(self, file: BinaryIO, texts: Iterable[str]) -> None:
        self._file = file
        self._texts = tuple(os.fsencode(text) for text in texts if text)

    def take(self, lines: bytes) -> None:
        found = [line for line in lines.splitlines(keepends=True) if any(text in line for text in self._texts)]
        if found:
            with contextlib.suppress(OSError):  # a full disk ends the copy, not the training
                self._file.write(b"".join(found))
                self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class Stream:
    """One stream of one worker, from a descriptor that becomes the relay's own.

    `follow`: a regular file that grows. `prefix`: None passes everything on as it comes. `outlet`: None shows nothing.
    """

    def __init__(
        self,
        fd: int,
        *,
        outlet: Outlet | None,
        prefix: bytes | None = None,
        follow: bool = False,
        copy: Copy | None = None,
        terminal: int | None = None,
    ) -> None:
        self.fd = fd
        self.follow = follow
        self.tail = b""
        self.ended = False
        self._outlet = outlet
        self._lines = None if prefix is None else Lines(prefix)
        self._through = Through()
        self._copy, self._copied = copy, Lines(prefix or b"")
        self._terminal = terminal  # whose size this pseudo-terminal takes over
        self._columns_used = len(prefix or b"")
        self._rewrites_since = 0.0  # an incomplete line; 0: no such line
        if not follow:
            os.set_blocking(fd, False)

    def read(self) -> int:
        """Take in what is there, READ_MAX at most. Returns how many bytes that was; 0 also at the end of the stream."""
        chunks: list[bytes] = []
        over = False
        for _ in range(1 if self._terminal is None else TERMINAL_READS):
            try:
                chunk = os.read(self.fd, READ_MAX)
            except BlockingIOError:
                break
            except OSError:  # how a pseudo-terminal ends; or a file system that fails
                chunk = b""
            if not chunk:
                over = not self.follow
                break
            chunks.append(chunk)
        if chunks:
            self._take(b"".join(chunks))
        if over:
            self.end()
        return sum(map(len, chunks))

    def drain(self) -> None:
        """Take in all that has been written."""
        left = DRAIN_MAX
        while not self.ended and (left > 0 or self.follow) and (size := self.read()):
            left -= size

    def end(self) -> None:
        """Show what lacks only its newline. Nothing is read any more."""
        if self.ended:
            return
        self.ended = True
        if self._lines is not None:
            self._show(self._lines.end())
        if self._copy is not None:
            self._copy.take(self._copied.end())
        os.close(self.fd)

    @property
    def rewrites(self) -> bool:
        return self._lines is not None and self._lines.rewrites

    def show_live(self, now: float) -> None:
        """Show how far a progress bar is, every LIVE_S."""
        if self._lines is None or not self._lines.rewrites:
            self._rewrites_since = 0.0
        elif not self._rewrites_since:
            self._rewrites_since = now
        elif now >= self._rewrites_since + LIVE_S:
            self._rewrites_since = 0.0
            self._show(self._lines.live())

    def _take(self, chunk: bytes) -> None:
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        if self._terminal is not None:
            copy_size(self._terminal, self.fd, self._columns_used)
        if self._lines is not None:
            self._show(self._lines.feed(chunk))
        elif self._outlet is not None:
            self._through.show(chunk, self._outlet)
        if self._copy is not None:
            self._copy.take(self._copied.feed(chunk))

    def _show(self, data: bytes) -> None:
        if data and self._outlet is not None:
            self._outlet.put(data, self)


class Relay:
    """The thread, and the streams it reads. All calls belong to one event loop."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._calls: deque[Callable[[], None]] = deque()
        self._streams: dict[int, Stream] = {}  # by descriptor; the thread's
        self._over = False
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def add(self, stream: Stream) -> None:
        """Read it from now on, until it ends or `finish`."""
        if not self._thread.is_alive():
            self._thread.start()
        self._call(lambda: self._add(stream))

    async def drain(self, streams: Iterable[Stream]) -> None:
        """Returns when all that was written to them so far has been taken in."""
        wanted = tuple(streams)
        await self._ask(Stream.drain, wanted)

    async def finish(self, streams: Iterable[Stream]) -> None:
        """The same, and then their end, even if somebody still has them open."""
        wanted = tuple(streams)
        await self._ask(self._finish, wanted)

    async def close(self) -> None:
        """End the thread. What it has not read is lost: `finish` the streams first. To be called once."""
        if self._thread.is_alive():
            await self._ask(Relay._stop, (self,))
            if self._over:
                self._thread.join(JOIN_S)
        if not self._thread.is_alive():  # if it hangs, it would use their numbers
            self._epoll.close()
            os.close(self._wake)

    async def _ask(self, do: Callable[[T], None], whom: Iterable[T]) -> None:
        """Have the thread do something with each of them; returns when it is done."""
        if not self._thread.is_alive():
            return
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def answer() -> None:
            if not done.done():
                done.set_result(None)

        def run() -> None:
            for each in whom:
                do(each)
            loop.call_soon_threadsafe(answer)

        self._call(run)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await done

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        os.eventfd_write(self._wake, 1)

    # ------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        nap = select.poll()
        nap.register(self._wake, select.POLLIN)
        while not self._over:
            ready = {fd for fd, _ in self._epoll.poll(TICK_S if self._ticks() else None)}
            if self._wake in ready:
                os.eventfd_read(self._wake)
                while self._calls:
                    self._calls.popleft()()
            size, now = 0, time.monotonic()
            for stream in list(self._streams.values()):
                if stream.follow or stream.fd in ready:
                    size += stream.read()
                stream.show_live(now)
                self._forget(stream)
            if size:
                nap.poll(NAP_S * 1000)
        # Its descriptors are not its own to close: who wakes it may not be done with that yet.

    def _ticks(self) -> bool:
        """Whether something has to be looked at that gives no sign of itself."""
        return any(stream.follow or stream.rewrites for stream in self._streams.values())

    def _add(self, stream: Stream) -> None:
        self._streams[stream.fd] = stream
        if not stream.follow:
            self._epoll.register(stream.fd, select.EPOLLIN)

    def _finish(self, stream: Stream) -> None:
        stream.drain()
        stream.end()
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        # A closed descriptor has left the epoll by itself; its number may name another stream by now.
        if stream.ended and self._streams.get(stream.fd) is stream:
            del self._streams[stream.fd]

    def _stop(self) -> None:
        self._over = True


def channel(like: int) -> tuple[int, int]:
    """A way for a worker's output: (our end, the worker's end). A pseudo-terminal where `like` is a terminal, so that
    the worker still finds one; else, and where there are none, a pipe. Raises OSError."""
    if os.isatty(like):
        with contextlib.suppress(OSError, termios.error):
            return _pseudo_terminal()
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # too many big ones for one user: a smaller one will do
        fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return ours, theirs


def _pseudo_terminal() -> tuple[int, int]:
    ours, theirs = os.openpty()
    modes = termios.tcgetattr(theirs)
    modes[1] &= ~termios.OPOST  # the real terminal does that, once
    modes[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    return ours, theirs


def copy_size(terminal: int, to: int, columns_used: int = 0) -> None:
    """Make the pseudo-terminal `to` as big as `terminal`, less the columns that a prefix takes."""
    with contextlib.suppress(OSError, termios.error):
        rows, columns = termios.tcgetwinsize(terminal)
        size = (rows, max(0, columns - columns_used))
        if termios.tcgetwinsize(to) != size:
            termios.tcsetwinsize(to, size)
