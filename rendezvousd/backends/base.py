"""Where jobs are kept, so that they outlive the daemon that attends them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rendezvousd.core.model import Job, JobUid


class Backend(Protocol):
    """One record per run id, written by compare-and-set on its revision."""

    async def write(self, job: Job, *, expected: int) -> int:
        """Store the job over revision `expected` (0: absent) and return the new revision.

        Returns once the record is durable. Raises NotLeader if the revision moved: somebody else attends this job.
        """

    async def delete(self, run_id: str, *, expected: int) -> None:
        """Remove the record. Raises NotLeader as `write` does."""


class Stores(Protocol):
    """What jobs keep in the store for longer than a round, as named records."""

    records_max: int  # that can be written at once
    bytes_max: int

    async def load(self, job_uid: JobUid) -> dict[str, bytes]:
        """Return all records of a job's store."""

    async def write(self, job_uid: JobUid, records: Mapping[str, bytes | None]) -> None:
        """Put the records and remove those that are None, all at once. Returns once that is durable. Raises NotLeader
        when another daemon leads."""

    async def drop(self, job_uid: JobUid) -> None:
        """Remove all that a job's store has. Raises NotLeader as `write` does."""
