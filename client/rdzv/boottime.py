"""The clock by which leases are counted (`--on-daemon-loss=stop`)."""

from __future__ import annotations

import time


def boottime() -> float:
    """Return seconds of a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
