"""Signals: those to which a node's own processes do not listen, and how a program finds them.

A signal to every process of a node (a scheduler's warning, `systemctl kill`) is meant for the launcher, which passes it
on to workers. What serves them must live on meanwhile: it ends by KILL, or with its pipe.
"""

from __future__ import annotations

import signal

# All that end a process by default, but for KILL, for those that a fault of its own raises, and for real-time signals.
DEAF_TO = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGTERM,
    signal.SIGXCPU,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGIO,
    signal.SIGPWR,
)
# Those that any Python treats otherwise than a program expects to find them.
OF_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class Given:
    """What the launcher was started with, and its workers are: the numbers of signals."""

    __slots__ = ("blocked", "ignored")

    def __init__(self, ignored: frozenset[int] = frozenset(), blocked: frozenset[int] = frozenset()) -> None:
        self.ignored = ignored
        self.blocked = blocked


# What serves workers finds these ignored from its first instruction.
DEAF = Given(frozenset(DEAF_TO))


def of_zygote(given: Given) -> Given:
    """Return how the zygote finds signals: as workers do, for what it forks is to differ in nothing, but blocked. So a
    worker gets even the one that comes in the instant of its birth."""
    return Given(given.ignored - {signal.SIGCHLD}, frozenset(DEAF_TO))


def be_deaf() -> None:
    """Ignore what is meant for the launcher. What may have been blocked or ignored at the start is not: the end of a
    child must be noticed."""
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def set_for_exec(given: Given) -> None:
    """Set what a program is to find that is started next in this process."""
    for number in (*DEAF_TO, *OF_PYTHON, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN if number in given.ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, given.blocked)


def set_for_worker(given: Given) -> None:
    """Set what a worker finds that the zygote has forked."""
    if signal.SIGCHLD in given.ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, given.blocked)
