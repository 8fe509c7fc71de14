"""Jobs in a real etcd: written once, by the leader only, whatever befalls etcd meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from immutables import Map
from msgspec.structs import replace

from rendezvousd.backends.etcd import EtcdBackend, Fence
from rendezvousd.backends.etcd_client import Access, EtcdClient, prefix_end
from rendezvousd.backends.etcd_errors import EtcdError, Trouble
from rendezvousd.core import codec
from rendezvousd.core.errors import NotLeader
from rendezvousd.core.events import NodeHeard
from rendezvousd.core.machine import step
from rendezvousd.core.model import Failure, Held, Job, JobSpec, JobUid, NodeSpec, NodeUid, Offer, Phase, RoundUid
from rendezvousd.core.rules.admit import found
from rendezvousd.etcd.v1 import etcd_pb2 as pb
from tests.etcd import Cable, Cluster, binaries, connected, etcd, until

PROGRAMS = pytest.mark.parametrize("program", binaries() or [None], ids=str)
LEADER = b"/rendezvousd/leader"


@dataclass(frozen=True)
class Reign:
    key: bytes
    revision: int


async def lead(client: EtcdClient) -> Reign:
    """Become the leader, whoever it was."""
    await client.txn(pb.TxnRequest(success=[pb.RequestOp(delete_range=pb.DeleteRangeRequest(key=LEADER))]))
    answer = await client.txn(pb.TxnRequest(success=[pb.RequestOp(put=pb.PutRequest(key=LEADER, value=b"me"))]))
    return Reign(LEADER, answer.header.revision)


@contextlib.asynccontextmanager
async def leading(access: Access) -> AsyncIterator[tuple[EtcdClient, EtcdBackend]]:
    """A client, and the backend of a leader that has just begun."""
    async with connected(access) as client:
        fence: Fence = await lead(client)
        backend = EtcdBackend(client, fence)
        await backend.load(0.0)
        yield client, backend


async def stored(client: EtcdClient) -> dict[str, Job]:
    """Return what the next leader finds."""
    return {found.job.run_id: found.job for found in await EtcdBackend(client, await lead(client)).load(0.0)}


def job(run_id: str = "run", nodes: int = 1, **more: object) -> Job:
    """A job whose first round runs."""
    spec = JobSpec(min_nodes=nodes, max_nodes=nodes, max_restarts=3)
    made: Job | None = None
    for number in range(nodes):
        said = says(number, spec)
        made = made if made is not None else found(run_id, said, uid=JobUid(f"uid of {run_id}"), seed="s", now=0.0)
        made = step(made, said, 0.0)
    assert made is not None
    assert made.running is not None
    return replace(made, **more)


def says(number: int, spec: JobSpec, held: Held | None = None) -> NodeHeard:
    uid = NodeUid(f"{number:032x}")
    offer = Offer(offer_id=f"{number:032x}", after=RoundUid(""), address=f"node{number}.cluster", port=40000)
    return NodeHeard(
        uid=uid,
        name=f"node{number}",
        job_spec=spec,
        spec=NodeSpec(),
        offer=None if held is not None else offer,
        held=held,
    )


async def keys(client: EtcdClient, prefix: bytes = b"/rendezvousd/jobs/") -> list[bytes]:
    return [kv.key for kv in (await client.range(prefix, prefix_end(prefix))).kvs]


async def put_of(client: EtcdClient, key: bytes) -> pb.KeyValue:
    """Return the key as it was first put, once it is."""
    async for events in client.watch(key, after=1):
        return events[0].kv
    raise AssertionError("unreachable")


async def gone(client: EtcdClient, kv: pb.KeyValue) -> None:
    async for events in client.watch(kv.key, after=kv.mod_revision):
        if events[-1].type == pb.Event.DELETE:
            return


# ------------------------------------------------------------------------------------------------------ one leader


@PROGRAMS
def test_jobs_are_written_found_again_and_removed(tmp_path: Path, program: Path | None) -> None:
    async def story(cluster: Cluster) -> None:
        names = ["a", "a/1", "a%2F1", "", "jobs/a/head", "ü\n"]  # each a stranger to the others
        async with leading(cluster.access()) as (client, backend):
            revisions = {name: await backend.write(job(name, nodes=2), expected=0) for name in names}
            found = {it.job.run_id: it for it in await EtcdBackend(client, await lead(client)).load(7.0)}
            assert {name: it.revision for name, it in found.items()} == revisions
            for name, it in found.items():
                assert it.job.uid == f"uid of {name}"
                assert it.job.running is not None
                assert it.job.running.sealed_at == 7.0
        async with leading(cluster.access()) as (client, backend):
            for name in names:
                await backend.delete(name, expected=revisions[name])
                names_left = set(await stored(client))
                assert names_left == set(names[names.index(name) + 1 :])
                backend = EtcdBackend(client, await lead(client))
                await backend.load(0.0)
            assert await keys(client) == []

    with etcd(tmp_path, program=program) as cluster:
        asyncio.run(story(cluster))


def test_each_write_goes_on_from_the_last_and_leaves_no_old_parts(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with leading(cluster.access()) as (client, backend):
            now, revision = job(nodes=3), 0
            for restarts in range(5):
                now = replace(now, known=replace(now.known, restarts_used=restarts))
                revision = await backend.write(now, expected=revision)
            broken = step(now, says(1, now.spec, failed(now)), 1.0)
            revision = await backend.write(broken, expected=revision)
            parts = codec.dump(broken).parts
            assert len(await keys(client)) == 1 + len(parts)
            with pytest.raises(NotLeader, match=f"is at revision {revision}, not 3"):
                await backend.write(now, expected=3)
            assert (await stored(client))["run"].round == again(broken).round

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


def failed(of: Job) -> Held:
    assert of.round is not None
    return Held(round_uid=of.round.uid, round=1, phase=Phase.FAILED, alive=0, failures=(Failure(rank=1, text="boom"),))


def again(it: Job) -> Job:
    record = codec.dump(it)
    return codec.load(record.head, record.parts, seed="s", now=0.0)


def test_what_is_not_stored_is_not_written(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with leading(cluster.access()) as (client, backend):
            before = job(nodes=2)
            revision = await backend.write(before, expected=0)
            assert before.round is not None
            held = Held(round_uid=before.round.uid, round=1, phase=Phase.RUNNING, alive=1)
            after = step(before, says(0, before.spec, held), 1.0)
            assert after != before
            assert await backend.write(after, expected=revision) == revision
            assert (await client.range(b"x")).header.revision == revision

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


@PROGRAMS
def test_ten_thousand_nodes_fit(tmp_path: Path, program: Path | None) -> None:
    async def story(cluster: Cluster) -> None:
        async with leading(cluster.access()) as (client, backend):
            crowd = job(nodes=10_000)
            revision = await backend.write(crowd, expected=0)
            parts = codec.dump(crowd).parts
            assert sum(map(len, parts.values())) > 2_000_000  # more than one request may hold
            assert len(parts) > 128  # and more operations than a transaction
            revision = await backend.write(step(crowd, says(77, crowd.spec, failed(crowd)), 1.0), expected=revision)
            found = (await stored(client))["run"]
            assert found.round is not None
            assert crowd.round is not None
            assert found.round.seats == crowd.round.seats
            assert len(found.nodes) == 10_000
            assert found.round.cause is not None
            await EtcdBackend(client, await lead(client)).load(0.0)
            assert len(await keys(client)) == 1 + len(codec.dump(found).parts)

    with etcd(tmp_path, program=program) as cluster:
        asyncio.run(story(cluster))


def test_a_large_write_that_is_broken_off_leaves_the_record_as_it_was(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with (
            Cable(cluster.members[0].client_port) as cable,
            connected(cluster.access()) as witness,
            leading(Access(endpoints=(cable.endpoint,))) as (_, backend),
        ):
            crowd = job(nodes=5000)
            revision = await backend.write(crowd, expected=0)
            before = set(await keys(witness))
            nodes = Map((uid, replace(node, unreachables=1)) for uid, node in crowd.nodes.items())

            def mute_after_a_success(answer: bytes) -> bool:
                cable.mute = b"\x10\x01\x1a" in answer  # TxnResponse.succeeded is true, and responses follow
                return cable.mute

            cable.loses = mute_after_a_success
            writing = asyncio.create_task(backend.write(replace(crowd, nodes=nodes), expected=revision))
            await until(lambda: cable.mute)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
            assert set(await keys(witness)) > before, "nothing was on its way"
            found = (await stored(witness))["run"]
            assert not any(node.unreachables for node in found.nodes.values())
            assert set(await keys(witness)) == before

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


# ------------------------------------------------------------------------------------------- somebody else leads now


@PROGRAMS
def test_the_late_writes_of_a_deposed_leader_are_refused(tmp_path: Path, program: Path | None) -> None:
    async def story(cluster: Cluster) -> None:
        async with leading(cluster.access()) as (client, backend):
            small, large = job("small"), job("large", nodes=10_000)
            revision = await backend.write(small, expected=0)
            await lead(client)
            for attempt in (
                backend.write(replace(small, arrivals=9), expected=revision),
                backend.write(job("new"), expected=0),
                backend.write(large, expected=0),
                backend.delete("small", expected=revision),
            ):
                with pytest.raises(NotLeader, match="another daemon leads"):
                    await attempt
            left = await keys(client)
            assert len(left) == 1 + len(codec.dump(small).parts)
            assert all(key.startswith(b"/rendezvousd/jobs/small/") for key in left)

    with etcd(tmp_path, program=program) as cluster:
        asyncio.run(story(cluster))


def test_a_record_moved_by_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with connected(cluster.access()) as client:
            fence = await lead(client)
            one, other = EtcdBackend(client, fence), EtcdBackend(client, fence)
            revision = await one.write(job(), expected=0)
            with pytest.raises(NotLeader, match=f"is at revision {revision}, not 0"):
                await other.write(job(arrivals=5), expected=0)
            await other.load(0.0)
            await other.write(job(arrivals=6), expected=revision)
            with pytest.raises(NotLeader, match=f"not {revision}"):
                await one.write(job(arrivals=7), expected=revision)
            with pytest.raises(NotLeader, match=f"not {revision}"):
                await one.delete("run", expected=revision)
            assert (await stored(client))["run"].arrivals == 6

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


def test_what_a_dead_leader_had_not_finished_is_removed(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with leading(cluster.access()) as (client, backend):
            await backend.write(job(), expected=0)
            whole = await keys(client)
            for key in (b"/rendezvousd/jobs/run/parts/nodes/7@2", b"/rendezvousd/jobs/unborn/parts/nodes/0@1"):
                await client.txn(pb.TxnRequest(success=[pb.RequestOp(put=pb.PutRequest(key=key, value=b"[]"))]))
            assert list(await stored(client)) == ["run"]
            assert await keys(client) == whole

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


def test_a_record_that_cannot_be_read_is_named_and_kept_and_the_other_jobs_are_found(tmp_path: Path) -> None:
    good = b'{"format":[1,0],"writer":"w","generation":1,"parts":%s}\n%s'
    values = {
        b"": "damaged",
        b'{"format":[2,0]}\n': r"its format is 2\.0, and this daemon reads 1\.x",
        b'{"format":1}\n': r"its format is 1, and should be major and minor, as \[1, 0\]",
        good % (b'{"nodes/0":1}', b"{}"): "damaged",
        good % (b"{}", b'{"version":[2,7]}'): r"its version is 2\.7, and this daemon reads 1\.x",
        good % (b"{}", codec.dump(job("another")).head): "it is damaged",
        good % (b"{}", codec.dump(replace(job("another"), round=None)).head): "it is of job 'another'",
    }

    async def story(cluster: Cluster) -> None:
        async with leading(cluster.access()) as (client, backend):
            await backend.write(job("good"), expected=0)
            key = b"/rendezvousd/jobs/a%2Fb/head"
            for value, why in values.items():
                await client.txn(pb.TxnRequest(success=[pb.RequestOp(put=pb.PutRequest(key=key, value=value))]))
                backend = EtcdBackend(client, await lead(client))
                assert [found.job.run_id for found in await backend.load(0.0)] == ["good"]
                assert re.search(f"job 'a/b' at /rendezvousd/jobs/a%2Fb/head cannot be read: .*{why}", aside(backend))
                assert (await client.range(key)).kvs[0].value == value

    def aside(backend: EtcdBackend) -> str:
        assert set(backend.unreadable) == {"a/b"}
        return backend.unreadable["a/b"]

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


def test_what_a_newer_daemon_added_is_kept_when_an_older_one_writes(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with leading(cluster.access()) as (client, backend):
            await backend.write(job("run"), expected=0)
            key = b"/rendezvousd/jobs/run/head"
            value = (await client.range(key)).kvs[0].value
            line, _, head = value.partition(b"\n")
            newer = {**json.loads(line), "format": [1, 4], "cells": 3}
            newer["parts"] = {**newer["parts"], "history/0": 1}
            raw = {**json.loads(head), "version": [1, 2], "colour": "red"}
            puts = {key: b"%s\n%s" % (json.dumps(newer).encode(), json.dumps(raw).encode())}
            puts[b"/rendezvousd/jobs/run/parts/history/0@1"] = b"?"
            request = [pb.RequestOp(put=pb.PutRequest(key=key, value=data)) for key, data in puts.items()]
            await client.txn(pb.TxnRequest(success=request))
            for restarts in range(1, 4):  # also by the daemon after this one
                backend = EtcdBackend(client, await lead(client))
                (found,) = await backend.load(0.0)
                now = replace(found.job, known=replace(found.job.known, restarts_used=restarts))
                at = await backend.write(now, expected=found.revision)
                now = replace(now, known=replace(now.known, charged_round=restarts))
                await backend.write(now, expected=at)
            line, _, head = (await client.range(key)).kvs[0].value.partition(b"\n")
            assert json.loads(line)["format"] == [1, 4]
            assert json.loads(line)["cells"] == 3
            assert json.loads(head)["version"] == [1, 2]
            assert json.loads(head)["colour"] == "red"
            assert json.loads(head)["known"]["restarts_used"] == 3
            assert (await client.range(b"/rendezvousd/jobs/run/parts/history/0@1")).kvs[0].value == b"?"

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


# --------------------------------------------------------------------------------------------------- etcd in trouble


@PROGRAMS
def test_a_write_that_timed_out_and_was_carried_out_later_counts_once(tmp_path: Path, program: Path | None) -> None:
    async def story(cluster: Cluster) -> None:
        (member,) = cluster.members
        async with leading(cluster.access()) as (client, backend):
            first = await backend.write(job(), expected=0)
            member.freeze()
            writing = asyncio.create_task(backend.write(job(arrivals=5), expected=first))
            await until(lambda: client.health.trouble is not None)
            member.thaw()
            second = await writing
            await backend.write(job(arrivals=6), expected=second)
            (head,) = (await client.range(b"/rendezvousd/jobs/run/head")).kvs
            assert head.version == 3
            assert (await stored(client))["run"].arrivals == 6

    with etcd(tmp_path, program=program) as cluster:
        asyncio.run(story(cluster))


def test_a_write_whose_answer_was_lost_is_recognized(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with (
            Cable(cluster.members[0].client_port) as cable,
            connected(cluster.access()) as witness,
            leading(Access(endpoints=(cable.endpoint,))) as (_, backend),
        ):
            cable.mute = True
            writing = asyncio.create_task(backend.write(job(), expected=0))
            head = await put_of(witness, b"/rendezvousd/jobs/run/head")
            cable.mute = False
            cable.cut()
            revision = await writing
            assert (revision, head.version) == (head.mod_revision, 1)
            cable.mute = True
            removing = asyncio.create_task(backend.delete("run", expected=revision))
            await gone(witness, head)
            cable.mute = False
            cable.cut()
            await removing

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


def test_a_slow_writer_never_overwrites_what_came_after_it(tmp_path: Path) -> None:
    """A transaction stuck in a stopped member, whose writer has died meanwhile, is refused when the member goes on."""

    async def story(cluster: Cluster) -> None:
        stuck = next(member for member in cluster.members if member is not cluster.leader())
        others = Access(endpoints=tuple(m.endpoint for m in cluster.members if m is not stuck))
        async with leading(Access(endpoints=(stuck.endpoint,))) as (_, old):
            revision = await old.write(job(), expected=0)
            stuck.freeze()
            late = asyncio.create_task(old.write(job(arrivals=666), expected=revision))
            async with leading(others) as (client, new):
                after = await new.write(job(arrivals=7), expected=revision)
                stuck.thaw()
                with pytest.raises(NotLeader):
                    await late
                assert (await client.range(b"/rendezvousd/jobs/run/head")).kvs[0].mod_revision == after
                assert (await stored(client))["run"].arrivals == 7

    with etcd(tmp_path, members=3) as cluster:
        asyncio.run(story(cluster))


def test_writes_wait_for_a_quorum_a_restart_and_a_new_leader_of_etcd_and_none_is_lost(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with leading(cluster.access()) as (client, backend):
            revision, arrivals = 0, 0

            async def write(count: int) -> None:
                nonlocal revision, arrivals
                for _ in range(count):
                    arrivals += 1
                    revision = await backend.write(job(arrivals=arrivals), expected=revision)

            await write(5)
            leader = cluster.leader()
            leader.kill()
            await write(5)
            leader.start()
            await until(leader.answers)
            other, another = (member for member in cluster.members if member is not leader)
            other.freeze()
            another.freeze()
            writing = asyncio.create_task(write(5))
            await until(lambda: client.health.trouble is Trouble.NO_QUORUM)
            other.thaw()
            another.thaw()
            await writing
            for member in cluster.members:
                member.kill()
            writing = asyncio.create_task(write(5))
            await until(lambda: client.health.trouble is Trouble.UNREACHABLE)
            for member in cluster.members:
                member.start()
            await writing
            (head,) = (await client.range(b"/rendezvousd/jobs/run/head")).kvs
            assert (head.version, head.mod_revision) == (20, revision)
            assert (await stored(client))["run"].arrivals == 20

    # the restarts of all are not for 3.5.0 to 3.5.2, which can lose data then
    with etcd(tmp_path, members=3, program=binaries()[0]) as cluster:
        asyncio.run(story(cluster))


def test_a_write_waits_until_there_is_room(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        (member,) = cluster.members
        async with leading(cluster.access()) as (client, backend):
            revision = await backend.write(job(), expected=0)
            with contextlib.suppress(EtcdError):
                while True:
                    big = pb.PutRequest(key=b"big", value=bytes(1 << 20))
                    await client.txn(pb.TxnRequest(success=[pb.RequestOp(put=big)]))
            writing = asyncio.create_task(backend.write(job(arrivals=5), expected=revision))
            await until(lambda: client.health.trouble is Trouble.OUT_OF_SPACE)
            await client.compact((await client.range(b"big")).header.revision)
            member.ask("maintenance/defragment")
            for alarm in member.ask("maintenance/alarm", action="GET")["alarms"]:
                member.ask("maintenance/alarm", action="DEACTIVATE", memberID=alarm["memberID"], alarm=alarm["alarm"])
            await writing
            assert (await stored(client))["run"].arrivals == 5

    with etcd(tmp_path, "--quota-backend-bytes=8388608") as cluster:
        asyncio.run(story(cluster))


# -------------------------------------------------------------------------------------------------------- neighbours


def test_an_operator_reads_our_keys_with_another_client_and_a_record_removed_by_hand_is_noticed(tmp_path: Path) -> None:
    import etcd3

    with etcd(tmp_path) as cluster, etcd3.client(host="127.0.0.1", port=cluster.members[0].client_port) as theirs:

        async def story() -> None:
            async with leading(cluster.access()) as (client, backend):
                revision = await backend.write(job("my/run"), expected=0)
                value, about = theirs.get("/rendezvousd/jobs/my%2Frun/head")
                line, head = value.decode().split("\n")
                assert json.loads(line)["format"] == [1, 0]
                assert json.loads(head)["run_id"] == "my/run"
                assert about.mod_revision == revision
                theirs.delete_prefix("/rendezvousd/jobs/")
                with pytest.raises(NotLeader, match=f"is at revision 0, not {revision}"):
                    await backend.write(job("my/run", arrivals=5), expected=revision)
                assert await keys(client) == []

        asyncio.run(story())
