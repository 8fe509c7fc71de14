"""A node that opens one stream after the other: only the newest one counts."""

from __future__ import annotations

import asyncio

from rendezvousd.core.model import JobSpec
from rendezvousd.engine import Engine
from tests.sim.test_engine import SimNode, beating, engine_running
from tests.simloop import simulate

ALONE = JobSpec(min_nodes=2, max_nodes=2)


def _there(engine: Engine, node: SimNode) -> bool:
    """Return whether it is a node of its job, which ends with its last node."""
    room = engine.rooms.get(node.run_id)
    return room is not None and node.uid in room.job.nodes


def test_that_an_older_stream_ends_is_no_news() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            old, new = SimNode(engine, "a", spec=ALONE), SimNode(engine, "a", spec=ALONE)
            new.stream_no = 2
            old.offers()
            await asyncio.sleep(0.1)
            new.offers()
            await asyncio.sleep(0.1)
            assert new.row is not None
            engine.stream_ended(new.row, old)
            await asyncio.sleep(2.0)
            assert new.job().nodes[new.uid].offer is not None, "what was offered on the newer stream stands"
            await beating([new], 20.0)
            assert new.uid in new.job().nodes

    simulate(story())


def test_a_stream_that_breaks_at_the_end_of_a_silence_prolongs_no_lease() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            a = SimNode(engine, "a", spec=ALONE)
            a.offers()
            await asyncio.sleep(engine.timing.lease_s - 0.5)
            assert a.row is not None
            engine.stream_ended(a.row, a)
            await asyncio.sleep(0.3)
            assert _there(engine, a)
            await asyncio.sleep(0.5)  # its grace alone would last longer
            assert not _there(engine, a)

    simulate(story())


def test_a_late_heartbeat_of_an_older_stream_keeps_no_node_alive() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            old, new = SimNode(engine, "a", spec=ALONE), SimNode(engine, "a", spec=ALONE)
            new.stream_no = 2
            old.offers()
            new.offers()
            await asyncio.sleep(0.1)
            new.say()  # and has seen all that it was told
            assert not old.beat()
            await beating([old], engine.timing.lease_s + 0.5)
            assert not _there(engine, new)

    simulate(story())
