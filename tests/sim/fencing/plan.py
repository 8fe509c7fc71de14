"""What befalls everybody in one schedule, and what all schedules have in common."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from rendezvousd.core.codec import dump
from rendezvousd.core.events import NodeHeard
from rendezvousd.core.model import (
    Assignment,
    Held,
    Job,
    NodeSpec,
    NodeUid,
    Offer,
    OnDaemonLoss,
    Phase,
    RoundUid,
)
from rendezvousd.core.rules import fence
from rendezvousd.rpc.rendezvous import SEQ_BYTES, SEQ_TAG
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.stage import Stage

HEARTBEAT_S = 1.0
LEASE_S = 4.0
KILL_S = 1.0
STOP_GRACE_S = 6.0
LEADER_TTL_S = 2.0
HORIZON_S = 60.0
NEVER = float("inf")
NO_TIME_S = 1e-9  # what sums of numbers may be off by
TIMES = {"lease_intervals": LEASE_S / HEARTBEAT_S, "kill_s": KILL_S, "recovery_s": 4.0, "recovery_max_s": 8.0}


def _first_round() -> tuple[Stage, Job, RoundUid]:
    stage = Stage("1:2", on_daemon_loss=OnDaemonLoss.STOP, settle_s=0.5, settle_max_s=1.0, **TIMES)  # type: ignore[arg-type]
    stage.run("n", "m", stop_grace_s=STOP_GRACE_S)
    return stage, stage.job, stage.round.uid


STAGE, JOB, ROUND = _first_round()
NODE, OTHER = (player.uid for player in STAGE.players)
KNOWN = JOB.known
RECORD = dump(JOB)
SPEC = NodeSpec(stop_grace_s=STOP_GRACE_S)


@dataclass(frozen=True, slots=True)
class Clock:
    """Goes `rate` seconds in one, from `offset` on."""

    rate: float
    offset: float

    def read(self, t: float) -> float:
        return self.offset + self.rate * t

    def when(self, reading: float) -> float:
        return (reading - self.offset) / self.rate


@dataclass(frozen=True, slots=True)
class Message:
    """What the node says, by a word for how its worker is."""

    stream: int
    seq: int
    word: str
    lease_s: float  # that it was last told


class Plan:
    """What befalls everybody in one schedule."""

    def __init__(self, rng: random.Random) -> None:
        chance = rng.random
        self.delay_s = rng.choice((0.0, 0.001, 0.05, rng.uniform(0.0, 1.0)))
        self.late = rng.choice((0.0, 0.0, 0.1, 0.3))
        self.loss = rng.choice((0.0, 0.0, 0.1))
        self.cut_at = rng.uniform(0.5, 5.0) if chance() < 0.85 else NEVER
        self.mended_at = self.cut_at + rng.uniform(0.0, 15.0) if chance() < 0.5 else NEVER
        self.cuts = rng.choice(("both", "both", "up", "down"))
        self.holds = chance() < 0.5
        self.noticed = chance() < 0.3  # the daemon's end of the stream breaks with the cut
        self.launcher_pause = _pause(rng, 0.35)
        self.daemon_pause = _pause(rng, 0.25)
        self.other_pause = _pause(rng, 0.1)
        self.failover_at = rng.uniform(1.0, 9.0) if chance() < 0.45 else NEVER
        self.forgets = chance() < 0.3
        # Less than none: one takes over while the other still takes itself for the leader.
        self.interregnum_s = rng.choice((0.0, 0.0, rng.uniform(0.0, 3.0), -rng.uniform(0.0, LEADER_TTL_S)))
        self.interregnum_s = max(0.0, self.interregnum_s) if self.forgets else self.interregnum_s
        # Where that cannot be, the time that is allowed for it would hide what else is wrong.
        exact = self.interregnum_s >= 0.0 and chance() < 0.8
        self.overlap_s = 0.0 if exact else fence.overlap_s(LEADER_TTL_S)
        self.all_new = chance() < 0.5
        self.restart_at = rng.uniform(0.5, 8.0) if chance() < 0.3 else NEVER
        # A daemon that forgets, and hears of nobody, reckons with the lease that it was itself configured for.
        longer = chance() < 0.2 and not (self.forgets and self.all_new)
        self.longer_lease_at = rng.uniform(0.0, 4.0) if longer else NEVER
        self.slow_writes_s = rng.choice((0.0, 0.0, 0.05, rng.uniform(0.0, 9.0)))
        self.other_writes_s = self.slow_writes_s  # of the daemon that leads next
        self.stall_s = rng.choice((0.0, 0.0, rng.uniform(0.0, 3.0)))  # of a daemon in the midst of an answer
        self.born_at = 0.0 if chance() < 0.8 else rng.uniform(0.0, 6.0)
        self.obeys = chance() < 0.4  # the worker ends when it is told to
        self.stuck = chance() < 0.15  # the regular stop does not work
        self.fails_at = rng.uniform(0.5, 6.0) if chance() < 0.15 else NEVER  # a first worker does, and one is left
        self.moves_at = rng.uniform(1.0, 12.0) if chance() < 0.2 else NEVER  # the node tries another daemon, unasked
        if longer and self.failover_at < NEVER and chance() < 0.5:
            self._longer_lease_is_lost(rng)
        elif self.failover_at < NEVER and chance() < 0.1:
            self._leader_is_stuck(rng)
        self.dies_after_s = rng.choice((KILL_S, KILL_S, rng.uniform(0.0, KILL_S)))

    def _longer_lease_is_lost(self, rng: random.Random) -> None:
        """The leader dies while it writes what lease it is going to tell, and soon the node hears nobody."""
        self.interregnum_s = self.overlap_s = self.other_writes_s = 0.0
        self.longer_lease_at = self.failover_at - rng.uniform(0.0, 2.0)
        self.slow_writes_s = rng.uniform(0.0, 4.0)
        self.cut_at = self.failover_at + rng.uniform(-1.0, 1.0)
        self.mended_at = NEVER

    def _leader_is_stuck(self, rng: random.Random) -> None:
        """The leader is followed while it answers, and soon the node hears nobody."""
        self.interregnum_s = self.overlap_s = self.other_writes_s = 0.0
        self.stall_s = rng.uniform(0.3, 1.5)
        self.cut_at = self.failover_at + rng.uniform(1.0, 2.0) * self.stall_s
        self.mended_at = NEVER


def _pause(rng: random.Random, chance: float) -> tuple[float, float]:
    if rng.random() >= chance:
        return NEVER, NEVER
    begins_at = rng.uniform(0.0, 8.0)
    return begins_at, begins_at + rng.uniform(0.0, 14.0)


def over(t: float, pause: tuple[float, float]) -> float:
    """Return when somebody with this pause gets to do what is due at `t`."""
    return pause[1] if pause[0] <= t < pause[1] else t


# ------------------------------------------------------------------------------------------------ what is said


def _seat(uid: NodeUid) -> Assignment:
    round_ = STAGE.round
    seat, master = round_.seats[round_.index[uid]], round_.master
    return Assignment(
        group_rank=seat.group_rank,
        group_size=len(round_.seats),
        first_rank=seat.first_rank,
        slots=seat.slots,
        world_size=round_.world_size,
        role_first_rank=seat.role_first_rank,
        role_world_size=seat.role_world_size,
        restart_count=0,
        master_addr=master.address,
        master_port=master.port,
        master_offer_id=master.offer_id,
    )


SEATS = {uid: _seat(uid) for uid in (NODE, OTHER)}
PHASES = {
    "running": (Phase.RUNNING, 1),
    "stopping": (Phase.STOPPING, 1),
    "failed": (Phase.FAILED, 1),
    "over": (Phase.FAILED, 0),
    "fenced": (Phase.FENCED, 0),
    "stopped": (Phase.STOPPED, 0),
}


def says(uid: NodeUid, name: str, word: str, lease_s: float = 0.0) -> NodeHeard:
    held: Held | None = None
    offer: Offer | None = Offer(offer_id=f"{name} anew", after=RoundUid(""), address="h", port=1)
    if word != "new":
        phase, alive = PHASES[word]
        held = Held(round_uid=ROUND, round=1, phase=phase, alive=alive, assignment=SEATS[uid])
        offer = None if alive else Offer(offer_id=f"{name} anew", after=ROUND, address="h", port=1)
    return NodeHeard(
        uid=uid,
        name=name,
        job_spec=STAGE.spec,
        spec=SPEC,
        resumed=True,
        lease_s=lease_s,
        known=KNOWN,
        held=held,
        offer=offer,
    )


@lru_cache(maxsize=4096)
def _state(stream: int, word: str, lease_s: float) -> bytes:
    """Return what the node says, but for the number of the message."""
    phase, alive = PHASES[word]
    seat = SEATS[NODE]
    held = pb.Held(phase=pb.HeldPhase.Value(phase.name), alive=alive)
    held.assignment.round, held.assignment.round_uid = 1, ROUND
    for name in seat.__struct_fields__:
        setattr(held.assignment, name, getattr(seat, name))
    spec = pb.Spec(
        min_nodes=STAGE.spec.min_nodes,
        max_nodes=STAGE.spec.max_nodes,
        slots=SPEC.slots,
        stop_grace_ms=int(STOP_GRACE_S * 1000),
        on_daemon_loss=pb.ON_DAEMON_LOSS_STOP,
    )
    known = pb.Known(job_uid=KNOWN.job_uid, round=KNOWN.round, round_uid=KNOWN.round_uid, group_size=KNOWN.group_size)
    state = pb.NodeState(
        run_id=JOB.run_id,
        node_uid=NODE,
        node_name="n",
        stream_no=stream,
        resumed=True,
        lease_ms=int(lease_s * 1000),
        known=known,
        spec=spec,
        held=held,
    )
    if not alive:
        state.offer.CopyFrom(pb.Offer(offer_id="n anew", after_round_uid=ROUND, address="h", port=1))
    return state.SerializeToString()


def sent(message: Message) -> bytes:
    """Return the message as it goes over the wire."""
    state = _state(message.stream, message.word, message.lease_s)
    return state + SEQ_TAG + message.seq.to_bytes(SEQ_BYTES, "little")


def other_says(word: str, lease_s: float = 0.0) -> NodeHeard:
    return says(OTHER, "m", word, lease_s)
