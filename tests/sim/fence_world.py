"""One node with a worker, and daemons that may want to give its place to another: any schedule of what can go wrong.

True time is the simulation's; no node or daemon sees it, only a clock of its own that goes a little too fast or too
slow. Everything that decides is the real thing: how long a node's worker may live (`rdzv.fence`), and when the next
round is sealed (`rendezvousd.core`, whole). What is modelled here is what lies between: messages, the node's launcher
and watchdog, and the order in which a daemon reads, checks that it leads, folds, writes and answers (`rendezvousd.
engine`, `rendezvousd.rpc.rendezvous`).

The judge asks one question: was the worker gone before the one that takes its place began?
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rdzv.fence import Fence, Sendings
from rendezvousd.core.codec import dump, load
from rendezvousd.core.events import Event, NodeHeard, NodeLost, RestartAsked, StreamBroke, TimePassed
from rendezvousd.core.machine import step, wakes_at
from rendezvousd.core.model import (
    Assignment,
    Held,
    Job,
    JobUid,
    Known,
    NodeSpec,
    NodeUid,
    Offer,
    OnDaemonLoss,
    Phase,
    RoundUid,
)
from rendezvousd.core.place import valid_round_uid
from rendezvousd.core.rules import fence
from rendezvousd.core.rules.admit import found
from tests.stage import Stage

HEARTBEAT_S = 1.0
LEASE_S = 4.0
KILL_S = 1.0
STOP_GRACE_S = 6.0
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
BEGAN_AT = STAGE.now
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


class World:
    """One schedule. `run` plays it, and returns by how much the worker outlived the beginning of its successor."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.t = 0.0
        self.successor_at = NEVER
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.plan = Plan(rng)
        self.daemons: list[Daemon] = []
        self.node = Node(self)
        self._found_daemons()

    def at(self, t: float, what: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (max(t, self.t), self._order, what))

    def run(self) -> float:
        """Return the overlap in seconds; 0: there is none."""
        while self._queue:
            t, _, what = heapq.heappop(self._queue)
            if t > HORIZON_S or (self.successor_at < NEVER and self.node.gone_at < NEVER):
                break
            self.t = t
            what()
        overlap_s = min(self.node.gone_at, HORIZON_S) - self.successor_at if self.node.was_born else 0.0
        return overlap_s if overlap_s > NO_TIME_S else 0.0

    def _found_daemons(self) -> None:
        plan = self.plan
        first = Daemon(self, self.clock(BEGAN_AT), ends_at=plan.failover_at, pauses=plan.daemon_pause)
        first.begin(JOB)
        self.daemons.append(first)
        if plan.failover_at < NEVER:
            self.at(plan.failover_at + plan.interregnum_s, self._another_leads)
        if plan.restart_at < NEVER:
            self.at(plan.restart_at, lambda: self.daemons[-1].post(RestartAsked(by="op", reason="")))
        if plan.longer_lease_at < NEVER:
            said = other_says("running", lease_s=LEASE_S * 2)
            self.at(plan.longer_lease_at, lambda: self.daemons[-1].post(said))

    def _another_leads(self) -> None:
        plan, last = self.plan, self.daemons[0]
        new = Daemon(self, self.clock(0.0), ends_at=NEVER, pauses=plan.other_pause)
        self.daemons.append(new)
        now = new.now()
        if plan.forgets:
            new.begin(None)
            if plan.all_new:
                new.post(replace(other_says("new"), uid=NodeUid("fresh"), known=Known(), held=None))
            else:
                new.post(other_says("running", lease_s=last.room.lease_s))
        else:
            record = dump(last.room_or_none or JOB)
            new.begin(load(record.head, record.parts, seed="second", now=now))
            new.post(other_says("running" if valid_round_uid(new.room) == ROUND else "stopped"))

    def clock(self, offset: float) -> Clock:
        """A clock that shows `offset` now."""
        rho = fence.CLOCK_RATE
        rate = self.rng.choice((1 - rho, 1 - rho, 1.0, 1 + rho, 1 + rho, self.rng.uniform(1 - rho, 1 + rho)))
        return Clock(rate, offset - rate * self.t)

    # ------------------------------------------------------------------------------------------------ the network

    def carry(self, *, up: bool, deliver: Callable[[], None]) -> None:
        """Bring a message over: at once, late, when the cable is mended, or never."""
        plan, rng = self.plan, self.rng
        delay_s = rng.choice((0.0, 0.0, plan.delay_s)) if rng.random() > plan.late else rng.uniform(0.0, 6.0)
        if plan.cut_at <= self.t < plan.mended_at and plan.cuts in ("both", "up" if up else "down"):
            if not plan.holds or plan.mended_at == NEVER:
                return
            delay_s += plan.mended_at - self.t
        elif rng.random() < plan.loss:
            return
        self.at(self.t + delay_s, deliver)


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
        self.interregnum_s = rng.choice((0.0, 0.0, rng.uniform(0.0, 3.0)))
        self.forgets = chance() < 0.3
        self.all_new = chance() < 0.5
        self.restart_at = rng.uniform(0.5, 8.0) if chance() < 0.3 else NEVER
        # A daemon that forgets, and hears of nobody, reckons with the lease that it was itself configured for.
        longer = chance() < 0.2 and not (self.forgets and self.all_new)
        self.longer_lease_at = rng.uniform(0.0, 4.0) if longer else NEVER
        self.slow_writes_s = rng.choice((0.0, 0.0, 0.05, rng.uniform(0.0, 9.0)))
        self.stall_s = rng.choice((0.0, 0.0, rng.uniform(0.0, 3.0)))  # of a daemon in the midst of an answer
        self.born_at = 0.0 if chance() < 0.8 else rng.uniform(0.0, 6.0)
        self.obeys = chance() < 0.4  # the worker ends when it is told to
        self.stuck = chance() < 0.15  # the regular stop does not work
        self.fails_at = rng.uniform(0.5, 6.0) if chance() < 0.15 else NEVER  # a first worker does, and one is left
        self.moves_at = rng.uniform(1.0, 12.0) if chance() < 0.2 else NEVER  # the node tries another daemon, unasked
        self.dies_after_s = rng.choice((KILL_S, KILL_S, rng.uniform(0.0, KILL_S)))


def _pause(rng: random.Random, chance: float) -> tuple[float, float]:
    if rng.random() >= chance:
        return NEVER, NEVER
    begins_at = rng.uniform(0.0, 8.0)
    return begins_at, begins_at + rng.uniform(0.0, 14.0)


def over(t: float, pause: tuple[float, float]) -> float:
    """Return when somebody with this pause gets to do what is due at `t`."""
    return pause[1] if pause[0] <= t < pause[1] else t


# ---------------------------------------------------------------------------------------------------- the node


class Node:
    """A launcher, its watchdog, and the worker of ROUND."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.plan = world.plan
        self.clock = world.clock(world.rng.uniform(0.0, 1e4))
        self.fence = Fence(round_uid=ROUND)
        self.sendings = Sendings()
        self.stream, self.seq, self.target = 1, 0, 0
        self.was_born = False
        self.gone_at = NEVER
        self.word = "running"
        self.stopping = False
        self.fenced = False
        self.watched = NEVER  # the end of the lease, as the watchdog was told
        self.fired = False  # the watchdog: nothing is there any more that could start anything
        self.heard_at = 0.0
        self.told_s = LEASE_S
        world.at(0.0, self._dealt)

    def now(self) -> float:
        return self.clock.read(self.world.t)

    def _dealt(self) -> None:
        """The place that dealt the round came as the answer to a heartbeat that was just sent."""
        self._renew(ROUND, self.now(), LEASE_S)
        self.world.at(self.plan.born_at, self._born)
        self.world.at(0.0, self._tick)
        if self.plan.fails_at < NEVER:
            self.world.at(self.plan.fails_at, self._fails)
        if self.plan.moves_at < NEVER:
            self.world.at(self.plan.moves_at, self._move)

    def _born(self) -> None:
        if self.stopping or self.fired or self.now() >= self.fence.term_at(STOP_GRACE_S):
            if self.gone_at == NEVER:
                self.gone_at = self.world.t
            return
        self.was_born = True

    def _fails(self) -> None:
        if self.was_born and not self.stopping and self.gone_at == NEVER:
            self.word = "failed"
            self._stop(STOP_GRACE_S)

    # ------------------------------------------------------------------------------------------------ speaking

    def _tick(self) -> None:
        world = self.world
        if (t := over(world.t, self.plan.launcher_pause)) > world.t:
            world.at(t, self._tick)
            return
        if self.now() - self.heard_at > 2.2 * HEARTBEAT_S:
            self._move()
        self._say()
        world.at(self.clock.when(self.now() + HEARTBEAT_S), self._tick)

    def _say(self) -> None:
        self.seq += 1
        self.sendings.sent(self.seq, self.now())
        message = Message(self.stream, self.seq, self._word(), self.told_s)
        daemon = self.world.daemons[self.target % len(self.world.daemons)]
        self.world.carry(up=True, deliver=lambda: daemon.arrives(message))

    def _word(self) -> str:
        if self.gone_at <= self.world.t:
            return "over" if self.word == "failed" else "fenced" if self.fenced else "stopped"
        return self.word

    def _move(self) -> None:
        """Leave the stream, and open another one."""
        self.target += 1
        self.stream, self.seq, self.sendings, self.heard_at = self.stream + 1, 0, Sendings(), self.now()

    # ------------------------------------------------------------------------------------------------ hearing

    def answered(self, stream: int, seq: int, valid: RoundUid, lease_s: float) -> None:
        if (t := over(self.world.t, self.plan.launcher_pause)) > self.world.t:
            self.world.at(t, lambda: self.answered(stream, seq, valid, lease_s))
            return
        if stream != self.stream:
            return  # that stream was left
        self.heard_at, self.told_s = self.now(), lease_s
        self._check()
        sent_at = self.sendings.answered(seq)
        if sent_at is not None and not self.fenced:
            self._renew(valid, sent_at, lease_s)
        if valid != ROUND:
            self._stop(STOP_GRACE_S)

    def _renew(self, valid: RoundUid, sent_at: float, lease_s: float) -> None:
        renewed = self.fence.renewed(valid, sent_at, lease_s)
        if renewed is self.fence:
            return
        self.fence = renewed
        self.watched = renewed.until
        self.world.at(self.clock.when(self.watched), self._watchdog)
        self.world.at(self.clock.when(renewed.term_at(STOP_GRACE_S)), self._check)

    # ------------------------------------------------------------------------------------------------ stopping

    def _check(self) -> None:
        """The launcher looks whether the lease ends."""
        if (t := over(self.world.t, self.plan.launcher_pause)) > self.world.t:
            self.world.at(t, self._check)
        elif not self.stopping and self.now() >= self.fence.term_at(STOP_GRACE_S) - 1e-9:
            self.fenced = True
            self._stop(max(0.0, self.fence.kill_at() - self.now()))

    def _stop(self, grace_s: float) -> None:
        """TERM, and after the grace KILL."""
        if self.stopping:
            return
        self.stopping = True
        self.word = self.word if self.word == "failed" else "stopping"
        if self.plan.obeys:
            self.world.at(self.world.t + self.world.rng.uniform(0.0, 1.0), self._gone)
        if not self.plan.stuck:
            self.world.at(self.clock.when(self.now() + grace_s), self._kill)

    def _watchdog(self) -> None:
        if self.now() >= self.watched - 1e-9:
            self.fired = True
            self._kill()

    def _kill(self) -> None:
        self.world.at(self.world.t + self.plan.dies_after_s, self._gone)

    def _gone(self) -> None:
        if self.gone_at == NEVER:
            self.gone_at = self.world.t


# ---------------------------------------------------------------------------------------------------- the daemon


@dataclass(slots=True)
class Row:
    """The node, as a daemon attends it: engine's Attendance."""

    stream: int
    read_at: float
    lease_s: float
    word: str = ""
    told_s: float = 0.0
    broken_at: float | None = None


@dataclass(eq=False)
class Daemon:
    """One term of one daemon. It leads until `ends_at`, whether it knows or not."""

    world: World
    clock: Clock
    ends_at: float
    pauses: tuple[float, float]
    room_or_none: Job | None = None
    row: Row | None = None
    withheld: bool = False
    _inbox: list[Event] = field(default_factory=list)
    _writing: bool = False

    def now(self) -> float:
        return self.clock.read(self.world.t)

    @property
    def room(self) -> Job:
        assert self.room_or_none is not None
        return self.room_or_none

    def begin(self, job: Job | None) -> None:
        """Attend a job that is on record, if any; its nodes count as heard now (Engine.take_over)."""
        if job is not None:
            patience_s = max(fence.pace(job).lease_s, job.spec.timing.recovery_s)
            self.room_or_none = job
            if NODE in job.nodes:
                self.row = Row(0, self.now(), patience_s)
                self._expect(self.row)
            self.post(TimePassed())
        if self.world.plan.noticed and self.world.plan.cut_at < NEVER:
            self.world.at(self.world.plan.cut_at, self._stream_broke)

    # ------------------------------------------------------------------------------------------------ reading

    def arrives(self, message: Message) -> None:
        t = over(self.world.t, self.pauses)
        if t > self.world.t:
            self.world.at(t, lambda: self.arrives(message))
        else:
            self.serve(message)

    def serve(self, message: Message) -> None:
        """As JoinStream: read; then, when the answer can be written, look whether this daemon leads; answer."""
        self.read(message)
        read_at, stall_s = self.world.t, self.world.plan.stall_s
        self.world.at(read_at + stall_s, lambda: self.answer(message, looked_at=self.world.t))

    def leads(self, at: float) -> bool:
        return at < self.ends_at

    def read(self, message: Message) -> None:
        now, row = self.now(), self.row
        if row is not None and message.stream < row.stream:
            return
        lease_s = fence.pace(self.room).lease_s if self.room_or_none is not None else LEASE_S
        if row is None or row.stream != message.stream or row.word != message.word or row.told_s != message.lease_s:
            self.row = Row(message.stream, now, lease_s, message.word, message.lease_s)
            self.post(_says(NODE, "n", message.word, message.lease_s))
            self._expect(self.row)
        else:
            row.read_at, row.lease_s, row.broken_at = now, lease_s, None

    def answer(self, message: Message, looked_at: float) -> None:
        job = self.room_or_none
        if not self.leads(looked_at) or job is None or self.withheld:
            return
        valid, lease_s = valid_round_uid(job), fence.pace(job).lease_s
        node = self.world.node
        self.world.carry(up=False, deliver=lambda: node.answered(message.stream, message.seq, valid, lease_s))

    # ------------------------------------------------------------------------------------------------ losing

    def _stream_broke(self) -> None:
        if self.row is not None and self.leads(self.world.t):
            self.row.broken_at = self.now()
            self.post(StreamBroke(uid=NODE))
            self._expect(self.row)

    def _expect(self, row: Row) -> None:
        """Look after the row when its time is up."""
        since, wait_s = (row.read_at, row.lease_s) if row.broken_at is None else (row.broken_at, 1.0)
        self.world.at(self.clock.when(since + wait_s), lambda: self._look_after(row, since + wait_s))

    def _look_after(self, row: Row, due_at: float) -> None:
        t = over(self.world.t, self.pauses)
        if t > self.world.t:  # after a pause what has arrived is read first
            self.world.at(t + 0.2, lambda: self._look_after(row, due_at))
        elif self.row is row and self.leads(self.world.t):
            since, wait_s = (row.read_at, row.lease_s) if row.broken_at is None else (row.broken_at, 1.0)
            if since + wait_s > self.now() + 1e-9:
                self._expect(row)
                return
            self.row = None
            self.post(NodeLost(uid=NODE, silent_s=self.now() - row.read_at, why="silent"))

    # ------------------------------------------------------------------------------------------------ fold and write

    def post(self, event: Event) -> None:
        self._inbox.append(event)
        self.world.at(self.world.t, self._fold)

    def _fold(self) -> None:
        """As Engine: fold what has come, write it, and only then let it be seen."""
        t = over(self.world.t, self.pauses)
        if t > self.world.t:
            self.world.at(t, self._fold)
            return
        if self._writing or not self._inbox or not self.leads(self.world.t):
            return
        letters, self._inbox = self._inbox, []
        job, now = self.room_or_none, self.now()
        for event in letters:
            job = self._folded(job, event, now)
        if job is None or job is self.room_or_none:
            self._wake()
            return
        if self.room_or_none is not None:
            self.withheld = valid_round_uid(self.room) not in ("", valid_round_uid(job))
        self._writing = True
        self.world.at(self.world.t + self.world.plan.slow_writes_s, lambda: self._written(job))

    def _folded(self, job: Job | None, event: Event, now: float) -> Job | None:
        if isinstance(event, NodeLost) and self.row is not None:
            event = replace(event, again_s=now - self.row.read_at)
        if job is None:
            if not isinstance(event, NodeHeard):
                return None
            job = found("run", event, uid=JobUid("other"), seed="other", now=now, remembers=False)
        return step(job, event, now)

    def _written(self, job: Job) -> None:
        if not self.leads(self.world.t):
            return  # refused: another daemon leads
        before, self.room_or_none = self.room_or_none, job
        self._writing = self.withheld = False
        valid = valid_round_uid(job)
        if job.running is not None and job.running.uid != ROUND:
            self.world.successor_at = min(self.world.successor_at, self.world.t)
        elif before is not None and valid_round_uid(before) == ROUND != valid:
            self.post(other_says("stopped"))
        self._wake()
        self.world.at(self.world.t, self._fold)

    def _wake(self) -> None:
        at = None if self.room_or_none is None else wakes_at(self.room)
        if at is not None:
            self.world.at(self.clock.when(max(at, self.now() + 1e-6)), lambda: self.post(TimePassed()))


# ---------------------------------------------------------------------------------------------------- what is said


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


def _says(uid: NodeUid, name: str, word: str, lease_s: float = 0.0) -> NodeHeard:
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


def other_says(word: str, lease_s: float = 0.0) -> NodeHeard:
    return _says(OTHER, "m", word, lease_s)
