"""Ends of processes in words."""

from __future__ import annotations

from rendezvousd.core.model import Failure

# Linux numbers, as in signal(7); the core cannot ask the operating system, and nodes may run on another one.
NAMES = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    14: "SIGALRM",
    15: "SIGTERM",
    24: "SIGXCPU",
    25: "SIGXFSZ",
    31: "SIGSYS",
}
# The kind of a failure that is the node's own: its worker could not be started.
SPAWN = "spawn"
# Characters of the reason why a worker could not be started, within a line.
TEXT_MAX = 300


def describe_end(failure: Failure) -> str:
    """Return how a worker ended, as the end of a sentence about it: "failed with exit code 3"."""
    if failure.kind == SPAWN:
        why = failure.text.strip().partition("\n")[0]
        return "could not be started" + (f": {why[:TEXT_MAX]}" if why else "")
    if not failure.signal:
        why = ", which is not to be tried again" if failure.kind == "no-retry" else ""
        return f"failed with exit code {failure.exit_code}{why}"
    if failure.kind == "oom":
        return "was killed for lack of memory (SIGKILL by the kernel's OOM killer)"
    name = NAMES.get(failure.signal)
    return f"died of signal {failure.signal}" + (f" ({name})" if name else "")
