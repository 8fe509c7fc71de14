"""One node with a worker, and daemons that may want to give its place to another: any schedule of what can go wrong.

True time is the simulation's; no node or daemon sees it, only a clock of its own that goes a little too fast or too
slow. Everything that decides is the real thing: how long a node's worker may live (`rdzv.fence`), and the daemon whole:
its engine and its streams, which read, check that they lead, fold, write and answer. What is modelled here is what lies
between: messages, the node's launcher and watchdog, who leads, and how long a write takes.

The judge asks one question: was the worker gone before the one that takes its place began?
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from types import SimpleNamespace

from msgspec.structs import replace

from rendezvousd import engine
from rendezvousd.core.events import RestartAsked
from rendezvousd.core.model import Known, NodeUid
from rendezvousd.core.place import valid_round_uid
from rendezvousd.core.rules import fence
from tests.sim.fencing.daemon import Daemon
from tests.sim.fencing.node import Node
from tests.sim.fencing.plan import (
    HORIZON_S,
    LEASE_S,
    NEVER,
    NO_TIME_S,
    RECORD,
    ROUND,
    Clock,
    Plan,
    other_says,
)
from tests.sim.world import machines


class World(machines.World):
    """One schedule. `play` plays it, and returns by how much the worker outlived the beginning of its successor."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(0)
        self.rng = rng
        self.successor_at = NEVER
        self.plan = Plan(rng)
        self.daemons: list[Daemon] = []
        self.node = Node(self)
        self._found_daemons()

    @property
    def t(self) -> float:
        return self.now

    def play(self) -> float:
        """Return the overlap in seconds; 0: there is none. Raises AssertionError if anything else went wrong."""
        secrets, collects = vars(engine)["secrets"], gc.isenabled()
        vars(engine)["secrets"] = SimpleNamespace(token_hex=self._token)
        gc.disable()
        try:
            self.run(HORIZON_S, self._done)
            assert not self.failure, self.failure
            self.end()
        finally:
            vars(engine)["secrets"] = secrets
            if collects:
                gc.enable()
        overlap_s = min(self.node.gone_at, HORIZON_S) - self.successor_at if self.node.was_born else 0.0
        return overlap_s if overlap_s > NO_TIME_S else 0.0

    def _token(self, size: int) -> str:
        return f"{self.rng.getrandbits(8 * size):0{2 * size}x}"

    def _done(self) -> bool:
        return self.successor_at < NEVER and self.node.gone_at < NEVER and self.now > self.plan.born_at

    def succeeded(self) -> None:
        """A round begins in which another may have the node's place."""
        self.successor_at = min(self.successor_at, self.now)
        self.changed = True

    def _found_daemons(self) -> None:
        plan = self.plan
        first = Daemon(
            self, self.clock(0.0), ends_at=plan.failover_at, pauses=plan.daemon_pause, writes_s=plan.slow_writes_s
        )
        self.daemons.append(first)
        first.begin(RECORD)
        first.peer.says(other_says("running"))
        if plan.failover_at < NEVER:
            self.at(plan.failover_at + plan.interregnum_s, self._another_leads)
        if plan.restart_at < NEVER:
            self.at(plan.restart_at, lambda: self.daemons[-1].ask(RestartAsked(by="op", reason="")))
        if plan.longer_lease_at < NEVER:
            said = other_says("running", lease_s=LEASE_S * 2)
            self.at(plan.longer_lease_at, lambda: self.daemons[-1].peer.says(said))

    def _another_leads(self) -> None:
        plan, last = self.plan, self.daemons[0]
        assert last.record is not None
        new = Daemon(self, self.clock(0.0), ends_at=NEVER, pauses=plan.other_pause, writes_s=plan.other_writes_s)
        self.daemons.append(new)
        if not plan.forgets:
            new.begin(last.record, plan.overlap_s)
            new.peer.says(other_says("running" if valid_round_uid(last.record.job) == ROUND else "stopped"))
            return
        new.begin(None)
        if plan.all_new:
            new.peer.says(replace(other_says("new"), uid=NodeUid("fresh"), known=Known(), held=None))
        else:
            new.peer.says(other_says("running", lease_s=last.record.job.lease_s))

    def clock(self, offset: float) -> Clock:
        """A clock that shows `offset` now."""
        rho = fence.CLOCK_RATE
        rate = self.rng.choice((1 - rho, 1 - rho, 1.0, 1 + rho, 1 + rho, self.rng.uniform(1 - rho, 1 + rho)))
        return Clock(rate, offset - rate * self.t)

    # ------------------------------------------------------------------------------------------------ the network

    def carry(self, *, up: bool, deliver: Callable[[], None]) -> None:
        """Bring a message over: at once, late, when the cable is mended, or never."""
        plan, rng = self.plan, self.rng
        delay_s = rng.choice((0.0, 0.0, plan.delay_s)) if rng.random() > plan.late else rng.uniform(0.0, 6.0)
        if plan.cut_at <= self.t < plan.mended_at and plan.cuts in ("both", "up" if up else "down"):
            if not plan.holds or plan.mended_at == NEVER:
                return
            delay_s += plan.mended_at - self.t
        elif rng.random() < plan.loss:
            return
        self.at(self.now + delay_s, deliver)
