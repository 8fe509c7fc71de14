"""A worker with the children that real ones have and worse: in its group, in a session of its own, orphaned and deaf to
TERM, stopped, and one that starts its successor whenever it is about to end. `difficult_worker.py [deaf] [stopped]`.

Who is going to stay is named so, for the kernel, once it is what it is to be.
"""

import os
import signal
import sys
import time
from collections.abc import Callable

# This process and the children below.
PROCESSES = 6
STAYING = 5
NAME = "stays"


def child(prepare: Callable[[], object]) -> None:
    if os.fork() == 0:
        prepare()
        sleep()


def stays() -> None:
    with open("/proc/self/comm", "w") as name:
        name.write(NAME)


def sleep() -> None:
    stays()
    while True:
        time.sleep(60)


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def orphan() -> None:
    os.setsid()
    deaf()
    if os.fork():
        os._exit(0)


def stopped() -> None:
    deaf()
    stays()
    os.kill(os.getpid(), signal.SIGSTOP)


def succeeded() -> None:
    """In a session of its own, ever again replaced by a child of itself."""
    os.setsid()
    deaf()
    while True:
        time.sleep(0.02)
        if os.fork():
            os._exit(0)


def main() -> None:
    if "deaf" in sys.argv:
        deaf()
    for prepare in (lambda: None, os.setsid, orphan, stopped, succeeded):
        child(prepare)
    if "stopped" in sys.argv:
        stopped()
    sleep()


if __name__ == "__main__":
    main()
