"""What jobs keep in the store for longer than a round, in etcd.

    <prefix>/stores/<job uid>/<record>      one for each record of the namespace's journal (core/kv_journal.py)

Written by one leader at a time, fenced as the jobs' own records are (etcd.py). Only that one changes a job's store, so
what it wrote last is what is there, and writing the same again does no harm.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from rendezvousd.backends.etcd import DEFAULT_PREFIX, OPERATIONS_MAX, Fence, deposed, leads, to_delete, to_put
from rendezvousd.backends.etcd_client import EtcdClient, prefix_end
from rendezvousd.backends.etcd_errors import EtcdClosed, EtcdCompacted, EtcdUnknown
from rendezvousd.core.model import JobUid
from rendezvousd.etcd.v1 import etcd_pb2 as pb

# Keys read at a time: as many as PAGE_BYTES hold, if they are as large as the largest so far. Values have at most half
# a megabyte, and large ones may come after small ones.
PAGE_MIN, PAGE_MAX, PAGE_BYTES = 16, 1024, 4 << 20


class EtcdStores:
    """The stores as one leader sees them; to be made anew for each term. While etcd is away a call waits, trying again
    with bounded pauses. Each method but `load` raises NotLeader when another daemon leads."""

    records_max = OPERATIONS_MAX
    # etcd takes requests of 1.5 MB by default. A largest item that was taken from a queue, as it is remembered for a
    # retry, has 700 KB.
    bytes_max = 1 << 20

    def __init__(self, client: EtcdClient, fence: Fence, prefix: str = DEFAULT_PREFIX) -> None:
        self._client = client
        self._fence = fence
        self._stores = f"{prefix.rstrip('/')}/stores/".encode()

    async def load(self, job_uid: JobUid) -> dict[str, bytes]:
        """Return all records of a job's store, by name."""
        return await self._client.persist(lambda: self._read(self._base(job_uid)))

    async def write(self, job_uid: JobUid, records: Mapping[str, bytes | None]) -> None:
        """Put the records, and remove those that are None, all at once: at most `records_max` of them, and of
        `bytes_max` together or a single one. Returns once that is durable."""
        base = self._base(job_uid)
        await self._carry_out(
            [
                to_delete(base + name.encode()) if data is None else to_put(base + name.encode(), data)
                for name, data in records.items()
            ]
        )

    async def drop(self, job_uid: JobUid) -> None:
        """Remove all that a job's store has."""
        base = self._base(job_uid)
        await self._carry_out([to_delete(base, prefix_end(base))])

    async def sweep(self, keep: Iterable[JobUid]) -> None:
        """Remove the stores of all other jobs: those that a daemon before this one did not come to remove."""
        kept = {self._base(job_uid) for job_uid in keep}
        start, end = self._stores, prefix_end(self._stores)
        while True:
            found = await self._client.persist(functools.partial(self._client.range, start, end, limit=1))
            if not found.kvs:
                return
            job_uid = found.kvs[0].key.removeprefix(self._stores).partition(b"/")[0]
            base = self._stores + job_uid + b"/"
            if base not in kept:
                await self._carry_out([to_delete(base, prefix_end(base))])
            start = prefix_end(base)

    async def _read(self, base: bytes) -> dict[str, bytes]:
        """Raises EtcdError."""
        found: dict[str, bytes] = {}
        start, revision, limit, largest = base, 0, PAGE_MIN, 1
        while True:
            try:
                page = await self._client.range(start, prefix_end(base), limit=limit, revision=revision)
            except EtcdCompacted:  # between two pages; so much was written meanwhile
                found, start, revision = {}, base, 0
                continue
            except EtcdUnknown as error:
                if limit == PAGE_MIN or isinstance(error, EtcdClosed):
                    raise
                limit = PAGE_MIN  # it may have been too much for one answer in time
                continue
            revision = revision or page.header.revision
            found.update((kv.key.removeprefix(base).decode(), kv.value) for kv in page.kvs)
            if not page.more:
                return found
            start = page.kvs[-1].key + b"\0"
            largest = max(largest, *(kv.ByteSize() for kv in page.kvs))
            limit = min(max(PAGE_BYTES // largest, PAGE_MIN), PAGE_MAX, 4 * limit)

    async def _carry_out(self, operations: list[Any]) -> None:
        request = pb.TxnRequest(compare=[leads(self._fence)], success=operations)

        async def attempt() -> None:
            if not (await self._client.txn(request)).succeeded:
                raise deposed()

        await self._client.persist(attempt)

    def _base(self, job_uid: JobUid) -> bytes:
        return self._stores + job_uid.encode() + b"/"
