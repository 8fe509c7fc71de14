"""What half of the seeds have beyond the job that plan.py draws for them, which stays what it was: other jobs, other
tokens and options, and stories that faults at random times do not tell."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from tests.sim.world import plan as plans
from tests.sim.world.plan import QUIET_AT_S, Fault, Mode, Plan, Wide

# What the daemon does not do right yet is not drawn: "defaults" that differ from daemon to daemon, and stories.
PENDING: tuple[str, ...] = ()
LARGE = range(65, 73)  # nodes of a job that is answered as large ones are, whatever it is taken for
DRIFT = 0.0005  # of the clocks where workers end with a lease, which is reckoned with twice as much


def plan(seed: int, mode: Mode | None = None) -> Plan:
    """Return what the seed stands for. Without a mode the seed decides that, too."""
    narrow = plans.plan(seed, mode)
    chance = random.Random(f"plan2 {seed}")
    return narrow if chance.random() < 0.5 else _widened(narrow, chance)


def _widened(plan: Plan, chance: random.Random) -> Plan:
    often, sometimes, seldom, rarely = (chance.random() < part for part in (0.4, 0.25, 0.12, 0.006))
    etcd = plan.members > 0
    wide = Wide(
        token=chance.choice(("s", "s", "")),
        stop=chance.random() < 0.2,
        settles_s=tuple(chance.choice((1.0, 3.0, 5.0)) for _ in range(plan.daemons)) if etcd and often else (),
        small_max=chance.choice((1, 2)) if sometimes else 0,
        operations_max=chance.choice((4, 8)) if etcd and chance.random() < 0.4 else 0,
        compacts=etcd and chance.random() < 0.4,
        calls=chance.random() < 0.4,
    )
    if "defaults" in PENDING:
        wide = replace(wide, settles_s=())
    plan = replace(plan, wide=wide)
    if wide.stop:
        plan = replace(plan, clocks=tuple((ahead_s, _steady(rate)) for ahead_s, rate in plan.clocks))
    if rarely:
        return _large(plan, chance)
    if chance.random() < 0.15:
        readers = [Fault(_at(chance, 30), "slow-reader", _node(plan, chance), "", chance.uniform(2.0, 20.0))]
        plan = _with_faults(plan, readers)
    if chance.random() < 0.5:
        name = chance.choice([name for name in STORIES if not etcd or name not in FORGETFUL])
        if name in PENDING:
            return plan
        plan = STORIES[name](replace(plan, wide=replace(plan.wide, story=name)), chance)
    if seldom and plan.wide.quiet_at_s == QUIET_AT_S:
        plan = replace(plan, wide=replace(plan.wide, beside=_beside(plan, chance)))
    return plan


def _steady(rate: float) -> float:
    return 1.0 + max(-DRIFT, min(DRIFT, (rate - 1.0) / 10))


def _large(plan: Plan, chance: random.Random) -> Plan:
    """More nodes than a small job has. It is short, for such a run takes as long as some dozens of others."""
    more = chance.choice(LARGE) - plan.nodes
    clocks, split = plan.clocks, plan.nodes
    new = tuple((chance.uniform(0.0, 1e5), 1.0) for _ in range(more))
    return replace(
        plan,
        nodes=plan.nodes + more,
        size=f"{plan.nodes + more - 3}:{plan.nodes + more}",
        slots=1,
        arrivals_s=plan.arrivals_s + tuple(chance.random() for _ in range(more)),
        clocks=(*clocks[:split], *new, *clocks[split:]),
        work_s=3.0,
        faults=plan.faults[:2],
    )


def _beside(plan: Plan, chance: random.Random) -> Plan:
    """Another job, which has nothing to do with the first. What befalls one must not be felt by the other."""
    other = plans.plan(chance.randrange(10**9), plan.mode)
    names = {f"n{i}": f"m{i}" for i in range(9)}
    of_nodes = [f for f in other.faults if f.who in names and not f.other.startswith(("d", "e"))]
    return replace(
        other,
        seed=plan.seed,
        daemons=plan.daemons,
        members=plan.members,
        delay_s=plan.delay_s,
        loss=plan.loss,
        run_id="beside",
        names="m",
        arrivals_s=tuple(at + 0.5 for at in other.arrivals_s),
        faults=tuple(replace(f, who=names[f.who], other=names.get(f.other, f.other)) for f in of_nodes),
    )


# ------------------------------------------------------------------------------------------------------- stories

Story: TypeAlias = Callable[[Plan, random.Random], Plan]


def _with_faults(plan: Plan, more: list[Fault]) -> Plan:
    return replace(plan, faults=tuple(sorted((*plan.faults, *more), key=lambda fault: fault.at)))


def _at(chance: random.Random, until: float, first: float = 5.0) -> float:
    return chance.uniform(first, until)


def _node(plan: Plan, chance: random.Random) -> str:
    return f"n{chance.randrange(plan.nodes)}"


def _away(plan: Plan, node: str, at: float, for_s: float) -> list[Fault]:
    """A node hears no daemon for a while. Its workers train on."""
    return [Fault(at, "cut", node, f"d{i}", for_s) for i in range(plan.daemons)]


def _room_for(plan: Plan, more: int) -> Plan:
    return replace(plan, size=f"{plan.min_nodes}:{plan.nodes + more}")


def _newcomer(plan: Plan, chance: random.Random) -> Plan:
    """All nodes are away for longer than a lease, and another launcher comes meanwhile."""
    at, away_s = _at(chance, 15), chance.uniform(6.0, 14.0)
    kind = chance.choice(("same", "same", "same", "name", "token", "options"))
    faults = [f for i in range(plan.nodes) for f in _away(plan, f"n{i}", at, away_s)]
    comes_at = at + chance.uniform(3.0, away_s)
    return _with_faults(_room_for(plan, 1), [*faults, Fault(comes_at, "newcomer", "x0", kind)])


def _stranger(plan: Plan, chance: random.Random) -> Plan:
    """A launcher comes whose token or options are others."""
    kind = chance.choice(("same", "name", "token", "options"))
    return _with_faults(_room_for(plan, 1), [Fault(_at(chance, 38, 0.5), "newcomer", "x0", kind)])


def _again(plan: Plan, chance: random.Random) -> Plan:
    """All launchers die, and are started again: by the same submission, or as another attempt of it."""
    at, for_s = _at(chance, 25), chance.uniform(0.5, 9.0)
    what = chance.choice(("kill", "kill", "requeue"))
    if what == "requeue":
        return _with_faults(plan, [Fault(at, what, "job", "", for_s)])
    kills = [Fault(at + chance.random(), what, f"n{i}", "", for_s + chance.random()) for i in range(plan.nodes)]
    return _with_faults(plan, kills)


def _stale(plan: Plan, chance: random.Random) -> Plan:
    """A node trains alone, and is away for a minute and more, while its daemon forgets, and others come."""
    at, away_s = _at(chance, 12, 8.0), chance.uniform(62.0, 80.0)
    more = max(1, plan.nodes - 1)
    plan = replace(
        plan,
        nodes=1 + more,
        size=f"1:{1 + more}",
        arrivals_s=(0.0, *(at + chance.uniform(1.0, 6.0) for _ in range(more))),
        clocks=(*((0.0, 1.0) for _ in range(1 + more)), *plan.clocks[-plan.daemons :]),
    )
    faults = _away(plan, "n0", at, away_s)
    faults += [Fault(at + 0.5, "daemon-kill", f"d{i}", "", 0.2) for i in range(plan.daemons)]
    return _long(replace(plan, faults=tuple(faults)), chance)


def _straggler(plan: Plan, chance: random.Random) -> Plan:
    """The first round's node goes on alone for a while, and so do the others, in a round after it. Then a daemon that
    knows of neither hears of the first, and one of the others much later."""
    plan = replace(
        plan, nodes=2, size="1:3", arrivals_s=(0.0, 8.0), clocks=(*plan.clocks[:1], *plan.clocks[-plan.daemons - 1 :])
    )
    at, away_s = _at(chance, 12, 11.0), chance.uniform(66.0, 72.0)
    newcomer = Fault(at + 0.1, "newcomer", "x0", "same")
    first = _away(plan, "n0", at, 14.0)
    after = at + 13.5
    faults = [newcomer, *first, *_away(plan, "n1", after, away_s), *_away(plan, "x0", after, away_s + 30.0)]
    faults += [Fault(after + 0.2, "daemon-kill", f"d{i}", "", 0.2) for i in range(plan.daemons)]
    return _long(replace(plan, faults=tuple(faults)), chance)


def _unreachable(plan: Plan, chance: random.Random) -> Plan:
    """A node that has not reached its peers for days, and does not reach them again."""
    node, peer = chance.sample([f"n{i}" for i in range(max(2, plan.nodes))], 2)
    until = chance.uniform(20.0, 38.0)
    faults = [Fault(0.2, "unreachable", node, peer, until), Fault(0.3, "aged", node, "", until)]
    return _with_faults(plan, faults)


def _long(plan: Plan, chance: random.Random) -> Plan:
    """A story in which something comes back after a minute and more."""
    return replace(plan, work_s=chance.uniform(110.0, 150.0), wide=replace(plan.wide, quiet_at_s=110.0))


STORIES: dict[str, Story] = {
    "newcomer": _newcomer,
    "stranger": _stranger,
    "again": _again,
    "stale": _stale,
    "straggler": _straggler,
    "unreachable": _unreachable,
}
FORGETFUL = ("stale", "straggler")  # those that need a daemon which forgets
