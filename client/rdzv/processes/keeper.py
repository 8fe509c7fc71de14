"""The keeper: the tiny process between the launcher and the spawner.

It exists for one thing: when the launcher or the spawner is gone, whatever became of the other, nothing below it goes
on living. Both have one above or below them that clears up as long as any one of the three lives:

    the launcher dies     the spawner and the keeper kill everything below them, the spawner last
    the spawner dies      the keeper kills what it left behind, and ends as it did
    the keeper dies       the launcher lets the spawner clear up, then does so itself

Run by path as `python -S -E -s keeper.py SOCKET IGNORED NOFILE ISOLATE`; the spawner is a fork of it (see there for the
first three). ISOLATE is "pid" for a PID namespace, in which the kernel itself lets nothing outlive the spawner, or
empty.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys

TYPE_CHECKING = False  # as in typing, which costs milliseconds to import
if TYPE_CHECKING:
    from typing import NoReturn

    from rdzv.processes import isolation, spawner
    from rdzv.processes.clearing import clear
    from rdzv.processes.wire import Channel
else:  # run by path: sys.path[0] is this directory
    import isolation
    import spawner
    from clearing import clear
    from wire import Channel

PR_SET_CHILD_SUBREAPER = 36
# What is meant for a launcher, and reaches whoever shares a name or a terminal with it.
DEAF_TO = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    socket_fd, ignored, nofile, isolate = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sock = socket.socket(fileno=int(socket_fd))
    sock.set_inheritable(False)
    problem = isolation.prepare() if isolate else ""
    spawner_pid = 0 if problem else os.fork()
    if spawner_pid:
        _keep(sock, spawner_pid)
    if isolate and not problem:
        problem = isolation.enter()
    channel = Channel(sock)
    if problem:
        channel.post({"is": "refused", "text": problem})
    else:
        spawner.main(channel, frozenset(map(int, filter(None, ignored.split(",")))), int(nofile))


def _keep(sock: socket.socket, spawner_pid: int) -> NoReturn:
    """Until the launcher or the spawner is gone. The socket is the spawner's: here only its end is of interest."""
    pidfd = os.pidfd_open(spawner_pid)
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    status = clear(last=spawner_pid)
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
