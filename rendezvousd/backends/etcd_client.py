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
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from rendezvousd.backends.etcd_errors import (
    EtcdCompacted,
    EtcdError,
    EtcdRefused,
    EtcdUnknown,
    Trouble,
    compacted,
    judge,
    stale_token,
)
from rendezvousd.backends.etcd_health import Health
from rendezvousd.etcd.v1 import etcd_pb2 as pb

T = TypeVar("T")
Answer = TypeVar("Answer")

# A healthy etcd answers in milliseconds; a member cut off from the others only after 7 s, when another could have
# answered long ago.
CALL_S = 1.5
# Asking a member how it is: it answers from memory.
STATUS_S = 1.0
# Pauses between attempts. The first is for the next endpoint, the last is what a mended etcd is noticed within.
PAUSE_MIN_S, PAUSE_MAX_S = 0.02, 1.0

_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),  # more often than every 5 s, etcd hangs up (too_many_pings)
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),  # a quiet watch is pinged for ever, not twice
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),  # a retry is the caller's decision
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),  # etcd's own limits hold; the default of 4 MB is below them
    ("grpc.max_send_message_length", -1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where etcd is and how to get in. Endpoints are host:port; certificates and key are PEM."""

    endpoints: tuple[str, ...]
    tls: bool = False
    ca: bytes | None = None  # None with tls: the system's
    cert: bytes | None = None
    key: bytes | None = None
    user: str = ""
    password: str = ""


@dataclass(frozen=True, slots=True)
class _Method(Generic[Answer]):
    path: str
    answer: type[Answer]


_RANGE = _Method("/etcdserverpb.KV/Range", pb.RangeResponse)
_TXN = _Method("/etcdserverpb.KV/Txn", pb.TxnResponse)
_COMPACT = _Method("/etcdserverpb.KV/Compact", pb.CompactionResponse)
_GRANT = _Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantResponse)
_REVOKE = _Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeResponse)
_KEEP_ALIVE = _Method("/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse)
_WATCH = _Method("/etcdserverpb.Watch/Watch", pb.WatchResponse)
_AUTHENTICATE = _Method("/etcdserverpb.Auth/Authenticate", pb.AuthenticateResponse)
_STATUS = _Method("/etcdserverpb.Maintenance/Status", pb.StatusResponse)


class _Endpoint:
    """One member: a channel of its own (one for all breaks the checking of host names), and the token it gave."""

    def __init__(self, access: Access, target: str) -> None:
        self.target = target
        self.token = ""
        self._access = access
        self._authenticating = asyncio.Lock()
        if access.tls:
            credentials = grpc.ssl_channel_credentials(access.ca, access.key, access.cert)
            self.channel = grpc.aio.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
        else:
            self.channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)

    async def unary(self, method: _Method[Answer], request: Any, timeout_s: float) -> Answer:
        """Raises grpc.aio.AioRpcError."""
        call = self.channel.unary_unary(method.path, _serialize, method.answer.FromString)  # type: ignore[attr-defined]
        for again in (False, True):
            metadata = await self.metadata()
            try:
                answer: Answer = await call(request, timeout=timeout_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if again or not self.renounce(metadata, error.code(), error.details() or ""):
                    raise
            else:
                return answer
        raise AssertionError("unreachable")

    def stream(self, method: _Method[Any], metadata: Any, timeout_s: float | None) -> Any:
        stream = self.channel.stream_stream(method.path, _serialize, method.answer.FromString)
        return stream(timeout=timeout_s, metadata=metadata)

    async def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what goes with every call: that a member without a leader must say so at once, and who calls."""
        required = (("hasleader", "true"),)
        if not self._access.user:
            return required
        async with self._authenticating:
            if not self.token:
                self.token = await self._authenticate()
        return (*required, ("token", self.token)) if self.token else required

    async def _authenticate(self) -> str:
        request = pb.AuthenticateRequest(name=self._access.user, password=self._access.password)
        call = self.channel.unary_unary(_AUTHENTICATE.path, _serialize, pb.AuthenticateResponse.FromString)
        try:
            answer: pb.AuthenticateResponse = await call(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                return ""  # then nobody asks for a token either
            raise
        return answer.token

    def renounce(self, metadata: tuple[tuple[str, str], ...], code: grpc.StatusCode, details: str) -> bool:
        """Forget the token if it is what a call failed for. Return whether to try again with a new one."""
        if not self._access.user or not stale_token(code, details):
            return False
        if dict(metadata).get("token", "") == self.token:  # otherwise another call has renewed it already
            self.token = ""
        return True


class EtcdClient:
    """To be made and closed on one event loop. All methods may be called from any of its tasks."""

    def __init__(self, access: Access) -> None:
        assert access.endpoints
        self._endpoints = [_Endpoint(access, target) for target in access.endpoints]
        self._at = 0
        self.health = Health(self._statuses)

    async def close(self) -> None:
        """Close all connections. Watches end with EtcdUnknown."""
        await self.health.close()
        for endpoint in self._endpoints:
            await endpoint.channel.close()

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
                    await _write(call, pb.LeaseKeepAliveRequest(id=lease))
                    answer: pb.LeaseKeepAliveResponse = await _read(call)
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

        Raises EtcdCompacted if what was missed is no longer kept, and EtcdRefused if the keys may not be read.
        """
        pauses = pauses_s()
        denied = False
        while True:
            endpoint = self._endpoints[self._at]
            metadata: tuple[tuple[str, str], ...] = ()
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
                self._failed(endpoint, _WATCH, error)
            except EtcdRefused as refusal:  # by etcd's own word on the stream, where an old token is not told apart
                if denied or not endpoint.token:
                    raise self.health.failed(endpoint.target, _WATCH.path, refusal) from None
                denied, endpoint.token = True, ""
            await asyncio.sleep(next(pauses))

    async def _watch_once(
        self, endpoint: _Endpoint, metadata: Any, key: bytes, end: bytes, start: int
    ) -> AsyncGenerator[list[pb.Event], None]:
        """Yield the events of each response, none for its creation. Raises AioRpcError, EtcdCompacted, EtcdRefused."""
        call = endpoint.stream(_WATCH, metadata, None)
        request = pb.WatchCreateRequest(key=key, range_end=end, start_revision=start, fragment=True)
        # Reading is not put under a timeout: that would end the stream. An unanswered creation is ended on purpose.
        unanswered = asyncio.get_running_loop().call_later(CALL_S, call.cancel)
        try:
            await _write(call, pb.WatchRequest(create=request))
            events: list[pb.Event] = []
            while True:
                response: pb.WatchResponse = await _read(call)
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

    async def _call(self, method: _Method[Answer], request: Any, timeout_s: float = CALL_S) -> Answer:
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

    def _failed(self, endpoint: _Endpoint, method: _Method[Any], error: grpc.aio.AioRpcError) -> EtcdError:
        """Return what the failure means. If it may be the member's own, the next call goes to another one."""
        failure = judge(error.code(), error.details() or "")
        member = isinstance(failure, EtcdUnknown) or failure.trouble is Trouble.CHANGING_LEADER
        if member and self._endpoints[self._at] is endpoint:
            self._at = (self._at + 1) % len(self._endpoints)
        return self.health.failed(endpoint.target, method.path, failure)

    async def _statuses(self) -> list[pb.StatusResponse | EtcdError]:
        """Return what each member says of itself."""

        async def ask(endpoint: _Endpoint) -> pb.StatusResponse | EtcdError:
            # without credentials or a wish for a leader: a member that lacks one is to say so
            call = endpoint.channel.unary_unary(_STATUS.path, _serialize, pb.StatusResponse.FromString)
            try:
                answer: pb.StatusResponse = await call(pb.StatusRequest(), timeout=STATUS_S)
            except grpc.aio.AioRpcError as error:
                return judge(error.code(), error.details() or "")
            return answer

        return list(await asyncio.gather(*(ask(endpoint) for endpoint in self._endpoints)))


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


def _serialize(message: Any) -> bytes:
    serialized: bytes = message.SerializeToString()
    return serialized


async def _write(call: Any, message: Any) -> None:
    """Raises AioRpcError, also where grpc.aio complains that the call has ended."""
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        raise _error(await call.code(), await call.details()) from None


async def _read(call: Any) -> Any:
    """Return the next message. Raises AioRpcError, also if the call was ended by its owner or in good order."""
    try:
        message = await call.read()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "not answered") from None  # by our own timer
    if message is grpc.aio.EOF:
        raise _error(grpc.StatusCode.UNAVAILABLE, "the stream was ended")
    return message


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
