"""When a round is sealed, and over whom (Members first, Quiet, Bounded waits)."""

from __future__ import annotations

import hashlib

from immutables import Map
from msgspec.structs import replace

from rendezvousd.core.model import Job, Node, Round, RoundUid, Stance
from rendezvousd.core.ranks import choose, deal, order, seat_index, unmet_wishes
from rendezvousd.core.tally import restance


def ready(job: Job) -> int:
    """Return how many nodes the next round would have if it were sealed now."""
    return min(job.spec.max_nodes, job.tally.members_ready + job.tally.newcomers_ready)


def settles(job: Job) -> bool:
    """Return whether the next round waits for stragglers: a first one does, and one with too few survivors."""
    return job.round is None or job.tally.members < job.spec.min_nodes


def blocked(job: Job) -> bool:
    """Return whether something else than the settle time must come first: enough nodes, a verdict, old workers' end,
    also where nobody tells of it, a member, the return of lost ones."""
    tally = job.tally
    return (
        job.recovering is not None
        or job.enough_at is None
        or job.judging
        or job.hold_until_at is not None
        or bool(job.fences)
        or tally.busy > 0
        or tally.members_ready < tally.members
    )


def seal_due_at(job: Job) -> float | None:
    """Return when the settle time is over, or None if the next round does not wait for it, or for more than it."""
    if not job.gathering or blocked(job) or not settles(job):
        return None
    assert job.enough_at is not None
    timing = job.spec.timing
    cap_at = job.enough_at + timing.settle_max_s
    if job.tally.unready:
        return cap_at  # an admitted node that is not ready yet is waited for, within bounds
    return min(cap_at, max(job.last_arrival_at, job.enough_at - timing.settle_s) + timing.settle_s)


def note_enough(job: Job, now: float) -> Job:
    """Return the job with the begin of having enough ready nodes set or cleared."""
    enough = job.gathering and ready(job) >= job.spec.min_nodes
    if enough == (job.enough_at is not None):
        return job
    return replace(job, enough_at=now if enough else None)


def seal_if_due(job: Job, now: float) -> Job:
    """Return the job with its next round sealed, if nothing needs to be waited for."""
    if not job.gathering or blocked(job):
        return job
    if settles(job) and ready(job) < job.spec.max_nodes:
        due_at = seal_due_at(job)
        if due_at is None or now < due_at:
            return job
    return _seal(job, now)


def _seal(job: Job, now: float) -> Job:
    able = [n for n in job.nodes.values() if n.stance is Stance.READY and n.usable and n.cooling_until_at is None]
    survivors = sorted((n for n in able if n.member), key=_by_arrival)
    strangers = [n for n in able if not n.member]
    newcomers = choose(job.round, strangers, job.spec.max_nodes - len(survivors))
    ordered = order(job.round, survivors, newcomers)
    seats = deal(ordered)
    number = job.known.round + 1
    last = job.round
    round_ = Round(
        uid=RoundUid(hashlib.blake2b(f"{job.seed} {job.uid} {number}".encode(), digest_size=12).hexdigest()),
        number=number,
        seats=seats,
        index=Map(seat_index(seats)),
        world_size=sum(seat.slots for seat in seats),
        restart_count=job.known.restarts_used,
        sealed_at=now,
        admitted=last is not None and any(n.uid not in last.index for n in newcomers),
        notice=unmet_wishes(ordered, frozenset(n.uid for n in newcomers)),
    )
    known = replace(job.known, round=number, round_uid=round_.uid, group_size=len(seats))
    cause = last.cause if last is not None else None
    job = replace(job, round=round_, last_cause=cause, known=known, enough_at=None, short_at=None, waiting_at=None)
    return restance(replace(job, lost_at=None), now)


def _by_arrival(node: Node) -> int:
    return node.arrival
