"""What operators and tools ask, against a real daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from immutables import Map
from msgspec.structs import replace

from rendezvousd.core.errors import NoSuchNode
from rendezvousd.core.model import Job, JobSpec, JobUid, Node, NodeSpec, NodeUid
from rendezvousd.rpc.admin import _chosen
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.daemon import daemon
from tests.wire.node import WireNode, cast


class Operator:
    """The unary calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def call(self, method: str, request: Any, reply: Any) -> Any:
        stub = self.channel.unary_unary(
            f"/rendezvousd.v1.Rendezvous/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        return await stub(request, timeout=30)


def play(tmp_path: Any, story: Callable[[Operator, WireNode, WireNode], Any]) -> None:
    async def scene(endpoint: str) -> None:
        async with cast(endpoint) as make, grpc.aio.insecure_channel(endpoint) as channel:
            a, b = make("job", "a", "1:2", slots=2), make("job", "b", "1:2")
            for node in (a, b):
                await node.open()
                await node.offer(after="")
            await asyncio.gather(a.assigned(), b.assigned())
            await story(Operator(channel), a, b)

    with daemon(tmp_path) as served:
        asyncio.run(scene(served.endpoint))


def test_a_job_can_be_looked_at(tmp_path: Any) -> None:
    async def story(ask: Operator, a: WireNode, b: WireNode) -> None:
        view = await ask.call("GetJob", pb.GetJobRequest(run_id="job"), pb.JobView)
        while any(node.state != "running" for node in view.nodes):  # what b says may still be under way
            await b.say()
            view = await ask.call("GetJob", pb.GetJobRequest(run_id="job"), pb.JobView)
        assert (view.phase, view.world_size, view.known.round) == (pb.JOB_RUNNING, 3, 1)
        assert [(n.node_name, n.group_rank, n.slots, n.state) for n in view.nodes] == [
            ("a", 0, 2, "running"),
            ("b", 1, 1, "running"),
        ]
        jobs = await ask.call("ListJobs", pb.ListJobsRequest(), pb.ListJobsReply)
        assert [job.run_id for job in jobs.jobs] == ["job"]
        with pytest.raises(grpc.aio.AioRpcError, match="no job 'other'"):
            await ask.call("GetJob", pb.GetJobRequest(run_id="other"), pb.JobView)

    play(tmp_path, story)


def test_a_restart_uses_none_of_the_budget(tmp_path: Any) -> None:
    async def story(ask: Operator, a: WireNode, b: WireNode) -> None:
        await ask.call("Restart", pb.RestartRequest(run_id="job", reason="new data"), pb.RestartReply)
        await asyncio.gather(a.stopped(), b.stopped())
        assert a.place.break_cause.kind == pb.OPERATOR
        assert "new data" in a.place.break_cause.text
        again = await a.assigned(2)
        assert again.restart_count == 0

    play(tmp_path, story)


def test_a_removed_node_stays_out(tmp_path: Any) -> None:
    async def story(ask: Operator, a: WireNode, b: WireNode) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="its nodes: a, b"):
            await ask.call("Leave", pb.LeaveRequest(run_id="job", node_name="c"), pb.LeaveReply)
        reply = await ask.call(
            "Leave", pb.LeaveRequest(run_id="job", node_name="b", reason="broken fan"), pb.LeaveReply
        )
        assert reply.removed == 1
        place = await b.until(lambda p: p.HasField("removed"))
        assert "broken fan" in place.removed.reason
        assert not place.valid_round_uid
        await b.hold(pb.STOPPED, 0)
        await a.stopped()
        assert (await a.assigned(2)).world_size == 2
        await b.offer()
        assert (await b.until(lambda p: p.HasField("removed"))).removed.reason == "broken fan"

    play(tmp_path, story)


def test_a_long_reason_is_cut_and_says_so(tmp_path: Any) -> None:
    async def story(ask: Operator, a: WireNode, b: WireNode) -> None:
        reason = f"begin {'x' * 900_000}\nend"
        await ask.call("Restart", pb.RestartRequest(run_id="job", reason=reason), pb.RestartReply)
        await asyncio.gather(a.stopped(), b.stopped())
        await ask.call("Leave", pb.LeaveRequest(run_id="job", node_name="b", reason=reason), pb.LeaveReply)
        removed = (await b.until(lambda p: p.HasField("removed"))).removed
        await ask.call("Close", pb.CloseRequest(run_id="job", reason=reason), pb.CloseReply)
        ended = (await a.until(lambda p: p.HasField("ended"))).ended
        for text in (a.place.break_cause.text, removed.reason, ended.root_cause.text):
            assert len(text) < 400
            assert "begin x" in text
            assert text.endswith("x end")
            assert "bytes cut" in text

    play(tmp_path, story)


def test_what_does_not_exist_is_not_found_however_much_there_is_to_say(tmp_path: Any) -> None:
    async def story(ask: Operator, a: WireNode, b: WireNode) -> None:
        for name in ("nobody", "x" * 900_000, "ü" * 200_000):
            for method, request, reply in (
                ("Leave", pb.LeaveRequest(run_id="job", node_name=name), pb.LeaveReply),
                ("GetJob", pb.GetJobRequest(run_id=name), pb.JobView),
                ("Close", pb.CloseRequest(run_id=name), pb.CloseReply),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask.call(method, request, reply)
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
                assert name[:10] in (caught.value.details() or "")

    play(tmp_path, story)


def test_the_refusal_to_remove_a_node_names_only_a_few_of_very_many() -> None:
    spec = JobSpec(min_nodes=1, max_nodes=500)
    job = Job(run_id="job", uid=JobUid("uid"), seed="", spec=spec, began_at=0.0)
    names = [f"node-{number:04}-{'n' * 200}" for number in range(500)]
    nodes = {NodeUid(name): Node(uid=NodeUid(name), name=name, arrival=0, spec=NodeSpec()) for name in names}
    with pytest.raises(NoSuchNode) as caught:
        _chosen(replace(job, nodes=Map(nodes)), pb.LeaveRequest(run_id="job", node_name="other"))
    text = str(caught.value)
    assert "node-0000" in text
    assert "node-0004" in text
    assert "and 495 more" in text
    assert len(text) < 700


def test_a_closed_job_ends_for_everybody(tmp_path: Any) -> None:
    async def story(ask: Operator, a: WireNode, b: WireNode) -> None:
        await ask.call("Close", pb.CloseRequest(run_id="job", reason="enough"), pb.CloseReply)
        for node in (a, b):
            place = await node.until(lambda p: p.HasField("ended"))
            assert place.ended.outcome == pb.OUTCOME_CLOSED
            assert "enough" in place.ended.root_cause.text
            assert not place.ended.may_exit
            await node.hold(pb.STOPPED, 0)
            node.state.outcome_seen = place.job_uid
            await node.say()
        for node in (a, b):
            await node.until(lambda p: p.ended.may_exit)

    play(tmp_path, story)


def test_a_watcher_sees_the_job_change(tmp_path: Any) -> None:
    async def story(ask: Operator, a: WireNode, b: WireNode) -> None:
        watch = ask.channel.unary_stream(
            "/rendezvousd.v1.Rendezvous/WatchJob",
            request_serializer=pb.GetJobRequest.SerializeToString,
            response_deserializer=pb.JobView.FromString,
        )(pb.GetJobRequest(run_id="job"))
        assert (await watch.read()).phase == pb.JOB_RUNNING
        await b.hold(pb.FAILED, 0, pb.Failure(rank=2, exit_code=3))
        view = await watch.read()
        while view.phase != pb.JOB_ENDED:
            await asyncio.gather(a.say(), b.say())
            if not a.place.valid_round_uid and a.state.held.phase != pb.STOPPED:
                await a.hold(pb.STOPPED, 0)
            view = await asyncio.wait_for(watch.read(), 60)
        assert view.ended.exit_code == 3
        assert "rank 2" in view.ended.root_cause.text

    play(tmp_path, story)
