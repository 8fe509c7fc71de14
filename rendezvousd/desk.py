"""Who serves at this moment: the engine of the daemon's term, or nobody and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rendezvousd.core.errors import NotLeader
from rendezvousd.engine import Engine

# Jobs that are not served of which the reason is said.
REASONS_MAX = 3


class Desk:
    """What the RPC layer asks for the engine. With several daemons there is none at it while another one leads."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._engine: Engine | None = None
        self._why = "this daemon is starting"
        self._leader: Callable[[], str] = lambda: ""
        self._trouble: Callable[[], str] = lambda: ""
        self.daemon_id = ""  # of the daemons that share a backend; empty: not known yet

    @property
    def engine(self) -> Engine:
        """The engine that serves. Raises NotLeader, saying where to go instead."""
        if self._engine is None:
            raise NotLeader(self.explain())
        return self._engine

    @property
    def attends(self) -> bool:
        return self._engine is not None

    @property
    def leader(self) -> str:
        """Address of the daemon that leads, if another one is known to."""
        return "" if self.attends else self._leader()

    def up_s(self) -> float:
        """Return for how long this process has been up."""
        return time.monotonic() - self._began_at

    def explain(self) -> str:
        """Return how this daemon is, in one line."""
        if self._engine is not None:
            jobs = len(self._engine.rooms)
            text = "; ".join([f"attends {jobs} job{'s' * (jobs != 1)}", *_said(self._engine.unserved)])
        else:
            text = f"the daemon at {self.leader} leads" if self.leader else self._why
        trouble = self._trouble()
        return f"{text}; {trouble}" if trouble else text

    def open(self, engine: Engine) -> None:
        self._engine, self.daemon_id = engine, engine.daemon_id

    def close(self, why: str) -> None:
        """Serve nobody from now on."""
        self._engine, self._why = None, why

    def share(self, daemon_id: str, leader: Callable[[], str], trouble: Callable[[], str]) -> None:
        """Be one of several daemons on a backend. `leader` is asked who leads and `trouble` what is wrong with the
        backend; empty: not known, and nothing."""
        self.daemon_id, self._leader, self._trouble = daemon_id, leader, trouble

    def check_lead(self) -> None:
        """Return if this daemon may answer. Raises NotLeader."""
        self.engine.check_lead()

    def check(self, run_id: str, job_uid: str, round_uid: str, generation: str) -> None:
        """Let a store call through whose scope exists. Raises NotLeader, NoSuchJob, RoundOver or StoreLost."""
        self.engine.check(run_id, job_uid, round_uid, generation)


def _said(unserved: Mapping[str, str]) -> list[str]:
    """Return why jobs are not served, for people."""
    reasons = list(unserved.values())[:REASONS_MAX]
    more = len(unserved) - len(reasons)
    return [*reasons, f"{more} more are not served"] if more else reasons
