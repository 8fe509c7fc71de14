"""The Join stream over loopback, against a real daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc

from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.daemon import daemon
from tests.wire.node import WireNode, cast

Story = Callable[[Callable[..., WireNode]], Coroutine[Any, Any, None]]


def play(tmp_path: Path, story: Story, *options: str) -> str:
    """Run the story against a daemon of its own; returns the daemon's log."""
    with daemon(tmp_path, *options) as served:

        async def scene() -> None:
            async with cast(served.endpoint) as make:
                await story(make)

        asyncio.run(scene())
    return served.text()


async def two_running(make: Callable[..., WireNode], **spec: Any) -> tuple[WireNode, WireNode]:
    a, b = make("job", "a", "2", **spec), make("job", "b", "2", **spec)
    for node in (a, b):
        await node.open()
        await node.offer(after="")
    await asyncio.gather(a.assigned(), b.assigned())
    return a, b


def test_two_nodes_get_ranks_and_agree(tmp_path: Path) -> None:
    async def story(make: Callable[..., WireNode]) -> None:
        a, b = make("job", "a", "2", slots=3), make("job", "b", "2", slots=1)
        await a.open()
        await a.offer(after="")
        place = await a.until(lambda p: p.HasField("waiting"))
        assert place.waiting.reason == pb.GATHERING
        assert "1 of 2" in place.explain
        await b.open()
        await b.offer(after="")
        first, second = await asyncio.gather(a.assigned(), b.assigned())
        assert (first.group_rank, second.group_rank) == (0, 1)
        assert (first.first_rank, second.first_rank, first.world_size, second.world_size) == (0, 3, 4, 4)
        assert first.round_uid == second.round_uid
        assert (first.master_offer_id, first.master_port) == (second.master_offer_id, second.master_port)
        assert first.master_offer_id == a.state.offer.offer_id

    play(tmp_path, story)


def test_a_failure_stops_everybody_uses_a_restart_and_deals_the_same_ranks(tmp_path: Path) -> None:
    async def story(make: Callable[..., WireNode]) -> None:
        a, b = await two_running(make, max_restarts=1)
        await b.hold(pb.FAILED, 0, pb.Failure(rank=1, exit_code=3))
        await asyncio.gather(a.stopped(), b.offer())
        first, second = await asyncio.gather(a.assigned(2), b.assigned(2))
        assert (first.group_rank, second.group_rank, first.restart_count) == (0, 1, 1)

        await a.hold(pb.FAILED, 0, pb.Failure(rank=0, signal=9, text="x" * 100_000))
        await b.stopped()
        for node in (a, b):
            place = await node.until(lambda p: p.HasField("ended"))
            assert place.ended.outcome == pb.OUTCOME_FAILED
            assert place.ended.exit_code == 128 + 9
            assert place.ended.root_cause.node_name == "a"
            assert len(place.ended.root_cause.failure.text) < 10_000
            assert "bytes cut" in place.ended.root_cause.failure.text

    play(tmp_path, story)


def test_a_traceback_is_sent_until_the_node_has_obeyed_a_place_with_it(tmp_path: Path) -> None:
    async def story(make: Callable[..., WireNode]) -> None:
        a, b = await two_running(make, max_restarts=3)
        for number in (2, 3):
            text = f"Traceback of round {number - 1} {'x' * 5_000}"
            await b.hold(pb.FAILED, 0, pb.Failure(rank=1, exit_code=3, text=text))
            await asyncio.gather(a.stopped(), b.offer())
            await asyncio.gather(a.assigned(number), b.assigned(number))
            for node in (a, b):
                seq = node.state.seq + 1
                await node.say()
                await node.until(lambda p, seq=seq: p.ack_seq >= seq)  # type: ignore[misc]
                assert any(place.break_cause.failure.text == text for place in node.places)
                cause = node.place.break_cause
                assert (cause.failure.text, cause.failure.exit_code, cause.node_name) == ("", 3, "b")
                assert "rank 1" in cause.text
                await node.close()  # a stream that breaks has told it before
                await node.open()
                place = await node.until(lambda p: p.HasField("assigned"))
                assert not place.break_cause.failure.text
                node.places.clear()
                await node.until(lambda p: p.HasField("assigned"))

    play(tmp_path, story)


def test_a_broken_stream_is_a_lost_node_unless_it_returns_within_its_grace(tmp_path: Path) -> None:
    async def story(make: Callable[..., WireNode]) -> None:
        a, b = await two_running(make)
        await b.close()
        await b.open()  # the same process, a new stream: nothing happened
        place = await b.until(lambda p: p.HasField("assigned"))
        assert place.assigned.round == 1
        await b.close()
        place = await a.until(lambda p: not p.valid_round_uid)
        assert place.break_cause.kind == pb.NODE_LOST
        assert place.break_cause.node_name == "b"

    play(tmp_path, story)


def test_an_older_stream_says_nothing_any_more(tmp_path: Path) -> None:
    async def story(make: Callable[..., WireNode]) -> None:
        a, b = await two_running(make)
        ghost = make("job", "b", "2")
        ghost.state.CopyFrom(b.state)
        await b.close()
        await b.open()
        await b.until(lambda p: p.HasField("assigned"))
        ghost.state.stream_no = 0
        await ghost.open()  # stream 1 again, now older than b's
        await ghost.hold(pb.FAILED, 0, pb.Failure(rank=1, exit_code=1))
        await ghost.close()
        for node in (a, b):
            seq = node.state.seq + 1
            await node.say()
            place = await node.until(lambda p, seq=seq: p.ack_seq >= seq)  # type: ignore[misc]
            assert place.assigned.round == 1

    play(tmp_path, story)


def test_disagreeing_wishes_are_spelled_out(tmp_path: Path) -> None:
    async def story(make: Callable[..., WireNode]) -> None:
        a, b = make("job", "a", "2:4"), make("job", "b", "2:5", max_restarts=7)
        await a.open()
        await a.until(lambda p: p.HasField("waiting"))
        await b.open()
        place = await b.until(lambda p: p.HasField("removed"))
        assert place.removed.exit_code == 2
        assert "--nnodes is 2:4" in place.removed.reason
        assert "2:5" in place.removed.reason
        assert "--max-restarts is 0" in place.removed.reason

    play(tmp_path, story)


def test_nonsense_is_refused_by_name_and_harms_nobody(tmp_path: Path) -> None:
    async def story(make: Callable[..., WireNode]) -> None:
        a, b = await two_running(make)
        for spoil, word in (
            (lambda n: setattr(n.state.spec, "slots", 0), "slots"),
            (lambda n: setattr(n.state.spec, "min_nodes", 9), "min_nodes"),
            (lambda n: setattr(n.state, "run_id", ""), "run_id"),
            (lambda n: setattr(n.state, "run_id", "x" * 1000), "run_id"),
            (lambda n: n.state.ClearField("spec"), "spec"),
        ):
            bad = make("other", "bad", "2")
            spoil(bad)
            await bad.open()
            error = await bad.ended()
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert word in (error.details() or "")
        seq = a.state.seq + 1
        await a.say()
        assert (await a.until(lambda p: p.ack_seq >= seq)).assigned.round == 1
        assert b.error is None

    play(tmp_path, story)
