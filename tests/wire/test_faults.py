"""A fault in one job is the fault of one job: the daemon goes on, and serves the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from rendezvousd.etcd.v1 import etcd_pb2
from rendezvousd.v1 import rendezvous_pb2 as pb
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


async def run_alone(node: WireNode) -> None:
    """Let it run a round of one node."""
    while True:
        await node.open()
        await node.offer(after="")
        try:
            await node.assigned()
        except AssertionError:
            if node.error is None or node.error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(0.1)  # no daemon leads yet
        else:
            return


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
