"""Calls of the daemon's Store service, from any thread and from forked children: tried again, at each endpoint in turn,
until they are answered or out of time."""

from __future__ import annotations

import functools
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc

from rdzv import channels
from rdzv.endpoints import Endpoint

Reply = TypeVar("Reply")

SERVICE = "rendezvousd.v1.Store"
# A daemon that holds its peace for so long over a call that waits for nothing is as good as away.
ATTEMPT_S = 10.0
# A call with less time than this would fail on a busy machine that has the answer ready.
ATTEMPT_MIN_S = 1.0
# From the end of a wait, which the daemon announces, to the arrival of the news.
NEWS_S = 5.0
# One call waits so long at most; then it is made again. The wire has 32 bits of milliseconds.
WAIT_MAX_S = 3600.0
RETRY_MIN_S = 0.1
RETRY_MAX_S = 1.0
REFUSAL_KEY = "refusal"  # trailing metadata of the daemon's refusals: the kind, where several share a code
LAST_SAID_MAX = 1000  # characters of an error text: gRPC quotes whole addresses and paths in its own

# The daemon knows its limits, and says so.
_UNLIMITED: channels.Options = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))

# The daemon is away, or not the one that leads. INTERNAL is what a proxy makes of a broken connection.
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL})


class NoAnswer(Exception):
    """Time ran out. `refusal` is the daemon's own word for it, empty if no daemon answered; `text` is for people."""

    def __init__(self, refusal: str, text: str) -> None:
        super().__init__(text)
        self.refusal, self.text = refusal, text


class Declined(Exception):
    """The daemon will not do this, however often it is asked."""

    def __init__(self, code: grpc.StatusCode, refusal: str, text: str) -> None:
        super().__init__(text)
        self.code, self.refusal, self.text = code, refusal, text


class Caller:
    """Calls the leading one of several daemons."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = tuple(endpoints)
        self._at = 0  # index of the endpoint that answered last; a race between threads costs a try
        self._connections = _Connections(self._endpoints)

    def __str__(self) -> str:
        return ", ".join(map(str, self._endpoints))

    def call(self, method: str, request: Any, reply: type[Reply], timeout_s: float) -> Reply:
        """Return the daemon's answer. Raises Declined and NoAnswer.

        A request that has a `timeout_ms` waits in the daemon for what is left of `timeout_s`, which is written into it.
        """
        waits = "timeout_ms" in request.DESCRIPTOR.fields_by_name
        deadline = time.monotonic() + timeout_s
        tries = 0
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            if waits:
                wait_s = min(left_s, WAIT_MAX_S)
                request.timeout_ms = math.ceil(wait_s * 1000)
                attempt_s = wait_s + NEWS_S
            else:
                attempt_s = min(max(left_s, ATTEMPT_MIN_S), ATTEMPT_S)
            at = self._at
            try:
                answer: Reply = self._connections.stub(at, method, request, reply)(request, timeout=attempt_s)
            except grpc.RpcError as error:
                refusal, text = _read(error)
            else:
                return answer
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NoAnswer(refusal, text)
            if not refusal:
                tries += 1
                self._move_on(at, tries, left_s)

    def _move_on(self, at: int, tries: int, left_s: float) -> None:
        """Turn to the next endpoint; once all were tried in vain, rest a little."""
        self._at = (at + 1) % len(self._endpoints)
        rounds, rest = divmod(tries, len(self._endpoints))
        if rest == 0:
            delay_s = min(RETRY_MAX_S, RETRY_MIN_S * 2 ** min(rounds, 10)) * random.uniform(0.5, 1)
            time.sleep(min(delay_s, left_s))


class _Connections:
    """One connection to each endpoint, made when first needed, and made anew in a forked child.

    A fork copies the channels and not the threads behind them. The child keeps its copies and never touches them: even
    to close them can hang. What cannot be helped here: gRPC leaves a child in disorder if another thread was within a
    call at the very moment of the fork.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = endpoints
        self._pid = os.getpid()
        self._channels: dict[int, grpc.Channel] = {}
        self._stubs: dict[tuple[int, str], Callable[..., Any]] = {}
        self._parents: list[object] = []

    def stub(self, at: int, method: str, request: Any, reply: Any) -> Callable[..., Any]:
        """Return what makes one call at one endpoint."""
        if self._pid != os.getpid():
            self._parents.append((self._channels, self._stubs))
            self._channels, self._stubs, self._pid = {}, {}, os.getpid()
        stub = self._stubs.get((at, method))
        if stub is None:  # two threads may both come here: the dicts keep one channel, and either stub will do
            if at not in self._channels:
                target, options = channels.target(self._endpoints[at])
                self._channels.setdefault(at, grpc.insecure_channel(target, options=(*options, *_UNLIMITED)))
            stub = self._channels[at].unary_unary(
                f"/{SERVICE}/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=reply.FromString,
            )
            self._stubs[at, method] = stub
        return stub


@functools.cache
def caller(endpoints: tuple[Endpoint, ...]) -> Caller:
    """Return the one Caller of this process for these endpoints: all its stores share their connections."""
    return Caller(endpoints)


def _read(error: Any) -> tuple[str, str]:
    """Return the daemon's word (empty: it is away) and the text of an error after which to try again. Raises Declined
    for every other."""
    code: grpc.StatusCode = error.code()
    text = str(error.details() or code.name.lower().replace("_", " "))[:LAST_SAID_MAX]
    refusal = next((str(value) for key, value in error.trailing_metadata() or () if key == REFUSAL_KEY), "")
    if code in _AWAY or (code is grpc.StatusCode.UNKNOWN and text == "Stream removed"):
        return "", text
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return refusal, text
    raise Declined(code, refusal, text)
