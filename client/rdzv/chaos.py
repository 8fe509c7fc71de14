"""Deliberate faults: `--chaos kill-worker=30s,kill-node=5m` shows whether a job survives what one day happens to it.

Off unless asked for, and loud: a line when it begins and one for each strike.
"""

from __future__ import annotations

import heapq
import random
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    Kind: TypeAlias = Literal["kill-worker", "stop-worker", "kill-node"]

KINDS: tuple[Kind, ...] = ("kill-worker", "stop-worker", "kill-node")
MEAN_MIN_S = 0.1
MEAN_MAX_S = 30 * 86400.0
SAID_S = 0.2  # for the last line of a launcher that is about to kill itself
SEED_MAX = 2**31 - 1
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|)")
_EXPECTED = "expected kill-worker=TIME, stop-worker=TIME, kill-node=TIME, or seed=N, as kill-worker=30s,kill-node=5m"


@dataclass(frozen=True, slots=True)
class Chaos:
    """What is to be struck, and how often on average."""

    means: tuple[tuple[Kind, float], ...]  # seconds; each kind once
    seed: int | None = None  # None: another one each time

    def describe(self) -> str:
        return ", ".join(f"{kind} every {mean_s:g} s" for kind, mean_s in self.means)


@dataclass(frozen=True, slots=True)
class Strike:
    at_s: float  # since chaos began
    kind: Kind
    pick: float  # 0 to 1: which of those that can be hit


def parse_chaos(text: str) -> Chaos:
    """What --chaos asks for. ValueError: a sentence that names the value."""
    means: dict[Kind, float] = {}
    seed: int | None = None
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        kind = next((kind for kind in KINDS if kind == name), None)
        if kind in means or (name == "seed" and seed is not None):
            raise ValueError(f"{name} is given twice")
        if name == "seed":
            seed = _seed(value)
        elif kind is not None:
            means[kind] = _duration(name, value)
        else:
            raise ValueError(f"{part!r} is unknown; {_EXPECTED}")
    if not means:
        raise ValueError(f"nothing to strike; {_EXPECTED}")
    return Chaos(tuple(means.items()), seed)


def schedule(chaos: Chaos, seed: int) -> Iterator[Strike]:
    """All strikes, in their order, without end; the same ones for the same seed. The pauses of each kind are
    exponential: how long ago the last one was says nothing of the next."""
    chance = random.Random(seed)
    means = dict(chaos.means)
    due = [(chance.expovariate(1 / mean_s), kind) for kind, mean_s in means.items()]
    heapq.heapify(due)
    while True:
        at_s, kind = due[0]
        yield Strike(at_s, kind, chance.random())
        heapq.heapreplace(due, (at_s + chance.expovariate(1 / means[kind]), kind))


class Victims(Protocol):
    """The workers that can be hit; a Supervisor."""

    def pids(self) -> dict[int, int]:
        """local rank → pid, of the workers that run."""

    def signal(self, number: int, local_rank: int | None = None) -> None:
        """Send a signal to the worker of this local rank."""


async def strike(chaos: Chaos, victims: Victims, say: Callable[[str], None]) -> None:
    """Carry the schedule out until cancelled, saying each line before it is done."""
    import asyncio  # not for reading a command line

    seed = random.SystemRandom().randint(0, SEED_MAX) if chaos.seed is None else chaos.seed
    say(f"chaos is on: {chaos.describe()} on average, on this node (seed={seed})")
    began_at = asyncio.get_running_loop().time()
    for blow in schedule(chaos, seed):
        await asyncio.sleep(began_at + blow.at_s - asyncio.get_running_loop().time())
        if blow.kind == "kill-node":
            say("chaos: SIGKILL to this launcher")
            await asyncio.sleep(SAID_S)
            signal.raise_signal(signal.SIGKILL)
        number = signal.SIGKILL if blow.kind == "kill-worker" else signal.SIGSTOP
        ranks = sorted(victims.pids())
        if not ranks:
            say(f"chaos: no worker runs, none gets {number.name}")
            continue
        local_rank = ranks[int(blow.pick * len(ranks))]
        say(f"chaos: {number.name} to local rank {local_rank}")
        victims.signal(number, local_rank)


def _duration(name: str, text: str) -> float:
    found = _DURATION.fullmatch(text)
    value_s = float(found[1]) * _UNITS_S[found[2]] if found is not None else 0.0
    if not MEAN_MIN_S <= value_s <= MEAN_MAX_S:
        raise ValueError(f"{name}={text}: expected a time from {MEAN_MIN_S:g}s to {MEAN_MAX_S / 3600:g}h, as 30s or 5m")
    return value_s


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= SEED_MAX):
        raise ValueError(f"seed={text}: expected a whole number from 0 to {SEED_MAX}")
    return int(text)
