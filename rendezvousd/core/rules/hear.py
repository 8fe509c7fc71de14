"""What a node says becomes what the job knows (Offer, Verdict, Done is kept, Leaving is a state, Unreachable peers)."""

from __future__ import annotations

from msgspec.structs import replace

from rendezvousd.core.events import NodeHeard
from rendezvousd.core.model import (
    Cause,
    CauseKind,
    Departure,
    End,
    Failure,
    Held,
    Job,
    Node,
    NodeUid,
    Phase,
    RoundUid,
    Stance,
)
from rendezvousd.core.rules import fence
from rendezvousd.core.rules.admit import admit, bar, give_way, gives_way, learn
from rendezvousd.core.rules.recover import note
from rendezvousd.core.rules.suspects import inherit
from rendezvousd.core.rules.verdict import blame, done, end_part, forfeit
from rendezvousd.core.settings import Limits
from rendezvousd.core.signals import describe_end
from rendezvousd.core.tally import place_node

# How a member's part ended, by what it says of it. STARTING, RUNNING and STOPPING are no ends.
ENDS = {
    Phase.SUCCEEDED: End.SUCCEEDED,
    Phase.FAILED: End.FAILED,
    Phase.STOPPED: End.STOPPED,
    Phase.FENCED: End.STOPPED,
}


def heard(job: Job, event: NodeHeard, limits: Limits, now: float) -> Job:
    """Return the job knowing how this node stands. Old news changes nothing."""
    if event.uid in job.gone:
        return job
    if gives_way(job, event, now):
        job = give_way(job, event, now)
    job = learn(job, event, now)
    node: Node | None
    if (node := job.nodes.get(event.uid)) is None:
        job, node = admit(job, event, limits, now)
        if node is None:
            return job
        node = inherit(job, node, now)
    job = _held(job, event, node, now)
    node = job.nodes.get(event.uid, node)  # its stance may have changed by what was learnt
    node = replace(
        node,
        held=event.held,
        offer=event.offer,
        outcome_seen=job.ending is not None and event.outcome_seen == job.uid,
        unreachables=0 if event.held is not None and event.held.phase is Phase.RUNNING else node.unreachables,
    )
    fresh = node.stance is not Stance.READY
    job = fence.heard(note(place_node(job, node, now), event, now), event)
    if fresh and job.nodes[event.uid].stance is Stance.READY and job.running is not None:
        job = replace(job, last_arrival_at=now)  # a quiet time before growth counts from readiness
    if event.leaving is not None or node.leaving is not None:
        return leave(job, event.uid, Departure(by=node.name, reason=event.leaving or ""), limits, now)
    return job


def take_in(job: Job, node: Node, now: float) -> Job:
    """Return the job judging anew what this node last said of its processes."""
    event = NodeHeard(
        uid=node.uid,
        name=node.name,
        job_spec=job.spec,
        spec=node.spec,
        held=node.held,
        offer=node.offer,
        leaving=node.leaving.reason if node.leaving is not None else None,
    )
    job = place_node(job, replace(node, held=None), now)
    job = _held(job, event, job.nodes[node.uid], now)
    return place_node(job, replace(job.nodes[node.uid], held=event.held), now)


def leave(job: Job, uid: NodeUid, departure: Departure, limits: Limits, now: float) -> Job:
    """Return the job in which the node goes: its seat is vacated at once, its processes are waited for."""
    node = job.nodes.get(uid)
    if node is None:
        return job
    if node.leaving is None:
        # done before anything else is judged: a success stays a success
        kept = done(job, uid)
        node = replace(node, leaving=departure)
        member = node.member
        job = place_node(forfeit(job, uid, End.LEFT), node, now)
        if member and not kept:
            kind = CauseKind.NODE_REMOVED if departure.removed else CauseKind.NODE_LEFT
            did = f"was removed by {departure.by}" if departure.removed else "left"
            text = f"node {node.name} {did}" + (f": {departure.reason}" if departure.reason else "")
            job = blame(job, Cause(kind=kind, at=now, text=text, uid=uid, name=node.name), now)
        node = job.nodes[uid]
    return job if node.stance is Stance.BUSY else depart(job, uid, End.LEFT, limits)


def depart(job: Job, uid: NodeUid, end: End, limits: Limits) -> Job:
    """Return the job without the leaving node, which is remembered and never comes back."""
    leaving = job.nodes[uid].leaving
    assert leaving is not None
    return bar(end_part(job, uid, end), uid, leaving, limits)


def _held(job: Job, event: NodeHeard, node: Node, now: float) -> Job:
    """Take in what the node says of its processes of the last round."""
    round_, held = job.round, event.held
    if round_ is None or event.uid not in round_.index:
        return job
    here = held is not None and held.round_uid == round_.uid
    if held is not None and here and event.uid not in round_.forfeits:
        before = node.held if node.held is not None and node.held.round_uid == round_.uid else None
        job = _failures(job, node, held, before, now)
        job = _troubles(job, node, held, before, now)
    if (end := _end(event, round_.uid, job.known.round_uid)) is None:
        return job
    job = end_part(job, event.uid, end)
    return _ended_alone(job, event, now) if end is End.STOPPED else job


def _end(event: NodeHeard, round_uid: RoundUid, latest_uid: RoundUid) -> End | None:
    """Return how the node's part in this round ended, by its own word; None if it may not have ended. A later round
    than this one, `latest_uid`, may be known that was sealed by a daemon before this one."""
    held = event.held
    if held is not None and held.alive and (held.phase is not Phase.SUCCEEDED or held.round_uid != round_uid):
        return None  # (what workers leave behind when all have succeeded takes nothing away from that)
    if held is not None and held.round_uid == round_uid and (end := ENDS.get(held.phase)) is not None:
        return end
    if event.offer is not None and event.offer.after in (round_uid, latest_uid):
        return End.STOPPED  # it has not started any process of this round, and will not
    return End.LEFT if event.leaving is not None else None


def _failures(job: Job, node: Node, held: Held, before: Held | None, now: float) -> Job:
    """Take in the failures not told before."""
    told = {f.rank for f in before.failures} if before is not None else set()
    for failure in held.failures:
        if failure.rank not in told:
            job = blame(job, worker_failed(node, failure, now - failure.age_s), now)
    if held.phase is Phase.FAILED and not held.failures and not (before is not None and before.phase is Phase.FAILED):
        text = f"node {node.name} failed, and did not say how"
        job = blame(job, Cause(kind=CauseKind.WORKER_FAILED, at=now, text=text, uid=node.uid, name=node.name), now)
    return job


def _troubles(job: Job, node: Node, held: Held, before: Held | None, now: float) -> Job:
    """Take in that the round's bootstrap store is out of reach, or gone."""
    if held.store_lost and not (before is not None and before.store_lost):
        text = f"the bootstrap store on node {node.name} died"
        job = blame(job, Cause(kind=CauseKind.STORE_LOST, at=now, text=text, uid=node.uid, name=node.name), now)
    if held.master_unreachable and not (before is not None and before.master_unreachable):
        assert job.round is not None
        master = job.round.master
        text = (
            f"node {node.name} cannot reach the bootstrap store at {master.address} port {master.port} "
            f"(on node {master.name}); is there a firewall between them, or should {master.name} be started with a "
            "--local-addr that its peers reach?"
        )
        unreachable = job.round.unreachable | {node.uid}
        job = replace(job, round=replace(job.round, unreachable=unreachable))
        job = blame(job, Cause(kind=CauseKind.NETWORK, at=now, text=text, uid=node.uid, name=node.name), now)
    return job


def _ended_alone(job: Job, event: NodeHeard, now: float) -> Job:
    """A member has no workers though nobody asked it to stop: nothing of the round can go on without them."""
    if job.running is None or event.leaving is not None or event.uid in job.running.forfeits:
        return job  # it was asked, or goes, which is a cause of its own
    if event.held is None or event.held.round_uid != job.running.uid:
        why = "takes the round for over"
    elif event.held.phase is Phase.FENCED:
        why = "stopped its workers because it heard no daemon"
    else:
        why = "stopped its workers"
    cause = Cause(kind=CauseKind.NETWORK, at=now, text=f"node {event.name} {why}", uid=event.uid, name=event.name)
    return blame(job, cause, now)


def worker_failed(node: Node, failure: Failure, at: float) -> Cause:
    """Return the cause that a failed worker is."""
    text = f"rank {failure.rank} (local rank {failure.local_rank}) on node {node.name} {describe_end(failure)}"
    return Cause(kind=CauseKind.WORKER_FAILED, at=at, text=text, uid=node.uid, name=node.name, failure=failure)
