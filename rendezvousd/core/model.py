"""What a job is: its nodes, its last sealed round, and what is known of their ends.

Everything here is a value. Instants (`..._at`) are seconds of the daemon's own clock; they mean nothing elsewhere and
are never stored. Durations end in `_s`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NewType

from immutables import Map
from msgspec import Struct

from rendezvousd.core.settings import Timing

if TYPE_CHECKING:
    from rendezvousd.core.events import NodeHeard

NodeUid = NewType("NodeUid", str)
RoundUid = NewType("RoundUid", str)
JobUid = NewType("JobUid", str)

NO_ROUND = RoundUid("")


class Grow(enum.Enum):
    QUIET = "quiet"  # nodes that wait while a round runs are let in after a quiet time
    NOW = "now"
    NEVER = "never"


class OnDaemonLoss(enum.Enum):
    CONTINUE = "continue"
    STOP = "stop"


class Phase(enum.Enum):
    """What a node says of the processes of one round."""

    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FENCED = "fenced"


class JobSpec(Struct, frozen=True, kw_only=True):
    """What all nodes of a job must agree on."""

    min_nodes: int
    max_nodes: int
    max_restarts: int = 0
    on_daemon_loss: OnDaemonLoss = OnDaemonLoss.CONTINUE
    grow: Grow = Grow.QUIET
    timing: Timing = Timing()
    # The durations and counts of `timing` that the node gave by itself (and "lease_s"); the others are its daemon's.
    given: tuple[str, ...] = ()


class NodeSpec(Struct, frozen=True, kw_only=True):
    """What may differ from node to node."""

    slots: int = 1
    role: str = ""
    node_rank: int | None = None
    topology: str = ""
    stop_grace_s: float = 30.0


class Failure(Struct, frozen=True, kw_only=True):
    """How one worker process ended that should not have."""

    rank: int
    local_rank: int = 0
    exit_code: int = 1
    signal: int = 0
    text: str = ""
    age_s: float = 0.0  # from its end to the first telling
    victim_hint: bool = False
    kind: str = ""


class Assignment(Struct, frozen=True, kw_only=True):
    """What a node was told of its place in a round, echoed."""

    group_rank: int
    group_size: int
    first_rank: int
    slots: int
    world_size: int
    role_first_rank: int
    role_world_size: int
    restart_count: int
    master_addr: str
    master_port: int
    master_offer_id: str


class Held(Struct, frozen=True, kw_only=True):
    """The one round that a node's processes belong, or belonged, to."""

    round_uid: RoundUid
    round: int
    phase: Phase
    alive: int = 0
    failures: tuple[Failure, ...] = ()
    master_unreachable: bool = False
    store_lost: bool = False
    assignment: Assignment | None = None


class Offer(Struct, frozen=True, kw_only=True):
    """A node's word: no process of `after` or any earlier round lives here, and this store is fresh."""

    offer_id: str
    after: RoundUid
    address: str
    port: int


class Known(Struct, frozen=True, kw_only=True):
    """The greatest facts ever told to, or heard from, a node."""

    job_uid: JobUid = JobUid("")
    round: int = 0
    round_uid: RoundUid = NO_ROUND
    group_size: int = 0
    restarts_used: int = 0
    charged_round: int = 0
    charged_round_uid: RoundUid = NO_ROUND


class Stance(enum.Enum):
    """Where a node stands towards the next thing its job does. Derived from what it said (see tally.stance)."""

    RUNNING = "running"  # a member of the running round; its processes may live
    BUSY = "busy"  # processes live that must not
    UNREADY = "unready"  # nothing lives; no valid offer yet
    READY = "ready"  # a valid offer stands


class Departure(Struct, frozen=True, kw_only=True):
    """A node goes for good: by its own word, or because somebody removed it."""

    by: str
    reason: str
    exit_code: int = 0
    removed: bool = False
    order: int = 0  # of its being remembered; the oldest are forgotten first


class SitOut(enum.Enum):
    """Why a node gets no seat for a while."""

    UNREACHABLE = "unreachable"
    FAILING = "failing"
    SPAWN = "spawn"

    @property
    def text(self) -> str:
        """For people."""
        match self:
            case SitOut.UNREACHABLE:
                return "it could not reach its peers"
            case SitOut.FAILING:
                return "its workers keep failing while those of the other nodes do not"
            case SitOut.SPAWN:
                return "its workers could not be started"


class Suspect(Struct, frozen=True, kw_only=True):
    """What a node, or one of the same name before it, is blamed for."""

    rounds: int = 0  # in a row that it was to blame for
    pauses: int = 0  # in a row that it sat out
    round: int = 0  # number of the last one that it was to blame for
    until_at: float | None = None  # it sits out until then, whichever launcher has its name ...
    why: SitOut = SitOut.FAILING  # ... for this


class Node(Struct, frozen=True, kw_only=True):
    """One attached launcher process."""

    uid: NodeUid
    name: str
    arrival: int  # the how-manieth newcomer of this job it is
    spec: NodeSpec
    held: Held | None = None
    offer: Offer | None = None
    leaving: Departure | None = None
    outcome_seen: bool = False
    cooling_until_at: float | None = None  # it sits out until then ...
    sits_out: SitOut = SitOut.UNREACHABLE  # ... for this
    unreachables: int = 0  # how often in a row it could not reach the bootstrap store
    # derived by tally.place_node:
    stance: Stance = Stance.UNREADY
    member: bool = False  # holds a seat of the last round
    due_at: float | None = None  # when this stance must have been left
    overdue: bool = False  # it was not: nobody waits for this node any more

    @property
    def alive(self) -> int:
        """Processes it last said were alive."""
        return self.held.alive if self.held is not None else 0

    @property
    def usable(self) -> bool:
        """Whether it may yet become part of the next round."""
        return self.leaving is None and not self.overdue and self.cooling_until_at is None


class Seat(Struct, frozen=True, kw_only=True):
    """One node's place in a round, dealt once."""

    uid: NodeUid
    name: str
    group_rank: int
    slots: int
    first_rank: int
    role: str
    role_first_rank: int
    role_world_size: int
    address: str
    port: int
    offer_id: str


class CauseKind(enum.Enum):
    WORKER_FAILED = "worker failed"  # the only kind that uses a restart
    NODE_LOST = "node lost"
    NODE_LEFT = "node left"
    NODE_REMOVED = "node removed"
    GROWTH = "growth"
    OPERATOR = "operator"
    NETWORK = "network"
    STORE_LOST = "store lost"
    JOIN_TIMEOUT = "join timeout"
    SHORT_ROUNDS = "short rounds"
    DAEMON_RESTARTED = "daemon restarted"


class Cause(Struct, frozen=True, kw_only=True):
    """One thing that breaks a round or ends a job."""

    kind: CauseKind
    at: float  # when it happened, as well as the daemon can tell
    text: str  # one line for people
    note: str = ""  # what else follows from it, for people
    uid: NodeUid = NodeUid("")
    name: str = ""
    failure: Failure | None = None


class End(enum.Enum):
    """How a member's part in a round ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    LEFT = "left"
    OVERRUN = "overrun"  # never told; given up after its grace


class Round(Struct, frozen=True, kw_only=True):
    """One formed world: a sealed roster with ranks, and what is known of its end."""

    uid: RoundUid
    number: int
    seats: tuple[Seat, ...]  # by group rank
    index: Map[NodeUid, int]  # uid -> group rank
    world_size: int
    restart_count: int
    sealed_at: float
    admitted: bool  # somebody sits here who did not in the round before
    forfeits: Map[NodeUid, End] = Map()  # seats given up, for this round and the next
    ends: Map[NodeUid, End] = Map()
    evidence: tuple[Cause, ...] = ()  # why it broke, most likely first; bounded
    unreachable: frozenset[NodeUid] = frozenset()  # members that could not reach the bootstrap store
    broken_at: float | None = None
    final: bool = False  # every member's end is known, and the cause is fixed
    done: int = 0  # members that succeeded before it broke
    notice: str = ""  # what nodes asked for and did not get, for people

    @property
    def master(self) -> Seat:
        return self.seats[0]

    @property
    def cause(self) -> Cause | None:
        """Why it broke, as far as is known; None while it runs."""
        return self.evidence[0] if self.evidence else None


class Outcome(enum.Enum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CLOSED = "closed"


class Ending(Struct, frozen=True, kw_only=True):
    """How a job ended."""

    outcome: Outcome
    at: float
    exit_code: int
    cause: Cause | None = None
    may_exit: bool = False
    timed: bool = True  # False: it ended under a daemon before this one, some time before `at`


class Tally(Struct, frozen=True, kw_only=True):
    """Counts over the attached nodes, kept by tally.place_node so that settling looks at none of them."""

    members: int = 0  # hold a seat, and may use it
    members_ready: int = 0
    newcomers_ready: int = 0  # hold none, and could take one
    usable: int = 0  # may become part of the next round
    unready: int = 0  # usable, nothing alive, no valid offer yet
    busy: int = 0  # have processes that must go, and are waited for
    sitting_out: int = 0
    suspended: int = 0  # of these, because of their workers' failures
    seen: int = 0  # have read the outcome


class Recovery(Struct, frozen=True, kw_only=True):
    """What is being learnt of a round that was sealed by a daemon before this one."""

    uid: RoundUid
    number: int
    size: int
    began_at: float
    last_at: float  # when a member was last heard for the first time
    heard: Map[NodeUid, NodeHeard] = Map()  # what its members said first


class Calm(Struct, frozen=True, kw_only=True):
    """What restrains growth, and gives up a job that goes nowhere."""

    required_s: float = 0.0  # a round runs so long before it is broken for growth
    short_rounds: int = 0  # in a row
    admitted_at: float | None = None  # when a round was last broken to let nodes in ...
    waited_s: float = 0.0  # ... and how long the first of them had waited then


class Fence(Struct, frozen=True, kw_only=True):
    """Workers may live where the daemon hears nothing any more; no round is sealed before they are gone."""

    name: str  # of the node; empty: of none that is known
    round_uid: RoundUid  # theirs
    bound_s: float  # so long after the daemon read from them last they are gone
    until_at: float


class Job(Struct, frozen=True, kw_only=True):
    """One training run. A value: every change makes a new one."""

    run_id: str
    uid: JobUid
    seed: str  # random, of this daemon's term; round uids are derived from it
    spec: JobSpec
    began_at: float
    submission: str = ""  # token of the submission it began with; empty: none
    nodes: Map[NodeUid, Node] = Map()
    arrivals: int = 0
    gone: Map[NodeUid, Departure] = Map()
    departures: int = 0
    round: Round | None = None  # the last one sealed here
    last_cause: Cause | None = None  # why the round before that broke
    known: Known = Known()
    calm: Calm = Calm()
    ending: Ending | None = None
    recovering: Recovery | None = None
    suspects: Map[str, Suspect] = Map()  # by node name
    # With OnDaemonLoss.STOP: the longest lease that its nodes were ever told, and may be told now; and what stands.
    lease_s: float = 0.0
    fences: Map[NodeUid, Fence] = Map()
    answered_until_at: float = 0.0  # a leader before this one may have answered nodes until then
    # Founded by a node that knew of no round, on a daemon without memory. Until then, in seconds of its clock, it gives
    # way to an older job of whose nodes one comes back.
    provisional_until_at: float = 0.0
    tally: Tally = Tally()
    # when what began; None: it is not so
    last_arrival_at: float = 0.0  # of a newcomer
    enough_at: float | None = None  # min nodes are ready, for a round that must settle
    short_at: float | None = None  # fewer than min nodes are usable
    apart_at: float | None = None  # rounds are formed, and members do not reach each other
    waiting_at: float | None = None  # somebody ready waits while a round runs
    lost_at: float | None = None  # no node is left, and members of the last round were lost by silence
    hold_until_at: float | None = None  # while those may return, other nodes form no round of their own before
    scan_at: float | None = None  # the earliest `due_at` or cool-down of any node, or sooner

    @property
    def running(self) -> Round | None:
        """The round whose workers may live, if there is one."""
        if self.ending is None and self.round is not None and self.round.broken_at is None:
            return self.round
        return None

    @property
    def gathering(self) -> bool:
        return self.ending is None and self.running is None

    @property
    def judging(self) -> bool:
        """Whether the last round broke and it is not known yet of what."""
        return self.round is not None and self.round.broken_at is not None and not self.round.final
