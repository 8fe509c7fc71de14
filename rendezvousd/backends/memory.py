"""Jobs kept in this process: as durable as the daemon itself."""

from __future__ import annotations

from rendezvousd.core.errors import NotLeader
from rendezvousd.core.model import Job


class MemoryBackend:
    """A job is a value, so keeping it is all there is to storing it."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[Job, int]] = {}

    async def write(self, job: Job, *, expected: int) -> int:
        self._check(job.run_id, expected)
        self._records[job.run_id] = (job, expected + 1)
        return expected + 1

    async def delete(self, run_id: str, *, expected: int) -> None:
        self._check(run_id, expected)
        self._records.pop(run_id, None)

    def _check(self, run_id: str, expected: int) -> None:
        _, revision = self._records.get(run_id, (None, 0))
        if revision != expected:
            raise NotLeader(f"the record of job {run_id!r} is at revision {revision}, not {expected}")
