"""Jobs that this daemon does not serve, each because of a fault of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rendezvousd.attendance import Table
from rendezvousd.core.errors import NotServed
from rendezvousd.core.events import Event
from rendezvousd.delivery import Letter, Room
from rendezvousd.waiting import WaitingNodes

log = logging.getLogger(__name__)

# Longest text of an error that is shown in explanations.
TEXT_MAX = 300


class Faults:
    """The faults that were met in this term. A job that is not served keeps its record and its store as they are."""

    def __init__(self, rooms: dict[str, Room], table: Table, waiting: WaitingNodes) -> None:
        self._rooms = rooms
        self._table = table
        self._waiting = waiting
        self.unserved: dict[str, str] = {}  # by run id: why the job is not served
        self._left_out: set[tuple[str, type[Event]]] = set()  # kinds of events that were left out, and logged

    def check(self, run_id: str) -> None:
        """Return if the job is served. Raises NotServed."""
        if (why := self.unserved.get(run_id)) is not None:
            raise NotServed(why)

    def leave_out(self, run_id: str, letter: Letter, error: Exception) -> None:
        """Go on without what a bug keeps from being folded. It is logged once, and shown."""
        kind, room = type(letter.event), self._rooms.get(run_id)
        trouble = f"the daemon met a bug in this job ({kind.__name__} left out: {_shown(error)})"
        if (run_id, kind) not in self._left_out:
            self._left_out.add((run_id, kind))
            log.error("%s", trouble, exc_info=error, extra={"run_id": run_id})
        if room is not None:
            room.trouble = trouble
        if letter.stream is not None:
            letter.stream.forget()  # what it says next is news again, not the heartbeat of a node that is not there
        if letter.done is not None and not letter.done.done():
            letter.done.set_exception(NotServed(trouble))

    def fail(self, run_id: str, when: str, error: Exception) -> None:
        """Serve this job no longer. Nothing of it is told or written from now on."""
        if run_id in self.unserved:
            return
        why = (
            f"job {run_id!r} is no longer served, because of a fault when it {when}: {_shown(error)}. Other jobs are "
            "served. The daemon's log has more; another daemon, or this one after a restart, will serve the job again"
        )
        log.error("%s", why, exc_info=error, extra={"run_id": run_id})
        self.unserved[run_id] = why
        if (room := self._rooms.get(run_id)) is not None:
            room.wakes_at = room.pays_at = None
            room.owed.clear()
            for watcher in room.watchers:
                watcher.set()
        for row in self._table.of_job(run_id):
            self._waiting.discard(run_id, row.uid)
            self._table.drop(run_id, row.uid)
            row.stream.fail(why)

    def send_back(self, run_id: str, letters: Iterable[Letter]) -> None:
        """Tell those who wait for an answer that the job is not served."""
        why = self.unserved[run_id]
        for letter in letters:
            if letter.stream is not None:
                letter.stream.fail(why)
            if letter.done is not None and not letter.done.done():
                letter.done.set_exception(NotServed(why))


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:TEXT_MAX]
