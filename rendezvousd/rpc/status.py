"""Refusals to gRPC codes, in one table."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from rendezvousd.core import errors
from rendezvousd.rpc.convert import cut

CODES: dict[type[errors.Refusal], grpc.StatusCode] = {
    errors.NotLeader: grpc.StatusCode.UNAVAILABLE,
    errors.StillLearning: grpc.StatusCode.UNAVAILABLE,
    errors.NotServed: grpc.StatusCode.UNAVAILABLE,
    errors.NoSuchJob: grpc.StatusCode.NOT_FOUND,
    errors.NoRoom: grpc.StatusCode.UNAVAILABLE,
    errors.NoSuchNode: grpc.StatusCode.NOT_FOUND,
    errors.NotRunning: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.BadRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RoundOver: grpc.StatusCode.ABORTED,
    errors.StoreLost: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WrongKind: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WaitTimedOut: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.QueueEmpty: grpc.StatusCode.NOT_FOUND,
}

# Trailing metadata with the refusal's name: several share a code (a store that was lost, a value that is no number),
# and a program should not have to read the text.
REFUSAL_KEY = "refusal"
# A text may quote what was asked for. It travels in a header, which clients refuse beyond 8 KB, and there a character
# outside ASCII takes up to nine bytes.
TEXT_MAX = 768


def status_text(text: str) -> str:
    """Return a text that fits into a status."""
    return cut(text, TEXT_MAX, one_line=True)


@contextlib.asynccontextmanager
async def refusals(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Turn a Refusal into its status. Bugs pass through and become UNKNOWN, loudly."""
    try:
        yield
    except errors.Refusal as refusal:
        name = type(refusal).__name__
        await context.abort(CODES[type(refusal)], status_text(str(refusal)), ((REFUSAL_KEY, name),))
