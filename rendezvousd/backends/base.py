"""Where jobs are kept, so that they outlive the daemon that attends them."""

from __future__ import annotations

from typing import Protocol

from rendezvousd.core.model import Job


class Backend(Protocol):
    """One record per run id, written by compare-and-set on its revision."""

    async def write(self, job: Job, *, expected: int) -> int:
        """Store the job over revision `expected` (0: absent) and return the new revision.

        Returns once the record is durable. Raises NotLeader if the revision moved: somebody else attends this job.
        """

    async def delete(self, run_id: str, *, expected: int) -> None:
        """Remove the record. Raises NotLeader as `write` does."""
