"""Where lines go that people read: a descriptor of this process, written to by a thread of its own.

A terminal that is slow, or stopped, holds up nobody. What it does not take in time is dropped and counted.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque

# Bytes not yet written: more than a second of 100,000 lines, for a reader that looks away for a moment.
PENDING_MAX = 16 << 20
# What may come on top of a full queue: the launcher's own few lines, its last one above all.
OWN_MAX = 1 << 20
WRITE_MAX = 64 << 10  # bytes of one system call: what a pipe takes at once
# How long the end waits for a reader that takes nothing. One that goes on reading gets everything.
STALL_S = 5.0


class Outlet:
    """Pieces of output, written in the order they were put. Must be closed for the last ones to appear.

    A piece that does not end its line may be continued by the same source only: before a piece of another one the
    line is ended.
    """

    def __init__(self, fd: int, name: str, pending_max: int = PENDING_MAX) -> None:
        self._fd = fd
        self._note = f"[{name}] ... %d lines dropped here ...\n"
        self._pending_max = pending_max
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._pending = 0  # bytes in the queue, and being written
        self._dropped = 0  # lines since the last note
        self._open_line: object = None  # whose unfinished line the last piece was
        self._written = 0  # system calls that took something
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"outlet {fd}", daemon=True)
        self._thread.start()

    def put(self, data: bytes, source: object = None, *, own: bool = False) -> bool:
        """Queue a piece. False: there is no room for it, and its lines are counted as dropped. `own`: of the launcher's
        own few lines, for which there is always a little room."""
        with self._changed:
            if self._pending + len(data) > self._pending_max + OWN_MAX * own:
                self._dropped += max(1, data.count(b"\n"))
                return False
            self._note_dropped()
            if self._open_line is not None and self._open_line is not source:
                self._push(b"\n")
            self._push(data)
            self._open_line = None if data.endswith(b"\n") else source
            self._changed.notify()
        return True

    def close(self) -> None:
        """Return when all is written, or when nobody has taken anything for STALL_S. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        seen = -1
        while self._thread.is_alive() and self._written != seen:
            seen = self._written
            self._thread.join(STALL_S)

    def _push(self, data: bytes) -> None:
        self._queue.append(data)
        self._pending += len(data)

    def _note_dropped(self) -> None:
        if self._dropped:
            note = (self._note % self._dropped).encode("utf-8", "backslashreplace")
            self._push(note if self._open_line is None else b"\n" + note)
            self._dropped, self._open_line = 0, None

    def _run(self) -> None:
        while data := self._next():
            with contextlib.suppress(OSError):  # nobody reads; the exit code still says how it ended
                self._write(memoryview(data))
            with self._changed:
                self._pending -= len(data)

    def _next(self) -> bytes:
        """Wait for something to write. Empty: closed, and nothing is left."""
        with self._changed:
            while not self._queue and not self._dropped and not self._closed:
                self._changed.wait()
            if not self._queue:
                self._note_dropped()
            taken, size = [], 0
            while self._queue and size < WRITE_MAX:
                taken.append(self._queue.popleft())
                size += len(taken[-1])
        return b"".join(taken)

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data[:WRITE_MAX]) :]
                self._written += 1
            except BlockingIOError:  # whoever shares the descriptor has made it so
                waiter = select.poll()
                waiter.register(self._fd, select.POLLOUT)
                waiter.poll()
