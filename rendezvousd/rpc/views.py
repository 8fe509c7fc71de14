"""A job as people and tools see it."""

from __future__ import annotations

from immutables import Map

from rendezvousd.core.model import Job, Node, NodeUid, Stance
from rendezvousd.delivery import Room
from rendezvousd.engine import Engine
from rendezvousd.rpc.convert import HELD_PHASES, cause_pb, ended_pb, known_pb
from rendezvousd.v1 import rendezvous_pb2 as pb


def job_view(engine: Engine, room: Room, *, nodes: bool) -> pb.JobView:
    """Return the job as it stands; with its nodes, members by group rank first, then the others by arrival."""
    job, now = room.job, engine.clock.now()
    round_ = job.running
    view = pb.JobView(
        run_id=job.run_id,
        job_uid=job.uid,
        phase=pb.JOB_ENDED if job.ending is not None else pb.JOB_RUNNING if round_ is not None else pb.JOB_GATHERING,
        explain=engine.explain(room),
        known=known_pb(job.known, job.uid),
        min_nodes=job.spec.min_nodes,
        max_nodes=job.spec.max_nodes,
        max_restarts=job.spec.max_restarts,
        age_ms=int((now - job.began_at) * 1000),
    )
    if round_ is not None:
        view.world_size = round_.world_size
        view.master_addr, view.master_port = round_.master.address, round_.master.port
    if job.round is not None:
        view.round_age_ms = max(1, int((now - job.round.sealed_at) * 1000))
        if job.round.cause is not None:
            view.break_cause.CopyFrom(cause_pb(job.round.cause, final=job.round.final))
    if job.ending is not None:
        view.ended.CopyFrom(ended_pb(job.ending))
    if nodes:
        index = round_.index if round_ is not None else Map[NodeUid, int]()
        order = sorted(job.nodes.values(), key=lambda n: (n.uid not in index, index.get(n.uid, n.arrival)))
        view.nodes.extend(_node_view(engine, job, node, now) for node in order)
    return view


def _node_view(engine: Engine, job: Job, node: Node, now: float) -> pb.NodeView:
    row = engine.table.get(job.run_id, node.uid)
    view = pb.NodeView(
        node_uid=node.uid,
        node_name=node.name,
        slots=node.spec.slots,
        state=_state(job, node),
        held_phase=HELD_PHASES[node.held.phase] if node.held is not None else pb.HELD_PHASE_UNSPECIFIED,
        alive=node.alive,
        address=node.offer.address if node.offer is not None else "",
        silent_ms=0 if row is None else int((now - row.spoke_at) * 1000),
    )
    if job.running is not None and (rank := job.running.index.get(node.uid)) is not None:
        view.group_rank = rank
        view.address = job.running.seats[rank].address
    return view


def _state(job: Job, node: Node) -> str:
    """Return what a node does, in a word."""
    if node.leaving is not None:
        return "leaving"
    if node.cooling_until_at is not None:
        return "cooling down"
    if job.ending is not None:
        return "ended"
    match node.stance:
        case Stance.RUNNING:
            return node.held.phase.value if node.held is not None and job.running is not None else "starting"
        case Stance.BUSY:
            return "stopping"
        case Stance.READY:
            return "spare" if job.running is not None else "ready"
        case Stance.UNREADY:
            return "waiting"
