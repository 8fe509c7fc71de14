"""For all tests."""

from __future__ import annotations

import signal

from hypothesis.internal.conjecture import providers

# hypothesis also draws constants that it finds in whichever of our modules are imported: what a test tries would depend
# on the tests that ran before it in the same process. (HUNT=20000 tries other things.)
_none = providers._local_constants
providers._get_local_constants = lambda: _none

# Signals that a shell's background job, nohup or a CI runner may start the tests with ignored.
IGNORED_BY_RUNNERS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


def _do_nothing(*_: object) -> None:
    pass


def _set_signal_state() -> None:
    """Let every process that the tests start have the default signal actions, and no signal blocked.

    A program inherits an ignored signal and a blocked one, but not a handler. So a handler that does nothing keeps the
    tests themselves as deaf as their runner wants them, and what they start is not.
    """
    for number in IGNORED_BY_RUNNERS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _do_nothing)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


_set_signal_state()
