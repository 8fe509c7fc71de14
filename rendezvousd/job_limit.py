"""The bound on the number of jobs (--max-jobs), and which job makes room for a new one when it is reached."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping

from rendezvousd.core.errors import NoRoom
from rendezvousd.core.machine import wakes_at
from rendezvousd.core.model import Job
from rendezvousd.core.rules.ending import forgettable_at, outcome_was_read_at
from rendezvousd.delivery import Room

log = logging.getLogger(__name__)

# Launchers that were refused come again every second, and looking for a job to drop looks at all of them.
LOOK_S = 0.5


class JobLimit:
    """Counts the jobs that are there, and those that are being made durable for the first time."""

    def __init__(self, most: int, rooms: Mapping[str, Room], unserved: Container[str]) -> None:
        """`unserved`: run ids of jobs whose records must not be touched."""
        self._most = most
        self._rooms = rooms
        self._unserved = unserved
        self._founding: set[str] = set()  # run ids of new jobs that are not durable yet
        self._leaving: set[str] = set()  # run ids of jobs that were asked to make room
        self._look_at = 0.0  # each job was needed a moment ago: when to look again
        self._warned = False  # that no new jobs are taken

    def claim(self, run_id: str, now: float) -> str:
        """Take a place for a new job, and return "". If there is none yet, return the run id of the job that is to be
        dropped; then the new job can try again. Raises NoRoom if no job can be dropped."""
        taken = len(self._rooms.keys() | self._founding)
        if taken < self._most:
            self._founding.add(run_id)
            self._warned = False
            return ""
        if now < self._look_at:
            raise self._full()
        since = {
            other: at
            for other, room in self._rooms.items()
            if other not in self._unserved and (at := _dispensable_since(room, now)) is not None
        }
        self._leaving &= since.keys()
        if taken - len(self._leaving) < self._most:
            raise self._full()  # enough are on their way out
        if since.keys() > self._leaving:
            oldest = min(since.keys() - self._leaving, key=since.__getitem__)
            self._leaving.add(oldest)
            return oldest
        self._look_at = now + LOOK_S
        if not self._warned:
            self._warned = True
            log.warning("no new jobs for now: %d jobs, the most this daemon attends (--max-jobs)", taken)
        raise self._full()

    def founded(self, run_id: str) -> None:
        """Take in that a new job is there, or will not be."""
        self._founding.discard(run_id)

    def drops(self, room: Room, now: float) -> bool:
        """Return whether this job is to be dropped now: it is not needed any longer, or was asked to make room."""
        job = room.job
        due_at = job.began_at if _abandoned(job) else forgettable_at(job)
        asked = job.run_id in self._leaving and _dispensable_since(room, now) is not None
        self._leaving.discard(job.run_id)
        return asked or (due_at is not None and now >= due_at)

    def _full(self) -> NoRoom:
        return NoRoom(
            f"this daemon attends {self._most} job{'s' * (self._most > 1)}, the most it may (--max-jobs); this node "
            "tries again until one has ended"
        )


def next_look_at(job: Job) -> float | None:
    """Return when the job next needs to be looked at: by its own timers, or to be dropped."""
    return job.began_at if _abandoned(job) else wakes_at(job)


def _never_ran(job: Job) -> bool:
    """Return whether no node is left of a job that never had a round: there is nothing to return to."""
    return not job.nodes and job.known.round == 0 and job.recovering is None and job.ending is None


def _abandoned(job: Job) -> bool:
    """Return whether that is so, and no node was removed that must stay out."""
    return _never_ran(job) and not any(departure.removed for departure in job.gone.values())


def _dispensable_since(room: Room, now: float) -> float | None:
    """Return since when a job is over for its nodes too; None if it is needed."""
    job = room.job
    if _never_ran(job):
        return job.began_at
    read_at = outcome_was_read_at(job)
    return read_at if read_at is not None and now >= read_at else None
