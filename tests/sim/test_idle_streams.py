"""Join streams that speak for no node: they do not stay for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from rendezvousd.backends.memory import MemoryBackend
from rendezvousd.core.settings import Limits, Timing
from rendezvousd.desk import Desk
from rendezvousd.engine import Engine
from rendezvousd.rpc.rendezvous import IDLE_S, SWEEP_S, RendezvousStreams
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.simloop import simulate


class Aborted(Exception):
    """The daemon has ended the stream."""


class Peer:
    """The other end of a Join stream, as the daemon's side sees it."""

    def __init__(self, uid: str = "u", max_nodes: int = 1) -> None:
        self.places: list[pb.Place] = []
        self.status: tuple[grpc.StatusCode, str] | None = None
        self._said: asyncio.Queue[bytes] = asyncio.Queue()
        self._state = pb.NodeState(run_id="job", node_uid=uid, node_name=uid, stream_no=1)
        self._state.spec.CopyFrom(pb.Spec(min_nodes=1, max_nodes=max_nodes, slots=1))

    def say(self) -> None:
        self._state.seq += 1
        self._said.put_nowait(self._state.SerializeToString())

    async def read(self) -> bytes:
        return await self._said.get()

    async def write(self, data: bytes) -> None:
        self.places.append(pb.Place.FromString(data))

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        self.status = (code, text)
        raise Aborted


@contextlib.asynccontextmanager
async def daemon(timing: Timing) -> AsyncIterator[RendezvousStreams]:
    """The streams of a daemon."""
    engine, desk = Engine(MemoryBackend(), timing, Limits()), Desk()
    life = asyncio.create_task(engine.run())
    desk.open(engine)
    try:
        yield RendezvousStreams(desk)
    finally:
        life.cancel()
        await asyncio.wait([life])


def join(streams: RendezvousStreams, peer: Peer) -> asyncio.Task[None]:
    context: Any = peer
    return asyncio.create_task(streams.join(None, context))


def test_a_stream_that_never_speaks_is_ended_so_that_a_launcher_would_come_again() -> None:
    async def story() -> None:
        async with daemon(Timing()) as streams:
            peer = Peer()
            joining = join(streams, peer)
            await asyncio.sleep(IDLE_S - 1)
            assert len(streams) == 1
            await asyncio.sleep(SWEEP_S + 2)
            assert isinstance(joining.exception(), Aborted)
            assert peer.status is not None
            code, text = peer.status
            assert code is grpc.StatusCode.UNAVAILABLE
            assert text.startswith("nothing was sent on this stream for 3")
            assert len(streams) == 0
            assert streams._sweeping is None

    simulate(story())


def test_a_stream_of_an_attended_node_stays_however_long_its_lease_and_goes_when_it_is_lost() -> None:
    async def story() -> None:
        timing = Timing(heartbeat_s=60.0)
        async with daemon(timing) as streams:
            peer = Peer()
            joining = join(streams, peer)
            peer.say()
            await asyncio.sleep(timing.lease_s - 1)
            assert not joining.done()
            await asyncio.sleep(SWEEP_S + 2)
            assert isinstance(joining.exception(), Aborted)

    simulate(story())


def test_a_stream_whose_node_was_refused_goes_if_the_node_does_not() -> None:
    async def story() -> None:
        async with daemon(Timing()) as streams:
            first, other = Peer("a"), Peer("b", max_nodes=2)
            joining = [join(streams, peer) for peer in (first, other)]
            for _ in range(int(2 * IDLE_S + SWEEP_S)):
                first.say()
                if not other.places:
                    other.say()
                await asyncio.sleep(1)
            assert other.places[-1].HasField("removed")
            assert [task.done() for task in joining] == [False, True]
            assert isinstance(joining[1].exception(), Aborted)
            joining[0].cancel()
            await asyncio.wait(joining)

    simulate(story())
