"""What is kept to answer nodes quickly, and what is left out of answers because they have it."""

from __future__ import annotations

import asyncio
import gc

from rendezvousd.core.events import CloseAsked
from rendezvousd.core.model import Failure, Held, JobSpec, Phase
from rendezvousd.engine import Engine
from rendezvousd.rpc.rendezvous import Renderer
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.sim.test_engine import TIMING, SimNode, beating, engine_running, pair
from tests.simloop import simulate


def told(renderer: Renderer, node: SimNode) -> pb.BreakCause:
    return pb.Place.FromString(renderer.place(node.run_id, node.uid, bytes(8))).break_cause


def fail(node: SimNode, text: str, *, victim: bool) -> None:
    assert node.held is not None
    failure = Failure(rank=0, exit_code=1, text=text, age_s=0.0, victim_hint=victim)
    node.held = Held(round_uid=node.held.round_uid, round=1, phase=Phase.FAILED, alive=0, failures=(failure,))
    node.say()


async def three(engine: Engine) -> list[SimNode]:
    """A round of three nodes that may fail often."""
    spec = JobSpec(min_nodes=3, max_nodes=3, max_restarts=9)
    nodes = [SimNode(engine, name, spec=spec) for name in ("a", "b", "c")]
    for node in nodes:
        node.offers()
    await beating(nodes, 0.3)
    for node in nodes:
        node.held = Held(round_uid=node.job().known.round_uid, round=1, phase=Phase.RUNNING, alive=1)
        node.known = node.job().known
        node.say()
    await beating(nodes, 0.2)
    return nodes


def test_a_node_is_sent_the_text_of_the_final_cause_though_it_has_obeyed_the_break() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            a, b, c = nodes = await three(engine)
            renderer = Renderer(engine)
            fail(a, "a lost its peer", victim=True)
            await beating(nodes, 0.05)
            assert told(renderer, c).failure.text == "a lost its peer"
            revision = engine.room("job").revision
            c.say(seen=revision)
            await beating(nodes, 0.05)
            assert told(renderer, c).failure.text == ""
            fail(b, "b divides by zero", victim=False)
            await beating(nodes, 0.05)
            assert engine.room("job").revision == revision
            c.say(seen=revision)
            await beating(nodes, 0.05)
            assert told(renderer, c).failure.text == "b divides by zero"
            assert told(renderer, a).failure.text == "b divides by zero"

    simulate(story())


def test_a_node_that_comes_later_is_sent_the_text_as_well() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            a, b, c = nodes = await three(engine)
            renderer = Renderer(engine)
            fail(b, "b divides by zero", victim=False)
            await beating(nodes, 0.05)
            for node in (a, c):
                node.say(seen=engine.room("job").revision)
            late = SimNode(engine, "late", spec=a.spec)
            late.say(seen=0)
            await beating(nodes, 0.05)
            assert told(renderer, a).failure.text == ""
            assert told(renderer, a).failure.exit_code == 1
            assert told(renderer, late).failure.text == "b divides by zero"

    simulate(story())


def test_nothing_is_kept_of_jobs_that_are_gone() -> None:
    async def story() -> None:
        async with engine_running() as (engine, _):
            renderer = Renderer(engine)
            for number in range(3):
                nodes = await pair(engine, f"job{number}")
                for node in nodes:
                    assert renderer.place(node.run_id, node.uid, bytes(8))
                    assert node.row is not None
                    engine.stream_ended(node.row, node)
                    renderer.forget(node.run_id, node.uid)
                await engine.tell(f"job{number}", CloseAsked(by="alice", reason=""))
                assert renderer.place(f"job{number}", nodes[0].uid, bytes(8))
            await asyncio.sleep(TIMING.ended_s + 60)
            assert not engine.rooms
            gc.collect()
            assert len(renderer._own) == 0
            assert len(renderer._common) <= 1  # the engine's loop still has the one that it looked at last

    simulate(story())
