"""What a node is told: its place, derived from the job alone, so that any daemon that has the job says the same."""

from __future__ import annotations

import enum
from typing import TypeAlias

from msgspec import Struct

from rendezvousd.core.model import NO_ROUND, Departure, Ending, Grow, Job, Node, NodeUid, Round, RoundUid, Seat
from rendezvousd.core.rules import ending, fence, growth, recover, seats


class Wait(enum.Enum):
    GATHERING = "gathering"
    RECOVERING = "recovering"
    SPARE = "spare"
    GROWING = "growing"
    COOLDOWN = "cooldown"


class Assigned(Struct, frozen=True):
    round: Round
    seat: Seat


class Waiting(Struct, frozen=True):
    reason: Wait
    left_s: float | None  # until something is decided anyway


Place: TypeAlias = Assigned | Waiting | Ending | Departure


def valid_round_uid(job: Job) -> RoundUid:
    """Return the only round whose workers may live; empty: none."""
    if job.recovering is not None and job.ending is None:
        return job.recovering.uid
    return job.running.uid if job.running is not None else NO_ROUND


def place(job: Job, uid: NodeUid, now: float) -> Place:
    """Return where the node stands. One that is not known waits like a newcomer."""
    if (departure := job.gone.get(uid)) is not None:
        return departure
    if job.ending is not None:
        return job.ending
    node = job.nodes.get(uid)
    if node is not None and node.leaving is not None:
        return node.leaving
    round_ = job.running
    if round_ is not None and uid in round_.index and uid not in round_.forfeits:
        return Assigned(round_, round_.seats[round_.index[uid]])
    return _waiting(job, node, now)


def _waiting(job: Job, node: Node | None, now: float) -> Waiting:
    if node is not None and node.cooling_until_at is not None:
        return _until(Wait.COOLDOWN, node.cooling_until_at, now)
    if job.recovering is not None:
        return _until(Wait.RECOVERING, recover.due_at(job), now)
    if job.running is None:
        due_at = ending.too_few_due_at(job)
        due_at = due_at if due_at is not None else job.hold_until_at or fence.due_at(job) or seats.seal_due_at(job)
        return _until(Wait.GATHERING, due_at, now)
    if job.spec.grow is Grow.NEVER or not growth.room(job):
        return Waiting(Wait.SPARE, None)
    return _until(Wait.GROWING, growth.growth_due_at(job), now)


def _until(reason: Wait, due_at: float | None, now: float) -> Waiting:
    return Waiting(reason, None if due_at is None else max(0.0, due_at - now))


def urgent(job: Job) -> object:
    """Return a value that differs whenever all nodes must be told at once.

    What is not in it (a countdown, the explanation, a verdict) rides on the next answer to a heartbeat.
    """
    return (
        job.uid,
        valid_round_uid(job),
        job.known.round_uid,
        job.ending,
    )
