"""A node that speaks the protocol by hand, for tests: no launcher, no processes, every message under control."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from rendezvousd.v1 import rendezvous_pb2 as pb

JOIN = "/rendezvousd.v1.Rendezvous/Join"
WAIT_S = 60.0  # generous: a condition that does not come is a failure, a slow machine is none


class WireNode:
    """One node. `state` is what it says next; `place` is what it was last told."""

    def __init__(self, channel: grpc.aio.Channel, run_id: str, name: str, spec: pb.Spec, uid: str = "") -> None:
        self.state = pb.NodeState(run_id=run_id, node_uid=uid or secrets.token_hex(8), node_name=name)
        self.state.spec.CopyFrom(spec)
        self.places: list[pb.Place] = []
        self._channel = channel
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self.error: grpc.aio.AioRpcError | None = None

    @property
    def place(self) -> pb.Place:
        return self.places[-1] if self.places else pb.Place()

    async def open(self) -> None:
        self.state.stream_no += 1
        self.state.seq = 0
        self.error = None
        self._call = self._channel.stream_stream(
            JOIN, request_serializer=pb.NodeState.SerializeToString, response_deserializer=pb.Place.FromString
        )()
        self._reader = asyncio.create_task(self._read(self._call))
        await self.say()

    async def _read(self, call: Any) -> None:
        try:
            async for place in call:
                self.places.append(place)
                if place.known.round >= self.state.known.round:
                    self.state.known.CopyFrom(place.known)
                self.state.seen.term, self.state.seen.revision = place.term, place.revision
                self._news.set()
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            pass
        self._news.set()

    async def say(self) -> None:
        """Say how the node stands."""
        self.state.seq += 1
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(self.state)

    async def offer(self, after: str | None = None) -> None:
        """Offer a fresh (imaginary) store for the next round."""
        offer = pb.Offer(offer_id=secrets.token_hex(8), address="10.9.8.7", port=4321)
        offer.after_round_uid = self.state.known.round_uid if after is None else after
        self.state.offer.CopyFrom(offer)
        await self.say()

    async def hold(self, phase: int, alive: int, *failures: pb.Failure) -> None:
        """Say how the processes of the assigned round are."""
        if self.place.HasField("assigned"):
            self.state.held.assignment.CopyFrom(self.place.assigned)
        self.state.held.phase = phase  # type: ignore[assignment]
        self.state.held.alive = alive
        del self.state.held.failures[:]
        self.state.held.failures.extend(failures)
        await self.say()

    async def until(self, wanted: Callable[[pb.Place], bool], what: str = "") -> pb.Place:
        """Return the first place that is as wanted, speaking like a living node meanwhile."""
        give_up = time.monotonic() + WAIT_S
        while not (self.places and wanted(self.place)):
            assert time.monotonic() < give_up, f"never told {what or wanted}; last: {self.place}"
            assert self.error is None, self.error
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), 0.3)
            if not self._news.is_set():
                await self.say()
        return self.place

    async def ended(self) -> grpc.aio.AioRpcError:
        """Wait until the daemon has ended the stream; returns with what status."""
        async with asyncio.timeout(WAIT_S):
            while self.error is None:
                self._news.clear()
                await self._news.wait()
        return self.error

    async def assigned(self, round_: int = 0) -> pb.Assigned:
        """Wait for an assignment (of this round number, if given) and start to run it."""
        place = await self.until(
            lambda p: p.HasField("assigned") and (not round_ or p.assigned.round == round_), f"round {round_}"
        )
        await self.hold(pb.RUNNING, place.assigned.slots)
        return place.assigned

    async def stopped(self) -> None:
        """Wait until told to stop, and stop, and offer again."""
        uid = self.state.held.assignment.round_uid
        await self.until(lambda p: p.valid_round_uid != uid, "to stop")
        await self.hold(pb.STOPPED, 0)
        await self.offer(after=self.place.known.round_uid)

    async def close(self) -> None:
        """Break the stream without a word."""
        if self._reader is not None:
            self._call.cancel()
            self._reader.cancel()
            await asyncio.wait([self._reader])


@contextlib.asynccontextmanager
async def cast(endpoint: str) -> AsyncIterator[Callable[..., WireNode]]:
    """Yield a maker of nodes that talk to this endpoint; all are gone when the scope ends."""
    nodes: list[WireNode] = []
    async with contextlib.AsyncExitStack() as stack:

        async def channel() -> grpc.aio.Channel:
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
            return await stack.enter_async_context(grpc.aio.insecure_channel(endpoint, options=options))

        shared = await channel()

        def make(run_id: str, name: str, nnodes: str = "1:2", *, slots: int = 1, **spec: Any) -> WireNode:
            low, _, high = nnodes.partition(":")
            wishes = pb.Spec(min_nodes=int(low), max_nodes=int(high or low), slots=slots, stop_grace_ms=1000, **spec)
            wishes.timeouts.settle_ms = wishes.timeouts.settle_ms or 300
            node = WireNode(shared, run_id, name, wishes)
            nodes.append(node)
            return node

        try:
            yield make
        finally:
            for node in nodes:
                await node.close()
