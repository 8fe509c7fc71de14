"""A namespace that outlives its daemon: nobody hears of a change before it is written down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from rendezvousd.core.errors import NotLeader, Refusal
from rendezvousd.core.kv_journal import Journal
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
    ) -> None:
        self._journal = journal
        self._write = write
        self._records_max = records_max
        self._bytes_max = bytes_max
        self._written = journal.number
        self._writing: asyncio.Task[None] | None = None
        self._waiters = Waiters()

    async def settled(self) -> None:
        """Return once everything that was changed so far is durable. Raises what kept it from being so."""
        number = self._journal.number
        while self._written < number:
            if self._writing is None:  # a task of its own: its callers may hang up
                self._writing = asyncio.create_task(self._write_batch())
            await self._waiters.wait("")

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
        except Exception as error:
            log.exception("the store cannot be written")
            self._waiters.end(NotLeader(f"this daemon cannot write the job's store: {error}"))
        else:
            self._written = batch.end
            self._writing = None
            self._waiters.wake("")
