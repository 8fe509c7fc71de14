"""The node's bootstrap stores, as the launcher sees them.

Each offer of the node comes with a fresh store that its peers can reach. Its socket is bound and listening here, so
that the address can be told at once and no port is ever lost to a race; the store holder, a helper process, serves it
as a torch TCPStore. Whoever connects before the holder has imported torch waits in the socket's backlog.
"""

from __future__ import annotations

import errno
import os
import random
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rdzv.interpreter import workers_python
from rdzv.processes.link import Link
from rdzv.processes.spawner_process import SpawnError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rdzv.processes.supervisor import Supervisor
    from rdzv.processes.wire import Body

# A port is not handed out again for so long after its store was dropped: a worker of an older round, or of another job,
# may still dial it. Longer than any stop grace that is left to its default, and than TIME_WAIT.
QUIET_S = 120.0
# All workers of a job may dial before the holder is up. The kernel takes the smaller of this and somaxconn (4,096).
BACKLOG = 4096
# How often the kernel may offer a port that is to be left alone before we give up; each costs two system calls.
EPHEMERAL_TRIES = 64


class NoPort(Exception):
    """No port to listen on. The text says which were tried and why they would not do."""


class StoresUnavailable(Exception):
    """The store holder does not run: start it again."""


class StoreHolder:
    """The stores of one node. After the holder's death (a HelperEnded of `NAME`) every store is lost; `start` makes a
    new holder, and ports used before are still left alone."""

    NAME = "store-holder"

    def __init__(self, *, fork: bool = False) -> None:
        """`fork`: the holder comes from the supervisor's zygote, if there is one, and need not import torch again."""
        self._fork = fork
        self._whole = False  # the last holder died: the next one goes no new ways with torch
        self._link: Link | None = None
        self._open: dict[str, int] = {}  # offer → port
        self._quiet: dict[int, float] = {}  # port that was used → until when it is left alone
        self.problem = ""  # what the holder said before it gave up

    @property
    def running(self) -> bool:
        """Whether there is a holder to open stores with."""
        return self._link is not None

    async def start(self, supervisor: Supervisor) -> None:
        """Returns when the holder's process is on its way; stores may be opened at once. Raises SpawnError."""
        self._lose()
        self.problem = ""
        try:
            ours, theirs = socket.socketpair()
        except OSError as refused:
            raise SpawnError(f"no wire to a store holder: {refused.strerror}") from refused
        with theirs:
            link = self._link = Link(ours, self._hear, lambda: self._gone(link))
            try:
                argv = [*_argv(), "whole"] if self._whole else _argv()
                await supervisor.begin_helper(self.NAME, argv, _env(), [theirs.fileno()], fork=self._fork)
            except BaseException:
                self._lose()
                raise

    async def open(self, offer_id: str, port_range: tuple[int, int] | None = None) -> int:
        """A fresh, empty store for this offer. Returns its port, on all interfaces, where connections are taken from
        now on. `port_range`: first and last port allowed. Raises NoPort, and StoresUnavailable without a holder."""
        if self._link is None:
            raise StoresUnavailable(self.problem or "the store holder does not run")
        if offer_id in self._open:
            raise ValueError(f"offer {offer_id} has a store")
        self._forget(time.monotonic())
        listener = listen(port_range, frozenset(self._quiet))
        with listener:  # the holder has its own copy
            port: int = listener.getsockname()[1]
            try:
                self._link.post({"do": "serve", "offer_id": offer_id, "port": port}, [listener.fileno()])
            except OSError as refused:  # this process has no descriptor left for that copy
                raise NoPort(f"cannot hand port {port} to the store holder: {refused.strerror}") from refused
        self._open[offer_id] = port
        return port

    async def drop(self, offer_id: str) -> None:
        """Let a store go: its connections end and its port is freed, to be used again after QUIET_S. Unknown: no-op."""
        port = self._open.pop(offer_id, None)
        if port is not None:
            self._quiet[port] = time.monotonic() + QUIET_S
            if self._link is not None:
                self._link.post({"do": "drop", "offer_id": offer_id})

    async def close(self) -> None:
        """Lets the holder end. Idempotent."""
        self._lose()

    def _hear(self, body: Body) -> None:
        self.problem = body["text"]

    def _gone(self, link: Link) -> None:
        if self._link is link:  # and not a later holder's
            self._whole = True
            self._lose()

    def _lose(self) -> None:
        """There is no holder (any more), and no store."""
        if self._link is not None:
            self._link.close()
            self._link = None
        until = time.monotonic() + QUIET_S
        self._quiet.update((port, until) for port in self._open.values())
        self._open.clear()

    def _forget(self, now: float) -> None:
        """Keeps the map as small as QUIET_S worth of stores."""
        for port in [port for port, until in self._quiet.items() if until <= now]:
            del self._quiet[port]


def _argv() -> list[str]:
    """The workers' interpreter, as torchrun chooses it."""
    return [workers_python(os.environ), str(Path(__file__).with_name("store_holder.py"))]


def _env() -> dict[str, str]:
    """The launcher's environment, less what makes `import torch` heavier than a store needs."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONSAFEPATH": "",  # the script finds its wire beside itself
    }


def listen(port_range: tuple[int, int] | None, quiet: frozenset[int]) -> socket.socket:
    """A listening socket on a port that is not in `quiet`. Raises NoPort."""
    refused: list[socket.socket] = []  # kept bound, so that the kernel offers others
    taken = 0
    try:
        for port in _candidates(port_range, quiet):
            try:
                listener = _bind(port)
            except OSError as problem:
                if problem.errno == errno.EADDRINUSE:
                    taken += 1
                    continue
                raise NoPort(f"cannot listen on port {port}: {problem.strerror}") from problem
            if listener.getsockname()[1] not in quiet:
                return listener
            refused.append(listener)
    finally:
        for listener in refused:
            listener.close()
    if port_range is None:
        raise NoPort(f"the system offered no port of its own that was not used within the last {QUIET_S:.0f} s")
    first, last = port_range
    resting = sum(first <= port <= last for port in quiet)
    raise NoPort(
        f"no free port in {first}-{last}: {taken} in use, {resting} used within the last {QUIET_S:.0f} s"
        " and left alone because a late worker may still dial them. Widen the range (master_port_range)"
    )


def _candidates(port_range: tuple[int, int] | None, quiet: frozenset[int]) -> Iterator[int]:
    """Ports to try; 0: the system chooses. A range is tried once round from a random place, so that two launchers on
    one host seldom meet."""
    if port_range is None:
        yield from [0] * EPHEMERAL_TRIES
        return
    first, last = port_range
    size = last - first + 1
    start = random.randrange(size)
    for step in range(size):
        port = first + (start + step) % size
        if port not in quiet:
            yield port


def _bind(port: int) -> socket.socket:
    """A socket that listens on all interfaces, IPv6 and IPv4 where both exist. Raises OSError. No SO_REUSEADDR: a port
    with connections of a former owner in TIME_WAIT is one that somebody may still dial."""
    try:
        return _bind_to(socket.AF_INET6, "::", port)
    except OSError as problem:
        if problem.errno in (errno.EADDRINUSE, errno.EACCES):
            raise
        return _bind_to(socket.AF_INET, "0.0.0.0", port)  # IPv6 is switched off


def _bind_to(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
