"""Between the wire's messages and the core's values."""

from __future__ import annotations

from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from rendezvousd.core import model
from rendezvousd.core.errors import BadRequest
from rendezvousd.core.events import NodeHeard
from rendezvousd.core.liveness import LEASE_MAX_S
from rendezvousd.core.model import CauseKind, Departure, Ending, Failure, Outcome, Phase, RoundUid
from rendezvousd.core.place import Assigned, Place, Wait, Waiting
from rendezvousd.core.rules import fence
from rendezvousd.core.settings import Limits, Timing
from rendezvousd.v1 import rendezvous_pb2 as pb

T = TypeVar("T")

HELD_PHASES = {
    Phase.STARTING: pb.STARTING,
    Phase.RUNNING: pb.RUNNING,
    Phase.SUCCEEDED: pb.SUCCEEDED,
    Phase.FAILED: pb.FAILED,
    Phase.STOPPING: pb.STOPPING,
    Phase.STOPPED: pb.STOPPED,
    Phase.FENCED: pb.FENCED,
}
PHASES: dict[int, Phase] = {number: phase for phase, number in HELD_PHASES.items()}
GROWS: dict[int, model.Grow] = {
    pb.GROW_QUIET: model.Grow.QUIET,
    pb.GROW_NOW: model.Grow.NOW,
    pb.GROW_NEVER: model.Grow.NEVER,
}
DAEMON_LOSSES: dict[int, model.OnDaemonLoss] = {
    pb.ON_DAEMON_LOSS_CONTINUE: model.OnDaemonLoss.CONTINUE,
    pb.ON_DAEMON_LOSS_STOP: model.OnDaemonLoss.STOP,
}
CAUSES = {
    CauseKind.WORKER_FAILED: pb.WORKER_FAILED,
    CauseKind.NODE_LOST: pb.NODE_LOST,
    CauseKind.NODE_LEFT: pb.NODE_LEFT,
    CauseKind.NODE_REMOVED: pb.NODE_REMOVED,
    CauseKind.GROWTH: pb.GROWTH,
    CauseKind.OPERATOR: pb.OPERATOR,
    CauseKind.NETWORK: pb.NETWORK,
    CauseKind.STORE_LOST: pb.STORE_LOST,
    CauseKind.JOIN_TIMEOUT: pb.JOIN_TIMEOUT,
    CauseKind.SHORT_ROUNDS: pb.SHORT_ROUNDS,
    CauseKind.DAEMON_RESTARTED: pb.DAEMON_RESTARTED,
}
WAITS = {
    Wait.GATHERING: pb.GATHERING,
    Wait.SPARE: pb.SPARE,
    Wait.RECOVERING: pb.RECOVERING,
    Wait.GROWING: pb.GROWING,
    Wait.COOLDOWN: pb.COOLDOWN,
}
OUTCOMES = {
    Outcome.SUCCEEDED: pb.OUTCOME_SUCCEEDED,
    Outcome.FAILED: pb.OUTCOME_FAILED,
    Outcome.CLOSED: pb.OUTCOME_CLOSED,
}

# The widest a duration of a job may be, in seconds: a week. Longer ones are typing errors.
DURATION_MAX_S = 7 * 24 * 3600.0
# Nodes that speak more often would be a load, and one late message would be a lost node.
HEARTBEAT_MIN_S = 0.05
# The most worker processes of one node; the largest hosts have a few hundred cores.
SLOTS_MAX = 4096
LEASE_INTERVALS_MIN = 2  # heartbeats; with fewer, one late message is a lost node
# Longest identity: ours have 32 characters.
UID_BYTES = 256
# Longest address: a host name has at most 253 characters.
ADDRESS_BYTES = 256
DIGEST_BYTES = 64
NOTICE_BYTES = 8192  # ours names a dozen nodes at most
# What is counted: a 32-bit field has room for one more, and for the sum of two.
COUNT_MAX = 2**31 - 1
# Numbers of rounds and of streams, and milliseconds of a long life: exact in JSON and in floats, and far from 2^64.
NUMBER_MAX = 2**53
# Processes of one host: the largest pid that Linux gives.
PIDS_MAX = 2**22
EXIT_CODE_MAX = 255
SIGNAL_MAX = 127  # a launcher that fails so exits with 128 and the signal
PORT_MAX = 65535
U32_MAX = 2**32 - 1


# -------------------------------------------------------------------------------------------------------- upstream


class Specs(Struct, frozen=True):
    """What a node said of its job and of itself when its stream began."""

    job: model.JobSpec
    node: model.NodeSpec
    unfit: str = ""  # why no job is to begin with this on this daemon


def node_heard(state: pb.NodeState, specs: Specs, limits: Limits) -> NodeHeard:
    """Return what the node says, with texts cut to their limits. Raises BadRequest where it makes no sense."""
    _check_name("run_id", state.run_id, limits.run_id_bytes, required=True)
    _check_name("node_uid", state.node_uid, UID_BYTES, required=True)
    _check_name("node_name", state.node_name, limits.name_bytes)
    _check_name("submission", state.submission, limits.name_bytes)
    _check_name("outcome_seen", state.outcome_seen, UID_BYTES)
    _check_name("seen.term", state.seen.term, UID_BYTES)
    _check_number("seen.revision", state.seen.revision, NUMBER_MAX)
    _check_number("stream_no", state.stream_no, NUMBER_MAX)
    _check_number("uptime_ms", state.uptime_ms, NUMBER_MAX)
    _check_number("lease_ms", state.lease_ms, int(LEASE_MAX_S * 1000))
    return NodeHeard(
        uid=model.NodeUid(state.node_uid),
        name=state.node_name or state.node_uid[:8],
        job_spec=specs.job,
        spec=specs.node,
        submission=state.submission,
        resumed=state.resumed,
        uptime_s=state.uptime_ms / 1000,
        lease_s=state.lease_ms / 1000,
        known=_known(state.known, specs.job.max_nodes, limits),
        held=_held(state.held, limits) if state.HasField("held") else None,
        offer=_offer(state.offer) if state.HasField("offer") else None,
        leaving=cut(state.leaving.reason, limits.name_bytes, one_line=True) if state.HasField("leaving") else None,
        outcome_seen=state.outcome_seen,
        unfit=specs.unfit,
    )


def read_spec(spec: pb.Spec, timing: Timing, limits: Limits, takeover_s: float = 0.0) -> Specs:
    """Return what the first message of a stream says once for all. `takeover_s`: for how long there may be no daemon
    that leads. Raises BadRequest where it makes no sense.

    What only this daemon's own options stand against is no reason to refuse a node: its job may go on here, and began
    on a daemon with others. It is in `unfit`.
    """
    if not 1 <= spec.min_nodes <= spec.max_nodes:
        raise BadRequest(f"spec: need 1 <= min_nodes <= max_nodes, got {spec.min_nodes} and {spec.max_nodes}")
    unfit = []
    if spec.min_nodes > limits.nodes_per_job:
        unfit.append(
            f"spec.min_nodes: {spec.min_nodes} nodes are more than this daemon attends of one job "
            f"(--max-nodes-per-job={limits.nodes_per_job})"
        )
    _check_number("spec.max_nodes", spec.max_nodes, COUNT_MAX)
    _check_number("spec.max_restarts", spec.max_restarts, COUNT_MAX)
    _check_number("spec.node_rank", spec.node_rank, COUNT_MAX)
    if len(spec.entry_digest) > DIGEST_BYTES:
        raise BadRequest(f"spec.entry_digest has {len(spec.entry_digest)} bytes, more than {DIGEST_BYTES}")
    if not 1 <= spec.slots <= SLOTS_MAX:
        raise BadRequest(f"spec.slots: need 1 to {SLOTS_MAX}, got {spec.slots}")
    _check_name("spec.role", spec.role, limits.name_bytes)
    _check_name("spec.topology", spec.topology, limits.name_bytes)
    on_daemon_loss = _choice("spec.on_daemon_loss", DAEMON_LOSSES, spec.on_daemon_loss)
    timing, given = job_timing(spec.timeouts, timing)
    if timing.lease_intervals < LEASE_INTERVALS_MIN:
        unfit.append(
            f"spec.timeouts: a lease of {timing.lease_s:g} s is less than two heartbeats of {timing.heartbeat_s:g} s"
        )
    if on_daemon_loss is model.OnDaemonLoss.STOP:
        if "lease_s" not in given:
            timing = fence.fenced_timing(timing, takeover_s)
        elif timing.lease_s <= fence.lease_min_s(timing, takeover_s):
            unfit.append(_lease_too_short(timing, takeover_s))
    job = model.JobSpec(
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        max_restarts=spec.max_restarts,
        on_daemon_loss=on_daemon_loss,
        grow=_choice("spec.grow", GROWS, spec.grow),
        timing=timing,
        given=given,
    )
    node = model.NodeSpec(
        slots=spec.slots,
        role=spec.role,
        node_rank=spec.node_rank if spec.HasField("node_rank") else None,
        topology=spec.topology,
        stop_grace_s=min(spec.stop_grace_ms / 1000, DURATION_MAX_S),
    )
    return Specs(job, node, "; ".join(unfit))


def job_timing(timeouts: pb.Timeouts, timing: Timing) -> tuple[Timing, tuple[str, ...]]:
    """Return the daemon's durations with what the node gives instead, and the names of these. Raises BadRequest."""
    seconds = {
        "join_s": timeouts.join_ms,
        "settle_s": timeouts.settle_ms,
        "settle_max_s": timeouts.settle_max_ms,
        "grow_s": timeouts.grow_ms,
        "grow_max_s": timeouts.grow_max_ms,
        "heartbeat_s": timeouts.heartbeat_ms,
        "short_round_s": timeouts.short_round_ms,
    }
    wanted = {name: ms / 1000 for name, ms in seconds.items() if ms}
    for name, value in (*wanted.items(), ("lease_s", timeouts.lease_ms / 1000)):
        if value > DURATION_MAX_S:
            raise BadRequest(f"spec.timeouts.{name.removesuffix('s')}ms: {value:g} s are more than a week")
    if 0 < timeouts.heartbeat_ms < HEARTBEAT_MIN_S * 1000:
        raise BadRequest(
            f"spec.timeouts.heartbeat_ms: a heartbeat every {timeouts.heartbeat_ms} ms is too often; need at least "
            f"{HEARTBEAT_MIN_S * 1000:g} ms"
        )
    if wanted:
        timing = replace(timing, **wanted)
    _check_number("spec.timeouts.short_rounds_max", timeouts.short_rounds_max, COUNT_MAX)
    if timeouts.short_rounds_max:
        timing = replace(timing, short_rounds_max=timeouts.short_rounds_max)
    if timeouts.lease_ms:
        timing = replace(timing, lease_intervals=timeouts.lease_ms / 1000 / timing.heartbeat_s)
    if timing.lease_s > LEASE_MAX_S:
        raise BadRequest(
            f"spec.timeouts: a lease of {timing.lease_s:g} s ({timing.lease_intervals:g} heartbeats of "
            f"{timing.heartbeat_s:g} s) is more than a week"
        )
    more = {"short_rounds_max": timeouts.short_rounds_max, "lease_s": timeouts.lease_ms}
    return timing, (*wanted, *(name for name, value in more.items() if value))


def _lease_too_short(timing: Timing, takeover_s: float) -> str:
    """Return why this lease will not do for a job whose workers end with it."""
    least_s = fence.lease_min_s(timing, takeover_s)
    failover = f"{takeover_s:g} s of failover (twice --leader-ttl, and 1 s to campaign), " if takeover_s else ""
    return (
        f"--on-daemon-loss=stop with a lease of {timing.lease_s:g} s: it must be more than {least_s:.3g} s, or workers "
        f"are stopped though a daemon comes back in time. It is {1 / fence.KEPT:.3g} times the sum of a heartbeat of "
        f"{timing.heartbeat_s:g} s, {failover}a pause of 1 s before the next call and a round trip of "
        f"{fence.ROUND_TRIP_S:g} s. Set --rdzv-conf lease={int(least_s) + 1} (keep_alive_interval times "
        "keep_alive_max_attempt), or leave it out" + (", or lower the daemons' --leader-ttl" if takeover_s else "")
    )


def _held(held: pb.Held, limits: Limits) -> model.Held:
    _check_number("held.alive", held.alive, PIDS_MAX)
    return model.Held(
        round_uid=RoundUid(held.assignment.round_uid),
        round=held.assignment.round,
        phase=_choice("held.phase", PHASES, held.phase),
        alive=held.alive,
        failures=tuple(_failure(f, limits) for f in held.failures[: limits.failures_per_node]),
        master_unreachable=held.master_unreachable,
        store_lost=held.store_lost,
        assignment=_assignment(held.assignment, limits),
    )


def _assignment(told: pb.Assigned, limits: Limits) -> model.Assignment:
    _check_name("held.assignment.round_uid", told.round_uid, UID_BYTES)
    _check_number("held.assignment.round", told.round, NUMBER_MAX)
    _check_size("held.assignment.group_size", told.group_size, limits)
    if told.group_rank >= max(1, told.group_size):
        raise BadRequest(
            f"held.assignment.group_rank: {told.group_rank} is no rank of a group of {told.group_size} nodes"
        )
    _check_number("held.assignment.slots", told.slots, SLOTS_MAX)
    _check_number("held.assignment.first_rank", told.first_rank, COUNT_MAX)
    _check_number("held.assignment.world_size", told.world_size, COUNT_MAX)
    _check_number("held.assignment.role_first_rank", told.role_first_rank, COUNT_MAX)
    _check_number("held.assignment.role_world_size", told.role_world_size, COUNT_MAX)
    _check_number("held.assignment.restart_count", told.restart_count, COUNT_MAX)
    _check_number("held.assignment.max_restarts", told.max_restarts, COUNT_MAX)
    _check_name("held.assignment.master_addr", told.master_addr, ADDRESS_BYTES)
    _check_number("held.assignment.master_port", told.master_port, PORT_MAX)
    _check_name("held.assignment.master_offer_id", told.master_offer_id, UID_BYTES)
    _check_name("held.assignment.store_generation", told.store_generation, UID_BYTES)
    _check_name("held.assignment.notice", told.notice, NOTICE_BYTES)
    return model.Assignment(
        group_rank=told.group_rank,
        group_size=told.group_size,
        first_rank=told.first_rank,
        slots=told.slots,
        world_size=told.world_size,
        role_first_rank=told.role_first_rank,
        role_world_size=told.role_world_size,
        restart_count=told.restart_count,
        master_addr=told.master_addr,
        master_port=told.master_port,
        master_offer_id=told.master_offer_id,
    )


def _failure(failure: pb.Failure, limits: Limits) -> Failure:
    _check_number("held.failures.rank", failure.rank, COUNT_MAX)
    _check_number("held.failures.local_rank", failure.local_rank, COUNT_MAX)
    _check_number("held.failures.exit_code", failure.exit_code, EXIT_CODE_MAX)
    _check_number("held.failures.signal", failure.signal, SIGNAL_MAX)
    _check_number("held.failures.age_ms", failure.age_ms, NUMBER_MAX)
    return Failure(
        rank=failure.rank,
        local_rank=failure.local_rank,
        exit_code=failure.exit_code,
        signal=failure.signal,
        text=cut(failure.text, limits.error_text_bytes),
        age_s=failure.age_ms / 1000,
        victim_hint=failure.victim_hint,
        kind=cut(failure.kind, limits.name_bytes),
    )


def _offer(offer: pb.Offer) -> model.Offer:
    _check_name("offer.offer_id", offer.offer_id, UID_BYTES, required=True)
    _check_name("offer.after_round_uid", offer.after_round_uid, UID_BYTES)
    _check_name("offer.address", offer.address, ADDRESS_BYTES, required=True)
    if not 1 <= offer.port <= PORT_MAX:
        raise BadRequest(f"offer.port: need 1 to {PORT_MAX}, got {offer.port}")
    return model.Offer(
        offer_id=offer.offer_id,
        after=RoundUid(offer.after_round_uid),
        address=offer.address,
        port=offer.port,
    )


def _known(known: pb.Known, max_nodes: int, limits: Limits) -> model.Known:
    _check_name("known.job_uid", known.job_uid, UID_BYTES)
    _check_name("known.round_uid", known.round_uid, UID_BYTES)
    _check_name("known.charged_round_uid", known.charged_round_uid, UID_BYTES)
    _check_number("known.round", known.round, NUMBER_MAX)
    _check_number("known.charged_round", known.charged_round, NUMBER_MAX)
    _check_number("known.restarts_used", known.restarts_used, COUNT_MAX)
    _check_size("known.group_size", known.group_size, limits)
    if known.group_size > max_nodes:
        raise BadRequest(f"known.group_size: {known.group_size} nodes are more than spec.max_nodes, {max_nodes}")
    return model.Known(
        job_uid=model.JobUid(known.job_uid),
        round=known.round,
        round_uid=RoundUid(known.round_uid),
        group_size=known.group_size,
        restarts_used=known.restarts_used,
        charged_round=known.charged_round,
        charged_round_uid=RoundUid(known.charged_round_uid),
    )


def _choice(name: str, choices: dict[int, T], number: int) -> T:
    try:
        return choices[number]
    except KeyError:
        raise BadRequest(f"{name}: {number} is none of {sorted(choices)}") from None


def _check_name(name: str, value: str, limit: int, *, required: bool = False) -> None:
    if required and not value:
        raise BadRequest(f"{name} is empty")
    if (size := len(value.encode())) > limit:
        raise BadRequest(f"{name} has {size} bytes, more than {limit}")


def _check_number(name: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise BadRequest(f"{name}: need 0 to {most}, got {value}")


def _check_size(name: str, nodes: int, limits: Limits) -> None:
    if nodes > limits.nodes_per_job:
        raise BadRequest(
            f"{name}: {nodes} nodes are more than this daemon attends of one job "
            f"(--max-nodes-per-job={limits.nodes_per_job})"
        )


def cut(text: str, limit: int, *, one_line: bool = False) -> str:
    """Return the text, cut in its middle to at most `limit` bytes; a note says how much was cut."""
    if one_line:
        text = " ".join(text.splitlines())
    raw = text.encode(errors="replace")
    if len(raw) <= limit:
        return text
    note = f"... {len(raw) - limit} bytes cut ..."
    note = f" {note} " if one_line else f"\n{note}\n"
    keep = max(0, limit - len(note)) // 2
    head, tail = raw[:keep].decode(errors="ignore"), raw[len(raw) - keep :].decode(errors="ignore")
    return head + note + tail


# ------------------------------------------------------------------------------------------------------ downstream


def known_pb(known: model.Known, job_uid: str) -> pb.Known:
    return pb.Known(
        job_uid=job_uid,
        round=known.round,
        round_uid=known.round_uid,
        group_size=known.group_size,
        restarts_used=known.restarts_used,
        charged_round=known.charged_round,
        charged_round_uid=known.charged_round_uid,
    )


def cause_pb(cause: model.Cause, *, final: bool) -> pb.BreakCause:
    text = f"{cause.text}; {cause.note}" if cause.note else cause.text
    message = pb.BreakCause(kind=CAUSES[cause.kind], node_uid=cause.uid, node_name=cause.name, text=text, final=final)
    if cause.failure is not None:
        message.failure.CopyFrom(_failure_pb(cause.failure))
    return message


def _failure_pb(failure: Failure) -> pb.Failure:
    return pb.Failure(
        rank=failure.rank,
        local_rank=failure.local_rank,
        exit_code=failure.exit_code,
        signal=failure.signal,
        text=failure.text,
        age_ms=int(failure.age_s * 1000),
        victim_hint=failure.victim_hint,
        kind=failure.kind,
    )


def ended_pb(ending: Ending) -> pb.Ended:
    message = pb.Ended(outcome=OUTCOMES[ending.outcome], exit_code=ending.exit_code, may_exit=ending.may_exit)
    if ending.cause is not None:
        message.root_cause.CopyFrom(cause_pb(ending.cause, final=True))
    return message


def status_pb(place: Place, max_restarts: int, generation: str) -> pb.Place:
    """Return a Place with nothing but the status of this one node."""
    match place:
        case Assigned():
            return pb.Place(assigned=_assigned_pb(place, max_restarts, generation))
        case Waiting():
            left_ms = 0 if place.left_s is None else min(max(1, int(place.left_s * 1000)), U32_MAX)
            return pb.Place(waiting=pb.Waiting(reason=WAITS[place.reason], left_ms=left_ms))
        case Ending():
            return pb.Place(ended=ended_pb(place))
        case Departure():
            return pb.Place(removed=pb.Removed(by=place.by, reason=place.reason, exit_code=place.exit_code))


def _assigned_pb(place: Assigned, max_restarts: int, generation: str) -> pb.Assigned:
    round_, seat = place.round, place.seat
    return pb.Assigned(
        round=round_.number,
        round_uid=round_.uid,
        group_rank=seat.group_rank,
        group_size=len(round_.seats),
        first_rank=seat.first_rank,
        slots=seat.slots,
        world_size=round_.world_size,
        role_first_rank=seat.role_first_rank,
        role_world_size=seat.role_world_size,
        restart_count=round_.restart_count,
        max_restarts=max_restarts,
        master_addr=round_.master.address,
        master_port=round_.master.port,
        master_offer_id=round_.master.offer_id,
        store_generation=generation,
        notice=round_.notice,
    )
