"""Nodes that wait for the end of a job that is not theirs: they have its run id, and belong to another submission.

They are attended, but no part of the job. When it is no longer in their way, what they sent last is taken up again.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from rendezvousd.attendance import Stream
from rendezvousd.core.events import NodeHeard
from rendezvousd.core.model import Job, NodeUid
from rendezvousd.core.rules.admit import in_the_way, why_it_waits


@dataclass(slots=True)
class Waiter:
    """One such node. Instants are seconds of the daemon's clock."""

    event: NodeHeard
    stream: Stream | None
    started_at: float  # when its launcher was started
    until_at: float  # when it gives up: its own join timeout after it came

    def again(self, now: float) -> NodeHeard:
        """Return what it sent last, as it would send it now on a new stream."""
        return replace(self.event, uptime_s=now - self.started_at)


class WaitingNodes:
    """All such nodes, by run id."""

    def __init__(self) -> None:
        self._waiters: dict[str, dict[NodeUid, Waiter]] = {}

    def put(self, run_id: str, event: NodeHeard, stream: Stream | None, now: float) -> bool:
        """Keep what this node sent last. Return whether it is new here."""
        waiters = self._waiters.setdefault(run_id, {})
        before = waiters.get(event.uid)
        started_at, until_at = now - event.uptime_s, now + event.job_spec.timing.join_s
        if before is not None:  # only the first message of a stream has an uptime
            started_at, until_at = min(started_at, before.started_at), before.until_at
        waiters[event.uid] = Waiter(event, stream, started_at, until_at)
        return before is None

    def discard(self, run_id: str, uid: NodeUid) -> None:
        """Forget this node, if it is here."""
        waiters = self._waiters.get(run_id)
        if waiters is not None and waiters.pop(uid, None) is not None and not waiters:
            del self._waiters[run_id]

    def get(self, run_id: str, uid: NodeUid) -> Waiter | None:
        waiters = self._waiters.get(run_id)
        return None if waiters is None else waiters.get(uid)

    def run_ids(self) -> list[str]:
        return list(self._waiters)

    def due(self, run_id: str, job: Job | None, now: float) -> list[Waiter]:
        """Return the nodes, no longer here, that need not wait for this job any longer (None: it is gone)."""
        if job is not None and in_the_way(job, now):
            return []
        return list(self._waiters.pop(run_id, {}).values())

    def expired(self, run_id: str, now: float) -> list[Waiter]:
        """Return the nodes, no longer here, that have waited for as long as they would."""
        late = [waiter for waiter in self._waiters.get(run_id, {}).values() if now >= waiter.until_at]
        for waiter in late:
            self.discard(run_id, waiter.event.uid)
        return late


def gave_up(job: Job, waiter: Waiter, now: float) -> str:
    """Return why this node waits no longer, for people."""
    event = waiter.event
    return f"{why_it_waits(job, event, now)}; it has waited for {event.job_spec.timing.join_s:g} s (join timeout)"
