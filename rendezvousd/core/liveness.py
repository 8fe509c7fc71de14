"""How often nodes speak, and for how long a silent one is believed. Numbers only; the engine holds the clock."""

from __future__ import annotations

from msgspec import Struct

from rendezvousd.core.settings import Timing

# What a daemon answers without being busy: a spread-out heartbeat costs about 90 us of CPU, so 9 % of a core.
HEARTBEATS_PER_S = 1000
# Longest lease: a week. What is longer is an error, or comes of a job's wish and very many nodes.
LEASE_MAX_S = 7 * 24 * 3600.0

# By then every bound is reached; a power without a bound overflows one day.
DOUBLINGS_MAX = 32


class Pace(Struct, frozen=True):
    """What a node is told of time. Seconds."""

    heartbeat_s: float
    lease_s: float
    retry_max_s: float


def pace(timing: Timing, nodes: int) -> Pace:
    """Return the pace for a daemon that attends `nodes` nodes in all.

    Past 1,000 nodes the interval grows so that all together stay at 1,000 messages a second; the lease grows with it.
    Reconnects are spread over a millisecond a node, as a stream costs the daemon a fraction of that.
    """
    heartbeat_s = max(timing.heartbeat_s, nodes / HEARTBEATS_PER_S)
    return Pace(
        heartbeat_s=heartbeat_s,
        lease_s=min(heartbeat_s * timing.lease_intervals, LEASE_MAX_S),
        retry_max_s=max(1.0, nodes / HEARTBEATS_PER_S),
    )


def pause_s(timing: Timing, times: int) -> float:
    """Return how long a node sits out that has sat out `times` times in a row before, in seconds."""
    return min(timing.cooldown_s * 2.0 ** min(max(0, times), DOUBLINGS_MAX), timing.cooldown_max_s)


def grace_s(timing: Timing, round_trip_s: float, lease_s: float) -> float:
    """Return how long a node whose stream broke may take to return; never more than its lease."""
    return min(timing.grace_s + 5 * round_trip_s, lease_s)
