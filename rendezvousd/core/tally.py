"""Counts over the attached nodes, kept as nodes change: settling a job costs the same for 2 nodes and for 10,000.

Every change of a node goes through `place_node` or `drop_node`; every change of what stances mean (a round sealed,
broken or ended) through `restance`.
"""

from __future__ import annotations

from msgspec.structs import replace

from rendezvousd.core.liveness import pace
from rendezvousd.core.model import Job, Node, NodeUid, SitOut, Stance, Tally


def holds_seat(job: Job, node: Node) -> bool:
    """Return whether a seat of the last round is still this node's."""
    return (
        job.round is not None
        and node.uid in job.round.index
        and node.uid not in job.round.forfeits
        and node.leaving is None
    )


def offer_counts(job: Job, node: Node) -> bool:
    """Return whether the node's offer is for the next round of this job.

    It must name the last sealed round as over. One that was dealt in that round, or is older, names an earlier one.
    """
    return node.offer is not None and node.leaving is None and node.offer.after == job.known.round_uid


def part_open(job: Job, node: Node) -> bool:
    """Return whether the node had a seat in the last round and has not said how that ended.

    It may have started processes that it has not told of yet.
    """
    return job.round is not None and node.uid in job.round.index and node.uid not in job.round.ends


def resumes(job: Job, node: Node) -> bool:
    """Return whether the node's processes belong to the round that is being learnt about, which may live."""
    return (
        job.recovering is not None
        and node.leaving is None
        and node.held is not None
        and node.held.round_uid == job.recovering.uid
    )


def stance(job: Job, node: Node) -> Stance:
    """Return where the node stands, from what it last said and what the job is at."""
    if job.running is not None and holds_seat(job, node):
        return Stance.RUNNING
    if job.recovering is not None and resumes(job, node):
        return Stance.RUNNING
    if node.alive or part_open(job, node):
        return Stance.BUSY
    if offer_counts(job, node):
        return Stance.READY
    return Stance.UNREADY


def place_node(job: Job, node: Node, now: float) -> Job:
    """Return the job with this version of the node, its stance, deadline and the counts brought up to date."""
    node = _derive(job, node, now)
    before = job.nodes.get(node.uid)
    if before is not None and before == node:
        return job
    tally = _add(job.tally, node, +1)
    if before is not None:
        tally = _add(tally, before, -1)
    return replace(job, nodes=job.nodes.set(node.uid, node), tally=tally, scan_at=sooner(job.scan_at, node))


def drop_node(job: Job, uid: NodeUid) -> Job:
    """Return the job without the node; the same job if it is not attached."""
    node = job.nodes.get(uid)
    if node is None:
        return job
    return replace(job, nodes=job.nodes.delete(uid), tally=_add(job.tally, node, -1))


def restance(job: Job, now: float) -> Job:
    """Return the job with all stances derived anew. Looks at every node."""
    tally, scan_at = Tally(), None
    nodes = job.nodes.mutate()
    for uid, old in job.nodes.items():
        node = nodes[uid] = _derive(job, old, now, anew=True)
        tally = _add(tally, node, +1)
        scan_at = sooner(scan_at, node)
    return replace(job, nodes=nodes.finish(), tally=tally, scan_at=scan_at)


def recount(job: Job) -> Tally:
    """Return the counts, made from nothing. For checks."""
    tally = Tally()
    for node in job.nodes.values():
        tally = _add(tally, node, +1)
    return tally


def _derive(job: Job, node: Node, now: float, *, anew: bool = False) -> Node:
    """Return the node with its derived fields; `anew` arms its deadline again though its stance stays."""
    new, member = stance(job, node), holds_seat(job, node)
    if node.uid in job.nodes and new is node.stance and (not anew or node.overdue):
        return node if member == node.member else replace(node, member=member)
    due_at = None
    if new is Stance.BUSY and job.ending is None:
        due_at = now + node.spec.stop_grace_s + pace(job.spec.timing, len(job.nodes)).lease_s
    elif new is Stance.UNREADY and job.gathering:
        due_at = now + job.spec.timing.offer_s
    return replace(node, stance=new, member=member, due_at=due_at, overdue=False)


def _add(tally: Tally, node: Node, sign: int) -> Tally:
    ready = node.stance is Stance.READY
    member = node.member and not node.overdue
    usable, sits_out = node.usable, node.cooling_until_at is not None and node.leaving is None
    return Tally(
        members=tally.members + sign * member,
        members_ready=tally.members_ready + sign * (member and ready),
        newcomers_ready=tally.newcomers_ready + sign * (usable and ready and not member),
        usable=tally.usable + sign * usable,
        unready=tally.unready + sign * (usable and node.stance is Stance.UNREADY),
        busy=tally.busy + sign * (node.stance is Stance.BUSY and not node.overdue),
        sitting_out=tally.sitting_out + sign * sits_out,
        suspended=tally.suspended + sign * (sits_out and node.sits_out is not SitOut.UNREACHABLE),
        seen=tally.seen + sign * node.outcome_seen,
    )


def sooner(scan_at: float | None, node: Node) -> float | None:
    """Return the earlier of `scan_at` and whatever this node is next looked at for."""
    for at in (None if node.overdue else node.due_at, node.cooling_until_at):
        if at is not None and (scan_at is None or at < scan_at):
            scan_at = at
    return scan_at
