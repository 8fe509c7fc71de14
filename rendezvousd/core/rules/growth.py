"""Letting nodes in that wait while a round runs, and restraint in doing so (Grow, Calm)."""

from __future__ import annotations

from msgspec.structs import replace

from rendezvousd.core.model import Calm, CauseKind, Grow, Job, Round

# Breaks that say nothing about the health of a round.
DELIBERATE = (CauseKind.GROWTH, CauseKind.OPERATOR)


def growth_due_at(job: Job) -> float | None:
    """Return when the running round is to be broken to let waiting nodes in, or None if it is not."""
    round_, spec = job.running, job.spec
    if round_ is None or job.waiting_at is None or spec.grow is Grow.NEVER or not room(job):
        return None
    due_at = job.waiting_at
    if spec.grow is Grow.QUIET:
        quiet_at = max(job.last_arrival_at, job.waiting_at) + spec.timing.grow_s
        due_at = min(quiet_at, job.waiting_at + spec.timing.grow_max_s)
    return max(due_at, round_.sealed_at + job.calm.required_s, _backed_off_until(job, job.waiting_at))


def _backed_off_until(job: Job, waiting_at: float) -> float:
    """Return until when nodes that wait since `waiting_at` are kept waiting because others were let in lately.

    Twice as long as those waited, but no longer than until the last admission is long ago: then it is calm.
    """
    calm, timing = job.calm, job.spec.timing
    if calm.admitted_at is None:
        return waiting_at
    wait_s = min(2 * calm.waited_s, timing.growth_backoff_max_s)
    return min(waiting_at + wait_s, calm.admitted_at + timing.calm_soon_s)


def backs_off(job: Job) -> bool:
    """Return whether it is the growth back-off that keeps nodes waiting."""
    due_at = growth_due_at(job)
    calm = replace(job.calm, required_s=0.0, admitted_at=None)
    return due_at is not None and due_at != growth_due_at(replace(job, calm=calm))


def admit_waiting(job: Job, now: float) -> Job:
    """Return the job remembering that its round is broken now to let nodes in."""
    assert job.waiting_at is not None
    return replace(job, calm=replace(job.calm, admitted_at=now, waited_s=now - job.waiting_at))


def room(job: Job) -> bool:
    """Return whether the running round has room for more; none once a member is done."""
    round_ = job.running
    return round_ is not None and len(round_.seats) < job.spec.max_nodes and round_.done == 0


def note_waiting(job: Job, now: float) -> Job:
    """Return the job with the begin of a wait for growth set or cleared. Only ready nodes wait."""
    waits = job.running is not None and job.tally.newcomers_ready > 0
    if waits == (job.waiting_at is not None):
        return job
    return replace(job, waiting_at=now if waits else None)


def calm_after(job: Job, round_: Round) -> Calm:
    """Return what restrains growth after `round_` broke, its cause being known."""
    assert round_.broken_at is not None
    timing, calm = job.spec.timing, job.calm
    ran_s = round_.broken_at - round_.sealed_at
    deliberate = round_.cause is not None and round_.cause.kind in DELIBERATE
    required_s = calm.required_s
    if ran_s >= required_s + timing.calm_reset_s:  # what it had to run before growth is no sign of calm
        required_s = 0.0
    elif round_.admitted and not deliberate and ran_s < timing.calm_soon_s:
        required_s = min(2 * max(ran_s, required_s, timing.grow_s), timing.calm_reset_s)
    short = calm.short_rounds + (not deliberate) if ran_s < timing.short_round_s else 0
    return replace(calm, required_s=required_s, short_rounds=short)
