"""Leadership as a scope: of all daemons on one etcd, at most one is in it.

    async with election.term() as term:     # entered once elected, whenever that is
        ...                                 # cancelled when the term ends; NotLeader comes out

A term ends when nobody can be sure any more that it goes on, answered or not: a time to live after the *sending* of the
last renewal that etcd confirmed. etcd lets the next one in only after that, as it counts from the receipt. The clock
here is one that runs on while the machine sleeps.

What must not be said by a deposed leader is said after `term.check()`: read, check, answer. What it must not write is
fenced by the term's key (backends/etcd.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

from rendezvousd.backends.etcd import DEFAULT_PREFIX
from rendezvousd.backends.etcd_client import EtcdClient, pauses_s
from rendezvousd.backends.etcd_errors import EtcdCompacted, EtcdError, EtcdRefused, lease_ended
from rendezvousd.core.errors import NotLeader
from rendezvousd.etcd.v1 import etcd_pb2 as pb

log = logging.getLogger(__name__)

# A leader that dies is followed so much later, and a little. etcd's own minimum, with its usual settings.
TTL_S = 2
# Renewals in one time to live: the first may meet a member that does not answer, and there is time for another one.
RENEWALS = 3
# What ending a lease in an orderly way may take: it only spares the others to wait for its end.
RESIGN_S = 0.5
# From the end of a leader's lease to the next one's first answer: etcd looks twice a second for leases that have ended,
# a candidate is told at once, or looks after a third of the time to live, and jobs are loaded in milliseconds.
CAMPAIGN_S = 1.0


def takeover_s(ttl_s: float) -> float:
    """Return for how long there may be no leader when one dies. Twice the time to live: when a member of etcd itself
    fails with it, the new leader among the members lets every lease begin anew."""
    return 2 * ttl_s + CAMPAIGN_S


def boottime() -> float:
    """Return seconds of a clock that never stands still, also not while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Term:
    """One daemon's time of leading. `key` and `revision` are what its writes are fenced with."""

    def __init__(self, key: bytes, revision: int, lease: int, valid_until: float) -> None:
        self.key = key
        self.revision = revision  # at which the leader's key was created
        self.lease = lease
        self.valid_until = valid_until  # seconds of `boottime`
        self.ended = ""  # why; empty while it goes on

    def check(self) -> None:
        """Return if this daemon leads, for certain, at this moment. Raises NotLeader."""
        if not self.ended and boottime() >= self.valid_until:
            self.ended = "etcd has not confirmed this daemon's leadership in time"
        if self.ended:
            raise NotLeader(self.ended)


class _Lease:
    """A candidate's, then a leader's: what the leader's key lives by."""

    def __init__(self, number: int, valid_until: float) -> None:
        self.number = number
        self.valid_until = valid_until


class Election:
    """One daemon's part in the choice of a leader. `address` is what the others tell their callers when it leads."""

    def __init__(self, client: EtcdClient, *, address: str, prefix: str = DEFAULT_PREFIX, ttl_s: int = TTL_S) -> None:
        self._client = client
        self._key = f"{prefix.rstrip('/')}/leader".encode()
        self._address = address
        self._ttl_s = ttl_s
        self._renewal_s = ttl_s / RENEWALS
        self._lease: _Lease | None = None
        self.leader = ""  # address of the daemon that leads, as far as this one has seen; empty: none, or not seen

    @contextlib.asynccontextmanager
    async def term(self) -> AsyncIterator[Term]:
        """Campaign until elected, then lead in this scope. Raises NotLeader when the term has ended.

        Whoever is not elected waits here, also while etcd is away.
        """
        try:
            term = await self._win()
            log.info("leads from now on", extra={"revision": term.revision})
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(self._renew_for_ever(term))
                try:
                    yield term
                finally:
                    term.ended = term.ended or "this term has ended"
                    renewing.cancel()
        except BaseExceptionGroup as errors:  # the task group's; what comes out is what was raised
            _, others = errors.split(NotLeader)
            raise _first(others or errors) from None
        finally:
            self.leader = "" if self.leader == self._address else self.leader
            await self._resign()

    # ------------------------------------------------------------------------------------------------ campaigning

    async def _win(self) -> Term:
        pauses = pauses_s()
        while True:
            try:
                term = await self._attempt()
            except EtcdError as error:
                if not error.passing:
                    raise
                await asyncio.sleep(next(pauses))
            else:
                if term is not None:
                    return term
                pauses = pauses_s()

    async def _attempt(self) -> Term | None:
        """Take the lead if nobody has it, else wait a while for that to change. None: try again. Raises EtcdError."""
        lease = await self._live_lease()
        seen = await self._client.range(self._key)
        if not seen.kvs:
            self.leader = ""
            return await self._take(lease)
        leader = seen.kvs[0]
        if leader.lease == lease.number:  # taken by an attempt whose answer was lost
            return self._begin(leader.create_revision, lease)
        self.leader = leader.value.decode(errors="replace")
        await self._until_gone(seen.header.revision)
        return None

    async def _live_lease(self) -> _Lease:
        sent_at = boottime()
        if self._lease is not None:
            left_s = await self._client.keep_alive(self._lease.number)
            if left_s > 0:
                self._lease.valid_until = sent_at + left_s
                return self._lease
        sent_at = boottime()
        number, left_s = await self._client.grant(self._ttl_s)
        self._lease = _Lease(number, sent_at + left_s)
        return self._lease

    async def _take(self, lease: _Lease) -> Term | None:
        request = pb.TxnRequest(
            compare=[pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.CREATE, key=self._key, create_revision=0)],
            success=[pb.RequestOp(put=pb.PutRequest(key=self._key, value=self._address.encode(), lease=lease.number))],
        )
        try:
            answer = await self._client.txn(request)
        except EtcdRefused as refusal:
            if not lease_ended(refusal):
                raise
            self._lease = None  # it ran out on the way, or while this process was stopped
            return None
        return self._begin(answer.header.revision, lease) if answer.succeeded else None

    def _begin(self, revision: int, lease: _Lease) -> Term:
        self.leader = self._address
        return Term(self._key, revision, lease.number, lease.valid_until)

    async def _until_gone(self, revision: int) -> None:
        """Wait until the leader's key may be gone, at most until the own lease wants a sign of life.

        A watch on a member that is stopped is silent for many seconds, hence the look after each wait.
        """
        with contextlib.suppress(TimeoutError, EtcdCompacted):
            async with (
                asyncio.timeout(self._renewal_s),
                contextlib.aclosing(self._client.watch(self._key, after=revision)) as changes,
            ):
                async for events in changes:
                    if any(event.type == pb.Event.DELETE for event in events):
                        return

    # ---------------------------------------------------------------------------------------------------- leading

    async def _renew_for_ever(self, term: Term) -> None:
        """Raises NotLeader when the term has ended."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, term.valid_until - boottime())):
                    await self._renew(term)
                    await asyncio.sleep(self._renewal_s)
            term.check()

    async def _renew(self, term: Term) -> None:
        """Prolong the term once, trying again while etcd is in trouble. Raises NotLeader if it is another's now."""
        for pause_s in pauses_s():
            sent_at = boottime()
            try:
                # A member without contact to the others may still answer this ...
                left_s = await self._client.keep_alive(term.lease, timeout_s=self._renewal_s)
                # ... but not that.
                leader = await self._client.range(self._key, timeout_s=self._renewal_s)
            except EtcdError as error:
                if not error.passing:
                    raise
                await asyncio.sleep(pause_s)
                continue
            if left_s == 0:
                term.ended = "this daemon's lease has ended"
            elif not leader.kvs or leader.kvs[0].create_revision != term.revision:
                term.ended = "the leader's key is no longer this daemon's"
            term.check()
            term.valid_until = max(term.valid_until, sent_at + left_s)
            return

    async def _resign(self) -> None:
        """End the lease, so that the others need not wait for it."""
        lease, self._lease = self._lease, None
        if lease is not None:
            with contextlib.suppress(EtcdError, TimeoutError):
                async with asyncio.timeout(RESIGN_S):
                    await self._client.revoke(lease.number)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception of a group that is none itself."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
