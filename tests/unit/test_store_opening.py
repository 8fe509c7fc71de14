"""How a job's store is loaded by a new leader, step by step on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rendezvousd.core.model import JobUid
from rendezvousd.rpc.store import StoreService
from rendezvousd.v1 import store_pb2 as pb

NO_CONTEXT: Any = None  # it is asked for nothing unless a call is refused


class Stores:
    """What is written down. What job "large" has is loaded once `may_load` is set."""

    records_max = 10
    bytes_max = 1000

    def __init__(self) -> None:
        self.may_load = asyncio.Event()
        self.loads: list[str] = []
        self.asked = asyncio.Event()

    async def load(self, job_uid: JobUid) -> dict[str, bytes]:
        self.loads.append(job_uid)
        self.asked.set()
        if job_uid == "large":
            await self.may_load.wait()
        return {"k/there": b"1"}

    async def write(self, job_uid: JobUid, records: Mapping[str, bytes | None]) -> None:
        pass

    async def drop(self, job_uid: JobUid) -> None:
        pass


class Everything:
    """Every scope exists."""

    def check(self, run_id: str, job_uid: str, round_uid: str, generation: str) -> None:
        pass

    def check_lead(self) -> None:
        pass


def test_a_store_that_takes_long_to_load_holds_up_its_own_job_only_and_is_loaded_once() -> None:
    async def story() -> None:
        stores, service = Stores(), StoreService(Everything())
        service.open(stores)

        async def add(job_uid: str) -> int:
            scope = pb.Scope(run_id=job_uid, job_uid=job_uid)
            return (await service.Add(pb.AddRequest(scope=scope, key="there", amount=1), NO_CONTEXT)).sum

        waiting = [asyncio.create_task(add("large")) for _ in range(3)]
        await stores.asked.wait()
        async with asyncio.timeout(20):
            assert await add("small") == 2
        assert not any(task.done() for task in waiting)
        stores.may_load.set()
        assert sorted(await asyncio.gather(*waiting)) == [2, 3, 4]
        assert stores.loads == ["large", "small"]

    asyncio.run(story())
