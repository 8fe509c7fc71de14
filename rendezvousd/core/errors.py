"""Refusals. Each says what the caller may do next; rpc/status.py gives each its gRPC code."""

from __future__ import annotations


class Refusal(Exception):
    """The request was understood and declined. Never raised for a bug."""


class NotLeader(Refusal):
    """Another daemon attends this job. Retry there."""


class StillLearning(Refusal):
    """This daemon was started a moment ago and does not know yet what ran before. Retry."""


class NoSuchJob(Refusal):
    """No job of this name, or not the one that was meant. Do not retry."""


class NotServed(Refusal):
    """This daemon cannot serve this job, though others: its record cannot be read, or there was a fault. Whoever has
    workers in it tries again, as another daemon or a mended one may serve it."""


class NoRoom(Refusal):
    """This daemon attends as many jobs as it may. Retry: one may have ended."""


class NoSuchNode(Refusal):
    """The job has no such node."""


class NotRunning(Refusal):
    """The job has no running round to which this could apply."""


class LimitExceeded(Refusal):
    """A bound of this daemon, named in the text, is reached."""


class BadRequest(Refusal):
    """A value makes no sense. The text names it and what was expected."""


class RoundOver(Refusal):
    """The round this call speaks of is over."""


class StoreLost(Refusal):
    """What the store held was lost since this generation was handed out."""


class WrongKind(Refusal):
    """The value is there and is not of the kind that this call works on."""


class WaitTimedOut(Refusal):
    """What the call waited for did not come in the time it gave."""


class QueueEmpty(Refusal):
    """The queue has nothing in it, and the call would not wait."""
