"""What those who look at a job are shown: one view for all of them, made without holding up the nodes."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from rendezvousd.core.events import CloseAsked
from rendezvousd.core.model import JobSpec
from rendezvousd.delivery import Room
from rendezvousd.engine import Engine
from rendezvousd.rpc.views import Views
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.sim.test_engine import SimNode, beating, engine_running, pair
from tests.simloop import simulate

MANY = 640


async def crowd(engine: Engine) -> Room:
    """A job that waits for one more node than there are."""
    spec = JobSpec(min_nodes=MANY + 1, max_nodes=MANY + 1)
    nodes = [SimNode(engine, f"n{number:04}", spec=spec) for number in range(MANY)]
    for node in nodes:
        node.offers()
    await beating(nodes, 1.0)
    room = engine.room("job")
    assert len(room.job.nodes) == MANY
    return room


def test_all_who_ask_at_once_are_given_one_view() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            room, views = await crowd(engine), Views(engine)
            found = await asyncio.gather(*(views.job(room) for _ in range(700)))
            assert all(data is found[0] for data in found)
            view = pb.JobView.FromString(found[0])
            assert [node.node_name for node in view.nodes] == [f"n{number:04}" for number in range(MANY)]
            assert view.phase == pb.JOB_GATHERING
            assert await views.job(room) is found[0]  # and whoever asks soon after

    simulate(story())


def test_others_run_while_the_view_of_a_large_job_is_made() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            room, views = await crowd(engine), Views(engine)
            making = asyncio.create_task(views.job(room))
            turns = 0
            while not making.done():
                await asyncio.sleep(0)
                turns += 1
            assert turns >= 5

    simulate(story())


def test_a_view_shows_what_had_happened_when_it_was_asked_for() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            room, views = await crowd(engine), Views(engine)
            early = asyncio.create_task(views.job(room))
            for _ in range(3):
                await asyncio.sleep(0)  # it is being made
            room.job = replace(room.job, arrivals=room.job.arrivals + 1)
            late = asyncio.create_task(views.job(room))
            assert await early is not await late
            for change in range(5):
                await engine.tell("job", CloseAsked(by="alice", reason=f"enough {change}", success=False))
                view = pb.JobView.FromString(await views.job(room))
                assert view.phase == pb.JOB_ENDED

    simulate(story())


def test_what_counts_time_is_true_within_half_a_second() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            a, _ = await pair(engine)
            room, views = engine.room("job"), Views(engine)
            began_at = engine.clock.now()
            first = pb.JobView.FromString(await views.job(room))
            for _ in range(13):
                await beating([a], 0.3)
                passed_ms = (engine.clock.now() - began_at) * 1000
                view = pb.JobView.FromString(await views.job(room))
                (listed,) = pb.ListJobsReply.FromString(await views.jobs()).jobs
                for shown in (view, listed):
                    for age_ms in (shown.age_ms - first.age_ms, shown.round_age_ms - first.round_age_ms):
                        assert 0 <= passed_ms - age_ms <= 501
                silent_ms = {node.node_name: node.silent_ms for node in view.nodes}
                assert silent_ms["a"] <= 301
                assert 0 <= passed_ms - (silent_ms["b"] - first.nodes[1].silent_ms) <= 501

    simulate(story())


def test_the_list_of_jobs_has_them_all_in_order_without_their_nodes() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            names = ["c", "a" * 200, "b"]
            for run_id in names:
                await pair(engine, run_id)
            views = Views(engine)
            jobs = pb.ListJobsReply.FromString(await views.jobs()).jobs
            assert [job.run_id for job in jobs] == sorted(names)
            for job in jobs:
                whole = pb.JobView.FromString(await views.job(engine.room(job.run_id)))
                assert len(whole.nodes) == 2
                del whole.nodes[:]
                assert whole.SerializeToString() == job.SerializeToString()

    simulate(story())
