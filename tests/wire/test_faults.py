"""A fault in one job is the fault of one job: the daemon goes on, and serves the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from rendezvousd.etcd.v1 import etcd_pb2
from rendezvousd.v1 import rendezvous_pb2 as pb
from rendezvousd.v1 import store_pb2
from tests.daemon import daemon
from tests.etcd import Cluster, connected, etcd
from tests.wire.node import WireNode, cast
from tests.wire.test_admin import Operator


def on_etcd(cluster: Cluster) -> tuple[str, str]:
    return "--backend=etcd", f"--etcd-endpoints={','.join(cluster.endpoints)}"


@asynccontextmanager
async def operator(endpoint: str) -> AsyncIterator[Operator]:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        yield Operator(channel)


async def leads(endpoint: str) -> None:
    """Wait until this daemon attends nodes."""
    async with operator(endpoint) as ask:
        while True:
            view = await ask.call("GetDaemon", pb.GetDaemonRequest(), pb.DaemonView)
            if view.leads:
                return
            await asyncio.sleep(0.05)


async def run_alone(node: WireNode) -> None:
    """Let it run a round of one node."""
    await node.open()
    await node.offer(after="")
    await node.assigned()


async def put(cluster: Cluster, key: bytes, value: bytes) -> None:
    async with connected(cluster.access()) as client:
        request = etcd_pb2.RequestOp(put=etcd_pb2.PutRequest(key=key, value=value))
        await client.txn(etcd_pb2.TxnRequest(success=[request]))


def test_a_record_that_cannot_be_read_stays_and_only_its_run_id_is_refused(tmp_path: Path) -> None:
    key = b"/rendezvousd/jobs/old/head"
    value = b'{"format":[1,0],"writer":"w","generation":1,"parts":{}}\n{"version":[2,3]}'
    text = (
        "the record of job 'old' at /rendezvousd/jobs/old/head cannot be read: its version is 2.3, and this daemon "
        "reads 1.x. The job is not served."
    )

    async def story(endpoint: str) -> None:
        await leads(endpoint)
        async with cast(endpoint) as make, operator(endpoint) as ask:
            await run_alone(make("well", "a", "1"))
            new = make("old", "b", "1")
            await new.open()
            refusal = await new.ended()
            assert refusal.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert text in str(refusal.details())
            member = make("old", "c", "1")
            member.state.resumed = True  # it may have workers, which another daemon could serve
            await member.open()
            refusal = await member.ended()
            assert refusal.code() is grpc.StatusCode.UNAVAILABLE
            assert text in str(refusal.details())
            view = await ask.call("GetDaemon", pb.GetDaemonRequest(), pb.DaemonView)
            assert text in view.explain
            assert (await ask.call("ListJobs", pb.ListJobsRequest(), pb.ListJobsReply)).jobs[0].run_id == "well"
            with pytest.raises(grpc.aio.AioRpcError, match="The job is not served"):
                await ask.call("GetJob", pb.GetJobRequest(run_id="old"), pb.JobView)

    async def left(cluster: Cluster) -> bytes:
        async with connected(cluster.access()) as client:
            return bytes((await client.range(key)).kvs[0].value)

    with etcd(tmp_path) as cluster:
        asyncio.run(put(cluster, key, value))
        with daemon(tmp_path, *on_etcd(cluster)) as served:
            asyncio.run(story(served.endpoint))
        assert asyncio.run(left(cluster)) == value
        assert text in served.text()


def test_nodes_of_a_daemon_that_is_deposed_read_so(tmp_path: Path) -> None:
    async def story(cluster: Cluster, endpoint: str) -> None:
        await leads(endpoint)
        async with cast(endpoint) as make, connected(cluster.access()) as client:
            node = make("job", "a", "1")
            await run_alone(node)
            removal = etcd_pb2.RequestOp(delete_range=etcd_pb2.DeleteRangeRequest(key=b"/rendezvousd/leader"))
            await client.txn(etcd_pb2.TxnRequest(success=[removal]))
            refusal = await node.ended()
            assert refusal.code() is grpc.StatusCode.UNAVAILABLE
            assert "no longer leads: the leader's key is no longer this daemon's" in str(refusal.details())

    with etcd(tmp_path) as cluster, daemon(tmp_path, *on_etcd(cluster)) as served:
        asyncio.run(story(cluster, served.endpoint))


def test_a_job_whose_record_etcd_refuses_is_not_served_and_the_others_are_also_by_the_next_daemon(
    tmp_path: Path,
) -> None:
    async def story(endpoint: str, number: int) -> None:
        await leads(endpoint)
        async with cast(endpoint) as make, operator(endpoint) as ask:
            well = make(f"well {number}", "a", "1")
            await run_alone(well)
            many = [make("bad", f"{name} " + "x" * 250, "40") for name in range(40)]
            for node in many:
                await node.open()
            for node in many:
                refusal = await node.ended()
                assert "job 'bad' is no longer served, because of a fault" in str(refusal.details())
                assert "too large" in str(refusal.details())
            view = await ask.call("GetDaemon", pb.GetDaemonRequest(), pb.DaemonView)
            assert "job 'bad' is no longer served" in view.explain
            seq = well.state.seq
            await well.until(lambda place: place.ack_seq > seq)
            assert well.place.HasField("assigned")
            await well.close()

    with etcd(tmp_path, "--max-request-bytes=8192") as cluster:
        for number in range(2):
            with daemon(tmp_path, *on_etcd(cluster)) as served:
                asyncio.run(story(served.endpoint, number))
                assert served.process.poll() is None


LARGE_VALUES = ("--max-store-value-bytes=4194304", "--max-message-bytes=8388608")


def test_a_value_that_etcd_refuses_is_refused_and_the_job_keeps_its_store(tmp_path: Path) -> None:
    async def story(endpoint: str) -> None:
        await leads(endpoint)
        options = [("grpc.max_send_message_length", -1)]
        async with cast(endpoint) as make, grpc.aio.insecure_channel(endpoint, options=options) as channel:
            node = make("job", "a", "1")
            await run_alone(node)
            scope = store_pb2.Scope(run_id="job", job_uid=node.place.job_uid)

            async def call(method: str, request: Any, reply: Any) -> Any:
                stub = channel.unary_unary(
                    f"/rendezvousd.v1.Store/{method}",
                    request_serializer=type(request).SerializeToString,
                    response_deserializer=reply.FromString,
                )
                while True:
                    try:
                        return await stub(request, timeout=30)
                    except grpc.aio.AioRpcError as error:  # as our clients do
                        if error.code() is not grpc.StatusCode.UNAVAILABLE:
                            raise

            async def put(key: str, value: bytes) -> None:
                await call("Set", store_pb2.SetRequest(scope=scope, key=key, value=value), store_pb2.SetReply)

            await put("before", b"1")
            small = [asyncio.create_task(put(f"small {number}", b"x" * 1000)) for number in range(50)]
            large = asyncio.create_task(put("large", b"x" * (2 << 20)))
            more = [asyncio.create_task(put(f"more {number}", b"x" * 1000)) for number in range(50)]
            await asyncio.gather(*small, *more)
            with pytest.raises(
                grpc.aio.AioRpcError, match=r"k/large.*etcd does not accept.*--max-store-value-bytes"
            ) as refusal:
                await large
            assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            keys = await call("NumKeys", store_pb2.NumKeysRequest(scope=scope), store_pb2.NumKeysReply)
            assert keys.keys == 101
            await put("after", b"1")

    with etcd(tmp_path) as cluster, daemon(tmp_path, *on_etcd(cluster), *LARGE_VALUES) as served:
        asyncio.run(story(served.endpoint))


def test_changes_that_etcd_refuses_together_are_written_one_by_one(tmp_path: Path) -> None:
    async def story(endpoint: str) -> None:
        await leads(endpoint)
        async with cast(endpoint) as make, grpc.aio.insecure_channel(endpoint) as channel:
            node = make("job", "a", "1")
            await run_alone(node)
            scope = store_pb2.Scope(run_id="job", job_uid=node.place.job_uid)
            keys = [str(number) for number in range(8)]
            request = store_pb2.MultiSetRequest(scope=scope, keys=keys, values=[b"x" * 100_000] * len(keys))
            stub = channel.unary_unary(
                "/rendezvousd.v1.Store/MultiSet",
                request_serializer=store_pb2.MultiSetRequest.SerializeToString,
                response_deserializer=store_pb2.MultiSetReply.FromString,
            )
            for _ in range(10):
                try:
                    await stub(request, timeout=30)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                else:
                    return
            raise AssertionError("never written")

    with etcd(tmp_path, "--max-request-bytes=204800") as cluster, daemon(tmp_path, *on_etcd(cluster)) as served:
        asyncio.run(story(served.endpoint))


def test_a_store_that_cannot_be_read_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    async def story(cluster: Cluster, endpoint: str) -> None:
        await leads(endpoint)
        async with cast(endpoint) as make, grpc.aio.insecure_channel(endpoint) as channel:
            node = make("job", "a", "1")
            await run_alone(node)
            uid = node.place.job_uid
            await put(cluster, f"/rendezvousd/stores/{uid}/o/0000000000000001".encode(), b"[[1]]")
            request = store_pb2.NumKeysRequest(scope=store_pb2.Scope(run_id="job", job_uid=uid))
            stub = channel.unary_unary(
                "/rendezvousd.v1.Store/NumKeys",
                request_serializer=store_pb2.NumKeysRequest.SerializeToString,
                response_deserializer=store_pb2.NumKeysReply.FromString,
            )
            with pytest.raises(grpc.aio.AioRpcError, match="job 'job' keeps in its store cannot be read") as refusal:
                await stub(request, timeout=30)
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
            request.scope.round_uid = node.place.assigned.round_uid
            assert (await stub(request, timeout=30)).keys == 0
            await node.until(lambda place: place.HasField("assigned"))

    with etcd(tmp_path) as cluster, daemon(tmp_path, *on_etcd(cluster)) as served:
        asyncio.run(story(cluster, served.endpoint))


def test_who_asks_for_a_change_that_cannot_be_written_is_told_when_the_daemon_no_longer_leads(tmp_path: Path) -> None:
    async def story(cluster: Cluster, endpoint: str) -> None:
        await leads(endpoint)
        async with cast(endpoint) as make, operator(endpoint) as ask:
            await run_alone(make("job", "a", "1"))
            cluster.members[0].kill()
            calls = (
                ask.call("Restart", pb.RestartRequest(run_id="job"), pb.RestartReply),
                ask.call("Close", pb.CloseRequest(run_id="job"), pb.CloseReply),
                ask.call("Leave", pb.LeaveRequest(run_id="job", node_name="a"), pb.LeaveReply),
            )
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(answer, grpc.aio.AioRpcError)
                assert answer.code() is grpc.StatusCode.UNAVAILABLE, answer

    with etcd(tmp_path) as cluster, daemon(tmp_path, *on_etcd(cluster)) as served:
        asyncio.run(story(cluster, served.endpoint))
