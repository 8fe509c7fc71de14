"""A daemon: the real engine and the real streams, on a record that one leader after the other keeps."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc

from rendezvousd.attendance import Attendance
from rendezvousd.core.codec import Record, dump, load
from rendezvousd.core.errors import NoSuchJob, NotLeader
from rendezvousd.core.events import Event, NodeHeard
from rendezvousd.core.model import Job, RoundUid
from rendezvousd.core.place import valid_round_uid
from rendezvousd.core.settings import Limits
from rendezvousd.desk import Desk
from rendezvousd.engine import Engine, Shared
from rendezvousd.rpc.rendezvous import RendezvousStreams
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.sim.fencing.plan import HEARTBEAT_S, JOB, NEVER, ROUND, STAGE, Clock, Message, other_says, over, sent
from tests.sim.world.machines import Process

if TYPE_CHECKING:
    from tests.sim.fencing.world import World

LIMITS = Limits()
FOLLOWED = "another daemon leads"
LATE_S = 0.3  # how often it looks whether it still leads
STALLS_EVERY_S = (2.0, 6.0)


class Daemon:
    """One term of one daemon. It leads until `ends_at`, whether it knows or not."""

    def __init__(
        self, world: World, clock: Clock, *, ends_at: float, pauses: tuple[float, float], writes_s: float
    ) -> None:
        self.world = world
        self.clock = clock
        self.writes_s = writes_s
        self.record: Record | None = None  # as it was written last
        self.peer = Peer(self)
        self._ends_at, self._pauses = ends_at, pauses
        self._found: Record | None = None
        self._overlap_s = 0.0
        self._streams: dict[int, Context] = {}  # of the node, by number
        self._stalls_at = 0.0
        self._desk = Desk()
        self._joins = RendezvousStreams(self._desk)
        self.process = Process(world, f"daemon {len(world.daemons)}", "d", ahead_s=clock.offset, rate=clock.rate)

    def begin(self, found: Record | None, overlap_s: float = 0.0) -> None:
        """Serve from now on: a job that is on record, if any."""
        self.record = self._found = found
        self._overlap_s = overlap_s
        self.process.start(self._run)
        pauses_at, goes_on_at = self._pauses
        if pauses_at < NEVER:
            self.world.at(pauses_at, self.process.pause)
            self.world.at(goes_on_at, self.process.go_on)
        if self._ends_at < NEVER:
            self.world.at(self._ends_at, self._end)
        if self.world.plan.noticed and self.world.plan.cut_at < NEVER:
            self.world.at(self.world.plan.cut_at, self._stream_broke)

    async def _run(self) -> None:
        shared = Shared(daemon_id="one", takeover_s=0.0, check_lead=self._check_lead, trouble=lambda: "")
        engine = Engine(self, STAGE.spec.timing, LIMITS, None if self.world.plan.forgets else shared)
        now = engine.clock.now()
        if self._found is not None:
            found = self._found
            job = load(found.head, found.parts, seed="on record", now=now, overlap_s=self._overlap_s)
            self.record = dump(job)
            engine.take_over(job, 1, now)
        self._desk.open(engine)
        try:
            await engine.run()
        except* NotLeader:
            pass
        finally:
            self._desk.close(FOLLOWED)
            await self._joins.end_all(FOLLOWED)

    def _end(self) -> None:
        """A daemon without memory is gone; another one has followed this one, and it is about to know."""
        if self.world.plan.forgets:
            self.process.kill()
        elif self.process.paused:  # nor does it know at once when it goes on
            self.world.after(LATE_S, self._end)
        elif self.process.main is not None:
            self.process.post(self.process.main.cancel)

    def leads(self) -> bool:
        return self.world.now < self._ends_at

    def _check_lead(self) -> None:
        if not self.leads():
            raise NotLeader(FOLLOWED)

    # ------------------------------------------------------------------------------------- the backend of its engine

    async def write(self, job: Job, *, expected: int) -> int:
        await asyncio.sleep(self.writes_s)
        if not self.leads() or self is not self.world.daemons[-1]:
            raise NotLeader("its late write is refused")
        before, self.record = self.record, dump(job, self.record)
        valid = valid_round_uid(job)
        if job.running is not None and job.running.uid != ROUND:
            self.world.succeeded()
        elif before is not None and valid_round_uid(before.job) == ROUND != valid:
            self.peer.says(other_says("stopped"))
        return expected + 1

    async def delete(self, run_id: str, *, expected: int) -> None:
        raise AssertionError("no job ends here")

    # --------------------------------------------------------------------------------------------- what is asked of it

    def arrives(self, message: Message) -> None:
        """A message of the node's."""
        if self.process.dead:
            return
        found = self._streams.get(message.stream)
        if found is None:
            found = self._streams[message.stream] = Context(self, message.stream)
        self.process.post(found.take, sent(message))

    def ask(self, event: Event) -> None:
        self.process.post(lambda: asyncio.ensure_future(self._ask(event)))

    async def _ask(self, event: Event) -> None:
        try:
            await self._desk.engine.tell(JOB.run_id, event)
        except (NoSuchJob, NotLeader):
            return

    async def serve(self, context: Context) -> None:
        await self._joins.join(None, context)

    def has_read(self) -> None:
        """It may be stopped at this point, before it answers."""
        world, plan = self.world, self.world.plan
        last = plan.failover_at - plan.stall_s <= world.now < plan.failover_at
        if plan.stall_s and (last or world.now >= self._stalls_at) and not self.process.paused:
            self._stalls_at = world.now + world.rng.uniform(*STALLS_EVERY_S)
            self.process.pause()
            world.after(plan.stall_s, self._go_on)

    def _go_on(self) -> None:
        if over(self.world.now, self._pauses) == self.world.now:
            self.process.go_on()

    def _stream_broke(self) -> None:
        for context in self._streams.values():
            self.process.post(context.break_)

    @property
    def engine(self) -> Engine:
        """Raises NotLeader."""
        return self._desk.engine


class Context:
    """The daemon's end of one stream of the node, as grpc.aio has it."""

    def __init__(self, daemon: Daemon, number: int) -> None:
        self._daemon, self._number = daemon, number
        self._inbox: deque[bytes] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._serving: asyncio.Future[None] | None = None
        self._broken = False

    def take(self, data: bytes) -> None:
        if self._broken:
            return
        self._inbox.append(data)
        if self._serving is None:
            self._serving = asyncio.ensure_future(self._daemon.serve(self))
        self._wake()

    def break_(self) -> None:
        self._broken = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def read(self) -> Any:
        while not self._inbox and not self._broken:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if not self._inbox:
            return grpc.aio.EOF
        self._daemon.has_read()
        return self._inbox.popleft()

    async def write(self, data: bytes) -> None:
        place, world, number = pb.Place.FromString(data), self._daemon.world, self._number
        valid, lease_s = RoundUid(place.valid_round_uid), place.lease_ms / 1000
        world.carry(up=False, deliver=lambda: world.node.answered(number, place.ack_seq, valid, lease_s))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            self._daemon.world.fail("bug", f"refused: {details}")
        raise grpc.aio.AbortError(details)


class Peer:
    """The job's other node: nothing ever happens to it, and it does what it is told."""

    stream_no = 1

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._row: Attendance | None = None
        self._said: NodeHeard | None = None

    def says(self, event: NodeHeard) -> None:
        if self._said is None:
            self._daemon.world.after(HEARTBEAT_S, self._beat)
        self._said = event
        self._daemon.process.post(self._say)

    def _say(self) -> None:
        assert self._said is not None
        try:
            self._row = self._daemon.engine.heard(JOB.run_id, self._said, self, ("", 0))
        except NotLeader:
            return

    def _beat(self) -> None:
        if not self._daemon.process.dead and self._daemon.leads():
            self._daemon.process.post(self._heartbeat)
            self._daemon.world.after(HEARTBEAT_S, self._beat)

    def _heartbeat(self) -> None:
        try:
            engine = self._daemon.engine
        except NotLeader:
            return
        if self._row is None or not engine.heartbeat(self._row, self):
            self._say()
        elif self._row.told > self._row.seen:
            self._row.echo(self._row.told, engine.clock.now())

    def notify(self) -> None:
        pass

    def forget(self) -> None:
        self._row = None

    def refuse(self, text: str) -> None:
        self._daemon.world.fail("bug", f"the other node is refused: {text}")

    def fail(self, text: str, *, passing: bool = False) -> None:
        self._daemon.world.fail("bug", text)
