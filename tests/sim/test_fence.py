"""No worker lives while another has its place (`--on-daemon-loss=stop`), whatever befalls nodes, daemons and messages.

The world, and what of it is real, is in fencing/world.py. `make fence` plays 200,000 schedules; SCHEDULES=N SEED=N
choose others. The seed is printed; each schedule can be played alone by its number.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from rdzv.fence import Fence
from rendezvousd.core import codec
from rendezvousd.core.rules import fence, seats
from rendezvousd.engine import Engine
from rendezvousd.rpc.rendezvous import Renderer
from tests.sim.fencing.node import Node
from tests.sim.fencing.plan import NEVER
from tests.sim.fencing.world import World
from tests.sim.test_mutations import Mutation, mutated

SCHEDULES = int(os.environ.get("SCHEDULES", "1000"))
SEED = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**9))
# Most rules are missed within a few hundred schedules that are played without them, the rarest in one of 2,000.
HUNT = 20000


@dataclass(frozen=True)
class Found:
    number: int  # of the schedule
    overlap_s: float


def overlaps(seed: int, schedules: int) -> Iterator[Found]:
    """Play that many schedules; yields those in which two workers lived at the same time."""
    for number in range(schedules):
        overlap_s = play(seed, number).overlap_s
        if overlap_s:
            yield Found(number, overlap_s)


@dataclass(frozen=True)
class Played:
    world: World
    overlap_s: float


def play(seed: int, number: int) -> Played:
    world = World(random.Random(seed * 1_000_003 + number))
    return Played(world, world.play())


def test_nobody_s_worker_lives_beside_its_successor() -> None:
    print(f"SEED={SEED}")
    succeeded = 0
    for number in range(SCHEDULES):
        played = play(SEED, number)
        assert not played.overlap_s, f"SEED={SEED}, schedule {number}: {played.overlap_s:g} s"
        succeeded += played.world.successor_at < NEVER and played.world.node.was_born
    print(f"{SCHEDULES} schedules, {succeeded} of them with a worker and its successor; no overlap")
    assert succeeded > SCHEDULES / 2, "most schedules come to the point"


# What the node does.
BY_NODE: dict[str, Mutation] = {
    "the lease counts from the receipt of the answer": (
        Node.answered,
        "sent_at = self.sendings.answered(seq)",
        "sent_at = self.now() if self.sendings.answered(seq) is not None else None",
    ),
    "an answer renews any round": (Fence.renewed, "round_uid != self.round_uid or ", ""),
    "nobody kills while the launcher is stopped": (
        Node._watchdog,
        "if self.now() >= self.watched - 1e-9:",
        "if self.now() >= self.watched - 1e-9 and over(self.world.t, self.plan.launcher_pause) == self.world.t:",
    ),
    "workers are spawned after the end of the lease": (
        Node._born,
        "if self.stopping or self.fired or self.now() >= self.fence.term_at(STOP_GRACE_S):",
        "if False:",
    ),
}
# How long the daemon waits. (That clocks differ is 9 ms here, which is not seen: the daemon looks ten times a second
# whether it is time. tests/unit/test_rules_fence.py holds it.)
BY_DAEMON: dict[str, Mutation] = {
    "a bare lease": (fence.bound_s, "(lease_s / (1 - CLOCK_RATE) + kill_s) * (1 + CLOCK_RATE)", "lease_s"),
    "the killed are gone at once": (fence.bound_s, " + kill_s", ""),
    "nothing is waited for": (seats.blocked, "or bool(job.fences)", ""),
    "the silence of a lost node is counted twice": (
        fence.fence_lost,
        "now - event.silent_s",
        "now - 2 * event.silent_s",
    ),
    "what a member has not told of does not live": (fence.may_live, " or part_open(job, node)", ""),
}
# What holds when another daemon leads, or while the end of a round is written.
BY_LEADERS: dict[str, Mutation] = {
    "a daemon answers without looking whether it leads": (Renderer.place, "self.engine.check_lead()", "pass"),
    "a new leader knows nothing of what its predecessor read": (
        codec._read_fence,
        "until_at=read_at + bound_s",
        "until_at=read_at",
    ),
    "a leader that has been followed is believed to know it at once": (
        fence.fence,
        "max(read_at, job.answered_until_at) + lasts_s",
        "read_at + lasts_s",
    ),
    "a daemon without memory begins at once": (fence.fence_unknown, 'fence(job, UNKNOWN, "", NO_ROUND, 0.0)', "job"),
    "a new leader does not know the longest lease that was told": (
        codec._job,
        "lease_s=head.lease_s",
        "lease_s=0.0",
    ),
    "a lease is told before it is on record": (
        Engine._commit,
        "stored = await",
        "if room is not None:\n        room.job = job\n    stored = await",
    ),
}
MUTATIONS = {**BY_NODE, **BY_DAEMON, **BY_LEADERS}


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_any_one_of_the_rules_two_workers_live_at_the_same_time(name: str) -> None:
    with mutated(*MUTATIONS[name]):
        assert next(overlaps(7, HUNT), None) is not None
