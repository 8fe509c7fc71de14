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
    return max(due_at, round_.sealed_at + job.calm.required_s)


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
    if ran_s >= timing.calm_reset_s:
        required_s = 0.0
    elif round_.admitted and not deliberate and ran_s < timing.calm_soon_s:
        required_s = min(2 * max(ran_s, required_s, timing.grow_s), timing.calm_reset_s)
    short = calm.short_rounds + (not deliberate) if ran_s < timing.short_round_s else 0
    return Calm(required_s=required_s, short_rounds=short)
