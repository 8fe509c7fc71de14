"""The Store service: namespaces of keys, made when first spoken of and gone with the round or job they belong to.

With a backend that outlives the daemon a job's own namespace does so as well; those of its rounds do not.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import WeakValueDictionary

import grpc

from rendezvousd.backends.base import Stores
from rendezvousd.core.errors import NotLeader, NotServed, QueueEmpty, Refusal, RoundOver, StillLearning, WaitTimedOut
from rendezvousd.core.kv import DEFAULT_LIMITS, KvLimits, Namespace, shown
from rendezvousd.core.model import JobUid
from rendezvousd.rpc.durable import Durable
from rendezvousd.rpc.status import refusals
from rendezvousd.rpc.waiters import Waiters
from rendezvousd.v1 import store_pb2 as pb

log = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SERVICE = "rendezvousd.v1.Store"

_ROUND_OVER = RoundOver("the round is over: its store is gone, and what waited in it will not come")
_JOB_OVER = RoundOver("the job is over: its store is gone, and what waited in it will not come")


class Scopes(Protocol):
    """Knows which jobs and rounds there are."""

    def check(self, run_id: str, job_uid: str, round_uid: str, generation: str) -> None:
        """Let a call through whose job is there and whose round, if it names one, runs. Raises NoSuchJob, RoundOver or
        StoreLost."""

    def check_lead(self) -> None:
        """Return if this daemon may answer. Raises NotLeader."""


class StoreCounts(NamedTuple):
    """What the daemon holds for all jobs together."""

    namespaces: int
    keys: int
    bytes_held: int
    waiters: int


@dataclass(eq=False, slots=True)
class Space:
    """One namespace and who waits in it."""

    kv: Namespace
    changed: Waiters = field(default_factory=Waiters)  # for a key to be there, or to change
    pushed: Waiters = field(default_factory=Waiters)  # for an item of a queue
    retried: Waiters = field(default_factory=Waiters)  # by op id: for the first try of the same pop
    popping: set[str] = field(default_factory=set)  # op ids of the pops that wait for an item
    durable: Durable | None = None

    def end(self, why: Refusal) -> None:
        if self.durable is not None:
            self.durable.end(why)
        for waiters in (self.changed, self.pushed, self.retried):
            waiters.end(why)

    def waiters(self) -> int:
        return len(self.changed) + len(self.pushed) + len(self.retried)


class StoreService:
    """All namespaces of this daemon. Everything here belongs to one event loop."""

    def __init__(self, scopes: Scopes, limits: KvLimits = DEFAULT_LIMITS) -> None:
        self._scopes = scopes
        self._limits = limits
        self._spaces: dict[tuple[str, str], Space] = {}  # by job uid and round uid, empty for the job's own
        self._stores: Stores | None = None  # what outlives this daemon, while it leads
        # For each job whose namespace is being loaded. A lock is kept for as long as a call holds or awaits it.
        self._opening: WeakValueDictionary[JobUid, asyncio.Lock] = WeakValueDictionary()
        self._dropping: set[asyncio.Task[None]] = set()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the service as a gRPC server takes it."""

        def unary(method: Callable[..., Awaitable[Any]], request: Any, reply: Any) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(method, request.FromString, reply.SerializeToString)

        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Set": unary(self.Set, pb.SetRequest, pb.SetReply),
                "Get": unary(self.Get, pb.GetRequest, pb.GetReply),
                "Wait": unary(self.Wait, pb.WaitRequest, pb.WaitReply),
                "Check": unary(self.Check, pb.CheckRequest, pb.CheckReply),
                "Add": unary(self.Add, pb.AddRequest, pb.AddReply),
                "CompareSet": unary(self.CompareSet, pb.CompareSetRequest, pb.CompareSetReply),
                "Append": unary(self.Append, pb.AppendRequest, pb.AppendReply),
                "Delete": unary(self.Delete, pb.DeleteRequest, pb.DeleteReply),
                "NumKeys": unary(self.NumKeys, pb.NumKeysRequest, pb.NumKeysReply),
                "MultiGet": unary(self.MultiGet, pb.MultiGetRequest, pb.MultiGetReply),
                "MultiSet": unary(self.MultiSet, pb.MultiSetRequest, pb.MultiSetReply),
                "QueuePush": unary(self.QueuePush, pb.QueuePushRequest, pb.QueuePushReply),
                "QueuePop": unary(self.QueuePop, pb.QueuePopRequest, pb.QueuePopReply),
                "QueueLen": unary(self.QueueLen, pb.QueueLenRequest, pb.QueueLenReply),
                "Watch": grpc.unary_stream_rpc_method_handler(
                    self.Watch, pb.WatchRequest.FromString, pb.WatchReply.SerializeToString
                ),
            },
        )

    # ---------------------------------------------------------------------------------------------------- its life

    def open(self, stores: Stores | None) -> None:
        """Keep what jobs own there from now on; None: in memory."""
        self._stores = stores

    def round_over(self, round_uid: str) -> None:
        """Drop a round's namespace; all who wait in it are told that the round is over."""
        self._end((name for name in self._spaces if round_uid and name[1] == round_uid), _ROUND_OVER)

    def job_gone(self, job_uid: str) -> None:
        """Drop a job's namespaces, those of its rounds included; all who wait in them are told."""
        own = self._spaces.get((job_uid, ""))
        self._end((name for name in self._spaces if name[0] == job_uid), _JOB_OVER)
        if self._stores is not None:
            dropping = asyncio.create_task(_drop(self._stores, JobUid(job_uid), own))
            self._dropping.add(dropping)
            dropping.add_done_callback(self._dropping.discard)

    def close(self, why: Refusal) -> None:
        """Forget everything, and refuse every call that waits: this daemon no longer attends any job. What outlives it
        stays."""
        for space in self._spaces.values():
            if space.durable is not None:
                space.durable.cancel()
        self._end(self._spaces, why)
        for dropping in self._dropping:
            dropping.cancel()
        self._stores = None

    def counts(self) -> StoreCounts:
        spaces = self._spaces.values()
        return StoreCounts(
            namespaces=len(spaces),
            keys=sum(space.kv.num_keys() for space in spaces),
            bytes_held=sum(space.kv.bytes_held for space in spaces),
            waiters=sum(space.waiters() for space in spaces),
        )

    def _end(self, names: Iterable[tuple[str, str]], why: Refusal) -> None:
        for name in list(names):
            self._spaces.pop(name).end(why)

    @asynccontextmanager
    async def _in(self, scope: pb.Scope, context: Context) -> AsyncIterator[Space]:
        """The namespace of a scope that exists. Others are refused, so that a late call makes none. What was done or
        seen in it is durable when this ends."""
        async with refusals(context):
            space = await self._space(scope)
            since = space.durable.number if space.durable is not None else None
            try:
                yield space
            except Refusal:
                await self._settled(space, since)  # that something is not there is an answer as well
                raise
            await self._settled(space, since)

    async def _space(self, scope: pb.Scope) -> Space:
        self._scopes.check(scope.run_id, scope.job_uid, scope.round_uid, scope.generation)
        name = (scope.job_uid, scope.round_uid)
        if name not in self._spaces:
            if self._stores is not None and not scope.round_uid:
                await self._open(scope, self._stores)
            else:
                self._spaces[name] = Space(Namespace(self._limits))
        return self._spaces[name]

    async def _open(self, scope: pb.Scope, stores: Stores) -> None:
        """Make a job's own namespace, of what is written down of it."""
        job_uid = JobUid(scope.job_uid)
        async with self._opening.setdefault(job_uid, asyncio.Lock()):
            if (job_uid, "") in self._spaces:
                return
            records = await stores.load(job_uid)
            self._scopes.check(scope.run_id, scope.job_uid, "", scope.generation)  # it may have ended meanwhile
            if stores is not self._stores:
                raise NotLeader("another daemon led meanwhile")
            try:
                kv = Namespace(self._limits, records)
            except ValueError as error:
                text = f"what job {scope.run_id!r} keeps in its store cannot be read, and is left as it is: {error}"
                log.error("%s", text, extra={"run_id": scope.run_id})  # noqa: TRY400 -- it is no bug
                raise NotServed(text) from error
            assert kv.journal is not None
            write = functools.partial(stores.write, job_uid)
            space = self._spaces[job_uid, ""] = Space(kv)
            space.durable = Durable(
                kv.journal,
                write,
                records_max=stores.records_max,
                bytes_max=stores.bytes_max,
                refused=functools.partial(self._refused, stores, job_uid, space),
            )

    def _refused(self, stores: Stores, job_uid: JobUid, space: Space, alone: bool) -> None:
        """Let the namespace be read again. Of several changes it is not known which one was too much: the next are
        written in smaller batches."""
        if not alone:
            stores.bytes_max = max(1, stores.bytes_max // 2)
        if self._spaces.get((job_uid, "")) is space:
            del self._spaces[job_uid, ""]
            space.end(StillLearning("a change in this job's store was refused, and the store is read again"))

    async def _settled(self, space: Space, since: int | None = None) -> None:
        """Return once all that may be told of this namespace is durable, and this daemon may tell it. `since` is as in
        `Durable.settled`."""
        if space.durable is not None:
            await space.durable.settled(since)
        self._scopes.check_lead()

    # ---------------------------------------------------------------------------------------------------- the calls

    async def Set(self, request: pb.SetRequest, context: Context) -> pb.SetReply:
        async with self._in(request.scope, context) as space:
            space.kv.set(request.key, request.value)
            space.changed.wake(request.key)
        return pb.SetReply()

    async def Get(self, request: pb.GetRequest, context: Context) -> pb.GetReply:
        async with self._in(request.scope, context) as space:
            value = space.kv.get(request.key)
            if value is None:
                (value,) = await _values(space, (request.key,), request.timeout_ms)
        return pb.GetReply(value=value)

    async def Wait(self, request: pb.WaitRequest, context: Context) -> pb.WaitReply:
        async with self._in(request.scope, context) as space:
            await _all_there(space, request.keys, space.kv.present, request.timeout_ms)
        return pb.WaitReply()

    async def Check(self, request: pb.CheckRequest, context: Context) -> pb.CheckReply:
        async with self._in(request.scope, context) as space:
            all_present = all(map(space.kv.present, request.keys))
        return pb.CheckReply(all_present=all_present)

    async def Add(self, request: pb.AddRequest, context: Context) -> pb.AddReply:
        async with self._in(request.scope, context) as space:
            total = space.kv.add(request.key, request.amount, request.op_id)
            space.changed.wake(request.key)
        return pb.AddReply(sum=total)

    async def CompareSet(self, request: pb.CompareSetRequest, context: Context) -> pb.CompareSetReply:
        async with self._in(request.scope, context) as space:
            value = space.kv.compare_set(request.key, request.expected, request.desired)
            space.changed.wake(request.key)
        return pb.CompareSetReply(value=value)

    async def Append(self, request: pb.AppendRequest, context: Context) -> pb.AppendReply:
        async with self._in(request.scope, context) as space:
            space.kv.append(request.key, request.value, request.op_id)
            space.changed.wake(request.key)
        return pb.AppendReply()

    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteReply:
        async with self._in(request.scope, context) as space:
            deleted = space.kv.delete(request.key)
            space.changed.wake(request.key)
        return pb.DeleteReply(deleted=deleted)

    async def NumKeys(self, request: pb.NumKeysRequest, context: Context) -> pb.NumKeysReply:
        async with self._in(request.scope, context) as space:
            keys = space.kv.num_keys()
        return pb.NumKeysReply(keys=keys)

    async def MultiGet(self, request: pb.MultiGetRequest, context: Context) -> pb.MultiGetReply:
        async with self._in(request.scope, context) as space:
            values = await _values(space, request.keys, request.timeout_ms)
        return pb.MultiGetReply(values=values)

    async def MultiSet(self, request: pb.MultiSetRequest, context: Context) -> pb.MultiSetReply:
        async with self._in(request.scope, context) as space:
            space.kv.multi_set(request.keys, request.values)
            for key in request.keys:
                space.changed.wake(key)
        return pb.MultiSetReply()

    async def QueuePush(self, request: pb.QueuePushRequest, context: Context) -> pb.QueuePushReply:
        async with self._in(request.scope, context) as space:
            space.kv.queue_push(request.key, request.value, request.op_id)
            space.changed.wake(request.key)
            space.pushed.wake_first(request.key)
        return pb.QueuePushReply()

    async def QueuePop(self, request: pb.QueuePopRequest, context: Context) -> pb.QueuePopReply:
        async with self._in(request.scope, context) as space:
            value = space.kv.queue_pop(request.key, request.op_id)
            if value is None and not request.block:
                raise QueueEmpty(f"the queue {shown(request.key)} is empty")
            if value is None:
                value = await pop_item(space, request.key, request.op_id, request.timeout_ms)
        return pb.QueuePopReply(value=value)

    async def QueueLen(self, request: pb.QueueLenRequest, context: Context) -> pb.QueueLenReply:
        async with self._in(request.scope, context) as space:
            length = space.kv.queue_len(request.key)
        return pb.QueueLenReply(length=length)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:
        async with self._in(request.scope, context) as space:
            key = request.key
            told = 0
            while True:
                version = space.kv.version(key)
                if version == told:
                    await space.changed.wait(key)
                    continue
                told, value = version, space.kv.get(key) or b""
                await self._settled(space)
                # A slow reader holds this up; what happens meanwhile is skipped but for the last.
                await context.write(pb.WatchReply(present=version != 0, value=value))


async def _drop(stores: Stores, job_uid: JobUid, own: Space | None) -> None:
    """Remove what a job kept, once nothing more is added to it."""
    if own is not None and own.durable is not None:
        await own.durable.idle()
    try:
        await stores.drop(job_uid)
    except NotLeader:
        pass  # who leads now finds that the job is gone
    except Exception:
        log.exception("cannot remove what job %s kept in its store", job_uid)


async def _values(space: Space, keys: Sequence[str], timeout_ms: int) -> list[bytes]:
    """Return the values of all keys, as soon as each has one. Raises WaitTimedOut, and what ends the namespace."""
    await _all_there(space, keys, space.kv.version, timeout_ms)
    return space.kv.multi_get(keys)


async def _all_there(space: Space, keys: Sequence[str], there: Callable[[str], object], timeout_ms: int) -> None:
    """Return when all keys are there at the same time. Raises WaitTimedOut, and what ends the namespace."""
    if all(map(there, keys)):
        return
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            while not all(map(there, keys)):
                # One key after the other: a caller waits in one line at a time, however many keys it names.
                for key in keys:
                    while not there(key):
                        await space.changed.wait(key)
    except TimeoutError:
        missing = [key for key in keys if not there(key)]
        if missing:  # else they came in the very moment
            raise WaitTimedOut(_not_there(missing, len(keys), timeout_ms)) from None


async def pop_item(space: Space, key: str, op_id: str, timeout_ms: int) -> bytes:
    """Return the next item of an empty queue. Raises WaitTimedOut, and what ends the namespace."""
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            while (value := space.kv.queue_pop(key, op_id)) is None:
                await _next_item(space, key, op_id)
    except TimeoutError:
        raise WaitTimedOut(f"the queue {shown(key)} stayed empty for {timeout_ms} ms") from None
    finally:
        if space.kv.queue_len(key):  # whoever was woken and left without an item, or leaves some, wakes the next
            space.pushed.wake_first(key)
    return value


async def _next_item(space: Space, key: str, op_id: str) -> None:
    """Return when the queue may have an item for this call. Raises what ends the namespace."""
    if op_id in space.popping:
        # A retry, and the daemon has not noticed that the first try's caller is gone. Whatever that one takes, which is
        # then remembered, is for both.
        await space.retried.wait(op_id)
        return
    if op_id:
        space.popping.add(op_id)
    try:
        await space.pushed.wait(key)
    finally:
        space.popping.discard(op_id)
        space.retried.wake(op_id)


def _not_there(missing: Sequence[str], asked: int, timeout_ms: int) -> str:
    names = ", ".join(map(shown, missing[:3])) + (", ..." if len(missing) > 3 else "")
    of = f" (of {asked} keys {len(missing)} are missing)" if asked > 1 else ""
    return f"not set within {timeout_ms} ms: {names}{of}"
