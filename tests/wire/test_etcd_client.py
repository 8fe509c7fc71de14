"""The etcd client against real members that are killed, stopped, cut off, full, and mistrustful."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rendezvousd.backends.etcd_client import Access, EtcdClient, prefix_end
from rendezvousd.backends.etcd_errors import EtcdClosed, EtcdCompacted, EtcdError, EtcdRefused, EtcdUnknown, Trouble
from rendezvousd.etcd.v1 import etcd_pb2 as pb
from tests.etcd import Cable, Cluster, Member, binaries, connected, etcd, failing, put, trouble, until

PROGRAMS = pytest.mark.parametrize("program", binaries() or [None], ids=str)
PREFIX = b"/k/"


async def put_many(client: EtcdClient, count: int, start: int = 0) -> list[bytes]:
    """Put that many keys one by one, each for certain, and return them."""
    keys = [PREFIX + f"{number:06}".encode() for number in range(start, start + count)]
    for key in keys:
        await client.persist(lambda key=key: client.txn(put(key, b"v", over=0)))  # type: ignore[misc]
    return keys


@contextlib.asynccontextmanager
async def following(client: EtcdClient, after: int) -> AsyncIterator[list[bytes]]:
    """The keys that a watch has seen put, growing meanwhile."""
    seen: list[bytes] = []

    async def follow() -> None:
        async for events in client.watch(PREFIX, prefix_end(PREFIX), after=after):
            seen.extend(event.kv.key for event in events)

    task = asyncio.create_task(follow())
    try:
        yield seen
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


# ----------------------------------------------------------------------------------------------------- plain calls


@PROGRAMS
def test_keys_transactions_and_leases(tmp_path: Path, program: Path | None) -> None:
    async def story(cluster: Cluster) -> None:
        async with connected(cluster.access()) as client:
            first = await client.txn(put(b"a", b"1", over=0))
            assert first.succeeded
            assert not (await client.txn(put(b"a", b"2", over=0))).succeeded
            assert (await client.txn(put(b"a", b"2", over=first.header.revision))).succeeded
            found = await client.range(b"a")
            assert [(kv.value, kv.create_revision, kv.version) for kv in found.kvs] == [
                (b"2", first.header.revision, 2)
            ]
            lease, ttl_s = await client.grant(60)
            assert ttl_s == 60
            assert await client.keep_alive(lease) == 60
            request = pb.TxnRequest(success=[pb.RequestOp(put=pb.PutRequest(key=b"leased", lease=lease))])
            await client.txn(request)
            await client.revoke(lease)
            await client.revoke(lease)
            assert not (await client.range(b"leased")).kvs
            assert await client.keep_alive(lease) == 0
            assert client.health.describe() == ""

    with etcd(tmp_path, program=program) as cluster:
        asyncio.run(story(cluster))


def test_what_etcd_does_not_accept_is_refused_at_once(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with connected(cluster.access()) as client:
            for request in (
                pb.TxnRequest(success=[*put(b"a").success, *put(b"a").success]),  # a key twice
                pb.TxnRequest(success=[op for i in range(129) for op in put(b"%d" % i).success]),
                put(b"a", bytes(2 << 20)),
            ):
                with pytest.raises(EtcdRefused) as caught:
                    await client.persist(lambda request=request: client.txn(request))  # type: ignore[misc]
                assert caught.value.trouble is Trouble.MISUSED
            big = bytes(1 << 20)
            for number in range(6):
                await client.txn(put(PREFIX + b"%d" % number, big))
            assert len((await client.range(PREFIX, prefix_end(PREFIX))).kvs) == 6  # more than gRPC's own 4 MB

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


def test_the_end_of_a_prefix() -> None:
    assert prefix_end(b"a/") == b"a0"
    assert prefix_end(b"a\xff") == b"b"
    assert prefix_end(b"\xff\xff") == b"\0"


# ------------------------------------------------------------------------------------------------ members in trouble


def test_one_member_down_costs_one_failed_call(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        first = cluster.members[0]
        async with connected(cluster.access()) as client:
            await client.txn(put(b"a"))
            first.kill()
            failed = 0
            for _ in range(20):
                try:
                    await client.persist(lambda: client.range(b"a"))
                except EtcdError:
                    failed += 1
            assert not failed
            answer = await client.txn(put(b"b"))
            assert answer.succeeded
            first.start()

    with etcd(tmp_path, members=3) as cluster:
        asyncio.run(story(cluster))


def test_a_stopped_member_is_left_for_another_within_the_deadline(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        first = next(member for member in cluster.members if member is not cluster.leader())
        others = [member for member in cluster.members if member is not first]
        access = Access(endpoints=(first.endpoint, *(member.endpoint for member in others)))
        async with connected(access) as client:
            await client.txn(put(b"a"))
            first.freeze()
            failure = await failing(client, put(b"a"))
            assert isinstance(failure, EtcdUnknown)
            assert (await client.txn(put(b"b"))).succeeded

    with etcd(tmp_path, members=3) as cluster:
        asyncio.run(story(cluster))


def test_a_watch_on_a_stopped_member_goes_on_at_another_one(tmp_path: Path) -> None:
    """Only a ping that is not answered tells: nothing else is sent on a watch."""

    async def story(cluster: Cluster) -> None:
        first = next(member for member in cluster.members if member is not cluster.leader())
        others = tuple(member.endpoint for member in cluster.members if member is not first)
        async with (
            connected(Access(endpoints=(first.endpoint, *others))) as watcher,
            connected(Access(endpoints=others)) as writer,
            following(watcher, after=1) as seen,
        ):
            keys = await put_many(writer, 1)
            await until(lambda: seen == keys)
            first.freeze()
            keys += await put_many(writer, 1, start=1)
            async with asyncio.timeout(45):  # 13 s; gRPC's own limit is a minute
                await until(lambda: seen == keys)

    with etcd(tmp_path, members=3) as cluster:
        asyncio.run(story(cluster))


@PROGRAMS
def test_a_learner_is_called_one_and_left_for_a_member_that_votes(tmp_path: Path, program: Path | None) -> None:
    async def story(learner: Member, voter: Member) -> None:
        async with connected(Access(endpoints=(learner.endpoint,))) as client:
            await trouble(client, Trouble.LEARNER, f"only {learner.endpoint} answers")
            voter.freeze()
        async with connected(Access(endpoints=(learner.endpoint, voter.endpoint))) as client:
            await trouble(client, Trouble.LEARNER, f"{voter.endpoint}: ")
            voter.thaw()
            await client.persist(lambda: client.txn(put(b"a")))
            await until(lambda: client.health.describe() == "")

    with etcd(tmp_path, program=program) as cluster:
        (voter,) = cluster.members
        learner = voter.another("learner")
        try:
            voter.ask("cluster/member/add", peerURLs=[f"http://127.0.0.1:{learner.peer_port}"], isLearner=True)
            learner.start()
            asyncio.run(story(learner, voter))
        finally:
            learner.end()


def test_close_ends_what_is_under_way_and_what_comes_later(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        client = EtcdClient(cluster.access())
        lease, _ = await client.grant(60)
        changes = client.watch(PREFIX, prefix_end(PREFIX), after=1)
        await put_many(client, 1)
        assert await anext(changes)
        cluster.members[0].freeze()
        pending: list[asyncio.Future[object]] = [
            asyncio.ensure_future(anext(changes)),
            asyncio.ensure_future(client.txn(put(b"a"))),
            asyncio.ensure_future(client.keep_alive(lease)),
            asyncio.ensure_future(client.persist(lambda: client.txn(put(b"a")))),
        ]
        await trouble(client, Trouble.SLOW)  # by now all are under way, or about to try again
        await client.close()
        pending += [asyncio.ensure_future(client.range(b"a")), asyncio.ensure_future(client.keep_alive(lease))]
        for outcome in await asyncio.gather(*pending, return_exceptions=True):
            assert isinstance(outcome, EtcdError), outcome
        assert isinstance(await failing(client, put(b"a")), EtcdClosed)
        await client.close()

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


def test_the_leader_of_three_killed_under_load_loses_no_write(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with connected(cluster.access()) as client, following(client, after=1) as seen:
            keys = await put_many(client, 50)
            leader = cluster.leader()
            leader.kill()
            keys += await put_many(client, 50, start=50)
            leader.start()
            await until(lambda: len(seen) >= len(keys))
            assert seen == keys

    with etcd(tmp_path, members=3) as cluster:
        asyncio.run(story(cluster))


@PROGRAMS
def test_no_quorum_is_said_and_a_watch_goes_on_after_it(tmp_path: Path, program: Path | None) -> None:
    async def story(cluster: Cluster) -> None:
        alone, *others = cluster.members
        async with connected(Access(endpoints=(alone.endpoint,))) as client, following(client, after=1) as seen:
            keys = await put_many(client, 5)
            for member in others:
                member.freeze()
            await trouble(client, Trouble.NO_QUORUM, "knows no leader")
            writing = asyncio.create_task(put_many(client, 5, start=5))
            for member in others:
                member.thaw()
            keys += await writing
            await until(lambda: len(seen) >= len(keys))
            assert seen == keys
            await until(lambda: client.health.describe() == "")

    with etcd(tmp_path, members=3, program=program) as cluster:
        asyncio.run(story(cluster))


def test_unreachable_slow_and_well_again_are_told_apart(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        (member,) = cluster.members
        async with connected(cluster.access()) as client:
            await client.range(b"a")
            member.freeze()
            await trouble(client, Trouble.SLOW, "0 of 1 endpoint answers")
            member.thaw()
            await client.persist(lambda: client.range(b"a"))
            await until(lambda: client.health.describe() == "")
            member.kill()
            await trouble(client, Trouble.UNREACHABLE)
            member.start()
            await client.persist(lambda: client.txn(put(b"a")))
            await until(lambda: client.health.trouble is not Trouble.UNREACHABLE)

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


@PROGRAMS
def test_out_of_space_refuses_writes_and_is_said_until_somebody_makes_room(
    tmp_path: Path, program: Path | None
) -> None:
    async def story(cluster: Cluster) -> None:
        (member,) = cluster.members
        async with connected(cluster.access()) as client:
            value, refused = bytes(1 << 20), None
            while refused is None:
                try:
                    await client.txn(put(b"big", value))
                except EtcdRefused as error:
                    refused = error
            assert refused.trouble is Trouble.OUT_OF_SPACE
            await client.range(b"big")  # readers are served, which does not mean that all is well
            assert "etcd is out of space" in client.health.describe()
            with pytest.raises(EtcdRefused, match="out of space"):
                await client.grant(60)
            waiting = asyncio.create_task(client.persist(lambda: client.txn(put(b"small"))))
            await make_room(client, member)
            await waiting
            assert client.health.describe() == ""

    with etcd(tmp_path, "--quota-backend-bytes=8388608", program=program) as cluster:
        asyncio.run(story(cluster))


async def make_room(client: EtcdClient, member: Member) -> None:
    await client.compact((await client.range(b"big")).header.revision)
    member.ask("maintenance/defragment")
    alarms = member.ask("maintenance/alarm", action="GET")["alarms"]
    for alarm in alarms:
        member.ask("maintenance/alarm", action="DEACTIVATE", memberID=alarm["memberID"], alarm=alarm["alarm"])


# ---------------------------------------------------------------------------------------------------------- watches


@PROGRAMS
def test_a_watch_cut_again_and_again_sees_everything_once_and_in_order(tmp_path: Path, program: Path | None) -> None:
    async def story(cluster: Cluster) -> None:
        async with (
            Cable(cluster.members[0].client_port) as cable,
            connected(Access(endpoints=(cable.endpoint,))) as watcher,
            connected(cluster.access()) as writer,
            following(watcher, after=1) as seen,
        ):
            keys = []
            for number in range(10):
                keys += await put_many(writer, 30, start=30 * number)
                cable.cut()
            await until(lambda: len(seen) >= len(keys))
            assert seen == keys

    with etcd(tmp_path, program=program) as cluster:
        asyncio.run(story(cluster))


def test_a_watch_cut_right_after_its_creation_misses_nothing(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with (
            Cable(cluster.members[0].client_port) as cable,
            connected(Access(endpoints=(cable.endpoint,))) as watcher,
            connected(cluster.access()) as writer,
        ):
            created = False

            def mute_after_created(answer: bytes) -> None:
                nonlocal created
                if answer.endswith(b"\x18\x01") and not created:  # WatchResponse.created is true, and the last field
                    created = cable.mute = True

            cable.saw = mute_after_created
            async with following(watcher, after=1) as seen:
                await until(lambda: created)
                keys = await put_many(writer, 20)  # the header of the next creation is ahead of these
                assert not seen
                cable.mute = False
                cable.cut()
                await until(lambda: len(seen) >= len(keys))
                assert seen == keys

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


def test_a_watch_from_before_a_compaction_says_so(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with connected(cluster.access()) as client:
            await put_many(client, 20)
            await client.compact(15)
            with pytest.raises(EtcdCompacted) as caught:
                await anext(client.watch(PREFIX, prefix_end(PREFIX), after=3))
            assert caught.value.revision == 15
            with pytest.raises(EtcdCompacted):
                await client.range(PREFIX, revision=3)
            listed = await client.range(PREFIX, prefix_end(PREFIX))
            async with following(client, after=listed.header.revision) as seen:
                keys = await put_many(client, 5, start=20)
                await until(lambda: seen == keys)

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


def test_a_large_response_comes_in_fragments_and_whole(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with connected(cluster.access()) as client:
            operations = [put(PREFIX + b"%d" % i, bytes(300_000)).success[0] for i in range(4)]
            for _ in range(3):
                await client.txn(pb.TxnRequest(success=operations))
            sizes = []
            async with contextlib.aclosing(client.watch(PREFIX, prefix_end(PREFIX), after=1)) as changes:
                async for events in changes:
                    sizes.append(len(events))
                    if sum(sizes) == 12:
                        break
            assert all(size % 4 == 0 for size in sizes), "a transaction was torn"

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


# --------------------------------------------------------------------------------------------------------- neighbours


def test_another_client_reads_and_writes_the_same_keys(tmp_path: Path) -> None:
    import etcd3

    async def ours(access: Access) -> None:
        async with connected(access) as client:
            await client.txn(put(b"ours", b"1"))
            assert (await client.range(b"theirs")).kvs[0].value == b"2"

    with etcd(tmp_path) as cluster:
        (member,) = cluster.members
        with etcd3.client(host="127.0.0.1", port=member.client_port) as theirs:
            theirs.put("theirs", "2")
            asyncio.run(ours(cluster.access()))
            assert theirs.get("ours")[0] == b"1"
