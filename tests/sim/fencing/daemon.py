"""A daemon: in which order it reads, checks that it leads, folds, writes and answers. The real core decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rendezvousd.core.events import Event, NodeHeard, NodeLost, StreamBroke, TimePassed
from rendezvousd.core.machine import step, wakes_at
from rendezvousd.core.model import (
    Job,
    JobUid,
)
from rendezvousd.core.place import valid_round_uid
from rendezvousd.core.rules import fence
from rendezvousd.core.rules.admit import found
from tests.sim.fencing.plan import (
    LEASE_S,
    NEVER,
    NODE,
    ROUND,
    Clock,
    Message,
    other_says,
    over,
    says,
)

if TYPE_CHECKING:
    from tests.sim.fencing.world import World


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
    writes_s: float
    room_or_none: Job | None = None
    row: Row | None = None
    withheld: bool = False
    next_or_none: Job | None = None  # what is being written
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
            self.post(says(NODE, "n", message.word, message.lease_s))
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
        self._writing, self.next_or_none = True, job
        self.world.at(self.world.t + self.writes_s, lambda: self._written(job))

    def _folded(self, job: Job | None, event: Event, now: float) -> Job | None:
        if job is None:
            if not isinstance(event, NodeHeard):
                return None
            job = found("run", event, uid=JobUid("other"), seed="other", now=now, remembers=False)
        return step(job, event, now)

    def _written(self, job: Job) -> None:
        if not self.leads(self.world.t) or self is not self.world.daemons[-1]:
            return  # refused: another daemon leads
        before, self.room_or_none = self.room_or_none, job
        self._writing, self.withheld, self.next_or_none = False, False, None
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
