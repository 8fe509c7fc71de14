"""Which node is sent what, and when: jobs as everybody may see them, and the answers that their nodes are owed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rendezvousd.attendance import Clock, Stream, Table
from rendezvousd.core.events import Event, NodeHeard
from rendezvousd.core.explain import explain
from rendezvousd.core.liveness import Pace, pace
from rendezvousd.core.model import Job
from rendezvousd.core.rules import fence
from rendezvousd.core.settings import Limits, Timing

# An explanation has a countdown in it; so long it is used for all who ask.
EXPLAIN_FRESH_S = 0.5
# Jobs of so many nodes are explained anew after every change, and their nodes are answered at once.
SMALL_MAX = 64
# In a larger one most answers would be overtaken by what all are told soon: a node is answered within so long for each
# of them (s), while thousands arrive or stop, but well within the two heartbeats after which it takes the daemon for
# dead, and within half of what it gives a first place where it knows another daemon.
ANSWER_A_NODE_S = 0.0005
ANSWER_HEARTBEATS, ANSWER_MAX_S = 0.5, 2.5


@dataclass(eq=False, slots=True, weakref_slot=True)
class Room:
    """One job as everybody may see it: durable."""

    job: Job
    stored: int  # revision of its record
    revision: int  # of what its nodes must obey
    wakes_at: float | None = None
    watchers: set[asyncio.Event] = field(default_factory=set)
    withheld: bool = False  # nodes are not answered: what is being made durable breaks the round that would be named
    owed: dict[Stream, None] = field(default_factory=dict)  # streams that spoke and are yet to be answered ...
    pays_at: float | None = None  # ... then
    paced: tuple[Job, int, Pace] | None = None  # for this job and so many attended nodes in all
    trouble: str = ""  # a bug that was met in this job, for people
    said: str = ""  # the last explanation logged, without its numbers
    _explained: tuple[Job, int, float, str] | None = None

    def explain(self, now: float) -> str:
        """Return why the job is where it is; of a large job, as it was up to EXPLAIN_FRESH_S ago.

        Naming nodes looks at all of them, and while thousands arrive the job changes with every fold.
        """
        if self._explained is not None:
            job, revision, at, text = self._explained
            fresh = job is self.job or len(self.job.nodes) > SMALL_MAX
            if fresh and revision == self.revision and now < at + EXPLAIN_FRESH_S:
                return text
        text = explain(self.job, now)
        self._explained = (self.job, self.revision, now, text)
        return text


class _Absent:
    """The stream of a node that has not come back yet."""

    stream_no = -1

    def notify(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def refuse(self, text: str) -> None:
        pass

    def fail(self, text: str, *, passing: bool = False) -> None:
        pass


ABSENT = _Absent()


@dataclass(slots=True)
class Letter:
    event: Event
    stream: Stream | None = None
    done: asyncio.Future[None] | None = None


class Delivery:
    """Sends nodes their places. Nothing of a job is sent but what its room holds."""

    def __init__(self, clock: Clock, table: Table, timing: Timing, limits: Limits) -> None:
        self._clock = clock
        self._table = table
        self._timing = timing
        self._limits = limits
        self.revision = 1  # the newest of this term: nothing that was told before is newer; 0 is that of no place

    def pace(self, room: Room | None) -> Pace:
        """Return how often nodes of this job speak, as it stands. None: of one that is not there yet.

        One that waits for thousands goes at their pace from the start: those that are there first would speak every
        second while the daemon is busy with the others.
        """
        if room is None:
            return pace(self._timing, len(self._table))
        job, attended = room.job, len(self._table)
        if room.paced is None or room.paced[0] is not job or room.paced[1] != attended:
            room.paced = (job, attended, fence.pace(job) if fence.stops(job) else self._open_pace(job))
        return room.paced[2]

    def _open_pace(self, job: Job) -> Pace:
        expected = min(job.spec.min_nodes, self._limits.nodes_per_job)
        return pace(job.spec.timing, max(len(self._table), len(job.nodes), expected))

    def tell_all(self, room: Room) -> None:
        """Tell every attached node its place: it has changed."""
        self.revision += 1
        room.revision = self.revision
        now, lease_s = self._clock.now(), self.pace(room).lease_s
        for row in self._table.of(room.job.run_id, iter(room.job.nodes)):
            row.tell(room.revision, lease_s, now)
            row.stream.notify()
            room.owed.pop(row.stream, None)

    def answer(self, room: Room, letters: list[Letter]) -> None:
        """Tell the nodes that spoke, or were spoken of, their places: at once, or soon if they are many."""
        job = room.job
        for letter in letters:
            if letter.stream is not None:
                room.owed[letter.stream] = None
                if isinstance(letter.event, NodeHeard) and letter.event.leaving is not None:
                    letter.stream.notify()  # it waits for this before it exits
            elif (uid := getattr(letter.event, "uid", None)) is not None:
                row = self._table.get(job.run_id, uid)
                if row is not None:
                    room.owed[row.stream] = None
        if len(job.nodes) <= SMALL_MAX or fence.stops(job):  # there an answer renews a lease
            self.settle_debts(room)
        elif room.owed and room.pays_at is None:
            heartbeats_s = ANSWER_HEARTBEATS * self.pace(room).heartbeat_s
            room.pays_at = self._clock.now() + min(ANSWER_A_NODE_S * len(job.nodes), heartbeats_s, ANSWER_MAX_S)

    def settle_debts(self, room: Room) -> None:
        room.pays_at = None
        owed, room.owed = room.owed, {}
        for stream in owed:
            stream.notify()
