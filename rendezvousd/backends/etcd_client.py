"""A thin client of etcd's v3 API, spoken directly over grpc.aio.

It tries each call once, at one endpoint, and says what became of it: the answer, a refusal, or that nobody knows
(etcd_errors.py). The next call goes to the next endpoint if this one was in trouble. Who may try again, and how, is the
caller's business, as only it knows what a second time would do; `persist` does the waiting in between. A watch resumes
by itself and loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import grpc

from rendezvousd.backends.etcd_endpoint import CALL_S, Access, Answer, Endpoint, Metadata, Method, Secrets, read, write
from rendezvousd.backends.etcd_errors import (
    EtcdClosed,
    EtcdCompacted,
    EtcdError,
    EtcdRefused,
    EtcdUnknown,
    Trouble,
    compacted,
    judge,
)
from rendezvousd.backends.etcd_health import Health
from rendezvousd.etcd.v1 import etcd_pb2 as pb

__all__ = ["Access", "EtcdClient", "Secrets", "pauses_s", "prefix_end"]

T = TypeVar("T")

# Pauses between attempts. The first is for the next endpoint, the last is what a mended etcd is noticed within.
PAUSE_MIN_S, PAUSE_MAX_S = 0.02, 1.0

_RANGE = Method("/etcdserverpb.KV/Range", pb.RangeResponse)
_TXN = Method("/etcdserverpb.KV/Txn", pb.TxnResponse)
_COMPACT = Method("/etcdserverpb.KV/Compact", pb.CompactionResponse)
_GRANT = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantResponse)
_REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeResponse)
_KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse)
_WATCH = Method("/etcdserverpb.Watch/Watch", pb.WatchResponse)


class EtcdClient:
    """To be made and closed on one event loop. All methods may be called from any of its tasks."""

    def __init__(self, access: Access) -> None:
        assert access.endpoints
        secrets = access.secrets()
        self._endpoints = [Endpoint(access, target, secrets) for target in access.endpoints]
        self._at = 0
        self._closed = False
        self.health = Health(self._statuses)

    async def close(self) -> None:
        """Close all connections. Calls and watches that are under way, and later ones, end with EtcdClosed."""
        self._closed = True
        await self.health.close()
        for endpoint in self._endpoints:
            await endpoint.close()

    # ------------------------------------------------------------------------------------------------------ keys

    async def range(
        self, key: bytes, end: bytes = b"", *, limit: int = 0, revision: int = 0, timeout_s: float = CALL_S
    ) -> pb.RangeResponse:
        """Return the key, or the keys up to `end`, as all members agree. Raises EtcdError, EtcdCompacted."""
        return await self._call(
            _RANGE, pb.RangeRequest(key=key, range_end=end, limit=limit, revision=revision), timeout_s
        )

    async def txn(self, request: pb.TxnRequest) -> pb.TxnResponse:
        """Carry out a transaction. Raises EtcdUnknown, EtcdRefused."""
        return await self._call(_TXN, request)

    async def compact(self, revision: int) -> None:
        """Let etcd forget what was before this revision. Raises EtcdError."""
        await self._call(_COMPACT, pb.CompactionRequest(revision=revision))

    # ---------------------------------------------------------------------------------------------------- leases

    async def grant(self, ttl_s: int) -> tuple[int, int]:
        """Return a new lease and its time to live in seconds, which may be longer than asked. Raises EtcdError."""
        answer = await self._call(_GRANT, pb.LeaseGrantRequest(ttl=ttl_s))
        return answer.id, answer.ttl

    async def revoke(self, lease: int) -> None:
        """End a lease and the keys put under it. Raises EtcdError."""
        with contextlib.suppress(EtcdRefused):  # it has ended
            await self._call(_REVOKE, pb.LeaseRevokeRequest(id=lease))

    async def keep_alive(self, lease: int, timeout_s: float = CALL_S) -> int:
        """Return for how many seconds more the lease lives; 0: it has ended. Raises EtcdError."""
        endpoint = self._endpoints[self._at]
        try:
            for again in (False, True):
                metadata = await endpoint.metadata()
                call = endpoint.stream(_KEEP_ALIVE, metadata, timeout_s)
                try:
                    await write(call, pb.LeaseKeepAliveRequest(id=lease))
                    answer: pb.LeaseKeepAliveResponse = await read(call)
                except grpc.aio.AioRpcError as error:
                    if again or not endpoint.renounce(metadata, error.code(), error.details() or ""):
                        raise
                else:
                    return max(0, answer.ttl)
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            raise self._failed(endpoint, _KEEP_ALIVE, error) from error
        raise AssertionError("unreachable")

    # --------------------------------------------------------------------------------------------------- watching

    async def watch(self, key: bytes, end: bytes = b"", *, after: int) -> AsyncGenerator[list[pb.Event], None]:
        """Yield what changes after revision `after`, in order, everything once, whatever breaks meanwhile.

        Raises EtcdCompacted if what was missed is no longer kept, EtcdRefused if the keys may not be read, and
        EtcdClosed.
        """
        pauses = pauses_s()
        denied = False
        while True:
            endpoint = self._endpoints[self._at]
            metadata: Metadata = ()
            try:
                metadata = await endpoint.metadata()
                async with contextlib.aclosing(self._watch_once(endpoint, metadata, key, end, after + 1)) as responses:
                    async for events in responses:
                        # Whole responses only, and never by the header: it may be ahead of what was sent.
                        after = max([after, *(event.kv.mod_revision for event in events)])
                        pauses, denied = pauses_s(), False
                        if events:
                            yield events
            except grpc.aio.AioRpcError as error:
                endpoint.renounce(metadata, error.code(), error.details() or "")
                failure = self._failed(endpoint, _WATCH, error)
                if isinstance(failure, EtcdClosed):
                    raise failure from None
            except EtcdRefused as refusal:  # by etcd's own word on the stream, where an old token is not told apart
                if denied or not endpoint.token:
                    raise self.health.failed(endpoint.target, _WATCH.path, refusal) from None
                denied, endpoint.token = True, ""
            await asyncio.sleep(next(pauses))

    async def _watch_once(
        self, endpoint: Endpoint, metadata: Any, key: bytes, end: bytes, start: int
    ) -> AsyncGenerator[list[pb.Event], None]:
        """Yield the events of each response, none for its creation. Raises AioRpcError, EtcdCompacted, EtcdRefused."""
        call = endpoint.stream(_WATCH, metadata, None)
        request = pb.WatchCreateRequest(key=key, range_end=end, start_revision=start, fragment=True)
        # Reading is not put under a timeout: that would end the stream. An unanswered creation is ended on purpose.
        unanswered = asyncio.get_running_loop().call_later(CALL_S, call.cancel)
        try:
            await write(call, pb.WatchRequest(create=request))
            events: list[pb.Event] = []
            while True:
                response: pb.WatchResponse = await read(call)
                unanswered.cancel()
                if response.compact_revision:
                    raise EtcdCompacted(response.compact_revision)
                if response.canceled:
                    raise EtcdRefused(Trouble.DENIED, response.cancel_reason or "the watch was cancelled")
                events.extend(response.events)
                if not response.fragment:
                    yield events
                    events = []
        finally:
            unanswered.cancel()
            call.cancel()

    # ----------------------------------------------------------------------------------------------- trying again

    async def persist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return what `attempt` returns, trying again for as long as etcd is in trouble.

        `attempt` must be fit for being repeated after EtcdUnknown. Raises EtcdRefused if no repetition can help, and
        whatever else `attempt` raises.
        """
        for pause_s in pauses_s():
            try:
                return await attempt()
            except EtcdError as error:
                if not error.passing:
                    raise
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    # -------------------------------------------------------------------------------------------------- one call

    async def _call(self, method: Method[Answer], request: Any, timeout_s: float = CALL_S) -> Answer:
        endpoint = self._endpoints[self._at]
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        try:
            answer = await endpoint.unary(method, request, timeout_s)
        except grpc.aio.AioRpcError as error:
            if compacted(error.details() or ""):
                raise EtcdCompacted(getattr(request, "revision", 0) + 1) from error
            raise self._failed(endpoint, method, error) from error
        self.health.worked(method.path, loop.time() - sent_at)
        return answer

    def _failed(self, endpoint: Endpoint, method: Method[Any], error: grpc.aio.AioRpcError) -> EtcdError:
        """Return what the failure means. If it may be the member's own, the next call goes to another one."""
        if self._closed:
            return EtcdClosed()
        failure = judge(error.code(), error.details() or "")
        member = isinstance(failure, EtcdUnknown) or failure.trouble in (Trouble.CHANGING_LEADER, Trouble.LEARNER)
        if member:
            endpoint.suspect()
        if member and self._endpoints[self._at] is endpoint:
            self._at = (self._at + 1) % len(self._endpoints)
        return self.health.failed(endpoint.target, method.path, failure)

    async def _statuses(self) -> dict[str, pb.StatusResponse | EtcdError]:
        """Return what each member says of itself, by endpoint."""
        answers = await asyncio.gather(*(endpoint.status() for endpoint in self._endpoints))
        return {endpoint.target: answer for endpoint, answer in zip(self._endpoints, answers, strict=True)}


def pauses_s() -> Iterator[float]:
    """Yield for ever how long to wait before each new attempt: doubled, bounded, and never the same for everybody."""
    pause_s = PAUSE_MIN_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that begin so."""
    for length in range(len(prefix), 0, -1):
        if prefix[length - 1] < 0xFF:
            return prefix[: length - 1] + bytes([prefix[length - 1] + 1])
    return b"\0"
