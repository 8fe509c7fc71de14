"""What happens in a run, drawn from its seed before it begins: a cluster, and a list of faults."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Mode = Literal["safety", "liveness"]

FAULTS_FROM_S = 0.2
QUIET_AT_S = 40.0  # after which nothing goes wrong any more, if the run is one that must come to an end
SAFETY_S = 60.0  # for which a run lasts in which anything may go wrong until its end
# A job whose faults have stopped is over within: what remains to be learnt and waited for (a recovery window, graces, a
# cool-down, a quiet time, the join timeout of latecomers), each once or twice, and the work.
HEALED_S = 400.0


@dataclass(frozen=True)
class Fault:
    """One thing that happens. `who` is a machine; what the other fields mean depends on what it is."""

    at: float
    what: str
    who: str
    other: str = ""
    for_s: float = 0.0
    number: int = 0

    def __str__(self) -> str:
        other = f" {self.other}" if self.other else ""
        lasts = f" for {self.for_s:.2f} s" if self.for_s else ""
        number = f" ({self.number})" if self.number else ""
        return f"{self.at:6.2f} s: {self.what} {self.who}{other}{number}{lasts}"


@dataclass(frozen=True)
class Wide:
    """What a run may have beyond one job whose nodes are all alike, on daemons and an etcd that are as by default."""

    token: str = "s"  # of the job's submission; empty: none
    stop: bool = False  # --on-daemon-loss=stop
    beside: Plan | None = None  # another job of the same daemons
    settles_s: tuple[float, ...] = ()  # --settle of each daemon, where they differ
    small_max: int = 0  # jobs of more nodes are answered as large ones are; 0: as by default
    operations_max: int = 0  # of one transaction of etcd, which then takes small requests only; 0: as by default
    compacts: bool = False  # etcd forgets its history every few seconds
    calls: bool = False  # workers call the job's store
    quiet_at_s: float = QUIET_AT_S
    story: str = ""  # the one that was added to the faults


@dataclass(frozen=True)
class Plan:
    seed: int
    mode: Mode
    nodes: int
    size: str  # --nnodes
    slots: int
    max_restarts: int
    grow: str
    daemons: int
    members: int  # of etcd; 0: the daemon keeps its jobs in memory
    work_s: float
    grace_s: float
    stubborn: float  # part of the workers that do not end before it is over
    delay_s: float
    loss: float
    arrivals_s: tuple[float, ...]
    clocks: tuple[tuple[float, float], ...]  # of the nodes, then of the daemons: seconds ahead, and rate
    faults: tuple[Fault, ...]
    run_id: str = "job"
    names: str = "n"  # what its nodes' names begin with
    wide: Wide = Wide()

    @property
    def min_nodes(self) -> int:
        return int(self.size.partition(":")[0])

    @property
    def gentle(self) -> bool:
        """Whether nothing comes between a node's death and what is known of it."""
        return self.loss == 0 and all(fault.what in GENTLE for fault in self.faults)

    @property
    def punctual(self) -> bool:
        """Whether nodes are heard in time unless something is wrong with them, or with a whole path."""
        return self.loss == 0 and not any(
            fault.what in ("slow", "slow-reader", "etcd-late", "etcd-leaderless") for fault in self.faults
        )

    @property
    def harsh(self) -> bool:
        """Whether a node may be too late with its offer."""
        return any(fault.what in ("slow", "slow-reader", "pause", "unreachable") for fault in self.faults)

    # The daemons, and their etcd, are those of both jobs: what befalls them in one befalls the other.

    @property
    def all_gentle(self) -> bool:
        return self.gentle and (self.wide.beside is None or self.wide.beside.gentle)

    @property
    def all_punctual(self) -> bool:
        return self.punctual and (self.wide.beside is None or self.wide.beside.punctual)

    @property
    def any_harsh(self) -> bool:
        return self.harsh or (self.wide.beside is not None and self.wide.beside.harsh)

    @property
    def lasts_s(self) -> float:
        """For how long a run goes on, at most."""
        if self.mode == "liveness":
            return self.wide.quiet_at_s + HEALED_S
        return SAFETY_S + self.wide.quiet_at_s - QUIET_AT_S

    def __str__(self) -> str:
        keeps = f"{self.daemons} daemons on etcd ({self.members})" if self.members else "a daemon with its memory"
        return (
            f"seed {self.seed}, {self.mode}: {self.nodes} nodes of {self.slots}, --nnodes={self.size}, "
            f"--max-restarts={self.max_restarts}, grow={self.grow}, {keeps}, {self.work_s:.0f} s of work, "
            f"delay {self.delay_s * 1000:.0f} ms, loss {self.loss:.0%}{self._more()}"
        )

    def _more(self) -> str:
        wide, usual = self.wide, Wide()
        parts = [
            f"; {name}: {what}"
            for name in wide.__dataclass_fields__
            if (what := getattr(wide, name)) != getattr(usual, name)
        ]
        return "".join(parts)


KINDS = (
    *("kill", "kill", "power", "leave", "join", "stores", "pause", "slow"),
    *("fail", "fail", "hang", "early"),
    *("cut", "cut", "one-way", "reset", "unreachable"),
    *("daemon-kill", "daemon-kill", "daemon-power", "daemon-end", "daemon-pause", "daemon-pause"),
    *("daemon-slow", "daemon-cut"),
    *("restart", "close", "remove"),
)
OF_ETCD = ("etcd-late", "etcd-leaderless", "etcd-alone", "etcd-cut") * 2
GENTLE = ("kill", "power", "fail", "leave", "remove", "restart", "stores")


def plan(seed: int, mode: Mode | None = None) -> Plan:
    """Return what the seed stands for. Without a mode the seed decides that, too."""
    chance = random.Random(f"plan {seed}")
    drawn: Mode = chance.choice(("safety", "liveness"))
    mode = mode or drawn
    nodes = chance.choice((1, 2, 2, 3, 3, 4))
    low = chance.randint(max(1, nodes - 2), nodes)
    high = chance.choice((low, nodes, nodes, nodes + 1)) if low < nodes else chance.choice((nodes, nodes + 1))
    members = chance.choice((0, 0, 0, 1, 3))
    daemons = chance.choice((2, 2, 3)) if members else 1
    drift = 0.01 if not members else 5e-5  # an election trusts that clocks run about alike
    return Plan(
        seed=seed,
        mode=mode,
        nodes=nodes,
        size=str(low) if low == high else f"{low}:{high}",
        slots=chance.choice((1, 1, 2)),
        max_restarts=chance.choice((0, 1, 3, 10)),
        grow=chance.choice(("quiet", "quiet", "now", "never")),
        daemons=daemons,
        members=members,
        work_s=chance.uniform(5.0, 40.0),
        grace_s=chance.choice((1.0, 3.0, 8.0)),
        stubborn=chance.choice((0.0, 0.1, 0.1, 0.8)),
        delay_s=chance.choice((0.001, 0.001, 0.01, 0.05, 0.15)),
        loss=chance.choice((0.0, 0.0, 0.0, 0.01)),
        arrivals_s=tuple(chance.choice((0.0, 1.0, 1.0, 8.0)) * chance.random() for _ in range(nodes)),
        clocks=tuple(
            (chance.uniform(0.0, 1e5), 1.0 + chance.uniform(-1, 1) * (0.01 if i < nodes else drift))
            for i in range(nodes + daemons)
        ),
        faults=faults(chance, mode, nodes, daemons, members),
    )


def faults(chance: random.Random, mode: Mode, nodes: int, daemons: int, members: int) -> tuple[Fault, ...]:
    """Each seed has a taste: some kinds of faults happen in it often, and others never."""
    kinds = KINDS + OF_ETCD if members else KINDS
    taste = chance.sample(kinds, chance.randint(1, 6))
    until = QUIET_AT_S if mode == "liveness" else SAFETY_S
    count = chance.choice((0, 1, 2, 3, 4, 6, 10))
    found: list[Fault] = []
    for _ in range(count):
        at = _moment(chance, found, until)
        found.append(_fault(chance, chance.choice(taste), at, nodes, daemons, members))
    return tuple(sorted(found, key=lambda fault: fault.at))


def _moment(chance: random.Random, found: list[Fault], until: float) -> float:
    """Any time, or one soon after something else began or was over: much that is rare happens then."""
    if not found or chance.random() < 0.4:
        return chance.uniform(FAULTS_FROM_S, chance.choice((5.0, 12.0, until)))
    last = chance.choice(found)
    after = last.at + chance.choice((0.0, last.for_s)) + chance.choice((0.1, 1.0, 5.0)) * chance.random()
    return min(after, until)


def _fault(chance: random.Random, what: str, at: float, nodes: int, daemons: int, members: int) -> Fault:
    node, daemon = f"n{chance.randrange(nodes)}", f"d{chance.randrange(daemons)}"
    peer = f"n{chance.randrange(nodes)}"
    back_s = chance.choice((0.2, 2.0, 8.0, 20.0)) * (0.5 + chance.random())
    number = chance.choice((1, 1, 3, 139))
    choices = {
        "cut": Fault(at, what, node, daemon, back_s),
        "one-way": Fault(at, what, node, daemon, back_s, chance.randrange(2)),
        "reset": Fault(at, what, node, daemon),
        "unreachable": Fault(at, what, node, peer, back_s),
        "etcd-late": Fault(at, what, "etcd", "", back_s / 3),
        "etcd-leaderless": Fault(at, what, "etcd", "", back_s / 3),
        "etcd-alone": Fault(at, what, f"e{chance.randrange(max(1, members))}", "", back_s),
        "etcd-cut": Fault(at, what, daemon, f"e{chance.randrange(max(1, members))}", back_s, chance.randrange(3)),
        "fail": Fault(at, what, node, "", 0.0, number),
        "hang": Fault(at, what, node),
        "early": Fault(at, what, node),
        "stores": Fault(at, what, node),
        "restart": Fault(at, what, "operator"),
        "close": Fault(at, what, "operator"),
        "remove": Fault(at, what, "operator", node),
        "join": Fault(at, what, f"n{nodes + chance.randrange(2)}"),
    }
    return choices.get(what, Fault(at, what, daemon if what.startswith("daemon-") else node, "", back_s))
