"""A job all of whose nodes were lost by silence: they may only be cut off, and their workers train on.

For `recovery_max` after the last loss the job stays the same. A member that returns, and a launcher with the node name
of a lost one, go on with it at once. Other nodes wait for `recovery`, and then go on with it without those.
"""

from __future__ import annotations

from msgspec.structs import replace

from rendezvousd.core.model import End, Job, NodeUid


def note_lost(job: Job, now: float) -> Job:
    """Return the job with the instant at which the last of its nodes went, if members were lost by silence."""
    if job.nodes or job.lost_at is not None or job.ending is not None or job.round is None:
        return job
    if not any(end is End.LOST for end in job.round.forfeits.values()):
        return job
    return replace(job, lost_at=now)


def may_return(job: Job, now: float) -> bool:
    """Return whether the job is kept for its lost nodes, and for others that go on with it."""
    return job.lost_at is not None and now < job.lost_at + job.spec.timing.recovery_max_s


def expected(job: Job, now: float) -> bool:
    """Return whether even a job of another submission must wait for the lost nodes."""
    return job.lost_at is not None and now < job.lost_at + job.spec.timing.recovery_s


def admitted(job: Job, uid: NodeUid, name: str, now: float) -> Job:
    """Return the job to which this node is about to be admitted: it is a lost member or stands for one, or it waits."""
    if job.lost_at is None or job.round is None:
        return job
    if uid in job.round.index or name in _lost_names(job):
        return replace(job, lost_at=None, hold_until_at=None)
    if job.nodes or not may_return(job, now):
        return job  # the wait counts from the first that came
    return replace(job, hold_until_at=now + job.spec.timing.recovery_s)


def release(job: Job, now: float) -> Job:
    """Return the job in which nodes that came meanwhile need wait no longer, if it is time."""
    if job.hold_until_at is None or now < job.hold_until_at:
        return job
    return replace(job, hold_until_at=None)


def _lost_names(job: Job) -> set[str]:
    round_ = job.round
    assert round_ is not None
    return {round_.seats[round_.index[uid]].name for uid, end in round_.forfeits.items() if end is End.LOST}
