"""The conversation with the daemon in a process of its own, so that torchrun's never has gRPC in it.

Programs that launch from Python may fork their workers (`start_method="fork"`). A fork of a process in which gRPC runs
crashes now and then, and gRPC cannot be used in it. Nothing of gRPC is imported here but in the other process.

Between the two is a socket with frames: a length, and a pickled tuple whose first item says what it is. To the other
process: start (its arguments), tell, flush. From it: place, away, refused, flushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rdzv.endpoints import Endpoint
from rdzv.model import Place, Standing

if TYPE_CHECKING:
    from rdzv.convert import Identity

_LENGTH = struct.Struct("!I")
AGAIN_S = 5.0  # one that has lived for so long is followed at once by the next, should it die
STREAMS_MAX = 1 << 20  # of one such process, so that the streams of the next have greater numbers
# What is started finds our modules where this process does, whatever has been done to sys.path.
_CODE = "import sys; sys.path[:] = sys.argv[3:]; from rdzv.plugin.session_process import main; main()"


@dataclass(frozen=True, slots=True)
class _Start:
    """What the Session in the other process is made of (see rdzv.session.Session)."""

    endpoints: tuple[Endpoint, ...]
    identity: Identity
    standing: Standing
    began_at: float
    local_addr: str | None
    retry_max_s: float | None
    streams_before: int


class SessionProcess:
    """As rdzv.session.Session, with the same callbacks, which are called from the loop that runs `run`."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        identity: Identity,
        standing: Standing,
        *,
        began_at: float,
        on_place: Callable[[Place], None],
        on_away: Callable[[str], None],
        on_refused: Callable[[str], None],
        local_addr: str | None = None,
        retry_max_s: float | None = None,
    ) -> None:
        self._start = _Start(tuple(endpoints), identity, standing, began_at, local_addr, retry_max_s, 0)
        self._standing = standing
        self._on_place, self._on_away, self._on_refused = on_place, on_away, on_refused
        self._writer: asyncio.StreamWriter | None = None
        self._flushes: dict[int, asyncio.Future[bool]] = {}
        self._flushed = 0

    def tell(self, standing: Standing, *, at_once: bool = True) -> None:
        """Let the daemon hear this: now, or with the next heartbeat."""
        self._standing = standing
        self._post("tell", standing, at_once)

    async def flush(self, within_s: float) -> bool:
        """Return whether the daemon has heard the latest standing, `within_s` at most from now."""
        if self._writer is None:
            return False
        self._flushed += 1
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._flushes[self._flushed] = done
        self._post("flush", self._flushed, within_s)
        try:
            async with asyncio.timeout(within_s):
                return await done
        except TimeoutError:
            return False
        finally:
            self._flushes.pop(self._flushed, None)

    async def run(self) -> None:
        """Attend daemons until cancelled, or refused by one."""
        streams, loop = 0, asyncio.get_running_loop()
        while True:
            began_at = loop.time()
            if not await self._serve(streams):
                return
            streams += STREAMS_MAX
            self._on_away("the process that speaks to the daemon has ended")
            if loop.time() < began_at + AGAIN_S:  # it may never come to speak
                await asyncio.sleep(AGAIN_S)

    async def _serve(self, streams_before: int) -> bool:
        """Live with one such process. Returns whether another one is needed: it has died."""
        process, ours = _spawn()
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._post("start", replace(self._start, standing=self._standing, streams_before=streams_before))
            while (message := await _read(reader)) is not None:
                match message:
                    case ("place", place):
                        self._on_place(place)
                    case ("away", text):
                        self._on_away(text)
                    case ("refused", text):
                        self._on_refused(text)
                        return False
                    case ("flushed", number, heard):
                        if (done := self._flushes.get(number)) is not None and not done.done():
                            done.set_result(heard)
                    case unknown:
                        raise ValueError(f"the process that speaks to the daemon says {unknown!r}")
            return True
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            process.kill()  # it has nothing to save
            process.wait()

    def _post(self, *message: object) -> None:
        if self._writer is not None:
            self._writer.write(_frame(message))


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = [str(theirs.fileno()), str(os.getpid()), *sys.path]
        environment = {"GRPC_VERBOSITY": "ERROR", **os.environ}  # or it tells of every connection that a peer closes
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,
        )
    ours.setblocking(False)
    return process, ours


def _frame(message: tuple[object, ...]) -> bytes:
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


async def _read(reader: asyncio.StreamReader) -> tuple[Any, ...] | None:
    """Return the next message; None: there will be no more."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        message: tuple[Any, ...] = pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return message


# ------------------------------------------------------------------------------------------------ the other process


def main() -> None:
    """Attend a daemon for the process that started this one, for as long as that lives."""
    from rdzv.processes.dispositions import be_deaf

    be_deaf()  # what is meant for torchrun: its workers are stopped, and the daemon is told so, before this ends
    asyncio.run(_main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))


async def _main(sock: socket.socket, parent: int) -> None:
    # Forked workers hold the other end of the socket as well, so its end does not tell of the parent's.
    gone = asyncio.Event()
    try:
        pidfd = os.pidfd_open(parent)
    except OSError:
        return
    asyncio.get_running_loop().add_reader(pidfd, gone.set)
    serving = asyncio.create_task(_attend(sock))
    await asyncio.wait({serving, asyncio.create_task(gone.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    os.kill(os.getpid(), signal.SIGKILL)  # nothing to save, and gRPC takes its time to end


async def _attend(sock: socket.socket) -> None:
    from rdzv.session import Session

    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock)

    def post(*message: object) -> None:
        writer.write(_frame(message))

    first = await _read(reader)
    if first is None:
        return
    start: _Start = first[1]
    session = Session(
        start.endpoints,
        start.identity,
        start.standing,
        began_at=start.began_at,
        on_place=lambda place: post("place", place),
        on_away=lambda text: post("away", text),
        on_refused=lambda text: post("refused", text),
        local_addr=start.local_addr,
        retry_max_s=start.retry_max_s,
        streams_before=start.streams_before,
    )
    running = asyncio.create_task(session.run())
    flushing = set()
    while (message := await _read(reader)) is not None:
        match message:
            case ("tell", standing, at_once):
                session.tell(standing, at_once=at_once)
            case ("flush", number, within_s):

                async def flush(number: int = number, within_s: float = within_s) -> None:
                    post("flushed", number, await session.flush(within_s))

                task = asyncio.create_task(flush())
                flushing.add(task)
                task.add_done_callback(flushing.discard)
            case unknown:
                raise ValueError(f"torchrun asks for {unknown!r}")
        if running.done() and not running.cancelled():
            running.result()  # a bug is to be loud
    with contextlib.suppress(ConnectionError):
        await writer.drain()
