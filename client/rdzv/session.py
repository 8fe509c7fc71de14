"""The conversation with the daemon: one Join stream to one of several endpoints, kept for as long as the scope lasts.

    told standing ──→ writer ──→ stream ──→ reader ──→ on_place
                        │ at once when something changed, and, once a place was heard, every heartbeat
                        └ whatever ends the stream, the next one says everything again

The writer and the reader wait for nothing but the stream and the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from rdzv import channels, convert
from rdzv.address import local_address
from rdzv.aside import aside
from rdzv.boottime import boottime
from rdzv.brains import Brain, stranger
from rdzv.channels import CONNECT_S
from rdzv.convert import Identity
from rdzv.endpoints import Endpoint
from rdzv.fence import Sendings
from rdzv.model import Failure, Place, Standing
from rendezvousd.v1 import rendezvous_pb2 as pb

METHOD = "/rendezvousd.v1.Rendezvous/Join"
HEARTBEAT_S = 1.0  # until a place says otherwise
RETRY_MIN_S = 0.2
RETRY_MAX_S = 1.0  # until a place says otherwise
RETRY_GROWTHS_MAX = 20  # by then the delay is over ten minutes; a power without a bound overflows one day
# From opening a stream to the first place. A daemon that 10,000 nodes storm at once takes 4 to 5 s, and is not helped
# by nodes that give up and come again: each try is more patient than the last. Where there is another endpoint to try,
# the first try is shorter, because a frozen daemon is to be left soon.
FIRST_PLACE_S = 10.0
FIRST_PLACE_OF_SEVERAL_S = 5.0
# And shorter still where workers end with their lease: a host that is dead or frozen must not use it up.
FIRST_PLACE_FENCED_S = 1.5
CONNECT_SHARE = 2 / 3  # of a short try; the rest is for the place
FIRST_PLACE_MAX_S = 20.0
FIRST_PLACE_SPREAD = 0.25  # and up to so much more, so that those who came together do not go together
SILENT_SLACK_S = 0.2  # on top of two heartbeat intervals: scheduling of both ends
LOOK_UP_S = 5.0  # the default timeout of a resolver's first try
CLOSE_S = 1.0  # a half-open peer must not hang the end

# Retrying cannot help; the details are for people.
FINAL = frozenset(
    {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED}
)

# Field 31, fixed64: the highest field, so that it may simply follow the rest. See the comment on NodeState.seq.
_SEQ_KEY = b"\xf9\x01"
_SEQ = struct.Struct("<Q")


class _Left(Exception):
    """The stream was given up; the text says why."""


class _Refused(Exception):
    """The daemon will not have this node, whatever it does."""


class Session:
    """Keeps a daemon told of how this node stands, and hears its place. All calls belong to one event loop.

    `on_place` hears every answer, repeated ones too. `on_away` hears of each failed attempt and broken stream, with the
    last error of each endpoint. `on_refused` is called once at most; nothing is tried after it.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        identity: Identity,
        standing: Standing,
        *,
        began_at: float,
        on_place: Callable[[Place], None],
        on_away: Callable[[str], None],
        on_refused: Callable[[str], None],
        local_addr: str | None = None,
        retry_max_s: float | None = None,
        streams_before: int = 0,
    ) -> None:
        """`streams_before`: how many streams this node may have opened before, in another process."""
        self._endpoints = tuple(endpoints)
        self._identity = identity
        self._standing = standing
        self._began_at = began_at
        self._on_place, self._on_away, self._on_refused = on_place, on_away, on_refused
        self._brain = Brain()
        self._probing: asyncio.Task[None] | None = None  # once, when the first daemon was found
        self._fenced = identity.spec.on_daemon_loss == pb.ON_DAEMON_LOSS_STOP
        self._given_address = local_addr
        self._address = local_addr or ""
        self._due = False  # the standing is to be sent without waiting for the heartbeat
        self._wake = asyncio.Event()  # of the writer
        self._tries = 0  # in a row that led to no place
        self._version = 0  # of the standing
        self._heartbeat_s = HEARTBEAT_S
        self._retry_given_s = retry_max_s  # outranks what the daemon says
        self._retry_max_s = retry_max_s or RETRY_MAX_S
        # of the stream, if one is open
        self._stream_no = streams_before
        self._open = False
        self._attended = False  # a place was heard on it
        self._seq = 0
        self._sendings: Sendings | None = None  # if it matters when what is answered was sent
        self._body: tuple[int, bytes] | None = None  # a version and how it is written
        self._ages: dict[tuple[int, int, float], int] = {}  # failures already told: as old as they were then
        self._sent: tuple[int, int] = (-1, 0)  # the newest version sent, and the seq that first carried it
        self._heard = -1  # the newest version the daemon has acknowledged
        self._progress = asyncio.Condition()  # of _heard, and of the stream's end

    def tell(self, standing: Standing, *, at_once: bool = True) -> None:
        """Let the daemon hear this: now, or with the next heartbeat."""
        self._standing = standing
        self._version += 1
        if at_once:
            self._send_now()

    async def flush(self, within_s: float) -> bool:
        """Return whether the daemon has heard the latest standing, `within_s` at most from now. Without one: False."""
        wanted = self._version
        self._send_now()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._progress:
                await self._progress.wait_for(lambda: self._heard >= wanted or not self._open)
        return self._heard >= wanted

    async def run(self) -> None:
        """Attend daemons until cancelled, or refused by one."""
        try:
            await self._attend_for_ever()
        finally:
            if self._probing is not None:
                self._probing.cancel()

    async def _attend_for_ever(self) -> None:
        errors: dict[Endpoint, str] = {}  # the last one of each endpoint
        turn = 0
        while True:
            endpoint = self._endpoints[turn % len(self._endpoints)]
            self._attended = False
            try:
                await self._attend(endpoint)
            except _Refused as refused:
                self._on_refused(str(refused))
                return
            except (OSError, _Left) as error:
                errors = {endpoint: str(error)} if self._attended else {**errors, endpoint: str(error)}
                self._on_away("; ".join(f"{e}: {errors[e]}" for e in self._endpoints if e in errors))
            self._tries = 0 if self._attended else self._tries + 1
            turn += 1
            rounds = self._tries // len(self._endpoints)  # trying each endpoint once is not being impatient
            delay_s = RETRY_MIN_S * 1.5 ** min(rounds, RETRY_GROWTHS_MAX)
            await asyncio.sleep(random.uniform(0.1, 1.0) * min(self._retry_max_s, delay_s))

    # -------------------------------------------------------------------------------------------- one stream

    async def _attend(self, endpoint: Endpoint) -> None:
        """Keep one stream for as long as it lives. Raises _Left, _Refused or OSError: it always ends."""
        await self._find_address(endpoint)
        channel = await self._channel_to(endpoint)
        call = channel.stream_stream(METHOD, request_serializer=None, response_deserializer=None)()
        self._stream_no += 1
        self._open, self._seq, self._body, self._ages, self._sent = True, 0, None, {}, (-1, 0)
        if self._fenced:
            self._sendings = Sendings()
        # Not a task group: one whose task fails while it is being cancelled forgets that it was.
        writing = asyncio.create_task(self._write(call))
        try:
            await self._read(call, channel, endpoint)
        finally:
            self._open = False
            call.cancel()
            writing.cancel()
            await self._note_progress()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await channel.close()
            await asyncio.wait([writing])
            if not writing.cancelled():
                writing.result()  # a bug is to be loud

    @property
    def address(self) -> str:
        """Where the peers of this host reach it; empty: not known yet."""
        return self._address

    async def _channel_to(self, endpoint: Endpoint) -> grpc.aio.Channel:
        try:
            target, options = await aside(lambda: channels.target(endpoint), within_s=LOOK_UP_S)
        except TimeoutError:
            raise OSError(f"looking up {endpoint.host} takes more than {LOOK_UP_S:g} s") from None
        return grpc.aio.insecure_channel(target, options=options)

    async def _find_address(self, endpoint: Endpoint) -> None:
        if self._given_address is not None:
            return
        try:
            self._address = await aside(lambda: local_address(endpoint), within_s=LOOK_UP_S)
        except TimeoutError:
            if not self._address:
                raise OSError(f"looking up {endpoint.host} takes more than {LOOK_UP_S:g} s") from None
        except OSError:
            if not self._address:
                raise

    async def _write(self, call: Any) -> None:
        try:
            while True:
                self._due = False
                await call.write(self._message())
                await self._until_due()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return  # the stream is over; the reader knows why

    async def _until_due(self) -> None:
        """Wait for something to say: a change or, once a place was heard on this stream, a heartbeat. A daemon that has
        not found the time to answer is not asked again."""
        while not self._due:
            self._wake.clear()
            try:
                async with asyncio.timeout(self._heartbeat_s if self._attended else None):
                    await self._wake.wait()
            except TimeoutError:
                return

    def _send_now(self) -> None:
        self._due = True
        self._wake.set()

    async def _read(self, call: Any, channel: Any, endpoint: Endpoint) -> None:
        try:
            raw = await self._first(call, channel)
            while raw is not grpc.aio.EOF:
                await self._hear(raw, endpoint)
                raw = await _within(2 * self._heartbeat_s + SILENT_SLACK_S, call.read())
        except grpc.aio.AioRpcError as error:
            raise _end(error) from None
        raise _Left("it ended the stream")

    async def _first(self, call: Any, channel: Any) -> Any:
        reading = asyncio.ensure_future(call.read())
        try:
            patience_s = self._patience_s()
            connect_s = min(CONNECT_S, patience_s * CONNECT_SHARE)
            done, _ = await asyncio.wait([reading], timeout=connect_s)
            if not done and channel.get_state() is not grpc.ChannelConnectivity.READY:
                raise _Left(f"no connection within {connect_s:.1f} s")
            return await _within(patience_s - connect_s, reading)
        finally:
            reading.cancel()
            # It may fail in the same instant, which asyncio would show to people, at length, if nobody asked.
            reading.add_done_callback(lambda read: read.cancelled() or read.exception())

    def _patience_s(self) -> float:
        several = len(self._endpoints) > 1
        turns = min(self._tries // len(self._endpoints), RETRY_GROWTHS_MAX)
        of_several_s = FIRST_PLACE_FENCED_S if self._fenced else FIRST_PLACE_OF_SEVERAL_S
        patience_s: float = (of_several_s if several else FIRST_PLACE_S) * 2.0**turns
        return min(patience_s, FIRST_PLACE_MAX_S) * random.uniform(1.0, 1.0 + FIRST_PLACE_SPREAD)

    async def _hear(self, raw: bytes, endpoint: Endpoint) -> None:
        message = pb.Place.FromString(raw)
        if problem := self._brain.hear(endpoint, message.daemon_id, message.up_ms / 1000, time.monotonic()):
            raise _Left(problem)
        first, self._attended = not self._attended, True
        if message.heartbeat_ms:
            faster = message.heartbeat_ms / 1000 < self._heartbeat_s
            self._heartbeat_s = message.heartbeat_ms / 1000
            if faster and not first:
                self._send_now()  # the writer still waits as long as it was told before
        if first:
            self._wake.set()  # heartbeats begin
            if self._probing is None:
                self._probing = asyncio.create_task(self._look_for_strangers(message.daemon_id))
        if message.retry_max_ms and self._retry_given_s is None:
            self._retry_max_s = message.retry_max_ms / 1000
        version, seq = self._sent
        if message.ack_seq >= seq and version > self._heard:
            self._heard = version
            await self._note_progress()
        sent_at = None if self._sendings is None else self._sendings.answered(message.ack_seq)
        place = convert.place(message, time.monotonic(), sent_at)
        if place is not None:
            self._on_place(place)

    async def _look_for_strangers(self, daemon_id: str) -> None:
        if problem := await stranger(self._endpoints, daemon_id):
            self._on_refused(problem)

    async def _note_progress(self) -> None:
        async with self._progress:
            self._progress.notify_all()

    # -------------------------------------------------------------------------------------------- one message

    def _message(self) -> bytes:
        self._seq += 1
        if self._sendings is not None:
            self._sendings.sent(self._seq, boottime())
        if self._sent[0] != self._version:
            self._sent = (self._version, self._seq)
        if self._seq == 1:
            return self._written(first=True) + _SEQ_KEY + _SEQ.pack(self._seq)
        if self._body is None or self._body[0] != self._version:
            self._body = (self._version, self._written(first=False))
        return self._body[1] + _SEQ_KEY + _SEQ.pack(self._seq)

    def _written(self, *, first: bool) -> bytes:
        now = time.monotonic()
        told = self._ages
        self._ages = {}  # only what is still told is kept

        def age_ms(failure: Failure) -> int:
            key = (failure.rank, failure.local_rank, failure.ended_at)
            return self._ages.setdefault(key, told.get(key, max(0, round((now - failure.ended_at) * 1000))))

        state = convert.node_state(self._identity, self._standing, address=self._address, age_ms=age_ms)
        state.stream_no = self._stream_no
        if first:
            state.spec.CopyFrom(self._identity.spec)
            state.uptime_ms = max(0, round((now - self._began_at) * 1000))
        return state.SerializeToString(deterministic=True)


async def _within(seconds: float, reading: Any) -> Any:
    try:
        async with asyncio.timeout(seconds):
            return await reading
    except TimeoutError:
        raise _Left(f"silent for {seconds:.1f} s") from None


def _end(error: Any) -> _Left | _Refused:
    text = error.details() or error.code().name
    if text.startswith("failed to connect to all addresses"):
        text = text.rpartition(": ")[2]  # after what gRPC tried, what the kernel said
    if error.code() in FINAL:
        return _Refused(text)
    return _Left(text)
