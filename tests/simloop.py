"""An event loop whose clock jumps: hours of timeouts in milliseconds, the same way every time.

When no task can run, the loop asks its selector to sleep until the next timer. Ours moves the clock there instead. If
there is no next timer, nothing will ever happen again, and that is reported as the deadlock it is.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("deadlock: every task waits and no timer is set")
        self.now += max(timeout, 0.0)
        return []


class SimLoop(asyncio.SelectorEventLoop):
    """Its `time` is simulated seconds; `stall` lets some pass in which this loop did not run."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def stall(self, seconds: float) -> None:
        self._jumping.now += seconds


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a fresh jumping loop."""
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main)
