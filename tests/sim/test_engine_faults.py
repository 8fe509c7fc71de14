"""The engine in virtual time: a fault in one job is that job's, every node of a job is attended, and nobody who asks is
left without an answer."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest
from msgspec.structs import replace

from rendezvousd import engine as engine_module
from rendezvousd.attendance import Attendance, Table
from rendezvousd.backends.memory import MemoryBackend
from rendezvousd.core import machine
from rendezvousd.core.errors import NoSuchJob, NotLeader, NotServed
from rendezvousd.core.events import CloseAsked, Event, NodeHeard, RestartAsked
from rendezvousd.core.liveness import Pace
from rendezvousd.core.model import Held, Job, JobSpec, JobUid, Known, NodeSpec, NodeUid, Phase, RoundUid
from rendezvousd.core.settings import Limits, Timing
from rendezvousd.delivery import ABSENT, Room
from rendezvousd.engine import Engine
from rendezvousd.rpc import views
from rendezvousd.rpc.rendezvous import JoinStream, Renderer
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.sim.test_engine import (
    LIMITS,
    TIMING,
    SimNode,
    SlowBackend,
    Wire,
    beating,
    engine_running,
    pair,
)
from tests.simloop import simulate

ALONE = JobSpec(min_nodes=1, max_nodes=1)


def attended(engine: Engine) -> bool:
    """Return whether every node of every job has a row, without which it would never be lost. (A job about which news
    is under way may have a node whose loss is among them.)"""
    busy = engine._serving | engine._inbox.keys()
    return all(
        engine.table.get(run_id, uid) is not None
        for run_id in engine.rooms.keys() - busy
        for uid in engine.rooms[run_id].job.nodes
    )


# -------------------------------------------------------------------------------------- a fault is the fault of one job


class Refusing(MemoryBackend):
    """It takes no further record of one job, as etcd does whose limit the record exceeds."""

    bad = ""

    async def write(self, job: Job, *, expected: int) -> int:
        if job.run_id == self.bad:
            raise ValueError("request is too large")
        return await super().write(job, expected=expected)


def test_a_record_that_the_backend_refuses_ends_the_service_of_its_job_only(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        backend = Refusing()
        async with engine_running(backend) as (engine, contents):
            bad, well = await pair(engine, "bad"), await pair(engine, "well")
            backend.bad = "bad"
            with pytest.raises(NotServed, match="request is too large"):
                await engine.tell("bad", RestartAsked(by="op", reason=""))
            await beating(well, 30)
            assert well[0].job().running is not None
            for node in bad:
                assert "job 'bad' is no longer served, because of a fault" in node.failed
                assert not node.beat()
                with pytest.raises(NotServed, match="request is too large"):
                    node.say()
            assert "request is too large" in engine.explain(engine.room("bad"))
            with pytest.raises(NotServed):
                engine.check("bad", bad[0].job().uid, "", "")
            with pytest.raises(NotServed):
                await engine.tell("bad", CloseAsked(by="op", reason=""))
            assert contents.jobs == [], "what it keeps in the store is for whoever serves it next"
            assert [record.levelname for record in caplog.records].count("ERROR") == 1

    with caplog.at_level(logging.INFO):
        simulate(story())


def test_a_first_record_that_is_refused_is_the_fault_of_its_job_too() -> None:
    async def story() -> None:
        backend = Refusing()
        backend.bad = "bad"
        async with engine_running(backend) as (engine, _):
            node = SimNode(engine, "a", "bad", ALONE)
            node.offers()
            await pair(engine, "well")
            assert "request is too large" in node.failed
            assert "bad" not in engine.rooms
            with pytest.raises(NotServed, match="request is too large"):
                engine.room("bad")

    simulate(story())


def test_a_bug_that_one_event_meets_is_logged_once_and_shown_and_the_job_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def step(job: Job, event: Event, now: float, limits: Limits) -> Job:
        if isinstance(event, RestartAsked) or (isinstance(event, NodeHeard) and event.name == "c"):
            raise ZeroDivisionError("a bug")
        return machine.step(job, event, now, limits)

    monkeypatch.setattr(engine_module, "step", step)

    async def story() -> None:
        async with engine_running() as (engine, _):
            nodes = await pair(engine)
            c = SimNode(engine, "c")
            for _ in range(5):
                c.say()
                await beating(nodes, 1)
            assert c.forgotten, "its next message is no heartbeat"
            assert nodes[0].job().running is not None
            assert "NodeHeard left out: ZeroDivisionError: a bug" in engine.explain(engine.room("job"))
            assert caplog.text.count("left out") == 1
            with pytest.raises(NotServed, match="RestartAsked left out: ZeroDivisionError: a bug"):
                await engine.tell("job", RestartAsked(by="op", reason=""))

    simulate(story())


def test_a_place_that_cannot_be_made_ends_the_service_of_its_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Renderer.place

    def render(self: Renderer, run_id: str, uid: NodeUid, seq: bytes) -> bytes:
        if run_id == "bad":
            raise OverflowError("too large for a field")
        return place(self, run_id, uid, seq)

    monkeypatch.setattr(Renderer, "place", render)

    async def story() -> None:
        async with engine_running() as (engine, _):
            nodes = await pair(engine)
            wire = Wire(said("bad", 1), said("bad", 2), said("bad", 3), before_each=lambda _: None)
            stream = JoinStream(engine, Renderer(engine), wire)
            with pytest.raises((NotServed, asyncio.CancelledError)):
                await stream.serve()
            assert "too large for a field" in engine.unserved["bad"]
            await beating(nodes, 10)
            assert nodes[0].job().running is not None

    simulate(story())


def said(run_id: str, number: int, **more: Any) -> bytes:
    spec = pb.Spec(min_nodes=1, max_nodes=2, slots=1)
    state = pb.NodeState(run_id=run_id, node_uid="u", stream_no=1, seq=number, spec=spec, **more)
    return state.SerializeToString()


def test_the_list_of_jobs_has_those_that_are_not_served_and_one_that_cannot_be_shown_spoils_it_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head_view = views._head_view

    def fails(engine: Engine, room: Room) -> pb.JobView:
        if room.job.run_id == "bad":
            raise OverflowError("too large for a field")
        return head_view(engine, room)

    monkeypatch.setattr(views, "_head_view", fails)

    async def story() -> None:
        async with engine_running() as (engine, _):
            nodes = await pair(engine, "bad") + await pair(engine, "well")
            engine.set_aside("old", "the record of job 'old' cannot be read")
            reply = pb.ListJobsReply.FromString(await views.Views(engine).jobs())
            assert [view.run_id for view in reply.jobs] == ["bad", "well", "old"]
            assert "too large for a field" in reply.jobs[0].explain
            assert reply.jobs[1].phase == pb.JOB_RUNNING
            assert reply.jobs[2].explain == "the record of job 'old' cannot be read"
            await beating(nodes[2:], 5)
            assert nodes[2].job().running is not None

    simulate(story())


def test_a_job_that_cannot_be_taken_over_is_not_served_and_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Engine.pace

    def fails(self: Engine, run_id: str) -> Pace:
        if run_id == "bad":
            raise OverflowError("lease")
        return pace(self, run_id)

    async def story() -> None:
        async with engine_running() as (engine, _):
            await pair(engine)
            jobs = [replace(engine.room("job").job, run_id=run_id) for run_id in ("bad", "well")]
        monkeypatch.setattr(Engine, "pace", fails)
        engine = Engine(MemoryBackend(), TIMING, LIMITS)
        for job in jobs:
            engine.take_over(job, 1, 0.0)
        assert list(engine.unserved) == ["bad"]
        assert len(engine.table) == 2

    simulate(story())


def test_an_ended_job_that_is_readable_for_no_time_is_dropped_once_its_nodes_have_read_how_it_ended() -> None:
    async def story() -> None:
        engine = Engine(MemoryBackend(), Timing(ended_s=0.0), LIMITS)
        life = asyncio.create_task(engine.run())
        spec = JobSpec(min_nodes=2, max_nodes=2, timing=engine.timing)
        nodes = [SimNode(engine, name, spec=spec) for name in ("a", "b")]
        for node in nodes:
            node.offers()
        await beating(nodes, 0.2)
        await engine.tell("job", CloseAsked(by="op", reason=""))
        uid = nodes[0].job().uid
        await beating(nodes, 2)
        for node in nodes:
            told = node.notified
            node.outcome_seen = uid
            node.say()
        await asyncio.sleep(0.05)
        assert nodes[0].job().ending.may_exit  # type: ignore[union-attr]
        assert nodes[1].notified > told, "they are told that they may exit"
        await asyncio.sleep(1)
        assert not engine.rooms
        assert not life.done()
        await pair(engine, "another")
        life.cancel()

    simulate(story())


# ------------------------------------------------------------------------------------- every node of a job is attended


def test_a_late_word_of_an_old_node_while_its_job_is_replaced_makes_no_node_that_is_never_lost() -> None:
    async def story() -> None:
        async with engine_running() as (engine, contents):
            a, b = await pair(engine)
            old = a.job()
            await engine.tell("job", CloseAsked(by="op", reason=""))
            for node in (a, b):
                node.say()
            await beating([a, b], TIMING.lease_s + 1)
            assert set(a.job().nodes) == {"a", "b"}
            fresh = SimNode(engine, "c")
            fresh.offers()
            a.known, a.held, a.offer = Known(), None, None  # what it said before it was ever told anything
            a.say()
            await beating([fresh], 0.1)
            assert fresh.job().uid != old.uid
            assert contents.jobs == [old.uid]
            assert attended(engine)
            for _ in range(10):
                fresh.say()
                await beating([fresh], 1)
            assert set(fresh.job().nodes) == {"c"}, "a and b are silent"

    simulate(story())


class Pausing(MemoryBackend):
    """Its writes take some seconds when it is slow."""

    slow = False

    async def write(self, job: Job, *, expected: int) -> int:
        if self.slow:
            await asyncio.sleep(3)
        return await super().write(job, expected=expected)


def test_a_word_that_comes_while_the_new_job_is_written_makes_no_such_node_either() -> None:
    async def story() -> None:
        backend = Pausing()
        async with engine_running(backend) as (engine, _):
            a, b = await pair(engine)
            old = a.job().uid
            await engine.tell("job", CloseAsked(by="op", reason=""))
            for node in (a, b):
                node.say()
            await beating([a, b], TIMING.lease_s + 1)
            backend.slow = True
            fresh = SimNode(engine, "c")
            fresh.offers()
            await beating([a, b, fresh], 1)
            assert fresh.job().uid == old
            a.known, a.held, a.offer = Known(), None, None
            a.say()
            await beating([a, b, fresh], 3)
            assert fresh.job().uid != old
            assert a.forgotten, "it must say all again"
            for _ in range(20):
                fresh.say()
                await beating([fresh], 1)
            assert set(fresh.job().nodes) == {"c"}

    simulate(story())


def say_anything(engine: Engine, node: SimNode, draw: random.Random) -> None:
    """Let a node say something that may be old news, of another submission, or nonsense."""
    job = engine.rooms[node.run_id].job if node.run_id in engine.rooms else None
    if job is not None and draw.random() < 0.5:
        node.known, node.outcome_seen = job.known, draw.choice(["", job.uid])
    elif draw.random() < 0.2:
        node.known = draw.choice([Known(), Known(job_uid=JobUid("elder"), round=3, round_uid=RoundUid("r3"))])
    node.held = node.offer = None
    if job is not None and job.round is not None and draw.random() < 0.5:
        phase, alive = draw.choice(list(Phase)), draw.randrange(2)
        node.held = Held(round_uid=job.round.uid, round=job.round.number, phase=phase, alive=alive)
    if draw.random() < 0.5:
        node.offers(after=node.known.round_uid)
    else:
        node.say()


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_every_node_of_a_job_is_attended(seed: int) -> None:
    """Nodes of two jobs and several submissions say anything in any order, while writes are quick or slow."""
    draw = random.Random(seed)
    asking: list[asyncio.Task[None]] = []

    async def story() -> None:
        backend = Pausing()
        async with engine_running(backend) as (engine, _):
            spec = JobSpec(min_nodes=1, max_nodes=2, max_restarts=1, timing=TIMING)
            nodes = [SimNode(engine, name, run_id, spec) for run_id in ("one", "two") for name in "abcd"]
            for _ in range(80):
                backend.slow = draw.random() < 0.3
                node = draw.choice(nodes)
                match draw.randrange(9):
                    case 0 if node.row is not None:
                        engine.stream_ended(node.row, node)
                        node.stream_no, node.row = node.stream_no + 1, None
                    case 1 if node.run_id in engine.rooms:
                        events: list[Event] = [CloseAsked(by="op", reason=""), RestartAsked(by="op", reason="")]
                        asking.append(asyncio.create_task(engine.tell(node.run_id, draw.choice(events))))
                    case 2:
                        await beating(draw.sample(nodes, 5), draw.choice([1, 6, 70]))
                    case _:
                        say_anything(engine, node, draw)
                await asyncio.sleep(draw.choice([0, 0, 0.002, 0.1]))
                assert attended(engine)
            assert not engine.unserved
            await asyncio.sleep(700)
            assert not any(room.job.nodes for room in engine.rooms.values()), "all were silent since"
            await asyncio.gather(*asking, return_exceptions=True)

    simulate(story())


def test_a_node_that_is_refused_is_none_of_the_job() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            gone = await pair(engine, "gone")
            uid = gone[0].job().uid
            await engine.tell("gone", CloseAsked(by="op", reason=""))
            await asyncio.sleep(TIMING.ended_s + TIMING.lease_s + 1)
            assert "gone" not in engine.rooms
            a, b = await pair(engine)
            b.known = Known(job_uid=uid)
            b.say()
            await beating([a], 0.5)
            assert "has ended" in b.refused
            assert set(a.job().nodes) == {"a"}
            assert attended(engine)

    simulate(story())


def test_what_a_member_said_before_it_was_lost_counts_though_the_write_before_took_longer() -> None:
    async def story() -> None:
        backend = SlowBackend()
        async with engine_running(backend) as (engine, _):
            a, b = SimNode(engine, "a", "slow"), SimNode(engine, "b", "slow")
            for node in (a, b):
                node.offers()
            await beating([a, b], 61)
            assert a.job().running is not None
            for node in (a, b):
                node.say()  # they have obeyed
            await beating([a, b], 130)
            c = SimNode(engine, "c", "slow")
            c.offers()  # the write of this takes a minute, in which b says a last word and dies
            await beating([a, b], 1)
            engine.heard("slow", leaving(b), b, ("", 0))
            await beating([a], 180)
            assert "node b left" in a.job().round.cause.text  # type: ignore[union-attr]

    def leaving(node: SimNode) -> NodeHeard:
        return NodeHeard(
            uid=node.uid, name=node.name, job_spec=node.spec, spec=NodeSpec(), known=node.known, leaving="enough"
        )

    simulate(story())


def test_the_store_of_a_job_that_is_replaced_ends_with_it_and_is_not_made_again() -> None:
    async def story() -> None:
        backend = SlowBackend()
        async with engine_running(backend) as (engine, contents):
            a = SimNode(engine, "a", "slow", ALONE)
            a.offers()
            await beating([a], 61)
            old = a.job().uid
            await engine.tell("slow", CloseAsked(by="op", reason=""))
            await beating([a], 130)
            fresh = SimNode(engine, "c", "slow", ALONE)
            fresh.offers()
            await beating([fresh], 30)
            assert fresh.job().uid == old, "the new job is not durable yet"
            engine.check("slow", old, "", engine.term)
            assert contents.jobs == [], "so the old one's store is there"
            await beating([fresh], 60)
            assert fresh.job().uid != old
            assert contents.jobs == [old]
            with pytest.raises(NoSuchJob, match="submitted anew"):
                engine.check("slow", old, "", engine.term)

    simulate(story())


# --------------------------------------------------------------------------------------------------- who asks is told


def test_who_asks_for_a_change_is_told_when_the_daemon_stops_to_serve_meanwhile() -> None:
    async def story() -> None:
        backend = SlowBackend()
        engine = Engine(backend, TIMING, LIMITS)
        life = asyncio.create_task(engine.run())
        node = SimNode(engine, "a", "slow", ALONE)
        node.offers()
        await beating([node], 61)
        asking = [
            asyncio.create_task(engine.tell("slow", event))
            for event in (RestartAsked(by="op", reason=""), CloseAsked(by="op", reason=""))
        ]
        await beating([node], 1)
        asking.append(asyncio.create_task(engine.tell("slow", CloseAsked(by="op", reason=""))))
        await asyncio.sleep(0.1)
        life.cancel()
        for done in await asyncio.gather(*asking, return_exceptions=True):
            assert isinstance(done, NotLeader)
            assert "stopped to serve before this was durable" in str(done)
        with pytest.raises(NotLeader):
            await engine.tell("slow", CloseAsked(by="op", reason=""))

    simulate(story())


# ------------------------------------------------------------------------------------------------------------- leases


def test_a_lease_that_has_become_shorter_is_noticed_when_it_ends() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            now = engine.clock.now()
            crowd = [NodeUid(str(number)) for number in range(10_000)]
            for uid in crowd:
                engine.table.attend("large", uid, ABSENT, now, Pace(heartbeat_s=10, lease_s=9999, retry_max_s=1))
            a, b = await pair(engine)
            await beating([a, b], 1)
            assert b.row is not None
            assert b.row.lease_s > 50
            for uid in crowd:
                engine.table.drop("large", uid)
            await beating([a, b], 1)  # each is told the shorter one
            await beating([a], TIMING.lease_s + 0.5)
            assert a.job().running is None
            assert "silent for 5 s" in a.job().round.cause.text  # type: ignore[union-attr]

    simulate(story())


def test_what_was_told_under_a_longer_lease_may_take_that_long_to_be_obeyed() -> None:
    table = Table(TIMING)
    row = table.attend("job", NodeUid("a"), ABSENT, 0.0, Pace(heartbeat_s=10, lease_s=50, retry_max_s=1))
    assert isinstance(row, Attendance)
    row.tell(1, 50.0, 0.0)
    row.heard_at = 20.0
    table.lend(row, 5.0)
    assert row.deadline(TIMING) == 25.0
    row.heard_at = 48.0
    assert row.deadline(TIMING) == 50.0
    row.echo(1, 48.0)
    row.tell(2, 5.0, 48.0)
    row.heard_at = 52.0
    assert row.deadline(TIMING) == 53.0


# --------------------------------------------------------------------------------------------------------- heartbeats


def test_a_message_whose_news_is_in_its_last_bytes_is_no_heartbeat() -> None:
    def without_seq(text: str) -> bytes:
        return said("job", 0, outcome_seen=text, offer=pb.Offer(offer_id="o", address="h", port=1))

    async def story() -> None:
        async with engine_running() as (engine, _):
            news: list[str] = []
            hears = engine.heard

            def heard(run_id: str, event: NodeHeard, *rest: object) -> object:
                news.append(event.outcome_seen)
                return hears(run_id, event, *rest)  # type: ignore[arg-type]

            engine.heard = heard  # type: ignore[assignment,method-assign]
            wire = Wire(*map(without_seq, ("uid of a", "uid of b", "uid of b")), before_each=lambda _: None)
            await JoinStream(engine, Renderer(engine), wire).serve()
            assert news == ["uid of a", "uid of b", "uid of b"]
            wire = Wire(said("job", 1), said("job", 2), before_each=lambda _: None)
            news.clear()
            await JoinStream(engine, Renderer(engine), wire).serve()
            assert news == [""], "where seq comes last, it is one"

    simulate(story())
