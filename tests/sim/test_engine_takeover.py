"""An engine that goes on with the jobs that another one has stored."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rendezvousd.backends.memory import MemoryBackend
from rendezvousd.core.codec import dump, load
from rendezvousd.core.model import Held, Job, Phase, RoundUid
from rendezvousd.engine import Engine, Shared
from tests.sim.test_engine import LIMITS, TIMING, SimNode, beating, engine_running
from tests.simloop import simulate

SHARED = Shared(daemon_id="one", takeover_s=5.0, check_lead=lambda: None, trouble=lambda: "")


async def _running_job() -> Job:
    """Return a job of two nodes whose first round runs, as it was stored."""
    async with engine_running(shared=SHARED) as (engine, _):
        nodes = [SimNode(engine, name) for name in "ab"]
        for node in nodes:
            node.offers()
        await asyncio.sleep(1.0)
        assert nodes[0].job().running is not None
        return nodes[0].job()


@contextlib.asynccontextmanager
async def _another(job: Job) -> AsyncIterator[tuple[Engine, list[SimNode]]]:
    """An engine that has taken over the job, and its nodes, which have not found it yet."""
    backend = MemoryBackend()
    engine = Engine(backend, TIMING, LIMITS, SHARED)
    now, record = engine.clock.now(), dump(job)
    engine.take_over(load(record.head, record.parts, seed="next", now=now), await backend.write(job, expected=0), now)
    life = asyncio.create_task(engine.run())
    nodes = [SimNode(engine, name) for name in "ab"]
    assert job.round is not None
    for node in nodes:
        node.known = job.known
        node.held = Held(round_uid=RoundUid(job.round.uid), round=1, phase=Phase.RUNNING, alive=1)
    try:
        yield engine, nodes
    finally:
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life


def test_nodes_are_believed_until_they_could_have_found_the_next_leader() -> None:
    async def story() -> None:
        job = await _running_job()
        async with _another(job) as (engine, nodes):
            await asyncio.sleep(TIMING.recovery_s - 0.5)
            assert engine.room("job").job.running is not None, "nobody has been heard, and nobody is lost"
            for node in nodes:
                node.say()
            await beating(nodes, 20.0)
            assert engine.room("job").job.running is not None
            assert set(engine.room("job").job.nodes) == {node.uid for node in nodes}

    simulate(story())


def test_a_node_that_does_not_find_the_next_leader_is_lost_when_its_time_is_up() -> None:
    async def story() -> None:
        job = await _running_job()
        async with _another(job) as (engine, (a, b)):
            a.say()
            await beating([a], TIMING.recovery_s + 1.0)
            assert set(engine.room("job").job.nodes) == {a.uid}
            assert engine.room("job").job.running is None
            assert b.row is None

    simulate(story())


def test_a_node_that_has_found_the_next_leader_has_its_usual_lease_there() -> None:
    async def story() -> None:
        job = await _running_job()
        async with _another(job) as (engine, (a, b)):
            a.say()
            b.say()
            await beating([a], TIMING.lease_s + 1.0)
            assert set(engine.room("job").job.nodes) == {a.uid}

    simulate(story())
