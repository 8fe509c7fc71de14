"""Why the job is where it is and what it waits for, in one line, for people."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest

from rendezvousd.core.model import Job, Node, Outcome, Recovery, Round, Stance
from rendezvousd.core.rules import ending, fence, growth, recover, seats

# Names spelled out before "and N more".
NAMES_MAX = 3


def explain(job: Job, now: float) -> str:
    """Return the line. Looks at every node only when the names of some are wanted."""
    if job.ending is not None:
        return _ended(job)
    if job.recovering is not None:
        return _recovering(job, job.recovering, now)
    if job.running is not None:
        return _running(job, job.running, now)
    return _gathering(job, now)


def _ended(job: Job) -> str:
    assert job.ending is not None
    match job.ending.outcome:
        case Outcome.SUCCEEDED:
            text = "the job has succeeded"
        case Outcome.FAILED:
            text = "the job has failed"
        case Outcome.CLOSED:
            text = "the job was closed"
    cause = job.ending.cause
    return f"{text}: {cause.text}" if cause is not None else text


def _running(job: Job, round_: Round, now: float) -> str:
    text = f"round {round_.number} runs: {_nodes(len(round_.seats))}, {_count(round_.world_size, 'rank')}"
    if round_.done:
        text += f"; {round_.done} of {len(round_.seats)} nodes have finished"
    if round_.notice:
        text += f"; {round_.notice}"
    if (waiting := job.tally.newcomers_ready) > 0:
        due_at = growth.growth_due_at(job)
        if due_at is None:
            text += f"; {waiting} spare"
        else:
            lately = " (growth back-off)" if growth.backs_off(job) else ""
            text += f"; {waiting} waiting, let in in {_left(due_at, now)}{lately}"
    return text + _sitting_out(job, now)


def _sitting_out(job: Job, now: float) -> str:
    """Return which nodes sit out, until when and why, to go after what else is said; empty: none."""
    if not job.tally.sitting_out:
        return ""
    nodes = [n for n in job.nodes.values() if n.cooling_until_at is not None and n.leaving is None]
    said = [
        f"{n.name} sits out for {_left(n.cooling_until_at, now)}: {n.sits_out.text}"
        for n in nsmallest(NAMES_MAX, nodes, key=lambda n: n.arrival)
        if n.cooling_until_at is not None
    ]
    more = [f"{len(nodes) - NAMES_MAX} more sit out"] if len(nodes) > NAMES_MAX else []
    return "".join(f"; {text}" for text in (*said, *more))


def _recovering(job: Job, recovery: Recovery, now: float) -> str:
    due_at = recover.due_at(job)
    assert due_at is not None
    return (
        f"the daemon was restarted: {len(recovery.heard)} of {_nodes(recovery.size)} of round {recovery.number} "
        f"came back, {_left(due_at, now)} left for the others"
    )


def _gathering(job: Job, now: float) -> str:
    spec, tally = job.spec, job.tally
    why = ""
    if job.round is not None and job.round.cause is not None:
        sure = "" if job.round.final else " (still being looked into)"
        why = f"; round {job.round.number} broke because {job.round.cause.text}{sure}"
    out = _sitting_out(job, now)
    if tally.busy:
        busy = _names(n for n in job.nodes.values() if n.stance is Stance.BUSY and not n.overdue)
        return f"waiting for workers to stop on {busy}{out}{why}"
    if job.hold_until_at is not None and job.lost_at is not None:
        return f"{_held_back(job, job.lost_at, job.hold_until_at, now)}{out}"
    if (due_at := ending.too_few_due_at(job)) is not None:
        more = spec.min_nodes - tally.usable
        wanted = f"{tally.usable} of {spec.min_nodes} {'nodes' if spec.min_nodes > 1 else 'node'}"
        apart_due_at = ending.apart_due_at(job)
        due_at = due_at if apart_due_at is None else min(due_at, apart_due_at)
        return f"{wanted}; waiting for {more} more, {_left(due_at, now)} left{out}{why}"
    if tally.members_ready < tally.members or seats.ready(job) < spec.min_nodes:
        slow = _names(n for n in job.nodes.values() if n.usable and n.stance is Stance.UNREADY)
        return f"waiting for {slow} to be ready{out}{why}"
    if job.fences:
        return f"{_fenced(job, now)}{out}{why}"
    due_at = seats.seal_due_at(job)
    left = f", starting in {_left(due_at, now)} unless more arrive" if due_at is not None else ""
    return f"{seats.ready(job)} of up to {_nodes(spec.max_nodes)} ready{left}{out}{why}"


def _held_back(job: Job, lost_at: float, until_at: float, now: float) -> str:
    count = len(job.nodes)
    go = "this node goes on" if count == 1 else f"{count} nodes go on"
    budget = f"restart {job.known.restarts_used}/{job.spec.max_restarts}"
    return (
        f"this job's nodes were lost {now - lost_at:.0f} s ago; {go} with it in {_left(until_at, now)} "
        f"unless they return, {budget}"
    )


def _fenced(job: Job, now: float) -> str:
    due_at = fence.due_at(job)
    assert due_at is not None
    names = sorted(f.name for f in job.fences.values() if f.name)
    if not names:
        return f"what ran before this daemon began may live for {_left(due_at, now)} more (on-daemon-loss is stop)"
    shown = ", ".join(names[:NAMES_MAX]) + (f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else "")
    return (
        f"workers may live on {shown} for {_left(due_at, now)} more: nobody has said that they have stopped "
        "(on-daemon-loss is stop)"
    )


def _left(due_at: float, now: float) -> str:
    return f"{max(0.0, due_at - now):.0f} s"


def _nodes(count: int) -> str:
    return _count(count, "node")


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _names(nodes: Iterable[Node]) -> str:
    """Name the first few by arrival, so that the line changes only when they do."""
    named = list(nodes)
    shown = ", ".join(n.name for n in nsmallest(NAMES_MAX, named, key=lambda n: n.arrival)) or "nobody"
    more = len(named) - NAMES_MAX
    return f"{shown} and {more} more" if more > 0 else shown
