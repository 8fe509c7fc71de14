"""Which faults come, when, and what is demanded after each. Pure: a seed is all the chance there is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Backend = Literal["memory", "etcd"]

TOGETHER_CHANCE = 0.15  # that a second fault comes before the first is over
PAUSE_S = (1.0, 4.0)  # of undisturbed training between two faults
WHOLE_S = 120.0  # from a fault's end until all nodes train together again


@dataclass(frozen=True)
class Kind:
    """One kind of fault. Seconds."""

    name: str
    hold_s: tuple[float, float]  # how long it lasts
    pause_s: float  # longest pause in the training that it may cause
    charged: bool = False  # workers may fail of it, so it may cost a restart
    backend: Backend | None = None  # None: with both


@dataclass(frozen=True)
class Shot:
    """One fault of the game."""

    kind: Kind
    hold_s: float
    pick: float  # 0 to 1: whom it hits


@dataclass(frozen=True)
class Turn:
    """After so long a pause: one fault, or two of which the second begins `apart_s` after the first."""

    pause_s: float
    shots: tuple[Shot, ...]
    apart_s: float = 0.0


# A pause of UNNOTICED_S is what a busy machine makes of "training goes on"; RESTART_S what it makes of a second or two.
UNNOTICED_S, RESTART_S, EXEC_S = 5.0, 20.0, 60.0
LEASE_S = 5.0
COLLECTIVE_S = 20.0  # after which a worker gives up on a peer; see training.py

KINDS: tuple[Kind, ...] = (
    Kind("kill-worker", (0.0, 0.0), EXEC_S, charged=True),
    Kind("stop-worker", (1.0, 8.0), 8.0 + RESTART_S, charged=True),
    Kind("stall-worker", (COLLECTIVE_S + 8.0, COLLECTIVE_S + 10.0), COLLECTIVE_S + EXEC_S, charged=True),
    Kind("kill-launcher", (0.5, 4.0), EXEC_S),
    Kind("stop-launcher", (2.0, 12.0), LEASE_S + EXEC_S),
    Kind("flap-launcher", (9.0, 9.0), EXEC_S),
    Kind("kill-zygote", (0.0, 0.0), UNNOTICED_S),
    Kind("stop-zygote", (3.0, 6.0), 6.0 + EXEC_S, charged=True),
    Kind("kill-spawner", (0.0, 0.0), EXEC_S, charged=True),
    Kind("kill-keeper", (0.0, 0.0), EXEC_S, charged=True),
    Kind("stop-keeper", (2.0, 6.0), UNNOTICED_S),
    Kind("kill-store-holder", (0.0, 0.0), EXEC_S),
    Kind("stop-store-holder", (2.0, 6.0), 6.0 + EXEC_S, charged=True),
    Kind("kill-daemon", (0.5, 5.0), UNNOTICED_S),
    Kind("stop-daemon", (2.0, 10.0), UNNOTICED_S),
    Kind("kill-etcd", (0.5, 5.0), UNNOTICED_S, backend="etcd"),
    Kind("stop-etcd", (2.0, 8.0), UNNOTICED_S, backend="etcd"),
    Kind("drop-etcd", (2.0, 8.0), UNNOTICED_S, backend="etcd"),
    Kind("pull-node", (2.0, 12.0), LEASE_S + EXEC_S),
    Kind("drop-node", (2.0, 12.0), LEASE_S + EXEC_S),
    Kind("drop-node-in", (2.0, 12.0), LEASE_S + EXEC_S),
    Kind("drop-node-out", (2.0, 12.0), LEASE_S + EXEC_S),
    Kind("flap-cable", (10.0, 10.0), 10.0 + EXEC_S),
    Kind("pull-daemon", (2.0, 10.0), EXEC_S),
    Kind("drop-daemon", (2.0, 10.0), EXEC_S),
    Kind("drop-daemon-out", (2.0, 10.0), EXEC_S),
    Kind("slow-node", (8.0, 12.0), RESTART_S),
    Kind("slow-daemon", (8.0, 12.0), RESTART_S),
    Kind("full-disk", (3.0, 6.0), 6.0 + EXEC_S, charged=True),
    Kind("few-files-launcher", (3.0, 6.0), 6.0 + EXEC_S, charged=True),
    Kind("few-files-daemon", (4.0, 8.0), EXEC_S),
    Kind("garbage", (4.0, 8.0), UNNOTICED_S),
    Kind("idle-connections", (5.0, 8.0), UNNOTICED_S),
)
BY_NAME = {kind.name: kind for kind in KINDS}

# What every change is tested with; each with seconds to hold it.
SHORT: dict[Backend, tuple[tuple[str, float], ...]] = {
    "memory": (
        ("kill-worker", 0.0),
        ("kill-daemon", 1.0),
        ("drop-node", 8.0),
        ("stop-launcher", 8.0),
        ("kill-store-holder", 0.0),
        ("garbage", 3.0),
        ("kill-launcher", 1.0),
    ),
    "etcd": (
        ("kill-daemon", 1.0),
        ("kill-etcd", 2.0),
        ("drop-daemon", 8.0),
        ("kill-worker", 0.0),
        ("pull-node", 8.0),
    ),
}


def short(backend: Backend, seed: int) -> Iterator[Turn]:
    """The schedule of the test suite: these faults, in this order; only whom they hit is chance."""
    chance = random.Random(seed)
    for name, hold_s in SHORT[backend]:
        yield Turn(1.0, (Shot(BY_NAME[name], hold_s, chance.random()),))


def soak(backend: Backend, seed: int) -> Iterator[Turn]:
    """Without end: every kind once before any comes again, some of them two at a time."""
    chance = random.Random(seed)
    while True:
        kinds = [kind for kind in KINDS if kind.backend in (None, backend)]
        chance.shuffle(kinds)
        while kinds:
            size = 2 if len(kinds) > 1 and chance.random() < TOGETHER_CHANCE else 1
            shots = tuple(
                Shot(kind, chance.uniform(*kind.hold_s), chance.random()) for kind in (kinds.pop() for _ in range(size))
            )
            yield Turn(chance.uniform(*PAUSE_S), shots, chance.uniform(0.0, 3.0))
