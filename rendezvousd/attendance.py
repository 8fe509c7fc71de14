"""Who was heard when: the mutable table beside the jobs, so that a heartbeat costs a field and no fold.

Only what runs out becomes an event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from rendezvousd.core.liveness import Pace, grace_s
from rendezvousd.core.model import NodeUid
from rendezvousd.core.settings import Timing

TICK_S = 0.1
# One tick credits time with at most this much, however long the process was stopped or busy: what arrived meanwhile is
# read before anybody is judged by it.
CREDIT_MAX_S = 2 * TICK_S
# Stalls of this process that are remembered, with how long they were: a busy host has a few an hour.
STALLS_MAX = 64
# A node's estimated round trip is believed up to this; it only lengthens the reconnect grace.
ROUND_TRIP_MAX_S = 1.0


class Clock:
    """Seconds of attention: as monotonic time, but for stalls of this process, which hardly count."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._ticked_at = time()
        self._now = 0.0
        self._stalls: deque[tuple[float, float]] = deque(
            maxlen=STALLS_MAX
        )  # when they were over, and what did not count

    def now(self) -> float:
        return self._now + min(self._time() - self._ticked_at, CREDIT_MAX_S)

    def tick(self) -> float:
        """Credit the time since the last tick, as far as it counts, and return now."""
        before, since = self._now, self._ticked_at
        self._now, self._ticked_at = self.now(), self._time()
        lost_s = (self._ticked_at - since) - (self._now - before)
        if lost_s > TICK_S:
            self._stalls.append((self._ticked_at, lost_s))
        return self._now

    def attended_s(self, real_s: float) -> float:
        """Return how many seconds of this clock have passed in the last `real_s` seconds of real time."""
        since = self._time() - real_s
        lost_s = sum(lost_s for over_at, lost_s in self._stalls if over_at > since)
        return max(0.0, real_s - lost_s)


class Stream(Protocol):
    """The daemon's end of a Join stream, as far as attendance and engine know it."""

    stream_no: int

    def notify(self) -> None:
        """Tell the node its place, as it is now."""

    def forget(self) -> None:
        """Take the next message for news, whatever it is."""

    def refuse(self, text: str) -> None:
        """Tell the node that it has no place here, and why."""

    def fail(self, text: str, *, passing: bool = False) -> None:
        """End, telling the node why it is not served. `passing`: every node is to try again, a new one too."""


class Attendance:
    """One attached node."""

    __slots__ = (
        "attached",
        "broken",
        "heard_at",
        "lease_s",
        "round_trip_s",
        "run_id",
        "seen",
        "slot",
        "spoke_at",
        "stream",
        "told",
        "told_at",
        "told_lease_s",
        "uid",
    )

    def __init__(self, run_id: str, uid: NodeUid, stream: Stream, now: float, lease_s: float) -> None:
        self.run_id = run_id
        self.uid = uid
        self.stream = stream
        self.attached = True  # it is in the table
        self.heard_at = now  # the last sign of life
        self.spoke_at = now  # the last message
        self.lease_s = lease_s
        self.broken = False  # its stream ended; it may return within its grace
        self.round_trip_s = 0.0
        self.told = 0  # newest revision it was told and must obey
        self.told_at = now  # when it was told the oldest revision that it has not echoed
        self.told_lease_s = lease_s  # the lease then
        self.seen = 0  # newest revision it echoed
        self.slot = -1

    def tell(self, revision: int, lease_s: float, now: float) -> None:
        """Note that the node was told this revision, and this lease. A shorter one holds when it has spoken again."""
        if self.told <= self.seen:
            self.told_at, self.told_lease_s = now, max(self.lease_s, lease_s)
        self.told = revision
        self.lease_s = max(self.lease_s, lease_s)

    def echo(self, revision: int, now: float) -> None:
        """Note that the node says it has obeyed this revision."""
        if self.seen < self.told <= revision:
            # the quickest echo is the network; what others took longer is the launcher, thinking
            took_s = min(max(now - self.told_at, 0.0), ROUND_TRIP_MAX_S)
            self.round_trip_s = took_s if self.round_trip_s == 0.0 else min(took_s, self.round_trip_s)
        self.seen = max(self.seen, revision)

    def deadline(self, timing: Timing) -> float:
        """Return when the node is lost unless it is heard: silent, gone, or deaf."""
        if self.broken:
            # that its stream was there until now is a sign of life, but does not make up for its silence
            returns_at = self.heard_at + grace_s(timing, self.round_trip_s, self.lease_s)
            return min(returns_at, self.spoke_at + self.lease_s)
        due_at = self.heard_at + self.lease_s
        # what it must obey was told under another lease, if that has become shorter since
        obeys_at = self.told_at + max(self.told_lease_s, self.lease_s)
        return min(due_at, obeys_at) if self.told > self.seen else due_at

    def why(self, now: float) -> str:
        """Return why it is lost, for people."""
        if self.broken:
            return "its connection broke"
        if now - self.heard_at < self.lease_s:
            return f"it did not obey what it was told for {max(self.told_lease_s, self.lease_s):g} s"
        return f"silent for {self.lease_s:g} s"


class Table:
    """All attached nodes, and a lazy wheel that finds those whose time is up.

    An entry lies in the slot of the deadline it had when it was put there. When the slot comes, a later deadline moves
    it on; so a heartbeat touches no wheel.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._rows: dict[tuple[str, NodeUid], Attendance] = {}
        self._wheel: dict[int, list[Attendance]] = {}
        self._turned = 0

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, run_id: str, uid: NodeUid) -> Attendance | None:
        return self._rows.get((run_id, uid))

    def attend(self, run_id: str, uid: NodeUid, stream: Stream, now: float, pace: Pace) -> Attendance | None:
        """Return the row of a node that just spoke on this stream; None if a newer stream speaks for it."""
        row = self._rows.get((run_id, uid))
        if row is None:
            row = self._rows[run_id, uid] = Attendance(run_id, uid, stream, now, pace.lease_s)
            self._put(row)
            return row
        if stream is not row.stream:
            if stream.stream_no < row.stream.stream_no:
                return None
            row.stream = stream
            row.told = row.seen  # what it is told on this stream it has to echo anew
        row.heard_at = row.spoke_at = now
        row.broken = False
        self.lend(row, pace.lease_s)
        return row

    def lend(self, row: Attendance, lease_s: float) -> None:
        """Give a node that just spoke this lease. A shorter one may end before the slot in which the row lies."""
        shorter = lease_s < row.lease_s
        row.lease_s = lease_s
        if shorter:
            self._put(row)

    def stream_ended(self, row: Attendance, stream: Stream, now: float) -> bool:
        """Shorten the wait for a node whose newest stream broke to its grace. False: it was not its newest."""
        if row.stream is not stream or not row.attached:
            return False
        # from now on, not from when it was last heard: until now the stream itself was a sign of life
        row.heard_at, row.broken = now, True
        self._put(row)
        return True

    def drop(self, run_id: str, uid: NodeUid) -> None:
        if (row := self._rows.pop((run_id, uid), None)) is not None:
            row.attached = False

    def of_job(self, run_id: str) -> list[Attendance]:
        """Return all rows of a job. Looks at those of all jobs."""
        return [row for row in self._rows.values() if row.run_id == run_id]

    def of(self, run_id: str, uids: Iterable[NodeUid]) -> list[Attendance]:
        """Return the rows of these nodes of a job, as far as they are attached."""
        rows = self._rows
        return [row for uid in uids if (row := rows.get((run_id, uid))) is not None]

    def expire(self, now: float) -> list[Attendance]:
        """Return the rows whose deadline has passed, without them in the table."""
        lost = []
        while self._turned * TICK_S <= now:
            for row in self._wheel.pop(self._turned, ()):
                if not row.attached or row.slot != self._turned:
                    continue
                if row.deadline(self._timing) <= now:
                    self.drop(row.run_id, row.uid)
                    lost.append(row)
                else:
                    self._put(row)
            self._turned += 1
        return lost

    def _put(self, row: Attendance) -> None:
        row.slot = max(int(row.deadline(self._timing) / TICK_S) + 1, self._turned + 1)
        self._wheel.setdefault(row.slot, []).append(row)
