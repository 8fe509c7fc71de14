"""What the judge writes down: what daemons have read from nodes, and what it found of rounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.sim.world.machines import Process
from tests.sim.world.training import Worker


@dataclass
class Word:
    """What a daemon knows of a node."""

    at: float
    stream_no: int
    state: Any
    over_at: float | None = None  # its stream ended
    busy_since: float | None = None  # it says that processes live which must not
    offered: set[str] = field(default_factory=set)  # the rounds it has named as over
    back_at: float = 0.0  # it was heard then, after it had been away for longer than a lease or its grace ...
    before_at: float = 0.0  # ... and before that then
    missed: str = ""  # the round that was the last one when it was away for so long that its seat is another's


@dataclass
class Facts:
    """How a node stood with the daemon that sealed a round."""

    over_for_s: float
    silent_s: float
    alive: int
    held: str
    busy_for_s: float
    offer_after: str | None
    offered: set[str]
    missed: str
    leaving: bool


@dataclass
class Book:
    uid: str
    sealed_at: float
    before: str  # the round before, as the sealing daemon last told
    facts: dict[str, Facts]
    daemon: Process
    number: int = 0
    told: Any = None  # what all its members must be told alike
    seats: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # by group rank
    failures: list[Worker] = field(default_factory=list)
    broken_at: float | None = None  # first told to be over
    deaths: list[str] = field(default_factory=list)  # of members' launchers while it was the last round

    @property
    def members(self) -> set[str]:
        return {uid for uid, _, _ in self.seats.values()}
