"""The etcd client against real members that are killed, stopped, cut off, full, and mistrustful."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rendezvousd.backends.etcd_client import Access, EtcdClient, prefix_end
from rendezvousd.backends.etcd_errors import EtcdCompacted, EtcdError, EtcdRefused, EtcdUnknown, Trouble
from rendezvousd.etcd.v1 import etcd_pb2 as pb
from tests.etcd import PATIENCE_S, Cable, Cluster, Member, binaries, connected, etcd, until

PROGRAMS = pytest.mark.parametrize("program", binaries() or [None], ids=str)
PREFIX = b"/k/"


def put(key: bytes, value: bytes = b"", *, over: int | None = None) -> pb.TxnRequest:
    """A put; with `over`, only if the key was last changed at that revision."""
    compare = []
    if over is not None:
        compare = [pb.Compare(target=pb.Compare.MOD, result=pb.Compare.EQUAL, key=key, mod_revision=over)]
    return pb.TxnRequest(compare=compare, success=[pb.RequestOp(put=pb.PutRequest(key=key, value=value))])


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


async def failing(client: EtcdClient, request: pb.TxnRequest) -> EtcdError:
    with pytest.raises(EtcdError) as caught:
        await client.txn(request)
    return caught.value


async def trouble(client: EtcdClient, wanted: Trouble, words: str = "") -> None:
    """Call until the client says so, in these words among others."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while client.health.trouble is not wanted or words not in client.health.describe():
        assert asyncio.get_running_loop().time() < deadline, f"only: {client.health.describe()}"
        with contextlib.suppress(EtcdError):
            await client.txn(put(b"x"))
        await asyncio.sleep(0.05)


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


# ------------------------------------------------------------------------------------------------ who may come in


def lock_up(member: Member) -> None:
    """Ask for passwords from now on: root may do everything, guest only read /open."""
    for name in ("root", "guest"):
        member.ask("auth/user/add", name=name, password=f"{name}'s")
        member.ask("auth/role/add", name=name)
        member.ask("auth/user/grant", user=name, role=name)
    member.ask("auth/enable")


@PROGRAMS
def test_a_token_that_has_expired_is_renewed_for_calls_leases_and_watches(tmp_path: Path, program: Path | None) -> None:
    async def story(cluster: Cluster) -> None:
        (member,) = cluster.members
        access = cluster.access(user="root", password="root's")
        async with connected(access) as client:
            await client.txn(put(b"a"))  # nobody asks yet
            lock_up(member)
            lease, _ = await client.grant(300)

            def forget_tokens() -> None:
                member.kill()  # it keeps them in its memory only
                member.start()

            forget_tokens()
            keys = await put_many(client, 3)
            forget_tokens()
            assert await client.persist(lambda: client.keep_alive(lease)) > 0
            await asyncio.gather(*(client.persist(lambda: client.range(b"a")) for _ in range(20)))
            async with following(client, after=1) as seen:
                await until(lambda: seen == keys)
                forget_tokens()
                keys += await put_many(client, 3, start=3)
                await until(lambda: seen == keys)

    with etcd(tmp_path, program=program) as cluster:
        asyncio.run(story(cluster))


@PROGRAMS
def test_a_wrong_password_none_and_a_forbidden_key_are_told_apart(tmp_path: Path, program: Path | None) -> None:
    async def story(cluster: Cluster) -> None:
        lock_up(cluster.members[0])
        for user, password, wanted in (
            ("root", "wrong", Trouble.PASSWORD),
            ("", "", Trouble.PASSWORD),
            ("guest", "guest's", Trouble.DENIED),
        ):
            async with connected(cluster.access(user=user, password=password)) as client:
                failure = await failing(client, put(b"a"))
                assert isinstance(failure, EtcdRefused)
                assert (failure.trouble, failure.passing) == (wanted, True)
                assert wanted.value in client.health.describe()
        async with connected(cluster.access(user="guest", password="guest's")) as client:
            with pytest.raises(EtcdRefused) as caught:
                await anext(client.watch(PREFIX, after=1))
            assert caught.value.trouble is Trouble.DENIED

    with etcd(tmp_path, program=program) as cluster:
        asyncio.run(story(cluster))


def test_tls_both_ways(tmp_path: Path) -> None:
    async def story(endpoint: str) -> None:
        pem = {name: (tmp_path / f"{name}.pem").read_bytes() for name in ("ca", "cert", "key")}
        access = Access(endpoints=(endpoint,), tls=True, ca=pem["ca"], cert=pem["cert"], key=pem["key"])
        async with connected(access) as client:
            assert (await client.persist(lambda: client.txn(put(b"a")))).succeeded
        async with connected(Access(endpoints=(endpoint,), tls=True, ca=pem["ca"])) as client:
            assert isinstance(await failing(client, put(b"a")), EtcdUnknown)  # it wants a certificate of ours

    certificates(tmp_path)
    with etcd(tmp_path) as cluster:
        (member,) = cluster.members
        member.kill()
        member.options += [
            f"--cert-file={tmp_path / 'cert.pem'}",
            f"--key-file={tmp_path / 'key.pem'}",
            f"--trusted-ca-file={tmp_path / 'ca.pem'}",
            "--client-cert-auth",
            f"--listen-client-urls=https://{member.endpoint}",
            f"--advertise-client-urls=https://{member.endpoint}",
        ]
        member.start()
        asyncio.run(story(member.endpoint))


def certificates(directory: Path) -> None:
    """Make ca.pem, and cert.pem with key.pem for 127.0.0.1, good for both sides."""
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    new = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for command in (
        f"req -x509 {new} -keyout ca.key -out ca.pem -days 2 -subj /CN=ca",
        f"req {new} -keyout key.pem -out request -subj /CN=etcd",
        "x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial -out cert.pem -days 2 -extfile names",
    ):
        subprocess.run(["openssl", *command.split()], cwd=directory, check=True, capture_output=True)


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
