"""The session against a real gRPC server that says what the test wants said."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from rdzv import session
from rdzv.convert import Identity
from rdzv.endpoints import Endpoint
from rdzv.model import Assignment, Failure, Held, Known, Offer, Phase, Place, Standing, Waiting
from rdzv.session import METHOD, Session
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.ports import free_port

PATIENCE_S = 20.0  # for what must happen, on however busy a machine
HEARTBEAT_MS = 50

IDENTITY = Identity(
    run_id="job", node_uid="u1", node_name="n1", submission="s", spec=pb.Spec(min_nodes=1, max_nodes=2, slots=2)
)


class Daemon:
    """Answers each message with `answer(message)`, or with nothing when that is None. Keeps what it read, as bytes."""

    def __init__(self) -> None:
        self.streams: list[list[bytes]] = []
        self.answer: Callable[[pb.NodeState], pb.Place | None] = waiting
        self.refuse: tuple[grpc.StatusCode, str] | None = None
        self.hang_up_after: int | None = None
        self.port = 0

    async def join(self, requests: AsyncIterator[bytes], context: Any) -> None:
        read: list[bytes] = []
        self.streams.append(read)
        if self.refuse is not None:
            await context.abort(*self.refuse)
        async for raw in requests:
            read.append(raw)
            place = self.answer(pb.NodeState.FromString(raw))
            if place is not None:
                await context.write(place.SerializeToString())
            if self.hang_up_after == len(read):
                return

    @property
    def messages(self) -> list[pb.NodeState]:
        return [pb.NodeState.FromString(raw) for stream in self.streams for raw in stream]

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[Daemon]:
        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(self.join)
        service, method = METHOD.strip("/").split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self.port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        try:
            yield self
        finally:
            await server.stop(grace=None)


def waiting(state: pb.NodeState) -> pb.Place:
    return pb.Place(
        term="t",
        revision=1,
        job_uid="j",
        heartbeat_ms=HEARTBEAT_MS,
        lease_ms=5 * HEARTBEAT_MS,
        retry_max_ms=50,
        explain="1 of 2 nodes",
        waiting=pb.Waiting(reason=pb.GATHERING),
        ack_seq=state.seq,
    )


class Heard:
    """What the session said, in order."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.away: list[str] = []
        self.refused: list[str] = []


@contextlib.asynccontextmanager
async def attending(*ports: int, standing: Standing | None = None) -> AsyncIterator[tuple[Session, Heard]]:
    heard = Heard()
    session = Session(
        [Endpoint("127.0.0.1", port) for port in ports],
        IDENTITY,
        standing or Standing(),
        began_at=time.monotonic(),
        on_place=heard.places.append,
        on_away=heard.away.append,
        on_refused=heard.refused.append,
    )
    task = asyncio.create_task(session.run())
    try:
        yield session, heard
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110  # what is awaited happens in the code under test, which has no event for it
            await asyncio.sleep(0.005)


def run(story: Callable[[], Any]) -> None:
    asyncio.run(story())


def test_the_first_message_says_who_and_what_and_heartbeats_differ_in_their_last_8_bytes_only() -> None:
    async def story() -> None:
        async with Daemon().serving() as daemon, attending(daemon.port) as (_, heard):
            await until(lambda: len(daemon.messages) >= 5)
            first, second = daemon.messages[:2]
            assert (first.run_id, first.node_uid, first.node_name, first.submission) == ("job", "u1", "n1", "s")
            assert first.spec.slots == 2
            assert (first.stream_no, first.seq, second.seq) == (1, 1, 2)
            assert not second.HasField("spec")
            assert len({raw[:-8] for raw in daemon.streams[0][1:]}) == 1
            assert heard.places[0].explain == "1 of 2 nodes"
            assert isinstance(heard.places[0].status, Waiting)

    run(story)


def test_a_change_is_sent_without_waiting_for_the_heartbeat_and_flush_waits_for_its_answer() -> None:
    async def story() -> None:
        daemon = Daemon()

        def rarely(state: pb.NodeState) -> pb.Place:
            place = waiting(state)
            place.heartbeat_ms = 3_600_000
            return place

        daemon.answer = rarely
        async with daemon.serving(), attending(daemon.port) as (ours, heard):
            await until(lambda: heard.places)
            ours.tell(Standing(leaving="SIGTERM"))
            assert await ours.flush(PATIENCE_S)
            assert daemon.messages[-1].leaving.reason == "SIGTERM"

    run(story)


def test_the_offer_carries_the_address_towards_the_daemon() -> None:
    async def story() -> None:
        standing = Standing(offer=Offer(offer_id="o", after="r1", port=4000))
        async with Daemon().serving() as daemon, attending(daemon.port, standing=standing):
            await until(lambda: daemon.messages)
            offer = daemon.messages[0].offer
            assert (offer.offer_id, offer.after_round_uid, offer.address, offer.port) == ("o", "r1", "127.0.0.1", 4000)

    run(story)


def test_what_is_held_is_echoed_and_a_failure_is_as_old_as_when_it_was_first_told() -> None:
    async def story() -> None:
        seat = pb.Assigned(
            round=3, round_uid="r3", group_rank=1, group_size=2, first_rank=2, slots=2, world_size=4, role_first_rank=2,
            role_world_size=4, restart_count=1, max_restarts=3, master_addr="h", master_port=1, master_offer_id="o",
            store_generation="g",
        )  # fmt: skip

        def assigned(state: pb.NodeState) -> pb.Place:
            place = waiting(state)
            place.assigned.CopyFrom(seat)
            return place

        daemon = Daemon()
        daemon.answer = assigned
        async with daemon.serving(), attending(daemon.port) as (ours, heard):
            await until(lambda: heard.places)
            status = heard.places[0].status
            assert isinstance(status, Assignment)
            failure = Failure(
                rank=2, local_rank=0, exit_code=3, signal=0, text="Traceback", ended_at=time.monotonic() - 7
            )
            ours.tell(Standing(held=Held(assignment=status, phase=Phase.FAILED, spawned=True, failures=(failure,))))
            assert await ours.flush(PATIENCE_S)
            ours.tell(Standing(known=Known(round=3), held=ours._standing.held))
            assert await ours.flush(PATIENCE_S)
            told = [state.held for state in daemon.messages if state.HasField("held")]
            assert told[0].assignment == seat
            assert (told[0].phase, told[0].alive, told[0].failures[0].exit_code) == (pb.FAILED, 2, 3)
            assert told[0].failures[0].age_ms >= 7000
            assert told[-1].failures[0].age_ms == told[0].failures[0].age_ms

    run(story)


def test_a_silent_daemon_is_left_for_the_next_endpoint_and_streams_are_numbered() -> None:
    async def story() -> None:
        mute, good = Daemon(), Daemon()
        mute.answer = lambda state: waiting(state) if state.seq == 1 else None
        async with mute.serving(), good.serving(), attending(mute.port, good.port) as (_, heard):
            await until(lambda: good.messages)
            assert "silent" in heard.away[0]
            assert good.messages[0].stream_no == 2
            assert good.messages[0].spec.slots == 2

    run(story)


def test_a_daemon_that_has_not_answered_yet_hears_what_changes_and_no_heartbeats() -> None:
    async def story() -> None:
        busy, good = Daemon(), Daemon()
        busy.answer = lambda state: None
        async with busy.serving(), good.serving(), attending(busy.port, good.port) as (ours, heard):
            await until(lambda: busy.messages)
            ours.tell(Standing(outcome_seen="j"))
            await until(lambda: good.messages)  # several heartbeats later
            assert [state.outcome_seen for state in busy.messages] == ["", "j"]
            assert "silent" in heard.away[0]
            await until(lambda: len(good.messages) >= 3)

    run(story)


def test_a_broken_stream_is_opened_again() -> None:
    async def story() -> None:
        daemon = Daemon()
        daemon.hang_up_after = 2
        async with daemon.serving(), attending(daemon.port) as (_, heard):
            await until(lambda: sum(message.seq == 1 for message in daemon.messages) >= 3)
            assert "ended the stream" in heard.away[0]
            assert [s.stream_no for s in daemon.messages if s.seq == 1][:3] == [1, 2, 3]

    run(story)


def test_a_daemon_that_is_not_there_yet_is_joined_when_it_comes_up() -> None:
    async def story() -> None:
        daemon, port = Daemon(), free_port()
        async with attending(port) as (_, heard):
            await until(lambda: heard.away)
            assert "refused" in heard.away[0]
            async with daemon.serving(port):
                await until(lambda: heard.places)

    run(story)


def test_final_codes_are_not_retried_and_others_are() -> None:
    async def story() -> None:
        daemon = Daemon()
        daemon.refuse = (grpc.StatusCode.INTERNAL, "too many streams")
        async with daemon.serving(), attending(daemon.port) as (ours, heard):
            await until(lambda: len(daemon.streams) >= 2)
            assert "too many streams" in heard.away[0]
            daemon.refuse = (grpc.StatusCode.FAILED_PRECONDITION, "nnodes differ")
            await until(lambda: heard.refused)
            assert heard.refused == ["nnodes differ"]
            assert not await ours.flush(PATIENCE_S), "nobody is there to hear it"

    run(story)


class Unlucky:
    """A call that fails in the instant in which one gives it up, as one in a hundred does when gRPC's time for a
    connection and the session's, which are the same, are over."""

    async def read(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        raise ConnectionError("no connection")


def test_nobody_is_told_of_a_call_that_failed_while_it_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CONNECT_S", 0.01)
    told: list[object] = []

    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        async with attending(free_port()) as (ours, _), grpc.aio.insecure_channel(f"127.0.0.1:{free_port()}") as away:
            with pytest.raises(session._Left, match="no connection within"):
                await ours._first(Unlucky(), away)
        gc.collect()
        assert told == []

    run(story)


def test_the_end_does_not_wait_for_a_peer_that_no_longer_answers() -> None:
    """A listener that accepts and never says a word: neither opening nor closing may hang on it."""

    async def story() -> None:
        with socket.socket() as hole:
            hole.bind(("127.0.0.1", 0))
            hole.listen()
            async with attending(hole.getsockname()[1]):
                accepted, _ = await asyncio.to_thread(hole.accept)
        accepted.close()
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    run(story)
