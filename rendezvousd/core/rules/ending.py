"""How a job ends, and how everybody gets to know (End, End in two steps)."""

from __future__ import annotations

from msgspec.structs import replace

from rendezvousd.core.model import Cause, CauseKind, Ending, Job, Outcome
from rendezvousd.core.rules.fence import bound_s, longest_lease_s, stops
from rendezvousd.core.rules.verdict import conclude, end_failed


def succeed(job: Job, now: float) -> Job:
    """Return the job ended as succeeded, if every member of the running round has succeeded."""
    round_ = job.running
    if round_ is None or round_.done < len(round_.seats):
        return job
    return conclude(job, Ending(outcome=Outcome.SUCCEEDED, at=now, exit_code=0), now)


def too_few_due_at(job: Job) -> float | None:
    """Return when a job with fewer than min nodes fails, or None while there are enough.

    None also while the cause of the last break is open: nothing ends before it is known.
    """
    if job.short_at is None or not job.gathering or job.judging:
        return None
    return job.short_at + job.spec.timing.join_s


def apart_due_at(job: Job) -> float | None:
    """Return when a job fails whose nodes reach the daemon but not each other, or None while they may."""
    if job.apart_at is None or not job.gathering or job.judging or job.round is None or not job.round.unreachable:
        return None
    return job.apart_at + job.spec.timing.join_s


def note_short(job: Job, now: float) -> Job:
    """Return the job with the begin of having too few nodes set or cleared."""
    short = job.gathering and job.recovering is None and job.tally.usable < job.spec.min_nodes
    if short == (job.short_at is not None):
        return job
    return replace(job, short_at=now if short else None)


def fail_if_hopeless(job: Job, now: float) -> Job:
    """Return the job ended as failed, if it has had too few nodes for too long, or nodes that do not reach each
    other, or too many short rounds."""
    if job.ending is not None or job.judging:
        return job
    spec = job.spec
    due_at = too_few_due_at(job)
    if due_at is not None and now >= due_at:
        text = f"{job.tally.usable} of {spec.min_nodes} nodes for {spec.timing.join_s:g} s (join timeout)"
        if job.round is not None and job.round.cause is not None:
            text += f"; the last round broke because {job.round.cause.text}"
        return end_failed(job, Cause(kind=CauseKind.JOIN_TIMEOUT, at=now, text=text), now)
    apart_due_at_ = apart_due_at(job)
    last = job.round.cause if job.round is not None else None
    if last is not None and apart_due_at_ is not None and now >= apart_due_at_:
        text = f"nodes reach the daemon but not each other for {spec.timing.join_s:g} s (join timeout); {last.text}"
        return end_failed(job, Cause(kind=CauseKind.JOIN_TIMEOUT, at=now, text=text), now)
    if job.gathering and last is not None and job.calm.short_rounds >= spec.timing.short_rounds_max:
        text = (
            f"{job.calm.short_rounds} rounds in a row lasted under {spec.timing.short_round_s:g} s; last: {last.text}"
        )
        return end_failed(job, replace(last, kind=CauseKind.SHORT_ROUNDS, text=text), now)
    return job


def may_exit_at(job: Job) -> float | None:
    """Return when nodes may exit even if some have not read the outcome; None if the job runs or they may already."""
    if job.ending is None or job.ending.may_exit:
        return None
    return job.ending.at + longest_lease_s(job)


def let_go(job: Job, now: float) -> Job:
    """Return the job telling its nodes that they may exit, once all have read the outcome or a lease has passed."""
    due_at = may_exit_at(job)
    if job.ending is None or due_at is None or (job.tally.seen < len(job.nodes) and now < due_at):
        return job
    return replace(job, ending=replace(job.ending, may_exit=True))


def forgettable_at(job: Job) -> float | None:
    """Return when an ended job need not be remembered any longer: nobody asks for it, and nothing of it lives. None:
    it has not ended, or its nodes have not read how."""
    read_at = outcome_was_read_at(job)
    if job.ending is None or read_at is None:
        return None
    return max(job.ending.at + job.spec.timing.ended_s, read_at)


def outcome_was_read_at(job: Job) -> float | None:
    """Return from when on an ended job may be forgotten if its place is needed: its nodes have read the outcome, and
    nothing of it lives. None: it has not ended, or they have not."""
    if job.ending is None or not job.ending.may_exit:
        return None
    return job.ending.at + (bound_s(job.lease_s, job.spec.timing.kill_s) if stops(job) else 0.0)
