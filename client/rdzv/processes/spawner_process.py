"""The spawner and its keeper, seen from the launcher: starting them, talking, noticing their death, clearing up."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rdzv.errors import describe_exit
from rdzv.processes import tree
from rdzv.processes.link import Link
from rdzv.processes.wire import INSTANT

if TYPE_CHECKING:
    from rdzv.processes.wire import Body

# Read once, when this module is imported, because a launcher soon installs handlers of its own and raises its limits.
# What it was started with ignored (SIGHUP under nohup) its workers inherit; what every Python ignores does not count.
_IGNORED_AT_START = tuple(
    int(number)
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}
    if signal.getsignal(number) is signal.SIG_IGN
)
_BLOCKED_AT_START = tuple(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
_NOFILE_AT_START, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

# An interpreter without site-packages is up in 0.03 s; on a node with a slow shared file system it has been seen to
# take seconds.
READY_S = 30.0
# After its socket is closed the spawner clears up for SWEEP_S (5 s) at most; then both are killed.
CLOSE_S = 7.0
# How long we kill what a dead spawner left behind, and the pause between two rounds of it.
CLEAR_S = 5.0
CLEAR_TICK_S = 0.01

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


class SpawnError(Exception):
    """There is no spawner, or it could not start a helper. The text is for people."""


class SpawnerProcess:
    """A running spawner, and the keeper above it: when one of them ends, so does the other. `on_body` gets the
    spawner's messages, `on_end` (once) what they died of, after the last message."""

    def __init__(
        self, on_body: Callable[[Body], None], on_end: Callable[[str], None], *, isolate: bool, fenced: bool = False
    ) -> None:
        """Starts the keeper, in this thread, without forking Python. `isolate`: in a PID namespace; pids that the
        spawner tells are of that. `fenced`: the keeper listens to `fence`. Raises SpawnError."""
        self._loop = asyncio.get_running_loop()
        self._on_body = on_body
        self._on_end = on_end
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self.ended = asyncio.Event()
        self.pid = 0  # the spawner's, once it is ready
        # Whoever descends from the launcher already is none of the spawner's.
        self._strangers = frozenset(tree.descendants(os.getpid()))
        fence_fd, self._fence_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if fenced else (-1, -1)
        try:
            self._process, sock = _start("pid" if isolate else "", fence_fd)
        except SpawnError:
            _close(self._fence_fd)
            raise
        finally:
            _close(fence_fd)
        self.link = Link(sock, self._hear, self.kill)
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as refused:
            self.link.close()
            self._process.kill()
            self._process.wait()
            _close(self._fence_fd)
            raise SpawnError(f"pidfd_open: {refused.strerror}; rdzvrun needs Linux 5.4 or newer") from refused
        self._loop.add_reader(self._pidfd, self._died)

    @property
    def keeper_pid(self) -> int:
        return self._process.pid

    async def ready(self) -> None:
        """Returns when it takes orders. Raises SpawnError when it died or takes too long."""
        try:
            async with asyncio.timeout(READY_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            self.kill()
            raise SpawnError(f"the spawner was not ready within {READY_S:.0f} s") from None

    def kill(self) -> None:
        if not self.ended.is_set():
            self._process.kill()

    def fence(self, until: float | None) -> None:
        """Let the keeper kill everything at this instant of CLOCK_BOOTTIME; None: at no time."""
        if self._fence_fd < 0:
            return
        # A keeper that does not read keeps to an earlier instant, and one that is dead has cleared up.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._fence_fd, INSTANT.pack(math.inf if until is None else until))

    async def close(self) -> None:
        """Let it kill everything below it and end; returns when it has ended."""
        self.link.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.ended.wait()
        except TimeoutError:
            self.kill()
            await self.ended.wait()

    async def clear(self) -> tuple[int, dict[int, int]]:
        """After their death: kill everything that they left behind, which the launcher has adopted. A spawner whose
        keeper died is killed last, as it clears up too. Returns how many could not be killed in CLEAR_S, and for each
        child that was reaped here, pid → exit code, or -signal."""
        statuses: dict[int, int] = {}
        deadline = self._loop.time() + CLEAR_S
        while True:
            self._kill_adopted(statuses)
            below = tree.descendants(os.getpid(), without=self._strangers)
            if not below or self._loop.time() > deadline:
                return len(below), statuses
            spared = self.pid if any(pid != self.pid and not tree.is_dead(pid) for pid in below) else 0
            for pid in below:
                if pid != spared:
                    _kill_and_reap(pid, statuses)
            await asyncio.sleep(CLEAR_TICK_S)

    def _kill_adopted(self, statuses: dict[int, int]) -> None:
        """Who replaces itself all the time may be gone before a look at all processes is over, but not before this."""
        for pid in tree.children(os.getpid()):
            if pid not in self._strangers and pid != self.pid:
                _kill_and_reap(pid, statuses)

    def _hear(self, body: Body) -> None:
        if body["is"] == "refused":
            self._refuse(body["text"])
        elif body["is"] == "ready":
            self.pid = next(iter(tree.children(self._process.pid)), 0)
            if not self._ready.done():
                self._ready.set_result(None)
        else:
            self._on_body(body)

    def _refuse(self, text: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(SpawnError(text))
            self._ready.exception()  # nobody may be waiting

    def _died(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        while self.link.read():  # its last words
            pass
        self.link.close()
        code = self._process.wait()
        _close(self._fence_fd)
        self._fence_fd = -1
        self.ended.set()
        # The keeper ends as the spawner did: by a shell's code for a signal.
        exited, signalled = (code, 0) if 0 <= code <= 128 else (0, code - 128 if code > 128 else -code)
        text = f"the spawner, or its keeper, ended by itself: {describe_exit(exited, signalled)}"
        self._refuse(text)
        self._on_end(text)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _start(isolate: str, fence_fd: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process and our end of the wire. Its stderr is ours: a traceback of it must not get lost."""
    script = Path(__file__).with_name("keeper.py")
    ignored, blocked = (",".join(map(str, numbers)) for numbers in (_IGNORED_AT_START, _BLOCKED_AT_START))
    try:
        ours, theirs = socket.socketpair()
    except OSError as refused:
        raise SpawnError(f"no wire to a spawner: {refused.strerror}") from refused
    with theirs:
        fd = theirs.fileno()
        argv = [sys.executable, "-S", "-E", "-s", str(script), str(fd), ignored, blocked, str(_NOFILE_AT_START)]
        argv += [isolate, *([] if fence_fd < 0 else [str(fence_fd)])]
        fds = [fd, *([] if fence_fd < 0 else [fence_fd])]
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=fds, start_new_session=True
            )
        except OSError as refused:
            ours.close()
            raise SpawnError(f"cannot start the spawner ({sys.executable}): {refused.strerror}") from refused
    return process, ours


def _kill_and_reap(pid: int, statuses: dict[int, int]) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        reaped, status = os.waitpid(pid, os.WNOHANG)
    except (ProcessLookupError, PermissionError, ChildProcessError):
        return  # gone, not ours to signal, or somebody else's child: it may become ours when its parent dies
    if reaped:
        statuses[pid] = os.waitstatus_to_exitcode(status)


def become_subreaper(yes: bool) -> bool:
    """Whether this process adopts its orphaned descendants. Returns how it was before. Raises SpawnError."""
    if sys.platform != "linux":
        raise SpawnError("rdzvrun needs Linux 5.4 or newer")
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = ctypes.c_int()
    if prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0) or prctl(
        _PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(yes), 0, 0, 0
    ):
        raise SpawnError(f"prctl: {os.strerror(ctypes.get_errno())}; rdzvrun needs Linux 5.4 or newer")
    return bool(before.value)
