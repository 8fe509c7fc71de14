"""The engine in virtual time: leases, pauses, what is told when, and that nothing outlives its owner."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from rendezvousd.attendance import Attendance
from rendezvousd.backends.memory import MemoryBackend
from rendezvousd.core.errors import NoSuchJob, NotLeader, RoundOver, StillLearning, StoreLost
from rendezvousd.core.events import CloseAsked, NodeHeard, RestartAsked
from rendezvousd.core.model import Held, Job, JobSpec, Known, NodeSpec, NodeUid, Offer, OnDaemonLoss, Phase, RoundUid
from rendezvousd.core.place import Place, place
from rendezvousd.core.rules import fence
from rendezvousd.core.settings import Limits, Timing
from rendezvousd.engine import Engine, Shared
from rendezvousd.rpc.rendezvous import JoinStream, Renderer
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.simloop import SimLoop, simulate

TIMING = Timing()
LIMITS = Limits(jobs=8)


class Contents:
    """What a store hears of ends."""

    def __init__(self) -> None:
        self.rounds: list[str] = []
        self.jobs: list[str] = []

    def round_over(self, round_uid: str) -> None:
        self.rounds.append(round_uid)

    def job_gone(self, job_uid: str) -> None:
        self.jobs.append(job_uid)


class SimNode:
    """A node on a stream of its own: says what it is told to say, obeys nothing by itself."""

    def __init__(self, engine: Engine, name: str, run_id: str = "job", spec: JobSpec | None = None) -> None:
        self.engine = engine
        self.run_id = run_id
        self.name = name
        self.spec = spec or JobSpec(min_nodes=2, max_nodes=2)
        self.stream_no = 1
        self.notified = 0
        self.refused = ""
        self.failed = ""
        self.forgotten = False
        self.row: Attendance | None = None
        self.held: Held | None = None
        self.offer: Offer | None = None
        self.known = Known()
        self.outcome_seen = ""
        self.leaving: str | None = None
        self.failed = ""
        self.passing = False
        self.unfit = ""

    @property
    def uid(self) -> NodeUid:
        return NodeUid(self.name)

    def notify(self) -> None:
        self.notified += 1

    def forget(self) -> None:
        self.forgotten = True

    def refuse(self, text: str) -> None:
        self.refused = text

    def fail(self, text: str, *, passing: bool = False) -> None:
        self.failed, self.passing = text, passing

    def say(self, *, seen: int = -1) -> None:
        event = NodeHeard(
            uid=self.uid,
            name=self.name,
            job_spec=self.spec,
            spec=NodeSpec(),
            known=self.known,
            held=self.held,
            offer=self.offer,
            outcome_seen=self.outcome_seen,
            leaving=self.leaving,
            unfit=self.unfit,
        )
        room = self.engine.rooms.get(self.run_id)
        revision = seen if seen >= 0 else room.revision if room is not None else 0
        self.row = self.engine.heard(self.run_id, event, self, (self.engine.term, revision))

    def offers(self, after: str = "") -> None:
        self.offer = Offer(offer_id=f"{self.name} {after}", after=RoundUid(after), address="h", port=1)
        self.say()

    def beat(self) -> bool:
        return self.row is not None and self.engine.heartbeat(self.row, self)

    def place(self) -> Place:
        return place(self.job(), self.uid, self.engine.clock.now())

    def job(self) -> Job:
        return self.engine.room(self.run_id).job


class SlowBackend(MemoryBackend):
    """Its writes of one job take a minute."""

    async def write(self, job: Job, *, expected: int) -> int:
        if job.run_id == "slow":
            await asyncio.sleep(60)
        return await super().write(job, expected=expected)


@contextlib.asynccontextmanager
async def engine_running(
    backend: MemoryBackend | None = None, shared: Shared | None = None
) -> AsyncIterator[tuple[Engine, Contents]]:
    engine, contents = Engine(backend or MemoryBackend(), TIMING, LIMITS, shared), Contents()
    engine.add_namespaces(contents)
    life = asyncio.create_task(engine.run())
    try:
        yield engine, contents
    finally:
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life


async def beating(nodes: list[SimNode], seconds: float) -> None:
    """Let time pass in which these nodes are heard."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while loop.time() < until:
        for node in nodes:
            node.beat()
        await asyncio.sleep(min(0.5, until - loop.time()))


async def pair(engine: Engine, run_id: str = "job") -> list[SimNode]:
    nodes = [SimNode(engine, "a", run_id), SimNode(engine, "b", run_id)]
    for node in nodes:
        node.offers()
    await beating(nodes, 0.2)
    assert nodes[0].job().running is not None
    for node in nodes:
        round_ = nodes[0].job().running
        assert round_ is not None
        node.held = Held(round_uid=round_.uid, round=1, phase=Phase.RUNNING, alive=1)
        node.known = node.job().known
        node.say()
    await beating(nodes, 0.2)
    return nodes


def test_a_silent_node_is_lost_within_its_lease_and_an_alive_one_never() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            a, b = await pair(engine)
            await beating([a, b], 3600)
            assert a.job().running is not None
            await beating([a], TIMING.lease_s + 0.3)
            cause = a.job().round.cause  # type: ignore[union-attr]
            assert cause is not None
            assert cause.text == "node b was lost: silent for 5 s"
            assert b.forgotten
            assert not b.beat()  # it must say all again

    simulate(story())


def test_a_broken_stream_is_forgiven_within_its_grace() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            a, b = await pair(engine)
            assert b.row is not None
            engine.stream_ended(b.row, b)
            await beating([a], 0.8)
            b.say()
            await beating([a, b], 30)
            assert a.job().running is not None
            engine.stream_ended(b.row, b)
            await beating([a], TIMING.grace_s + 5 * b.row.round_trip_s + 0.3)
            assert a.job().running is None
            assert "its connection broke" in a.job().round.cause.text  # type: ignore[union-attr]

    simulate(story())


def test_only_the_newest_stream_speaks_for_a_node_and_only_its_end_counts() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            a, b = await pair(engine)
            again = SimNode(engine, "b")
            again.stream_no, again.held, again.known = 2, b.held, b.known
            again.say()
            old_row = b.row
            b.say()
            assert b.row is None, "the older stream must not be heard"
            assert old_row is not None
            engine.stream_ended(old_row, b)
            await beating([a, again], 30)
            assert a.job().running is not None

    simulate(story())


def test_a_pause_of_the_daemon_is_nobodys_silence() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            a, b = await pair(engine)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, SimLoop)
            for _ in range(3):
                loop.stall(60)
                await beating([a, b], 2)
            assert a.job().running is not None

    simulate(story())


def test_a_node_that_does_not_obey_is_lost_though_it_speaks() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            a, b = await pair(engine)
            await engine.tell("job", RestartAsked(by="op", reason=""))
            a.say()
            await beating([a, b], 2 * TIMING.lease_s + 0.5)
            assert a.uid in a.job().nodes
            assert b.uid not in a.job().nodes, "b heard nothing of the restart, by its own word"

    simulate(story())


def test_a_slow_write_of_one_job_holds_up_no_other_and_is_told_to_nobody() -> None:
    async def story() -> None:
        async with engine_running(SlowBackend()) as (engine, _):
            slow = SimNode(engine, "s", "slow")
            slow.offers()
            await asyncio.sleep(1)
            await pair(engine)
            assert slow.notified == 0
            assert "slow" not in engine.rooms
            await beating([slow], 60)
            assert slow.notified > 0

    simulate(story())


def test_an_ended_job_is_readable_for_a_while_and_then_nothing_of_it_is_left() -> None:
    async def story() -> None:
        async with engine_running() as (engine, contents):
            a, b = await pair(engine)
            job_uid, round_uid = a.job().uid, a.job().known.round_uid
            await engine.tell("job", CloseAsked(by="op", reason="enough"))
            assert contents.rounds == [round_uid]
            await beating([a, b], TIMING.lease_s + 1)
            assert a.job().ending.may_exit  # type: ignore[union-attr]
            await asyncio.sleep(TIMING.ended_s - 10)
            assert engine.room("job").job.uid == job_uid
            await asyncio.sleep(20)
            with pytest.raises(NoSuchJob):
                engine.room("job")
            assert contents.jobs == [job_uid]
            assert len(engine.table) == 0
            assert not engine.rooms
            a.say()  # it slept through all that
            await asyncio.sleep(1)
            assert "has ended" in a.refused
            assert not engine.rooms

    simulate(story())


def test_a_new_submission_takes_the_name_of_a_job_with_nobody_alive() -> None:
    async def story() -> None:
        async with engine_running() as (engine, contents):
            old = await pair(engine)
            uid = old[0].job().uid
            await asyncio.sleep(2 * TIMING.lease_s + TIMING.recovery_s)
            fresh = SimNode(engine, "c", spec=JobSpec(min_nodes=1, max_nodes=1))
            fresh.offers()
            await beating([fresh], 0.5)
            fresh.offers(after=fresh.job().known.round_uid)
            await beating([fresh], 0.5)
            running = fresh.job().running
            assert fresh.job().uid != uid
            assert running is not None
            assert running.number == 2, "numbers go on"
            assert contents.jobs == [uid]
            old[0].say()
            await beating([fresh], 1)
            assert "submitted anew" in old[0].refused
            assert fresh.job().running is running

    simulate(story())


def test_a_store_call_reaches_only_a_scope_that_exists() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            a, b = await pair(engine)
            job, round_uid = a.job(), a.job().known.round_uid
            engine.check("job", job.uid, round_uid, engine.term)
            engine.check("job", job.uid, "", engine.term)
            with pytest.raises(StillLearning):
                engine.check("other", job.uid, "", engine.term)
            with pytest.raises(NoSuchJob):
                engine.check("job", "another instance", "", engine.term)
            with pytest.raises(StoreLost):
                engine.check("job", job.uid, round_uid, "an earlier daemon")
            await engine.tell("job", RestartAsked(by="op", reason=""))
            with pytest.raises(RoundOver, match="op asked for a restart"):
                engine.check("job", job.uid, round_uid, engine.term)
            await beating([a, b], TIMING.recovery_max_s)
            with pytest.raises(NoSuchJob):
                engine.check("other", job.uid, "", engine.term)

    simulate(story())


# -------------------------------------------------------------------------------------- workers that may still live

STOP = JobSpec(min_nodes=1, max_nodes=2, on_daemon_loss=OnDaemonLoss.STOP)


async def stopping_pair(engine: Engine) -> list[SimNode]:
    nodes = [SimNode(engine, "a", spec=STOP), SimNode(engine, "b", spec=STOP)]
    for node in nodes:
        node.offers()
    await beating(nodes, 0.2)
    for node in nodes:
        node.say()
    await beating(nodes, fence.bound_s(TIMING.lease_s, TIMING.kill_s))  # of a daemon that has just begun
    round_ = nodes[0].job().running
    assert round_ is not None
    for node in nodes:
        node.held = Held(round_uid=round_.uid, round=1, phase=Phase.RUNNING, alive=1)
        node.known = node.job().known
        node.offer = None
        node.say()
    await beating(nodes, 0.2)
    return nodes


def test_what_counts_is_the_last_heartbeat_and_a_pause_of_the_daemon_only_prolongs_it() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            a, b = await stopping_pair(engine)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, SimLoop)
            b.beat()
            beaten_at = loop.time()
            await beating([a], 2.0)
            loop.stall(3.0)
            await beating([a], TIMING.lease_s)
            assert a.job().running is None
            a.held = Held(round_uid=a.known.round_uid, round=1, phase=Phase.STOPPED, alive=0)
            a.offers(after=a.known.round_uid)
            while a.job().running is None:
                await beating([a], 0.1)
                assert loop.time() < beaten_at + 60
            assert loop.time() - beaten_at >= fence.bound_s(TIMING.lease_s, TIMING.kill_s)

    simulate(story())


def test_a_lease_is_told_only_when_it_is_on_record() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            a, _ = await stopping_pair(engine)
            told = engine.pace("job").lease_s
            assert told == a.job().lease_s == TIMING.lease_s
            others = [SimNode(engine, f"n{i}", "other", JobSpec(min_nodes=1, max_nodes=2000)) for i in range(1500)]
            for other in others:
                other.offers()
            await beating([a, *others], 0.2)
            assert engine.pace("other").lease_s > told, "so many nodes speak less often"
            assert engine.pace("job").lease_s == told, "and those of this job as often as before"

    simulate(story())


def test_nobody_is_answered_while_the_end_of_a_round_is_being_written() -> None:
    class Writes(MemoryBackend):
        slow = False

        async def write(self, job: Job, *, expected: int) -> int:
            if self.slow:
                await asyncio.sleep(3)
            return await super().write(job, expected=expected)

    async def story() -> None:
        backend = Writes()
        async with engine_running(backend) as (engine, _):
            a, b = await stopping_pair(engine)
            renderer = Renderer(engine)
            assert renderer.place("job", a.uid, bytes(8))
            backend.slow = True
            asking = asyncio.create_task(engine.tell("job", RestartAsked(by="op", reason="")))
            await beating([a, b], 1.0)
            assert a.job().running is not None, "it is not durable yet"
            assert renderer.place("job", a.uid, bytes(8)) == b"", "but no lease is renewed any more"
            await asking
            assert a.job().running is None
            assert renderer.place("job", a.uid, bytes(8))

    simulate(story())


class Wire:
    """The transport of one stream: says what it is given, and keeps what is answered."""

    def __init__(self, *said: bytes, before_each: Callable[[int], None]) -> None:
        self._said = list(said)
        self._before_each = before_each
        self._read = 0
        self.answers: list[pb.Place] = []

    async def read(self) -> object:
        await asyncio.sleep(0.5)
        if not self._said:
            return grpc.aio.EOF
        self._before_each(self._read)
        self._read += 1
        return self._said.pop(0)

    async def write(self, data: bytes) -> None:
        self.answers.append(pb.Place.FromString(data))


def test_what_is_read_when_another_daemon_may_lead_is_not_answered() -> None:
    """Looking first and reading then would answer what came after another daemon had taken over."""

    async def story() -> None:
        leads = True

        def check_lead() -> None:
            if not leads:
                raise NotLeader("another one does")

        def before(number: int) -> None:
            nonlocal leads
            leads = number < 2

        shared = Shared(daemon_id="d", takeover_s=5.0, check_lead=check_lead, trouble=lambda: "")
        async with engine_running(shared=shared) as (engine, _):
            state = pb.NodeState(run_id="job", node_uid="u", node_name="a", stream_no=1)
            state.spec.CopyFrom(pb.Spec(min_nodes=1, max_nodes=1, slots=1))
            said = []
            for seq in range(1, 4):
                state.seq = seq
                said.append(state.SerializeToString())
            wire = Wire(*said, before_each=before)
            stream = JoinStream(engine, Renderer(engine), wire)
            await stream.serve()
            await asyncio.sleep(1)
            stream.end()
            assert [place.ack_seq for place in wire.answers] == [1, 2]

    simulate(story())


def test_a_refusal_is_newer_than_whatever_was_told_before() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            await pair(engine)
            renderer, seq = Renderer(engine), bytes(8)
            told = pb.Place.FromString(renderer.place("job", NodeUid("a"), seq))
            refused = pb.Place.FromString(renderer.refusal("no more", seq))
            assert told.revision > 0
            assert refused.term == told.term
            assert refused.revision >= told.revision

    simulate(story())
