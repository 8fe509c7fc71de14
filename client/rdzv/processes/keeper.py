"""The keeper: the tiny process between the launcher and the spawner.

It exists for one thing: when the launcher or the spawner is gone, whatever became of the other, nothing below it goes
on living. Both have one above or below them that clears up as long as any one of the three lives:

    the launcher dies     the spawner and the keeper kill everything below them, the spawner last
    the spawner dies      the keeper kills what it left behind, and ends as it did
    the keeper dies       the launcher lets the spawner clear up, then does so itself

It is the watchdog too where workers may not outlive their node's lease (`--on-daemon-loss=stop`): it is told the end of
the lease, and told again when it is renewed, and kills everything below it at that instant, even while the launcher and
the spawner are stopped.

Run by path as `python -S -E -s keeper.py SOCKET IGNORED BLOCKED NOFILE ISOLATE [FENCE]`; the spawner is a fork of it
(see there for the first four). ISOLATE is "pid" for a PID namespace, in which the kernel itself lets nothing outlive
the spawner, or empty. FENCE is a pipe of instants (wire.INSTANT), of which the last counts; without it there is no
lease.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False  # as in typing, which costs milliseconds to import
if TYPE_CHECKING:
    from typing import NoReturn

    from rdzv.processes import isolation, spawner
    from rdzv.processes.clearing import clear, send
    from rdzv.processes.dispositions import Given, be_deaf
    from rdzv.processes.wire import INSTANT, Channel
else:  # run by path: sys.path[0] is this directory
    import isolation
    import spawner
    from clearing import clear, send
    from dispositions import Given, be_deaf
    from wire import INSTANT, Channel

PR_SET_CHILD_SUBREAPER = 36
# How often the clock is looked at while a lease runs.
LOOK_S = 0.2


def main() -> None:
    be_deaf()
    socket_fd, ignored, blocked, nofile, isolate, *fence = sys.argv[1:]
    fence_fd = int(fence[0]) if fence else -1
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sock = socket.socket(fileno=int(socket_fd))
    sock.set_inheritable(False)
    problem = isolation.prepare() if isolate else ""
    spawner_pid = 0 if problem else os.fork()
    if spawner_pid:
        _keep(sock, spawner_pid, fence_fd)
    if fence:
        os.close(fence_fd)
    if isolate and not problem:
        problem = isolation.enter()
    channel = Channel(sock)
    if problem:
        channel.post({"is": "refused", "text": problem})
    else:
        spawner.main(channel, Given(_numbers(ignored), _numbers(blocked)), int(nofile))


def _numbers(text: str) -> frozenset[int]:
    return frozenset(map(int, filter(None, text.split(","))))


def _keep(sock: socket.socket, spawner_pid: int, fence_fd: int) -> NoReturn:
    """Until the launcher or the spawner is gone, or the lease has ended. The socket is the spawner's: here only its end
    is of interest."""
    pidfd = os.pidfd_open(spawner_pid)
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.register(pidfd, select.POLLIN)
    if fence_fd < 0:
        poll.poll()
    elif _lease_ended(poll, fence_fd):
        send(os.kill, spawner_pid, signal.SIGKILL)  # first of all: it could start more
    status = clear(last=spawner_pid)
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _lease_ended(poll: select.poll, fence_fd: int) -> bool:
    """Wait for the end of the lease, or for something else that `poll` tells of. Returns which of them came."""
    os.set_inheritable(fence_fd, False)
    poll.register(fence_fd, select.POLLIN)
    until = math.inf
    while True:
        left_s = until - time.clock_gettime(time.CLOCK_BOOTTIME)
        # The timeout is of a clock that stands still while the machine sleeps.
        events = poll.poll(None if left_s == math.inf else max(0.0, min(left_s, LOOK_S)) * 1000)
        if any(fd != fence_fd for fd, _ in events):
            return False
        if events:
            told = os.read(fence_fd, INSTANT.size * 1024)
            if not told:  # the launcher is gone: its socket tells, too
                poll.unregister(fence_fd)
            else:
                (until,) = INSTANT.unpack(told[-INSTANT.size :])
        elif time.clock_gettime(time.CLOCK_BOOTTIME) >= until:
            return True


if __name__ == "__main__":
    main()
