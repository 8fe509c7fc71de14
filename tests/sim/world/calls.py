"""Workers that call their job's store, and what must hold of it: what was acknowledged is there, and nothing is done
twice or made up, whichever daemon answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from rendezvousd.rpc.store import SERVICE, StoreService
from rendezvousd.v1 import store_pb2 as pb
from tests.sim.world.machines import Process
from tests.sim.world.training import Worker

if TYPE_CHECKING:
    from tests.sim.world.jobs import JobRun
    from tests.sim.world.network import Handler

PAUSE_S = (0.3, 2.0)
CALLS_S = (2.0, 2.0, 0.2, 0.05)  # after which a call is tried again; its answer may be on its way
LARGE = bytes(20_000)  # a value that does not fit in with many others into one of etcd's smaller requests
REQUESTS: dict[str, Any] = {"Add": pb.AddRequest, "Set": pb.SetRequest, "Get": pb.GetRequest, "Wait": pb.WaitRequest}
REPLIES: dict[str, Any] = {"Add": pb.AddReply, "Set": pb.SetReply, "Get": pb.GetReply, "Wait": pb.WaitReply}
# The round or the job is over, as far as the daemon knows: nothing more comes of this worker.
OVER = (grpc.StatusCode.ABORTED, grpc.StatusCode.NOT_FOUND)


@dataclass
class Contents:
    """What a job's store must have: of one counter, and of one key for each worker."""

    added: int = 0  # acknowledged
    adding: int = 0  # asked for, those that were acknowledged included
    kept: dict[str, int] = field(default_factory=dict)  # by key, the greatest number that was acknowledged
    asked: dict[str, int] = field(default_factory=dict)  # and that was asked for


def handlers(store: StoreService) -> dict[str, Handler]:
    """Return what a simulated server calls."""
    return {f"/{SERVICE}/{name}": _handler(getattr(store, name), request) for name, request in REQUESTS.items()}


def _handler(method: Callable[[Any, Any], Any], request: Any) -> Handler:
    async def serve(_: object, context: Any) -> None:
        reply = await method(request.FromString(await context.read()), context)
        try:
            await context.write(reply.SerializeToString())
        except asyncio.InvalidStateError:  # the caller has gone
            return

    return serve


class User:
    """A process of a worker's, which counts and keeps in the job's store how far it is."""

    def __init__(self, job: JobRun, worker: Worker) -> None:
        self._job, self._worker = job, worker
        env = worker.env
        generation = env["RENDEZVOUSD_STORE_GENERATION"]
        self._scope = pb.Scope(
            run_id=env["RENDEZVOUSD_RUN_ID"], job_uid=env["RENDEZVOUSD_JOB_UID"], generation=generation
        )
        self._forgets = job.cluster.etcd is None
        self._contents = job.contents.setdefault((self._scope.job_uid, generation if self._forgets else ""), Contents())
        self._key = f"{worker.round_uid} {worker.rank}"
        self._endpoints = env["RENDEZVOUSD_ENDPOINT"].split(",")
        self._at = 0
        self._calls = 0
        process = self._process = Process(job.world, f"user of {worker} ({worker.round_uid})", worker.node.name)
        process.owner = job.cluster  # as far as it is asked for its network
        process.start(self._run)

    def end(self) -> None:
        """The worker has ended, and so does what it has called."""
        if not self._process.dead:
            self._process.kill()
            self._job.cluster.net.died(self._process)

    async def _run(self) -> None:
        chance = self._process.chance
        turns = (self._add, self._set, self._get)
        try:
            while True:
                await asyncio.sleep(chance.uniform(*PAUSE_S))
                await chance.choice(turns)()
        except grpc.aio.AioRpcError as error:
            code = error.code()
            lost = code is grpc.StatusCode.FAILED_PRECONDITION and self._forgets
            if code not in OVER and not lost:
                self._fail(f"{code.name}: {error.details()}")

    async def _add(self) -> None:
        contents = self._contents
        before, contents.adding = contents.added, contents.adding + 1
        self._calls += 1
        op_id = f"{self._key} {self._calls}"
        reply = await self._call("Add", pb.AddRequest(scope=self._scope, key="count", amount=1, op_id=op_id))
        contents.added += 1
        if not before < reply.sum <= contents.adding:
            self._fail(f"a counter is {reply.sum} after {before} additions of at most {contents.adding}")

    async def _set(self) -> None:
        contents, key = self._contents, self._key
        number = contents.asked[key] = contents.asked.get(key, 0) + 1
        value = b"%d " % number + (LARGE if self._process.chance.random() < 0.1 else b"")
        await self._call("Set", pb.SetRequest(scope=self._scope, key=key, value=value))
        contents.kept[key] = number

    async def _get(self) -> None:
        contents, chance = self._contents, self._process.chance
        if not contents.kept:
            return
        key = chance.choice(sorted(contents.kept))
        before = contents.kept[key]
        if chance.random() < 0.3:
            await self._call("Wait", pb.WaitRequest(scope=self._scope, keys=[key], timeout_ms=1))
        reply = await self._call("Get", pb.GetRequest(scope=self._scope, key=key, timeout_ms=1))
        found = int(reply.value.split()[0])
        if not before <= found <= contents.asked[key]:
            self._fail(f"{key!r} is {found}, and {before} was kept")

    async def _call(self, method: str, request: Any) -> Any:
        """Return the reply. Tried again until a daemon says what has become of it."""
        while True:
            endpoint = self._endpoints[self._at]
            async with grpc.aio.insecure_channel(endpoint) as channel:
                call = channel.unary_unary(
                    f"/{SERVICE}/{method}", REQUESTS[method].SerializeToString, REPLIES[method].FromString
                )
                try:
                    return await call(request, timeout=self._process.chance.choice(CALLS_S))
                except grpc.aio.AioRpcError as error:
                    ours = error.details() == "Deadline Exceeded"  # the store's own says more
                    if error.code() is not grpc.StatusCode.UNAVAILABLE and not ours:
                        raise
            self._at = (self._at + 1) % len(self._endpoints)
            await asyncio.sleep(self._process.chance.uniform(0.1, 1.0))

    def _fail(self, text: str) -> None:
        self._job.world.fail("Store", f"{self._worker}: {text}")
