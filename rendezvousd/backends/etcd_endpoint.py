"""One member of etcd as the client sees it: its channel, its certificates, and the token that it gave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from rendezvousd.backends.etcd_errors import EtcdError, judge, stale_token
from rendezvousd.etcd.v1 import etcd_pb2 as pb

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Metadata = tuple[tuple[str, str], ...]

# A healthy etcd answers in milliseconds; a member cut off from the others only after 7 s, when another could have
# answered long ago.
CALL_S = 1.5
# Asking a member how it is: it answers from memory.
STATUS_S = 1.0

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),  # more often than every 5 s, etcd hangs up (too_many_pings)
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # newer grpcio waits this long for a ping, by default a minute
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
class Secrets:
    """What may change while the daemon runs. Certificates and key are PEM."""

    ca: bytes | None = None  # None with TLS: the system's
    cert: bytes | None = None
    key: bytes | None = None
    password: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where etcd is and how to get in. Endpoints are host:port.

    `secrets` is called in a thread, again and again; it raises OSError or ValueError when it cannot read them.
    """

    endpoints: tuple[str, ...]
    tls: bool = False
    user: str = ""
    secrets: Callable[[], Secrets] = Secrets


@dataclass(frozen=True, slots=True)
class Method(Generic[Answer]):
    path: str
    answer: type[Answer]


_AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", pb.AuthenticateResponse)
_STATUS = Method("/etcdserverpb.Maintenance/Status", pb.StatusResponse)


class Endpoint:
    """One member. It has a channel of its own: one channel for all members breaks the checking of host names.

    A channel keeps the certificates that it was made with. So after a failure the files are read again, and the channel
    is replaced if they have changed: a rotation costs each endpoint one failed call.
    """

    def __init__(self, access: Access, target: str, secrets: Secrets) -> None:
        self.target = target
        self.token = ""
        self._access = access
        self._secrets = secrets
        self._authenticating = asyncio.Lock()
        self._channel = self._connect()
        self._suspect = False  # the last call failed: perhaps the certificates have changed
        self._unreadable = ""  # why the files could not be read the last time
        self._closed = False
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close all connections. Calls that are under way fail."""
        self._closed = True
        await self._channel.close()
        await asyncio.gather(*self._closing)

    async def unary(self, method: Method[Answer], request: Any, timeout_s: float) -> Answer:
        """Raises grpc.aio.AioRpcError."""
        for again in (False, True):
            metadata = await self.metadata()
            try:
                return await self._unary(method, request, timeout_s, metadata)
            except grpc.aio.AioRpcError as error:
                if again or not self.renounce(metadata, error.code(), error.details() or ""):
                    raise
        raise AssertionError("unreachable")

    def stream(self, method: Method[Any], metadata: Metadata, timeout_s: float | None) -> Any:
        """Begin a call with messages both ways. Raises grpc.aio.AioRpcError."""
        with _only_rpc_errors():
            stream = self._channel.stream_stream(method.path, _serialize, method.answer.FromString)
            return stream(timeout=timeout_s, metadata=metadata)

    async def status(self) -> pb.StatusResponse | EtcdError:
        """Return what the member says of itself."""
        try:
            await self._refresh()
            # without credentials or a wish for a leader: a member that lacks one is to say so
            return await self._unary(_STATUS, pb.StatusRequest(), STATUS_S, None)
        except grpc.aio.AioRpcError as error:
            return judge(error.code(), error.details() or "")

    def suspect(self) -> None:
        """Read the certificates again before the next call: this one failed."""
        self._suspect = self._access.tls

    async def metadata(self) -> Metadata:
        """Return what goes with every call: that a member without a leader must say so at once, and who calls.

        Raises grpc.aio.AioRpcError.
        """
        await self._refresh()
        required = (("hasleader", "true"),)
        if not self._access.user:
            return required
        async with self._authenticating:
            if not self.token:
                self.token = await self._authenticate()
        return (*required, ("token", self.token)) if self.token else required

    def renounce(self, metadata: Metadata, code: grpc.StatusCode, details: str) -> bool:
        """Forget the token if it is what a call failed for. Return whether to try again with a new one."""
        if not self._access.user or not stale_token(code, details):
            return False
        if dict(metadata).get("token", "") == self.token:  # otherwise another call has renewed it already
            self.token = ""
        return True

    # ------------------------------------------------------------------------------------------------------------

    async def _unary(self, method: Method[Answer], request: Any, timeout_s: float, metadata: Metadata | None) -> Answer:
        with _only_rpc_errors():
            call = self._channel.unary_unary(method.path, _serialize, method.answer.FromString)  # type: ignore[attr-defined]
            answer: Answer = await call(request, timeout=timeout_s, metadata=metadata)
        return answer

    async def _authenticate(self) -> str:
        await self._read_secrets()
        request = pb.AuthenticateRequest(name=self._access.user, password=self._secrets.password)
        try:
            answer: pb.AuthenticateResponse = await self._unary(_AUTHENTICATE, request, CALL_S, None)
        except grpc.aio.AioRpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                return ""  # then nobody asks for a token either
            raise
        return answer.token

    async def _refresh(self) -> None:
        if self._suspect and not self._closed:
            self._suspect = False
            await self._read_secrets()

    async def _read_secrets(self) -> None:
        """Take over what the files hold now. A file that is missing at this moment may be back at the next."""
        try:
            found = await asyncio.to_thread(self._access.secrets)
        except (OSError, ValueError) as error:
            if str(error) != self._unreadable:
                log.warning("cannot read the files for etcd again, and go on with what was read before: %s", error)
            self._unreadable = str(error)
            return
        self._unreadable = ""
        had, self._secrets = self._secrets, found
        if self._closed or not self._access.tls or (had.ca, had.cert, had.key) == (found.ca, found.cert, found.key):
            return
        log.info("the certificates for etcd have changed; connects again", extra={"endpoint": self.target})
        closing = asyncio.create_task(self._channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._channel = self._connect()

    def _connect(self) -> grpc.aio.Channel:
        if not self._access.tls:
            return grpc.aio.insecure_channel(self.target, options=CHANNEL_OPTIONS)
        secrets = self._secrets
        credentials = grpc.ssl_channel_credentials(secrets.ca, secrets.key, secrets.cert)
        return grpc.aio.secure_channel(self.target, credentials, options=CHANNEL_OPTIONS)


def _serialize(message: Any) -> bytes:
    serialized: bytes = message.SerializeToString()
    return serialized


# ------------------------------------------------------------------------------------------------------------ streams


async def write(call: Any, message: Any) -> None:
    """Raises AioRpcError, also where grpc.aio complains that the call has ended."""
    with _only_rpc_errors():
        try:
            await call.write(message)
        except asyncio.InvalidStateError:
            raise rpc_error(await call.code(), await call.details()) from None


async def read(call: Any) -> Any:
    """Return the next message. Raises AioRpcError, also if the call was ended by its owner or in good order."""
    with _only_rpc_errors(grpc.StatusCode.DEADLINE_EXCEEDED, "not answered"):  # by the timer of the call's owner
        message = await call.read()
    if message is grpc.aio.EOF:
        raise rpc_error(grpc.StatusCode.UNAVAILABLE, "the stream was ended")
    return message


@contextlib.contextmanager
def _only_rpc_errors(
    code: grpc.StatusCode = grpc.StatusCode.CANCELLED, details: str = "the connection was closed"
) -> Iterator[None]:
    """Turn into AioRpcError what grpc.aio raises in a task that nobody cancels, when its call or channel is closed."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise rpc_error(code, details) from None
    except grpc.aio.UsageError as error:
        raise rpc_error(grpc.StatusCode.CANCELLED, str(error)) from None


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
