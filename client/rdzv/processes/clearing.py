"""Killing everything below a process, from within that process."""

from __future__ import annotations

import os
import signal
import time

TYPE_CHECKING = False  # as in typing, which costs milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.processes import tree
else:  # run by path: sys.path[0] is this directory
    import tree

# How long killing goes on. Only processes in uninterruptible sleep live that long, and nobody can hurry those.
SWEEP_S = 5.0
# So much of it is left to who clears up as well, and may be stuck.
SPARE_S = 0.5
# Between two rounds of killing; a self-respawning chain loses against it.
TICK_S = 0.01


def send(how: Callable[[int, int], None], target: int, number: int) -> bool:
    """Send a signal with os.kill or os.killpg. Returns whether there was anybody who may be signalled."""
    try:
        how(target, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def dead_child() -> os.waitid_result | None:
    """A child that has ended and is not reaped; None: there is none. It stays unreaped."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None


def clear(last: int = 0) -> int | None:
    """Kill everything below this process until nothing is left (SWEEP_S at most). `last` is a child that clears below
    itself, and is let live until it is the only one, or for SPARE_S. Returns its wait status; None: not reaped here.

    Children are looked for, not all descendants: these come to be children as their parents die, and one look is so
    quick that even who replaces itself all the time is met alive.
    """
    status = None
    began = time.monotonic()
    while (now := time.monotonic()) < began + SWEEP_S:
        while (dead := dead_child()) is not None:
            _, how = os.waitpid(dead.si_pid, 0)
            if dead.si_pid == last:
                status = how
        below = tree.children(os.getpid())
        if last in below:
            below += tree.children(last)
        if not below and dead_child() is None:
            break
        # Whoever is dead and waits for `last` to bury them does not count.
        others = [pid for pid in below if pid != last and not tree.is_dead(pid)]
        for pid in others if others and now < began + SPARE_S else below:
            send(os.kill, pid, signal.SIGKILL)
        time.sleep(TICK_S)
    return status
