"""How many jobs there may be, and what becomes of those that nobody needs."""

from __future__ import annotations

import asyncio

from rendezvousd.backends.memory import MemoryBackend
from rendezvousd.core.events import CloseAsked, NodeRemoved
from rendezvousd.core.model import Held, Job, Phase
from rendezvousd.engine import Engine
from tests.sim.test_engine import LIMITS, TIMING, SimNode, beating, engine_running, pair
from tests.simloop import simulate

RETRIES = 20


async def knock(node: SimNode) -> bool:
    """Let a node try to begin a job, again and again as launchers do. Return whether it has one."""
    for _ in range(RETRIES):
        node.failed = ""
        node.stream_no += 1
        node.offers()
        await asyncio.sleep(0.3)
        if node.run_id in node.engine.rooms:
            return True
        assert node.failed
        assert node.passing
        assert not node.refused
    return False


async def close(engine: Engine, nodes: list[SimNode]) -> None:
    """End a job whose nodes read the outcome and leave."""
    run_id, uid = nodes[0].run_id, nodes[0].job().uid
    await engine.tell(run_id, CloseAsked(by="alice", reason="enough"))
    for node in nodes:
        if node.held is not None:
            node.held = Held(round_uid=node.held.round_uid, round=1, phase=Phase.STOPPED, alive=0)
        node.outcome_seen = uid
        node.say()
    await beating(nodes, 0.2)


def test_a_new_job_beyond_the_limit_is_refused_with_the_reason_until_another_one_has_ended() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            jobs = [await pair(engine, f"job{number}") for number in range(LIMITS.jobs)]
            late = SimNode(engine, "late", "late")
            assert not await knock(late)
            assert late.failed == (
                "this daemon attends 8 jobs, the most it may (--max-jobs); this node tries again until one has ended"
            )
            assert late.row is not None
            assert not late.row.attached
            await close(engine, jobs[3])
            assert await knock(late)
            assert sorted(engine.rooms) == sorted([f"job{number}" for number in range(8) if number != 3] + ["late"])

    simulate(story())


def test_the_job_that_ended_first_makes_room_and_no_other() -> None:
    async def story() -> None:
        async with engine_running() as (engine, contents):
            jobs = [await pair(engine, f"job{number}") for number in range(LIMITS.jobs)]
            uids = [nodes[0].job().uid for nodes in jobs]
            for number in (5, 2, 7):
                await close(engine, jobs[number])
                await asyncio.sleep(1)
            for number, late in enumerate(("x", "y")):
                assert await knock(SimNode(engine, late, late))
                assert contents.jobs == [uids[5], uids[2]][: number + 1]
            assert "job7" in engine.rooms

    simulate(story())


def test_an_outcome_that_nodes_have_not_read_is_kept() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            jobs = [await pair(engine, f"job{number}") for number in range(LIMITS.jobs)]
            await engine.tell("job0", CloseAsked(by="alice", reason=""))
            alive = [node for nodes in jobs for node in nodes]
            late = SimNode(engine, "late", "late")
            late.offers()
            await beating(alive, 1.0)
            assert late.failed
            assert "job0" in engine.rooms

    simulate(story())


class Hesitant(MemoryBackend):
    """Its writes take as long as etcd is away."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = asyncio.Event()
        self.writing = 0

    async def write(self, job: Job, *, expected: int) -> int:
        self.writing += 1
        await self.may_write.wait()
        return await super().write(job, expected=expected)


def test_the_limit_holds_while_new_jobs_are_being_written() -> None:
    async def story() -> None:
        backend = Hesitant()
        async with engine_running(backend) as (engine, _):
            nodes = [SimNode(engine, "a", f"job{number}") for number in range(3 * LIMITS.jobs)]
            for node in nodes:
                node.offers()
                await beating(nodes, 0.05)
            assert backend.writing == LIMITS.jobs
            assert sum(bool(node.failed) for node in nodes) == 2 * LIMITS.jobs
            backend.may_write.set()
            await beating(nodes, 0.5)
            assert len(engine.rooms) == LIMITS.jobs

    simulate(story())


def test_a_job_without_nodes_that_never_had_a_round_is_dropped_at_once() -> None:
    async def story() -> None:
        async with engine_running() as (engine, contents):
            for number in range(3 * LIMITS.jobs):
                node = SimNode(engine, "a", f"job{number}")
                node.offers()
                await asyncio.sleep(0.2)
                uid = node.job().uid
                node.leaving = "enough of waiting"
                node.say()
                await asyncio.sleep(0.3)
                assert not engine.rooms
                assert contents.jobs[-1] == uid
            assert not node.failed

    simulate(story())


def test_a_node_that_was_lost_before_the_first_round_returns_to_its_job() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            node = SimNode(engine, "a")
            node.offers()
            await asyncio.sleep(0.2)
            node.known, uid = node.job().known, node.job().uid
            await asyncio.sleep(TIMING.lease_s + 1)
            assert not engine.rooms
            node.offers()
            await asyncio.sleep(0.2)
            assert node.job().uid == uid
            assert not node.refused

    simulate(story())


def test_a_node_that_was_removed_before_the_first_round_stays_out_unless_the_room_is_needed() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            node = SimNode(engine, "a")
            node.offers()
            await asyncio.sleep(0.2)
            await engine.tell("job", NodeRemoved(uid=node.uid, by="alice", reason="broken fan"))
            node.offers()
            await asyncio.sleep(10)
            assert not node.job().nodes
            for number in range(LIMITS.jobs - 1):
                await pair(engine, f"job{number}")
            assert await knock(SimNode(engine, "late", "late"))
            assert "job" not in engine.rooms

    simulate(story())


def test_a_job_that_had_a_round_is_kept_when_its_nodes_are_gone() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            nodes = await pair(engine)
            await asyncio.sleep(TIMING.lease_s + 1)
            assert not nodes[0].job().nodes
            await asyncio.sleep(60)
            assert "job" in engine.rooms

    simulate(story())
