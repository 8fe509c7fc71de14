"""Between the agent's values and the messages of the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rdzv.model import (
    Assignment,
    Cause,
    Ended,
    Failure,
    Held,
    Known,
    Outcome,
    Phase,
    Place,
    Removed,
    Standing,
    Status,
    Waiting,
    WaitReason,
)
from rdzv.options import Options, entry_digest
from rendezvousd.v1 import rendezvous_pb2 as pb

_PHASES = {
    Phase.STARTING: pb.STARTING,
    Phase.RUNNING: pb.RUNNING,
    Phase.SUCCEEDED: pb.SUCCEEDED,
    Phase.FAILED: pb.FAILED,
    Phase.STOPPING: pb.STOPPING,
    Phase.STOPPED: pb.STOPPED,
    Phase.FENCED: pb.FENCED,
}
_WAITS = {
    pb.GATHERING: WaitReason.GATHERING,
    pb.SPARE: WaitReason.SPARE,
    pb.GROWING: WaitReason.GROWING,
    pb.RECOVERING: WaitReason.RECOVERING,
    pb.COOLDOWN: WaitReason.COOLDOWN,
}
_GROWS = {"quiet": pb.GROW_QUIET, "now": pb.GROW_NOW, "never": pb.GROW_NEVER}
_DAEMON_LOSSES = {"continue": pb.ON_DAEMON_LOSS_CONTINUE, "stop": pb.ON_DAEMON_LOSS_STOP}
_OUTCOMES = {
    pb.OUTCOME_SUCCEEDED: Outcome.SUCCEEDED,
    pb.OUTCOME_FAILED: Outcome.FAILED,
    pb.OUTCOME_CLOSED: Outcome.CLOSED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this launcher is, and what it wants: what stays the same in every message."""

    run_id: str
    node_uid: str
    node_name: str
    spec: pb.Spec
    submission: str = ""


def identity(options: Options, node_uid: str) -> Identity:
    """Return who a launcher with these options is."""
    conf = options.rdzv_conf
    spec = pb.Spec(
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        max_restarts=options.max_restarts,
        slots=options.nproc_per_node,
        role=options.role,
        node_rank=options.node_rank,
        topology=conf.topology,
        stop_grace_ms=round(options.shutdown_timeout_s * 1000),
        on_daemon_loss=_DAEMON_LOSSES[options.on_daemon_loss],
        grow=_GROWS[conf.grow],
        timeouts=pb.Timeouts(**conf.timeouts()),
        entry_digest=entry_digest(options),
    )
    return Identity(
        run_id=options.run_id,
        node_uid=node_uid,
        node_name=options.node_name,
        submission=options.submission,
        spec=spec,
    )


def node_state(
    identity: Identity, standing: Standing, *, address: str, age_ms: Callable[[Failure], int]
) -> pb.NodeState:
    """Return what is told, without `stream_no`, `seq` and what only the first message of a stream carries.

    `address` is where peers reach this host. `age_ms` tells how old a failure was when it was first told.
    """
    state = pb.NodeState(
        run_id=identity.run_id,
        node_uid=identity.node_uid,
        node_name=identity.node_name,
        submission=identity.submission,
        resumed=standing.resumed,
        lease_ms=round(standing.lease_s * 1000),
        outcome_seen=standing.outcome_seen,
        known=_known_out(standing.known),
    )
    if standing.seen_term:
        state.seen.CopyFrom(pb.Seen(term=standing.seen_term, revision=standing.seen_revision))
    if standing.held is not None:
        state.held.CopyFrom(_held_out(standing.held, age_ms))
    offer = standing.offer
    if offer is not None and offer.port is not None:
        state.offer.CopyFrom(
            pb.Offer(offer_id=offer.offer_id, after_round_uid=offer.after, address=address, port=offer.port)
        )
    if standing.leaving is not None:
        state.leaving.CopyFrom(pb.Leaving(reason=standing.leaving))
    return state


def place(message: pb.Place, now: float, sent_at: float | None = None) -> Place | None:
    """Return the place told, or None if it says nothing that this launcher understands.

    A failure's age is turned into an instant of this machine, `now` being when the message came. `sent_at`: when what
    it acknowledges was sent, for those who count from there.
    """
    status = _status(message, now)
    if status is None:
        return None
    return Place(
        term=message.term,
        revision=message.revision,
        daemon_id=message.daemon_id,
        job_uid=message.job_uid,
        valid_round_uid=message.valid_round_uid,
        known=_known_in(message.known),
        status=status,
        lease_s=message.lease_ms / 1000,
        sent_at=sent_at,
        cause=_cause(message.break_cause, now) if message.HasField("break_cause") else None,
        explain=message.explain,
    )


def _status(message: pb.Place, now: float) -> Status | None:
    match message.WhichOneof("status"):
        case "assigned":
            return _seat_in(message.assigned)
        case "waiting":
            reason = _WAITS.get(message.waiting.reason, WaitReason.UNKNOWN)
            return Waiting(reason=reason, left_s=message.waiting.left_ms / 1000)
        case "ended":
            ended = message.ended
            return Ended(
                outcome=_OUTCOMES.get(ended.outcome, Outcome.FAILED),
                exit_code=ended.exit_code,
                cause=_cause(ended.root_cause, now) if ended.HasField("root_cause") else None,
                may_exit=ended.may_exit,
            )
        case "removed":
            removed = message.removed
            return Removed(by=removed.by, reason=removed.reason, exit_code=removed.exit_code)
        case _:
            return None


def _cause(cause: pb.BreakCause, now: float) -> Cause:
    failure = cause.failure
    return Cause(
        kind=pb.CauseKind.Name(cause.kind) if cause.kind in pb.CauseKind.values() else str(cause.kind),
        node_uid=cause.node_uid,
        node_name=cause.node_name,
        text=cause.text,
        final=cause.final,
        failure=Failure(
            rank=failure.rank,
            local_rank=failure.local_rank,
            exit_code=failure.exit_code,
            signal=failure.signal,
            text=failure.text,
            ended_at=now - failure.age_ms / 1000,
            victim=failure.victim_hint,
            kind=failure.kind,
        )
        if cause.HasField("failure")
        else None,
    )


def _held_out(held: Held, age_ms: Callable[[Failure], int]) -> pb.Held:
    return pb.Held(
        assignment=seat_out(held.assignment),
        phase=_PHASES[held.phase],
        alive=held.alive,
        master_unreachable=held.master_unreachable,
        store_lost=held.store_lost,
        failures=[
            pb.Failure(
                rank=failure.rank,
                local_rank=failure.local_rank,
                exit_code=failure.exit_code,
                signal=failure.signal,
                text=failure.text,
                age_ms=age_ms(failure),
                victim_hint=failure.victim,
                kind=failure.kind,
            )
            for failure in held.failures
        ],
    )


def seat_out(seat: Assignment) -> pb.Assigned:
    """Return the seat as the wire has it."""
    return pb.Assigned(
        round=seat.round,
        round_uid=seat.round_uid,
        group_rank=seat.group_rank,
        group_size=seat.group_size,
        first_rank=seat.first_rank,
        slots=seat.slots,
        world_size=seat.world_size,
        role_first_rank=seat.role_first_rank,
        role_world_size=seat.role_world_size,
        restart_count=seat.restart_count,
        max_restarts=seat.max_restarts,
        master_addr=seat.master_addr,
        master_port=seat.master_port,
        master_offer_id=seat.master_offer_id,
        store_generation=seat.store_generation,
    )


def _seat_in(seat: pb.Assigned) -> Assignment:
    return Assignment(
        round=seat.round,
        round_uid=seat.round_uid,
        group_rank=seat.group_rank,
        group_size=seat.group_size,
        first_rank=seat.first_rank,
        slots=seat.slots,
        world_size=seat.world_size,
        role_first_rank=seat.role_first_rank,
        role_world_size=seat.role_world_size,
        restart_count=seat.restart_count,
        max_restarts=seat.max_restarts,
        master_addr=seat.master_addr,
        master_port=seat.master_port,
        master_offer_id=seat.master_offer_id,
        store_generation=seat.store_generation,
        notice=seat.notice,
    )


def _known_out(known: Known) -> pb.Known:
    return pb.Known(
        job_uid=known.job_uid,
        round=known.round,
        round_uid=known.round_uid,
        group_size=known.group_size,
        restarts_used=known.restarts_used,
        charged_round=known.charged_round,
        charged_round_uid=known.charged_round_uid,
    )


def _known_in(known: pb.Known) -> Known:
    return Known(
        job_uid=known.job_uid,
        round=known.round,
        round_uid=known.round_uid,
        group_size=known.group_size,
        restarts_used=known.restarts_used,
        charged_round=known.charged_round,
        charged_round_uid=known.charged_round_uid,
    )
