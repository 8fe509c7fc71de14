"""Nodes that wait for the end of a job that is not theirs, in virtual time."""

from __future__ import annotations

import pytest

from rendezvousd.attendance import Clock
from rendezvousd.core.events import NodeHeard
from rendezvousd.core.model import JobSpec, NodeSpec
from rendezvousd.core.settings import Timing
from rendezvousd.engine import Engine
from rendezvousd.rpc.rendezvous import Renderer
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.sim.test_engine import SimNode, beating, engine_running
from tests.simloop import simulate

SPEC = JobSpec(min_nodes=1, max_nodes=4, timing=Timing(join_s=30.0))


class Submitted(SimNode):
    """A node with a submission token, ready for a first round from the start."""

    def __init__(self, engine: Engine, name: str, submission: str, age_s: float = 0.0) -> None:
        super().__init__(engine, name, spec=SPEC)
        self.submission = submission
        self.age_s = age_s

    def say(self, *, seen: int = -1) -> None:
        event = NodeHeard(
            uid=self.uid,
            name=self.name,
            job_spec=self.spec,
            spec=NodeSpec(),
            submission=self.submission,
            uptime_s=self.age_s,
            offer=self.offer,
            outcome_seen=self.outcome_seen,
        )
        room = self.engine.rooms.get(self.run_id)
        self.row = self.engine.heard(
            self.run_id, event, self, (self.engine.term, room.revision if room is not None else 0)
        )

    def reads(self) -> pb.Place:
        return pb.Place.FromString(Renderer(self.engine).place(self.run_id, self.uid, bytes(8)))


async def beside_a_live_job(engine: Engine) -> tuple[Submitted, Submitted]:
    first, other = Submitted(engine, "a", "s1"), Submitted(engine, "b", "s2")
    first.offers()
    await beating([first], 4.0)
    assert engine.room("job").job.running is not None
    first.say()  # it has obeyed
    other.offers()
    await beating([first, other], 1.0)
    return first, other


def test_a_node_of_another_submission_is_attended_and_told_nothing_of_the_job_but_why_it_waits() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            first, other = await beside_a_live_job(engine)
            place = other.reads()
            assert place.WhichOneof("status") == "waiting"
            assert (place.job_uid, place.known.round, place.valid_round_uid) == ("", 0, "")
            assert "belongs to submission s1, and this node to s2" in place.explain
            assert 28_000 < place.waiting.left_ms <= 30_000
            assert other.beat(), "it is attended"
            assert list(engine.room("job").job.nodes) == [first.uid]

    simulate(story())


def test_it_starts_its_own_job_when_the_other_is_over_though_it_sends_nothing_new() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            first, other = await beside_a_live_job(engine)
            old = engine.room("job").job.uid
            assert first.row is not None
            engine.stream_ended(first.row, first)
            while engine.room("job").job.lost_at is None:
                await beating([other], 0.5)
            assert engine.room("job").job.uid == old, "the other one's workers may live"
            assert "a new job starts in 10 s" in other.reads().explain
            await beating([other], Timing().recovery_s + 1.0)
            assert engine.room("job").job.uid != old
            assert list(engine.room("job").job.nodes) == [other.uid]
            place = other.reads()
            assert place.job_uid == engine.room("job").job.uid
            assert engine.waiting.get("job", other.uid) is None

    simulate(story())


def test_it_gives_up_after_its_join_timeout_and_says_what_it_waited_for() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            first, other = await beside_a_live_job(engine)
            await beating([first, other], 20.0)
            assert not other.refused
            await beating([first, other], 11.0)
            assert "belongs to submission s1" in other.refused
            assert other.refused.endswith("it has waited for 30 s (join timeout)")
            assert first.beat()

    simulate(story())


def test_one_that_is_gone_starts_no_job() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            first, other = await beside_a_live_job(engine)
            old = engine.room("job").job.uid
            await beating([first], 6.0)
            assert engine.waiting.get("job", other.uid) is None
            assert first.row is not None
            engine.stream_ended(first.row, first)
            await beating([], 15.0)
            assert engine.room("job").job.uid == old

    simulate(story())


def test_a_stop_of_the_daemon_makes_no_launcher_older_than_the_end_of_a_job() -> None:
    """Time in which the daemon was stopped does not count on its clock, but it does on that of a launcher."""
    real = 100.0
    clock = Clock(lambda: real)
    for _ in range(20):
        real += 0.1
        clock.tick()
    ended_at = clock.now()
    real += 60.0  # the daemon is stopped; a launcher is started 30 s later
    clock.tick()
    real += 0.1
    assert clock.now() - ended_at < 1.0
    assert clock.attended_s(30.1) < clock.now() - ended_at
    assert clock.attended_s(0.05) == pytest.approx(0.05)
    assert clock.attended_s(70.0) > clock.now() - ended_at, "this one was there before"


def test_nothing_is_left_of_those_that_came_and_went() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            first = Submitted(engine, "a", "s1")
            first.offers()
            await beating([first], 4.0)
            first.say()
            for number in range(50):
                other = Submitted(engine, f"b{number}", "s2")
                other.offers()
            await beating([first], 8.0)
            assert engine.waiting.run_ids() == []
            assert len(engine.table) == 1

    simulate(story())
