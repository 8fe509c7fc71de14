"""How a job changes.

There are two kinds of change. An *event* changes what it names; then `settle` applies the rules that now hold, whatever
led there, in this order: waits that ran out, the verdict on a broken round, the end of the job, growth, sealing.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from rendezvousd.core.events import (
    CloseAsked,
    Event,
    NodeHeard,
    NodeLost,
    NodeRemoved,
    RestartAsked,
    StreamBroke,
    TimePassed,
)
from rendezvousd.core.model import Cause, CauseKind, Departure, End, Ending, Job, Outcome, Stance
from rendezvousd.core.rules import ending, fence, growth, hear, lost, recover, seats, suspects, verdict
from rendezvousd.core.settings import Limits
from rendezvousd.core.tally import drop_node, place_node

DEFAULT_LIMITS = Limits()


def step(job: Job, event: Event, now: float, limits: Limits = DEFAULT_LIMITS) -> Job:
    """Return the job as it stands after `event`, `now` being seconds of the daemon's clock."""
    match event:
        case NodeHeard():
            job = hear.heard(job, event, limits, now)
        case StreamBroke():
            job = _unheard(job, event, now)
        case NodeLost():
            job = _lost(job, event, limits, now)
        case NodeRemoved():
            gone = Departure(by=event.by, reason=event.reason, exit_code=1, removed=True)
            job = hear.leave(job, event.uid, gone, limits, now)
        case RestartAsked():
            job = _restart(job, event, now)
        case CloseAsked():
            job = _close(job, event, now)
        case TimePassed():
            pass
        case _:
            assert_never(event)
    return settle(job, now)


def settle(job: Job, now: float) -> Job:
    """Return the job with every rule applied that holds at `now`."""
    job = fence.note_lease(job)
    job = _recover(job, now)
    job = lost.release(lost.note_lost(job, now), now)
    job = verdict.give_up_overdue(job, now)
    job = verdict.fix_verdict(job, now)
    job = suspects.take_back(job, now)
    job = ending.succeed(job, now)
    job = ending.note_short(job, now)
    job = ending.fail_if_hopeless(job, now)
    job = growth.note_waiting(job, now)
    job = _grow(job, now)
    job = fence.lower(job, now)
    job = seats.note_enough(job, now)
    job = seats.seal_if_due(job, now)
    return ending.let_go(job, now)


def wakes_at(job: Job) -> float | None:
    """Return when the job next needs a `TimePassed`, or None if only events move it."""
    instants = (
        job.scan_at,
        recover.due_at(job),
        ending.too_few_due_at(job),
        ending.apart_due_at(job),
        growth.growth_due_at(job),
        seats.seal_due_at(job),
        fence.due_at(job),
        job.hold_until_at,
        ending.may_exit_at(job),
        ending.forgettable_at(job),
    )
    return min((t for t in instants if t is not None), default=None)


def _unheard(job: Job, event: StreamBroke, now: float) -> Job:
    """Let no round be sealed over a node that may be dead: an offer stands for as long as the stream that made it.

    A node that has read the outcome of its job ends its stream because it exits: nobody needs to wait for its return.
    """
    node = job.nodes.get(event.uid)
    if node is not None and job.ending is not None and node.outcome_seen and node.stance is not Stance.BUSY:
        return drop_node(job, event.uid)
    return job if node is None or node.offer is None else place_node(job, replace(node, offer=None), now)


def _lost(job: Job, event: NodeLost, limits: Limits, now: float) -> Job:
    node = job.nodes.get(event.uid)
    if node is None:
        return job
    job = fence.fence_lost(job, event, now)
    if node.leaving is not None:  # it will not come back, by its own word or by somebody else's
        return hear.depart(job, event.uid, End.LOST, limits)
    text = f"node {node.name} was lost: {event.why}"
    at = now - event.silent_s
    cause = Cause(kind=CauseKind.NODE_LOST, at=at, text=text, uid=event.uid, name=node.name)
    return verdict.vanish(job, event.uid, End.LOST, cause, now)


def _restart(job: Job, event: RestartAsked, now: float) -> Job:
    if job.running is None:
        return job
    text = f"{event.by} asked for a restart" + (f": {event.reason}" if event.reason else "")
    return verdict.blame(job, Cause(kind=CauseKind.OPERATOR, at=now, text=text), now)


def _close(job: Job, event: CloseAsked, now: float) -> Job:
    if job.ending is not None:
        return job
    text = f"{event.by} closed the job" + (f": {event.reason}" if event.reason else "")
    ending_ = Ending(
        outcome=Outcome.SUCCEEDED if event.success else Outcome.CLOSED,
        at=now,
        exit_code=0 if event.success else 1,
        cause=Cause(kind=CauseKind.OPERATOR, at=now, text=text),
    )
    return verdict.conclude(job, ending_, now)


def _recover(job: Job, now: float) -> Job:
    """Adopt the round that a daemon before this one sealed, once it is known as far as it will be."""
    recovery, due_at = job.recovering, recover.due_at(job)
    if recovery is None or due_at is None or job.ending is not None:
        return job
    if not recover.complete(job) and now < due_at:
        return job
    job = recover.adopt(job, now)
    # what they said of their workers is judged now that there is a round to judge it by; failures first: they explain
    members = [node for uid in recovery.heard if (node := job.nodes.get(uid)) is not None]
    for node in sorted(members, key=lambda n: n.held is None or not n.held.failures):
        job = hear.take_in(job, node, now)
    return job


def _grow(job: Job, now: float) -> Job:
    """Break the running round to let waiting nodes in, if it is time."""
    due_at = growth.growth_due_at(job)
    if due_at is None or now < due_at:
        return job
    count = job.tally.newcomers_ready
    text = f"{count} waiting node{'s' if count > 1 else ''} let in"
    job = growth.admit_waiting(job, now)
    return verdict.blame(job, Cause(kind=CauseKind.GROWTH, at=now, text=text), now)
