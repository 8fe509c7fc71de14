"""What the nodes run: workers that meet at the round's bootstrap store, train together, and suffer from each other.

Training is one piece of work for the whole job. It advances while every rank of a round is there, and keeps what it had
at the last full second when a rank is lost. Most peers of a lost rank fail soon, some hang until they are stopped.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.sim.world.machines import World

MEET_S = 10.0  # for the ranks to find the store
SUFFER_S = (0.3, 2.0)  # how soon a rank fails by the loss of another one
HANG_S = 20.0  # collectives of a rank that hangs time out


@dataclass(eq=False)
class Worker:
    node: Any
    round_uid: str
    local_rank: int
    rank: int
    world_size: int
    master: tuple[str, int]
    restart_count: int
    on_end: Callable[[Worker], None]
    env: Mapping[str, str]
    alive: bool = True
    told_to_stop: bool = False
    exit_code: int = 0
    signal: int = 0
    own_fault: bool = False  # it failed by itself, and is nobody's victim
    hint: bool = False  # it looks like a victim

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.round_uid[:6]} on {self.node.name}"


@dataclass(eq=False)
class Group:
    """The workers of one round that have met."""

    ranks: dict[int, Worker] = field(default_factory=dict)
    since: float | None = None  # it trains
    trains: int = 0  # how often it began to: what was planned for an earlier time is void
    met: bool = False  # all of them, at some time


class Training:
    def __init__(self, world: World, work_s: float, stubborn: float) -> None:
        """`stubborn`: the part of the workers that do not end by SIGTERM."""
        self.world = world
        self._stubborn = stubborn
        self.left_s = work_s
        self.on_start: Callable[[Worker], None] = lambda worker: None
        self.on_meet: Callable[[Worker, str], None] = lambda worker, offer_id: None
        self.on_end: Callable[[Worker], None] = lambda worker: None
        self.find_store: Callable[[Worker], str] = lambda worker: ""  # the offer whose store is there; empty: none
        self._groups: dict[str, Group] = {}
        self._chance = world.random("training")

    def start(self, worker: Worker) -> None:
        self.on_start(worker)
        self.world.after(self._chance.uniform(0.05, 0.3), self._meet, worker, self.world.now + MEET_S)

    def _meet(self, worker: Worker, until: float) -> None:
        if not worker.alive:
            return
        offer_id = self.find_store(worker)
        if not offer_id:
            if self.world.now >= until:
                self.end(worker, exit_code=1, hint=True)
            else:
                self.world.after(0.5, self._meet, worker, until)
            return
        self.on_meet(worker, offer_id)
        group = self._groups.setdefault(worker.round_uid, Group())
        group.ranks[worker.rank] = worker
        if not all(w.alive for w in group.ranks.values()):
            self.world.after(HANG_S, self._suffer, worker)
        elif len(group.ranks) == worker.world_size:
            group.since, group.trains, group.met = self.world.now, group.trains + 1, True
            self.world.after(max(self.left_s, 0.5), self._complete, group, group.trains)
        else:
            self.world.after(HANG_S, self._miss, group, worker)

    def _miss(self, group: Group, worker: Worker) -> None:
        """A rank has waited long enough for the others: one may have ended before it came to meet them."""
        if not group.met:
            self._suffer(worker)

    def _complete(self, group: Group, trains: int) -> None:
        if group.since is None or group.trains != trains:
            return
        self._keep(group)
        for worker in list(group.ranks.values()):
            self.world.after(self._chance.uniform(0.0, 0.2), self.end, worker)

    def _keep(self, group: Group) -> None:
        if group.since is not None:
            self.left_s = max(0.0, self.left_s - (self.world.now - group.since) // 1.0)
            group.since = None

    # ------------------------------------------------------------------------------------------------ how it ends

    def end(
        self, worker: Worker, *, exit_code: int = 0, number: int = 0, own_fault: bool = False, hint: bool = False
    ) -> None:
        """A worker's process ends."""
        if not worker.alive:
            return
        worker.alive = False
        worker.exit_code, worker.signal, worker.own_fault, worker.hint = exit_code, number, own_fault, hint
        self.on_end(worker)
        worker.on_end(worker)
        group = self._groups.get(worker.round_uid)
        if group is None or worker.rank not in group.ranks or (group.met and exit_code == 0 and number == 0):
            return  # whoever has done its part is not missed
        self._keep(group)
        for peer in group.ranks.values():
            if peer.alive:
                hangs = self._chance.random() < 0.3
                after_s = HANG_S if hangs else self._chance.uniform(*SUFFER_S)
                self.world.after(after_s, self._suffer, peer)

    def _suffer(self, worker: Worker) -> None:
        self.end(worker, exit_code=1, hint=self._chance.random() < 0.6)

    def fail(self, worker: Worker, exit_code: int, number: int) -> None:
        """A worker fails by its own fault."""
        self.end(worker, exit_code=exit_code, number=number, own_fault=True)

    def hang(self, worker: Worker) -> None:
        """A worker stops making progress; all of them find out by a timeout."""
        group = self._groups.get(worker.round_uid)
        if group is None or not worker.alive or group.since is None:
            return
        self._keep(group)
        for peer in group.ranks.values():
            self.world.after(HANG_S / 2 + self._chance.uniform(0.0, 1.0), self._time_out, peer)

    def _time_out(self, worker: Worker) -> None:
        self.end(worker, exit_code=1, own_fault=True)

    def stop(self, worker: Worker, number: int, grace_s: float) -> None:
        """Send a worker the signal, and KILL after the grace."""
        worker.told_to_stop = True
        stubborn = self._chance.random() < self._stubborn
        if not stubborn:
            after_s = min(grace_s, self._chance.uniform(0.0, 0.3))
            self.world.after(after_s, lambda: self.end(worker, number=number))
        else:
            self.world.after(grace_s, lambda: self.end(worker, number=int(signal.SIGKILL)))
