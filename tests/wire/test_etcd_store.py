"""What a job keeps in the store, in a real etcd: there for the next leader, written by the present one only."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest

from rendezvousd.backends.etcd_client import EtcdClient
from rendezvousd.backends.etcd_errors import EtcdUnknown, Trouble
from rendezvousd.backends.etcd_store import EtcdStores
from rendezvousd.core.errors import NotLeader
from rendezvousd.core.kv import Namespace
from rendezvousd.core.model import JobUid
from rendezvousd.rpc.durable import Durable
from tests.etcd import binaries, connected, etcd, until
from tests.wire.test_etcd_backend import job, keys, lead

PROGRAMS = pytest.mark.parametrize("program", binaries() or [None], ids=str)
JOB = JobUid("job")
STORES = b"/rendezvousd/stores/"


async def opened(stores: EtcdStores) -> tuple[Namespace, Durable]:
    """A job's namespace as the leader with these stores has it."""
    kv = Namespace(records=await stores.load(JOB))
    assert kv.journal is not None
    write = functools.partial(stores.write, JOB)
    return kv, Durable(kv.journal, write, records_max=stores.records_max, bytes_max=stores.bytes_max)


async def next_leader(client: EtcdClient) -> EtcdStores:
    return EtcdStores(client, await lead(client))


@PROGRAMS
def test_the_next_leader_finds_all_that_was_durable_and_calls_count_once(tmp_path: Path, program: Path | None) -> None:
    async def story() -> None:
        with etcd(tmp_path, program=program) as cluster:
            async with connected(cluster.access()) as client:
                kv, durable = await opened(await next_leader(client))
                kv.multi_set([f"k{number}" for number in range(300)], [b"v"] * 300)
                kv.set("large", b"x" * (1 << 19))
                for number in range(5):
                    kv.queue_push("q", b"%d" % number * 1000)
                assert kv.add("n", 41, "op") == 41
                await durable.settled()
                assert kv.queue_pop("q", "pop") == b"0" * 1000
                await durable.settled()

                kv, durable = await opened(await next_leader(client))
                assert kv.num_keys() == 302
                assert kv.get("large") == b"x" * (1 << 19)
                assert kv.add("n", 41, "op") == 41
                assert kv.queue_pop("q", "pop") == b"0" * 1000
                assert kv.queue_pop("q", "another") == b"1" * 1000

    asyncio.run(story())


def test_many_callers_share_writes(tmp_path: Path) -> None:
    async def story() -> None:
        with etcd(tmp_path) as cluster:
            async with connected(cluster.access()) as client:
                kv, durable = await opened(await next_leader(client))

                async def call(number: int) -> int:
                    total = kv.add("n", 1, f"op{number}")
                    await durable.settled()
                    return total

                before = (await client.range(b"x")).header.revision
                totals = await asyncio.gather(*(call(number) for number in range(500)))
                assert sorted(totals) == list(range(1, 501))
                assert (await client.range(b"x")).header.revision - before < 20
                kv, _ = await opened(await next_leader(client))
                assert kv.get("n") == b"500"

    asyncio.run(story())


def test_a_deposed_leader_adds_nothing_and_says_so_to_all_who_ask(tmp_path: Path) -> None:
    async def story() -> None:
        with etcd(tmp_path) as cluster:
            async with connected(cluster.access()) as client:
                old, old_durable = await opened(await next_leader(client))
                new, new_durable = await opened(await next_leader(client))
                old.set("k", b"old")
                for _ in range(2):
                    with pytest.raises(NotLeader):
                        await old_durable.settled()
                new.set("k", b"new")
                await new_durable.settled()
                kv, _ = await opened(await next_leader(client))
                assert kv.get("k") == b"new"

    asyncio.run(story())


def test_a_write_waits_for_etcd_and_a_caller_that_hangs_up_breaks_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        with etcd(tmp_path) as cluster:
            async with connected(cluster.access()) as client:
                kv, durable = await opened(await next_leader(client))
                [member] = cluster.members
                member.kill()
                kv.set("k", b"v")
                impatient, patient = (asyncio.create_task(durable.settled()) for _ in range(2))
                await until(lambda: client.health.describe() != "")
                impatient.cancel()
                member.start()
                await patient
                kv, _ = await opened(await next_leader(client))
                assert kv.get("k") == b"v"

    asyncio.run(story())


def test_stores_of_jobs_that_are_gone_are_removed(tmp_path: Path) -> None:
    async def story() -> None:
        with etcd(tmp_path) as cluster:
            async with connected(cluster.access()) as client:
                stores = await next_leader(client)
                for uid in ("a", "b", "ba", "c"):
                    await stores.write(JobUid(uid), {"k/1": b"v", "k/2": b"v"})
                await stores.drop(JobUid("b"))
                names = [uid + name for uid in (b"a", b"ba", b"c") for name in (b"/k/1", b"/k/2")]
                assert await keys(client, STORES) == [STORES + name for name in names]
                await stores.sweep([JobUid("ba"), job("run").uid])
                assert await keys(client, STORES) == [STORES + b"ba/k/1", STORES + b"ba/k/2"]
                await next_leader(client)
                with pytest.raises(NotLeader):
                    await stores.drop(JobUid("ba"))

    asyncio.run(story())


@pytest.mark.parametrize("slow", [False, True], ids=["in-time", "large-pages-take-too-long"])
def test_a_store_of_many_keys_is_read_in_few_pages_and_in_small_ones_if_it_must_be(tmp_path: Path, slow: bool) -> None:
    async def story() -> None:
        with etcd(tmp_path) as cluster:
            async with connected(cluster.access()) as client:
                stores = await next_leader(client)
                small = {f"k/{number:05}": b"v" * 50 for number in range(3000)}
                large = {f"k/{number:05}": bytes(1 << 19) for number in range(3000, 3020)}
                for start in range(0, 3000, 100):
                    await stores.write(JOB, dict(list(small.items())[start : start + 100]))
                for name, data in large.items():
                    await stores.write(JOB, {name: data})
                pages = 0
                ask = client.range

                async def counted(start: bytes, end: bytes, *, limit: int, revision: int) -> Any:
                    nonlocal pages
                    pages += 1
                    page = await ask(start, end, limit=limit, revision=revision)
                    if slow and page.ByteSize() > 1 << 23:
                        raise EtcdUnknown(Trouble.SLOW, "not answered in time")
                    return page

                client.range = counted  # type: ignore[method-assign,assignment]
                assert await stores.load(JOB) == small | large
                assert pages < 30

    asyncio.run(story())
