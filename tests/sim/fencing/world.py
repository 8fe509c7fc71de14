"""One node with a worker, and daemons that may want to give its place to another: any schedule of what can go wrong.

True time is the simulation's; no node or daemon sees it, only a clock of its own that goes a little too fast or too
slow. Everything that decides is the real thing: how long a node's worker may live (`rdzv.fence`), and when the next
round is sealed (`rendezvousd.core`, whole). What is modelled here is what lies between: messages, the node's launcher
and watchdog, and the order in which a daemon reads, checks that it leads, folds, writes and answers (`rendezvousd.
engine`, `rendezvousd.rpc.rendezvous`).

The judge asks one question: was the worker gone before the one that takes its place began?
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from msgspec.structs import replace

from rendezvousd.core.codec import dump, load
from rendezvousd.core.events import RestartAsked
from rendezvousd.core.model import (
    Known,
    NodeUid,
)
from rendezvousd.core.place import valid_round_uid
from rendezvousd.core.rules import fence
from tests.sim.fencing.daemon import Daemon
from tests.sim.fencing.node import Node
from tests.sim.fencing.plan import (
    BEGAN_AT,
    HORIZON_S,
    JOB,
    LEASE_S,
    NEVER,
    NO_TIME_S,
    ROUND,
    Clock,
    Plan,
    other_says,
)


class World:
    """One schedule. `run` plays it, and returns by how much the worker outlived the beginning of its successor."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.t = 0.0
        self.successor_at = NEVER
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.plan = Plan(rng)
        self.daemons: list[Daemon] = []
        self.node = Node(self)
        self._found_daemons()

    def at(self, t: float, what: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (max(t, self.t), self._order, what))

    def run(self) -> float:
        """Return the overlap in seconds; 0: there is none."""
        while self._queue:
            t, _, what = heapq.heappop(self._queue)
            over_ = self.successor_at < NEVER and self.node.gone_at < NEVER and t > self.plan.born_at
            if t > HORIZON_S or over_:
                break
            self.t = t
            what()
        overlap_s = min(self.node.gone_at, HORIZON_S) - self.successor_at if self.node.was_born else 0.0
        return overlap_s if overlap_s > NO_TIME_S else 0.0

    def _found_daemons(self) -> None:
        plan = self.plan
        first = Daemon(
            self, self.clock(BEGAN_AT), ends_at=plan.failover_at, pauses=plan.daemon_pause, writes_s=plan.slow_writes_s
        )
        first.begin(JOB)
        self.daemons.append(first)
        if plan.failover_at < NEVER:
            self.at(plan.failover_at + plan.interregnum_s, self._another_leads)
        if plan.restart_at < NEVER:
            self.at(plan.restart_at, lambda: self.daemons[-1].post(RestartAsked(by="op", reason="")))
        if plan.longer_lease_at < NEVER:
            said = other_says("running", lease_s=LEASE_S * 2)
            self.at(plan.longer_lease_at, lambda: self.daemons[-1].post(said))

    def _another_leads(self) -> None:
        plan, last = self.plan, self.daemons[0]
        new = Daemon(self, self.clock(0.0), ends_at=NEVER, pauses=plan.other_pause, writes_s=plan.other_writes_s)
        self.daemons.append(new)
        now = new.now()
        if plan.forgets:
            new.begin(None)
            if plan.all_new:
                new.post(replace(other_says("new"), uid=NodeUid("fresh"), known=Known(), held=None))
            else:
                new.post(other_says("running", lease_s=last.room.lease_s))
        else:
            record = dump(last.room_or_none or JOB)
            new.begin(load(record.head, record.parts, seed="second", now=now, overlap_s=plan.overlap_s))
            new.post(other_says("running" if valid_round_uid(new.room) == ROUND else "stopped"))

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
        self.at(self.t + delay_s, deliver)
