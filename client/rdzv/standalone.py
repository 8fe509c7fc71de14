"""A daemon of this launcher's own, for jobs of one node: nothing else to start, and gone with the launcher."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

from rdzv.endpoints import Endpoint, parse_endpoint

if TYPE_CHECKING:
    from rdzv.processes.supervisor import Supervisor

READY_S = 30.0  # from starting it to its word that it serves: 0.3 s, and a lot more from a slow shared file system
NO_LEASE = 6 * 24 * 3600  # in seconds, and in heartbeats of one: longer than a launcher is ever stopped
LINE_MAX = 256  # bytes of that word


class NotServing(Exception):
    """The daemon did not come to serve. The text is for people."""


class OwnDaemon:
    """A daemon on the loopback. It is started by `start`, and again, on the same port, whenever it has died."""

    NAME = "daemon"

    def __init__(self, *, leases: bool) -> None:
        """`leases`: workers end with the lease of their node (--on-daemon-loss=stop), so it must be a usual one."""
        self._leases = leases
        self._port = 0  # until it is known: any free one

    async def start(self, supervisor: Supervisor) -> Endpoint:
        """Return where it serves. Raises NotServing, and SpawnError if it could not be started at all."""
        ours, theirs = os.pipe()
        try:
            try:
                await supervisor.start_helper(self.NAME, _argv(self._port, self._leases), os.environ, [theirs])
            finally:
                os.close(theirs)
            line = await _line(ours)
        finally:
            os.close(ours)
        if not line:
            await supervisor.stop_helper(self.NAME)
            raise NotServing(f"the daemon of this launcher does not start; try: {' '.join(_argv(0, True)[:4])}")
        endpoint = parse_endpoint(line)
        self._port = endpoint.port
        return endpoint


def _argv(port: int, leases: bool) -> list[str]:
    # -P: a file in the working directory that has the name of a module is not meant for the daemon.
    argv = [sys.executable, "-P", "-m", "rendezvousd", "--listen", f"127.0.0.1:{port}", "--ready-fd", "3"]
    # Its only node is the launcher, with which it ends. One that is silent was stopped (Ctrl-Z, a debugger) with nobody
    # to take its place, and its workers go on.
    return argv if leases else [*argv, f"--lease-intervals={NO_LEASE}", f"--grace={NO_LEASE}"]


async def _line(fd: int) -> str:
    """Return the first line that comes through a pipe; empty if it ends first, or none comes within READY_S."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[str] = loop.create_future()
    read = b""

    def more() -> None:
        nonlocal read
        chunk = os.read(fd, LINE_MAX)
        read += chunk
        if not ready.done() and (not chunk or b"\n" in read or len(read) > LINE_MAX):
            ready.set_result(read.decode("ascii", "replace").partition("\n")[0].strip() if b"\n" in read else "")

    loop.add_reader(fd, more)
    try:
        async with asyncio.timeout(READY_S):
            return await ready
    except TimeoutError:
        return ""
    finally:
        loop.remove_reader(fd)
