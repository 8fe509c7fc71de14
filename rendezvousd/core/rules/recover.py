"""A daemon without memory learns what ran before it began (Recover).

Every node says the greatest round it was ever told, its size, and the assignment its workers belong to. A job that
hears of a round it did not seal seals nothing until each of that round's members has been heard, or the window ends. A
complete round is adopted: no worker is restarted. Of an incomplete one, those not heard are lost.
"""

from __future__ import annotations

from immutables import Map
from msgspec.structs import replace

from rendezvousd.core.events import NodeHeard
from rendezvousd.core.model import (
    Assignment,
    Cause,
    CauseKind,
    End,
    Ending,
    Job,
    Known,
    NodeUid,
    Outcome,
    Phase,
    Recovery,
    Round,
    Seat,
)
from rendezvousd.core.ranks import seat_index
from rendezvousd.core.rules.fence import fence, fence_all
from rendezvousd.core.rules.verdict import blame, conclude, end_part, forfeit
from rendezvousd.core.tally import restance

# A round all of whose members are so has not been broken.
GOES_ON = (Phase.STARTING, Phase.RUNNING, Phase.SUCCEEDED)


def begin(job: Job, known: Known, now: float) -> Job:
    """Return the job learning about the round known to be the greatest, which was not sealed here."""
    if known.group_size == 0:  # a new submission goes on from the last one's round, and none was formed since
        return restance(job, now)
    recovery = Recovery(uid=known.round_uid, number=known.round, size=known.group_size, began_at=now, last_at=now)
    return restance(replace(job, recovering=recovery), now)


def stands_alone(event: NodeHeard) -> bool:
    """Return whether the speaker is the only member of the greatest round it knows, and its workers go on."""
    held = event.held
    return (
        event.known.group_size == 1
        and held is not None
        and held.round_uid == event.known.round_uid
        and held.phase in GOES_ON
    )


def note(job: Job, event: NodeHeard, now: float) -> Job:
    """Return the job knowing one more member of the round that it learns about, if the speaker is one."""
    recovery = job.recovering
    if recovery is None:
        return job
    seat = event.held.assignment if event.held is not None else None
    if seat is None or event.held is None or event.held.round_uid != recovery.uid:
        return job
    if seat.group_rank >= recovery.size:  # by the word of whoever told of the round first it has no such seat
        return job
    last_at = recovery.last_at if event.uid in recovery.heard else now
    return replace(job, recovering=replace(recovery, heard=recovery.heard.set(event.uid, event), last_at=last_at))


def due_at(job: Job) -> float | None:
    """Return when the window ends; None if nothing is being learnt."""
    recovery, timing = job.recovering, job.spec.timing
    if recovery is None:
        return None
    return min(recovery.last_at + timing.recovery_s, recovery.began_at + timing.recovery_max_s)


def complete(job: Job) -> bool:
    """Return whether every member of the round has been heard."""
    recovery = job.recovering
    return recovery is not None and 0 < recovery.size <= len(recovery.heard)


def adopt(job: Job, now: float) -> Job:
    """Return the job with the round it learnt about as its own. Members that were not heard are lost."""
    recovery = job.recovering
    assert recovery is not None
    round_ = _round(recovery, now)
    job = fence_all(job, now) if job.round is not None else job  # of a round before it, which is forgotten here
    job = replace(job, recovering=None, round=round_, short_at=None, enough_at=None, waiting_at=None)
    missing = [seat.uid for seat in round_.seats if seat.uid not in job.nodes]
    if missing and _all_succeeded(recovery):
        # those that are not here have read the outcome and gone: no other outcome lets a member succeed
        return conclude(job, Ending(outcome=Outcome.SUCCEEDED, at=now, exit_code=0), now)
    for uid in missing:
        end = End.LEFT if uid in job.gone else End.LOST
        if uid not in recovery.heard:  # who was heard, and lost, has its fence already
            job = fence(job, uid, f"of group rank {round_.index[uid]}", round_.uid, recovery.began_at)
        job = end_part(forfeit(job, uid, end), uid, end)
    job = restance(job, now)
    if missing:
        text = f"{len(missing)} of {len(round_.seats)} nodes did not come back after the daemon was restarted"
        return blame(job, Cause(kind=CauseKind.NODE_LOST, at=now, text=text), now)
    return _resume_stopping(job, recovery, now)


def _resume_stopping(job: Job, recovery: Recovery, now: float) -> Job:
    """Of a round that had been broken before, who failed tells so again; for the rest it was the daemon."""
    helds = [event.held for event in recovery.heard.values() if event.held is not None]
    if any(held.failures for held in helds) or all(held.phase in GOES_ON for held in helds):
        return job
    text = "the daemon was restarted while the round was being stopped"
    return blame(job, Cause(kind=CauseKind.DAEMON_RESTARTED, at=now, text=text), now)


def _all_succeeded(recovery: Recovery) -> bool:
    helds = [event.held for event in recovery.heard.values() if event.held is not None]
    return bool(helds) and all(held.phase is Phase.SUCCEEDED for held in helds)


def _round(recovery: Recovery, now: float) -> Round:
    """Return the round as its members tell it; a member that was not heard has an empty seat."""
    seats: dict[int, Seat] = {}
    world_size = restart_count = 0
    for uid, event in recovery.heard.items():
        assert event.held is not None
        told = event.held.assignment
        assert told is not None
        seats[told.group_rank] = _seat(uid, event, told)
        world_size, restart_count = told.world_size, told.restart_count
        master = told
    for rank in range(recovery.size):
        if rank not in seats:
            seats[rank] = _nobody(rank)
    if recovery.heard:
        seats[0] = replace(
            seats[0], address=master.master_addr, port=master.master_port, offer_id=master.master_offer_id
        )
    ordered = tuple(seats[rank] for rank in sorted(seats))
    return Round(
        uid=recovery.uid,
        number=recovery.number,
        seats=ordered,
        index=Map(seat_index(ordered)),
        world_size=world_size,
        restart_count=restart_count,
        sealed_at=now,
        admitted=False,
    )


def _seat(uid: NodeUid, event: NodeHeard, told: Assignment) -> Seat:
    return Seat(
        uid=uid,
        name=event.name,
        group_rank=told.group_rank,
        slots=told.slots,
        first_rank=told.first_rank,
        role=event.spec.role,
        role_first_rank=told.role_first_rank,
        role_world_size=told.role_world_size,
        address="",
        port=0,
        offer_id="",
    )


def _nobody(rank: int) -> Seat:
    return Seat(
        uid=NodeUid(f"not heard, group rank {rank}"),
        name=f"of group rank {rank}",
        group_rank=rank,
        slots=0,
        first_rank=0,
        role="",
        role_first_rank=0,
        role_world_size=0,
        address="",
        port=0,
        offer_id="",
    )
