"""Who serves at this moment: the engine of the daemon's term, or nobody and why."""

from __future__ import annotations

from collections.abc import Callable

from rendezvousd.core.errors import NotLeader
from rendezvousd.engine import Engine


class Desk:
    """What the RPC layer asks for the engine. With several daemons there is none at it while another one leads."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._why = "this daemon is starting"
        self._leader: Callable[[], str] = lambda: ""

    @property
    def engine(self) -> Engine:
        """The engine that serves. Raises NotLeader, saying where to go instead."""
        if self._engine is None:
            leader = self._leader()
            raise NotLeader(f"the daemon at {leader} leads" if leader else self._why)
        return self._engine

    def open(self, engine: Engine) -> None:
        self._engine = engine

    def close(self, why: str, leader: Callable[[], str] = lambda: "") -> None:
        """Serve nobody from now on. `leader` is asked who does; empty: it is not known."""
        self._engine, self._why, self._leader = None, why, leader

    def check_lead(self) -> None:
        """Return if this daemon may answer. Raises NotLeader."""
        self.engine.check_lead()

    def check(self, run_id: str, job_uid: str, round_uid: str, generation: str) -> None:
        """Let a store call through whose scope exists. Raises NotLeader, NoSuchJob, RoundOver or StoreLost."""
        self.engine.check(run_id, job_uid, round_uid, generation)
