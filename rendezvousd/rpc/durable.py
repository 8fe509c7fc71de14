"""A namespace that outlives its daemon: nobody hears of a change before it is written down.

A change that the backend does not take is refused to its caller, by name. What was changed here since is not what is
written down, so the namespace ends then, and the next call reads it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from rendezvousd.core.errors import LimitExceeded, Refusal, StillLearning
from rendezvousd.core.kv import shown
from rendezvousd.core.kv_journal import Batch, Journal
from rendezvousd.rpc.waiters import Waiters

log = logging.getLogger(__name__)


class Durable:
    """Writes a journal down, one batch after the other: while one is written, changes gather for the next."""

    def __init__(
        self,
        journal: Journal,
        write: Callable[[Mapping[str, bytes | None]], Awaitable[None]],
        *,
        records_max: int,
        bytes_max: int,
        refused: Callable[[bool], None] = lambda _alone: None,
    ) -> None:
        """`refused` is called when the backend does not take changes, with whether it was a single one: then this
        namespace has ended."""
        self._journal = journal
        self._write = write
        self._records_max = records_max
        self._bytes_max = bytes_max
        self._written = journal.number
        self._writing: asyncio.Task[None] | None = None
        self._waiters = Waiters()
        self._on_refused = refused
        self._culprit = 0  # number of the change that is refused
        self._why = ""

    @property
    def number(self) -> int:
        """The number of changes so far."""
        return self._journal.number

    async def settled(self, since: int | None = None) -> None:
        """Return once everything that was changed so far is durable. Raises what kept it from being so. The caller
        made the changes after number `since`; None: it made none."""
        number = self._journal.number
        while self._written < number:
            if self._writing is None:  # a task of its own: its callers may hang up
                self._writing = asyncio.create_task(self._write_batch())
            try:
                await self._waiters.wait("")
            except StillLearning:
                if since is not None and since < self._culprit <= number:
                    raise LimitExceeded(self._why) from None
                raise

    def end(self, why: Refusal) -> None:
        """Refuse all who wait. What is being written is written."""
        self._waiters.end(why)

    async def idle(self) -> None:
        """Return when nothing is being written any more; after `end` that stays so."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    def cancel(self) -> None:
        """Write no more."""
        if self._writing is not None:
            self._writing.cancel()

    async def _write_batch(self) -> None:
        batch = self._journal.take(records_max=self._records_max, bytes_max=self._bytes_max)
        try:
            await self._write(batch.records)
        except Refusal as refusal:
            self._waiters.end(refusal)  # and stay so: what was changed here is not what is written
        except Exception as error:  # noqa: BLE001 -- it is logged there
            self._refuse(batch, error)
        else:
            self._written = batch.end
            self._writing = None
            self._waiters.wake("")

    def _refuse(self, batch: Batch, error: Exception) -> None:
        alone = batch.changes == 1
        names = ", ".join(map(shown, list(batch.records)[:3]))
        size = sum(len(data or b"") for data in batch.records.values())
        log.error("%d changes of a job's store cannot be written (%d bytes; %s): %s", batch.changes, size, names, error)
        if alone:
            self._culprit = batch.end
            self._why = (
                f"this cannot be kept ({size} bytes; {names}): {error}. Raise etcd's --max-request-bytes, or lower the "
                "daemons' --max-store-value-bytes"
            )
        self._waiters.end(StillLearning("a change in this job's store was refused, and the store is read again"))
        self._on_refused(alone)
