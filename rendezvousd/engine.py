"""The one mutable room: what nodes say comes in, is folded into their jobs, made durable, and only then told.

    inbox -> fold(step) -> backend.write -> swap room.job -> tell

Nothing is visible before it is durable, so what a node was told can never be taken back by a failover. Heartbeats do
not come this way: they touch the attendance table, and only a lease that runs out becomes an event.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from rendezvousd.attendance import TICK_S, Attendance, Clock, Stream, Table
from rendezvousd.backends.base import Backend
from rendezvousd.core.errors import BadRequest, NoRoom, NoSuchJob, NotLeader, RoundOver, StillLearning, StoreLost
from rendezvousd.core.events import Event, NodeHeard, NodeLost, StreamBroke, TimePassed
from rendezvousd.core.kv import shown
from rendezvousd.core.liveness import Pace
from rendezvousd.core.lookalikes import Lookalikes
from rendezvousd.core.machine import step
from rendezvousd.core.model import NO_ROUND, Job, JobUid, NodeUid
from rendezvousd.core.place import urgent, valid_round_uid
from rendezvousd.core.rules import fence
from rendezvousd.core.rules.admit import Instance, found, instance, superseding, why_it_waits
from rendezvousd.core.settings import Limits, Timing
from rendezvousd.delivery import ABSENT, Delivery, Letter, Room
from rendezvousd.faults import Faults
from rendezvousd.job_limit import JobLimit, next_look_at
from rendezvousd.waiting import WaitingNodes, gave_up

log = logging.getLogger(__name__)

# How long letters are gathered before a fold: one fold and one answer serve all nodes that speak within it.
WINDOW_S = 0.003
# Letters folded without letting the readers of streams run: a burst of 10,000 is cut into pieces of some milliseconds.
FOLD_MAX = 512
# Uids of dropped jobs that are remembered, so that a launcher which slept through the end does not start it anew.
FINISHED_MAX = 4096
# How often it is looked whether nodes that wait for the end of another job may go on (s): each of them may be one of
# thousands.
WAITING_S = 0.3


class Namespaces(Protocol):
    """The store's contents, which end with what they belong to."""

    def round_over(self, round_uid: str) -> None: ...

    def job_gone(self, job_uid: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What daemons have in common whose backend outlives them."""

    daemon_id: str
    takeover_s: float  # for so long there may be no leader when one dies
    check_lead: Callable[[], None]  # raises NotLeader when another daemon may lead
    trouble: Callable[[], str]  # what is wrong with the backend; empty: nothing


class Engine:
    """Owns all jobs. `run` is its whole life; everything else may be called from any task of its loop."""

    def __init__(
        self,
        backend: Backend,
        timing: Timing,
        limits: Limits,
        shared: Shared | None = None,
    ) -> None:
        """`shared`: what daemons on one backend have in common; None: the backend is this daemon's own and forgets."""
        self.clock = Clock(asyncio.get_running_loop().time)
        self.began_at = self.clock.now()
        self.term = secrets.token_hex(8)
        self.shared = shared
        self.daemon_id = self.term if shared is None else shared.daemon_id  # on memory, a term of service is a daemon
        self.takeover_s = 0.0 if shared is None else shared.takeover_s
        self.limits = limits
        self.timing = timing
        self.table = Table(timing)
        self._delivery = Delivery(self.clock, self.table, timing, limits)
        self.rooms: dict[str, Room] = {}
        self._backend = backend
        self._namespaces: list[Namespaces] = []
        self._inbox: dict[str, list[Letter]] = {}
        self._letters = asyncio.Event()
        self._serving: set[str] = set()  # jobs with a fold or a write under way; what comes in for them waits
        self._asked: set[asyncio.Future[None]] = set()  # what callers of `tell` wait for
        self._over = False  # it does not run any more
        self._superseded: dict[str, set[NodeUid]] = {}  # by run id: nodes of jobs that another one is about to follow
        self._finished: OrderedDict[JobUid, str] = OrderedDict()
        self.waiting = WaitingNodes()
        self._lookalikes = Lookalikes()
        self._faults = Faults(self.rooms, self.table, self.waiting)
        self._job_limit = JobLimit(limits.jobs, self.rooms, self._faults.unserved)
        self._waiting_at = 0.0  # when they are looked at next

    def check_lead(self) -> None:
        """Return if this daemon leads; to be asked after reading what a node says and before answering it. Raises
        NotLeader when another one may."""
        if self.shared is not None:
            self.shared.check_lead()

    def take_over(self, job: Job, stored: int, now: float) -> None:
        """Attend a job that a daemon before this one stored at this revision; before `run`.

        Its nodes are believed until they could have found this daemon and been heard. They count as heard at `now`,
        when the job's timers were armed: before anything that is told of it from here on. What holds without anybody's
        word is settled, and made durable, at once.
        """
        self.rooms[job.run_id] = Room(job=job, stored=stored, revision=self.revision, wakes_at=now)
        try:
            believed = self.pace(job.run_id)
            patience = replace(believed, lease_s=max(believed.lease_s, job.spec.timing.recovery_s))
            for uid in job.nodes:
                self.table.attend(job.run_id, uid, ABSENT, now, patience)
        except Exception as error:  # noqa: BLE001 -- it is logged there
            self.fail(job.run_id, "was taken over", error)

    def set_aside(self, run_id: str, why: str) -> None:
        """Serve no job of this run id, whose record is not to be touched; before `run`."""
        self._faults.unserved[run_id] = why

    # ------------------------------------------------------------------------------------------ what streams call

    def heard(self, run_id: str, event: NodeHeard, stream: Stream, seen: tuple[str, int]) -> Attendance | None:
        """Take in what a node says anew. Its place is told once that is durable. None: a newer stream speaks for it.
        Raises NotServed."""
        self._faults.check(run_id)
        row = self.table.attend(run_id, event.uid, stream, self.clock.now(), self.pace(run_id))
        if row is None:
            return None
        if seen[0] == self.term:
            row.echo(seen[1], self.clock.now())
        if event.uptime_s:  # in seconds of this daemon's clock, to compare it with what that has seen
            event = replace(event, uptime_s=self.clock.attended_s(event.uptime_s))
        self._post(run_id, Letter(event, stream))
        return row

    def heartbeat(self, row: Attendance, stream: Stream) -> bool:
        """Take in that a node is alive. False: it is not attended any more on this stream, so it must say all again."""
        if not row.attached or row.stream is not stream:
            return False
        row.heard_at = row.spoke_at = self.clock.now()
        self.table.lend(row, self.pace(row.run_id).lease_s)
        return True

    def stream_ended(self, row: Attendance, stream: Stream) -> None:
        """Take in that a node's stream broke, which may or may not be the end of it."""
        if self.table.stream_ended(row, stream, self.clock.now()):
            self._post(row.run_id, Letter(StreamBroke(uid=row.uid)))

    # ---------------------------------------------------------------------------------------- what anybody may ask

    @property
    def revision(self) -> int:
        """The newest revision of this term: nothing that was told before is newer."""
        return self._delivery.revision

    def pace(self, run_id: str) -> Pace:
        """Return how often nodes of this job speak, as it stands."""
        return self._delivery.pace(self.rooms.get(run_id))

    def room(self, run_id: str) -> Room:
        """Return a job's room. Raises NoSuchJob, NotServed."""
        room = self.rooms.get(run_id)
        if room is None:
            self._faults.check(run_id)
            raise NoSuchJob(f"there is no job {shown(run_id)}; it never began, or ended some time ago")
        return room

    @property
    def unserved(self) -> Mapping[str, str]:
        """By run id: why this daemon does not serve the job."""
        return self._faults.unserved

    def fail(self, run_id: str, when: str, error: Exception) -> None:
        """Serve this job no longer: there was a fault when it "was taken over", say."""
        self._faults.fail(run_id, when, error)
        self._faults.send_back(run_id, self._inbox.pop(run_id, ()))

    def explain(self, room: Room) -> str:
        """Return why the job is where it is, and what is wrong with it or the backend."""
        if (why := self.unserved.get(room.job.run_id)) is not None:
            return why
        trouble, now = "" if self.shared is None else self.shared.trouble(), self.clock.now()
        alike = self._lookalikes.explain(room.job, (it.job for it in self.rooms.values()), now)
        return "; ".join(filter(None, (room.explain(now), alike, room.trouble, trouble)))

    async def tell(self, run_id: str, event: Event) -> None:
        """Return once the event is part of the job, durably. Raises NoSuchJob, NotServed, and NotLeader when this
        daemon stops to serve before it is."""
        self.room(run_id)
        self._faults.check(run_id)
        if self._over:
            raise _not_done()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.add(done)
        try:
            self._post(run_id, Letter(event, done=done))
            await done
        finally:
            self._asked.discard(done)

    def check(self, run_id: str, job_uid: str, round_uid: str, generation: str) -> None:
        """Let a store call through whose scope exists. Raises NoSuchJob, NotServed, RoundOver, StoreLost or
        StillLearning."""
        self._faults.check(run_id)
        outlives = self.shared is not None and not round_uid
        if generation and generation != self.term and not outlives:  # first: the job may not be known here yet
            raise StoreLost(f"the daemon was restarted; what job {shown(run_id)} kept in its store is lost")
        if self._learning(run_id):
            raise StillLearning(f"this daemon was just started, and is learning how job {shown(run_id)} stands")
        room = self.room(run_id)
        if job_uid != room.job.uid:
            raise NoSuchJob(f"job {run_id!r} was submitted anew; the one you belong to is over")
        if round_uid and (room.job.running is None or room.job.running.uid != round_uid):
            raise RoundOver(f"the round you belong to is over: {room.explain(self.clock.now())}")

    def _learning(self, run_id: str) -> bool:
        """Return whether nodes may yet tell of this job what was before this daemon."""
        room = self.rooms.get(run_id)
        unknown = room is None or room.job.recovering is not None
        return unknown and self.shared is None and self.clock.now() < self.timing.recovery_max_s

    def add_namespaces(self, namespaces: Namespaces) -> None:
        """Tell this keeper of contents when rounds and jobs end."""
        self._namespaces.append(namespaces)

    # ---------------------------------------------------------------------------------------------------- its life

    async def run(self) -> None:
        """Serve until cancelled. Raises NotLeader when another daemon has taken over."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fold_for_ever())
                group.create_task(self._tick_for_ever())
        finally:
            self._over = True
            for done in self._asked:
                if not done.done():
                    done.set_exception(_not_done())
            for room in self.rooms.values():
                for watcher in room.watchers:
                    watcher.set()

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self.clock.tick()
            for row in self.table.expire(now):
                row.stream.forget()
                self.waiting.discard(row.run_id, row.uid)
                silent_s = now - row.spoke_at
                self._post(row.run_id, Letter(NodeLost(uid=row.uid, silent_s=silent_s, why=row.why(now))))
            for run_id, room in list(self.rooms.items()):
                if room.wakes_at is not None and now >= room.wakes_at:
                    room.wakes_at = None  # asked for again by the fold
                    self._post(run_id, Letter(TimePassed()))
                if room.pays_at is not None and now >= room.pays_at:
                    self._delivery.settle_debts(room)
            if now >= self._waiting_at:
                self._waiting_at = now + WAITING_S
                for run_id in self.waiting.run_ids():
                    try:
                        self._take_up(run_id, now)
                    except Exception as error:  # noqa: BLE001 -- it is logged there
                        self.fail(run_id, "was asked whether nodes must still wait for it", error)

    def _take_up(self, run_id: str, now: float) -> None:
        """Let nodes in that waited for the end of another job, and send those away that have waited too long."""
        room = self.rooms.get(run_id)
        if room is not None:
            for waiter in self.waiting.expired(run_id, now):
                self._refuse(run_id, waiter.event, waiter.stream, gave_up(room.job, waiter, now))
        for waiter in self.waiting.due(run_id, None if room is None else room.job, now):
            row = self.table.get(run_id, waiter.event.uid)
            if row is not None and row.stream is waiter.stream and waiter.event.leaving is None:
                self._post(run_id, Letter(waiter.again(now), waiter.stream))

    async def _fold_for_ever(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await self._letters.wait()
                await asyncio.sleep(WINDOW_S)
                self._letters.clear()
                for run_id in [r for r in self._inbox if r not in self._serving]:
                    self._serving.add(run_id)
                    group.create_task(self._serve(run_id, self._inbox.pop(run_id)))

    def _post(self, run_id: str, letter: Letter) -> None:
        if run_id in self.unserved:
            self._faults.send_back(run_id, [letter])
            return
        self._inbox.setdefault(run_id, []).append(letter)
        self._letters.set()

    async def _serve(self, run_id: str, letters: list[Letter]) -> None:
        """Fold, commit, tell: for one job, in pieces. A fault ends the service of this job, and of no other."""
        try:
            for start in range(0, len(letters), FOLD_MAX):
                piece = letters[start : start + FOLD_MAX]
                job = self._fold(run_id, piece)
                if job is not None:
                    await self._commit(job, piece)
                for letter in piece:
                    if letter.done is not None and not letter.done.done():  # the caller may have hung up
                        letter.done.set_result(None)
                await asyncio.sleep(0)
                if run_id in self.unserved:
                    self._faults.send_back(run_id, letters[start + FOLD_MAX :])
                    break
        except NotLeader:
            raise
        except Exception as error:  # noqa: BLE001 -- it is logged there
            self.fail(run_id, "was changed or written", error)
            self._faults.send_back(run_id, letters)
        self._job_limit.founded(run_id)
        self._serving.discard(run_id)
        if run_id in self._inbox:
            self._letters.set()

    def _fold(self, run_id: str, letters: list[Letter]) -> Job | None:
        room = self.rooms.get(run_id)
        job = None if room is None else room.job
        now = self.clock.now()
        for letter in letters:
            event = letter.event
            try:
                if isinstance(event, NodeHeard):
                    if not self._attended(run_id, job, letter, event):
                        continue
                    found_job = self._which_job(run_id, job, event, now)
                    if found_job is None:
                        self._let_wait(run_id, job, letter, now)
                        continue
                    job = found_job
                    self.waiting.discard(run_id, event.uid)
                if job is not None:
                    job = step(job, event, now, self.limits)
            except (BadRequest, NoRoom, NoSuchJob) as refusal:
                assert isinstance(event, NodeHeard)
                self._refuse(run_id, event, letter.stream, str(refusal), passing=isinstance(refusal, NoRoom))
                if job is not None:  # a refused node is none of the job
                    job = step(job, NodeLost(uid=event.uid, silent_s=0.0, why=str(refusal)), now, self.limits)
            except Exception as error:  # noqa: BLE001 -- a bug met by one job ends none
                self._faults.leave_out(run_id, letter, error)
        return self._without_ghosts(job, letters, now)

    def _attended(self, run_id: str, job: Job | None, letter: Letter, event: NodeHeard) -> bool:
        """Return whether what a node said counts: one that has been let go since would be a node of the job that is
        never lost. It says all again with its next message."""
        if (job is not None and event.uid in job.nodes) or self.table.get(run_id, event.uid) is not None:
            return True
        if letter.stream is not None:
            letter.stream.forget()
        return False

    def _without_ghosts(self, job: Job | None, letters: list[Letter], now: float) -> Job | None:
        """Return the job in which each node that spoke has a row in the table; by what others do, no node is added."""
        for letter in letters:
            event = letter.event
            if job is None or not isinstance(event, NodeHeard) or event.uid not in job.nodes:
                continue
            if self.table.get(job.run_id, event.uid) is None:
                lost = NodeLost(uid=event.uid, silent_s=0.0, why="it is no longer attended")
                job = step(job, lost, now, self.limits)
        return job

    def _which_job(self, run_id: str, job: Job | None, event: NodeHeard, now: float) -> Job | None:
        """Return the job the speaker belongs to, which may be a new one. None: it is too early for a new one.
        Raises BadRequest, NoRoom, NoSuchJob."""
        if (why := self._finished.get(event.known.job_uid)) is not None:
            raise NoSuchJob(why)
        match instance(job, event, now):
            case Instance.THIS:
                assert job is not None
                return job
            case Instance.WAITS:
                return None
            case Instance.SUPERSEDED:
                raise NoSuchJob(f"job {run_id!r} was submitted anew; the one this node belongs to is over")
            case Instance.NEW:
                if event.unfit and not event.known.round:  # one that ran elsewhere goes on as it did
                    raise BadRequest(event.unfit)
                seed, uid = secrets.token_hex(16), JobUid(secrets.token_hex(8))
                if job is not None:
                    follower = superseding(job, event, uid=uid, seed=seed, now=now)
                    self._superseded.setdefault(run_id, set()).update(job.nodes)
                    return follower
                if dispensable := self._job_limit.claim(run_id, now):
                    self._post(dispensable, Letter(TimePassed()))
                    raise NoRoom(f"job {dispensable!r}, which is over, makes room for job {run_id!r}")
                return found(run_id, event, uid=uid, seed=seed, now=now, remembers=self.shared is not None)

    def _let_wait(self, run_id: str, job: Job | None, letter: Letter, now: float) -> None:
        """Let a node wait for the end of this job, which is not its own."""
        event = letter.event
        assert isinstance(event, NodeHeard)
        assert job is not None
        if self.waiting.put(run_id, event, letter.stream, now):
            log.info("node %s waits: %s", event.name, why_it_waits(job, event, now), extra={"run_id": run_id})

    def _refuse(
        self, run_id: str, event: NodeHeard, stream: Stream | None, text: str, *, passing: bool = False
    ) -> None:
        self.waiting.discard(run_id, event.uid)
        self.table.drop(run_id, event.uid)
        if stream is not None and passing:
            stream.fail(text, passing=True)
        elif stream is not None:
            stream.refuse(text)

    async def _commit(self, job: Job, letters: list[Letter]) -> None:
        room = self.rooms.get(job.run_id)
        now = self.clock.now()
        if room is not None and job is room.job:
            # a job that changes is told first; so its nodes know all of it when it is dropped
            if self._job_limit.drops(room, now):
                await self._drop(room)
                return
            self._delivery.answer(room, letters)
            room.wakes_at = next_look_at(job)
            return
        let_go = self._superseded.pop(job.run_id, None)
        if let_go is not None and room is not None:
            await self._last_word(room)
        before = None if room is None else room.job
        if room is not None and fence.stops(room.job):  # what is read while a round's end is written renews no lease
            room.withheld = valid_round_uid(room.job) not in (NO_ROUND, valid_round_uid(job))
        stored = await self._backend.write(job, expected=0 if room is None else room.stored)
        if room is None:
            room = self.rooms[job.run_id] = Room(job=job, stored=stored, revision=self.revision)
        room.job, room.stored, room.wakes_at, room.withheld = job, stored, next_look_at(job), False
        if let_go is not None:
            self._let_go(before, job, let_go)
        self._end_namespaces(before, job)
        self._log(room)
        self._delivery.answer(room, letters)
        if before is None or urgent(before) != urgent(job):
            self._delivery.tell_all(room)
        for watcher in room.watchers:
            watcher.set()

    def _end_namespaces(self, before: Job | None, job: Job) -> None:
        if before is None:
            return
        if before.running is not None and (job.running is None or job.running.uid != before.running.uid):
            for namespaces in self._namespaces:
                namespaces.round_over(before.running.uid)

    async def _last_word(self, room: Room) -> None:
        """Let the nodes of an ended job go, whose name is taken by a new submission."""
        ending = room.job.ending
        if ending is not None and not ending.may_exit:
            room.job = replace(room.job, ending=replace(ending, may_exit=True))
            self._delivery.tell_all(room)
            await asyncio.sleep(0)  # they are told how it is now, and soon it will be otherwise

    def _let_go(self, before: Job | None, job: Job, uids: set[NodeUid]) -> None:
        """Forget the job that this one has taken the name of, and its nodes."""
        self._forget_nodes(job.run_id, (uid for uid in uids if uid not in job.nodes))
        if before is not None:
            log.info("superseded by a new submission", extra={"run_id": job.run_id})
            self._forget(before, f"job {job.run_id!r} was submitted anew; the one this node belongs to is over")

    async def _drop(self, room: Room) -> None:
        job = room.job
        del self.rooms[job.run_id]
        await self._backend.delete(job.run_id, expected=room.stored)
        self._forget_nodes(job.run_id, job.nodes)
        if job.ending is None:
            log.info("dropped: it never had a round, and no node is left", extra={"run_id": job.run_id})
        self._forget(job, "" if job.ending is None else f"job {job.run_id!r} has ended, some time ago")
        for watcher in room.watchers:
            watcher.set()

    def _forget_nodes(self, run_id: str, uids: Iterable[NodeUid]) -> None:
        for row in self.table.of(run_id, uids):
            self.table.drop(run_id, row.uid)
            row.stream.forget()

    def _forget(self, job: Job, why: str) -> None:
        """Let what belongs to this job go. `why` is for nodes that come back later; empty: they may found it again."""
        if why:
            self._finished[job.uid] = why
        while len(self._finished) > FINISHED_MAX:
            self._finished.popitem(last=False)
        for namespaces in self._namespaces:
            namespaces.job_gone(job.uid)

    def _log(self, room: Room) -> None:
        """Log the explanation when it says something new; a countdown is nothing new."""
        text = room.explain(self.clock.now())
        said = "".join(c for c in text if not c.isdigit())
        if said != room.said:
            room.said = said
            number = room.job.known.round
            log.info("%s", text, extra={"run_id": room.job.run_id, "round": number})


def _not_done() -> NotLeader:
    """An exception of its own for each caller."""
    return NotLeader("the daemon stopped to serve before this was durable; look how the job is, and ask again")
