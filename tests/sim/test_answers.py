"""When a node is answered: at once in a small job, once instead of twice in a large one, and at once what is urgent."""

from __future__ import annotations

import asyncio

import pytest

from rendezvousd.core.events import RestartAsked
from rendezvousd.core.model import JobSpec, OnDaemonLoss
from rendezvousd.delivery import ANSWER_A_NODE_S, SMALL_MAX
from rendezvousd.engine import Engine
from tests.sim.test_engine import SimNode, beating, engine_running
from tests.simloop import simulate

LARGE = 4 * SMALL_MAX
SOON_S = LARGE * ANSWER_A_NODE_S


def crowd(engine: Engine, count: int, rule: OnDaemonLoss = OnDaemonLoss.CONTINUE) -> list[SimNode]:
    """So many nodes of a job that needs one more."""
    spec = JobSpec(min_nodes=count + 1, max_nodes=count + 1, on_daemon_loss=rule)
    return [SimNode(engine, f"n{number}", spec=spec) for number in range(count)]


@pytest.mark.parametrize(
    ("count", "rule"), [(SMALL_MAX, OnDaemonLoss.CONTINUE), (LARGE, OnDaemonLoss.STOP)], ids=["few", "workers end"]
)
def test_where_it_matters_a_node_is_answered_at_once(count: int, rule: OnDaemonLoss) -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            nodes = crowd(engine, count, rule)
            for node in nodes:
                node.offers()
            await asyncio.sleep(0.05)
            assert all(node.notified for node in nodes)
            before = nodes[0].notified
            nodes[0].say()
            await asyncio.sleep(0.05)
            assert nodes[0].notified == before + 1

    simulate(story())


def test_in_a_large_job_who_speaks_is_answered_soon_or_with_what_all_are_told() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            nodes = crowd(engine, LARGE)
            for node in nodes:
                node.offers()
            await asyncio.sleep(0.05)
            assert {node.notified for node in nodes} == {1}, "all were told that there is such a job"
            nodes[0].say()
            await asyncio.sleep(0.05)
            assert nodes[0].notified == 1
            await asyncio.sleep(SOON_S + 0.1)
            assert nodes[0].notified == 2
            for node in nodes:
                node.say()
            last = SimNode(engine, "last", spec=nodes[0].spec)
            last.offers()
            await asyncio.sleep(0.05)
            assert last.job().running is not None
            assert (nodes[0].notified, nodes[1].notified, last.notified) == (3, 2, 1), "their places, at once"
            await beating(nodes, 1.0)
            assert (nodes[0].notified, nodes[1].notified, last.notified) == (3, 2, 1), "and nothing again"
            await engine.tell("job", RestartAsked(by="op", reason=""))
            assert {node.notified for node in nodes[1:]} == {3}

    simulate(story())


def test_a_job_that_waits_for_thousands_goes_at_their_pace_from_the_start() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            first = SimNode(engine, "n0", "many", JobSpec(min_nodes=4_000, max_nodes=10_000))
            few = SimNode(engine, "n0", "few", JobSpec(min_nodes=1, max_nodes=10_000))
            endless = SimNode(engine, "n0", "endless", JobSpec(min_nodes=10**9, max_nodes=10**9))
            for node in (first, few, endless):
                node.offers()
            await asyncio.sleep(0.05)
            assert engine.pace("many").heartbeat_s == pytest.approx(4.0)
            assert engine.pace("few").heartbeat_s == pytest.approx(1.0), "one job's nodes are no concern of another's"
            most = engine.limits.nodes_per_job
            assert engine.pace("endless").heartbeat_s == pytest.approx(most / 1_000), "no more than can ever come"

    simulate(story())
