"""What a node knows, is told and does: the values that the agent reads and writes.

Instants (`..._at`, `now`) are seconds of this machine's monotonic clock and never leave it; durations end in `_s`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

# ------------------------------------------------------------------------------------------------ what a daemon says


WORKER_FAILED = "WORKER_FAILED"  # a Cause's kind, by its name in the protocol

# A Failure's kinds, in the protocol's words.
SPAWN = "spawn"  # it could not be started
OOM = "oom"  # the kernel killed it for lack of memory
NO_RETRY = "no-retry"  # starting it again would not help: the job ends, whatever its budget


class WaitReason(enum.Enum):
    GATHERING = "gathering"
    SPARE = "spare"
    GROWING = "growing"
    RECOVERING = "recovering"
    COOLDOWN = "cooldown"
    UNKNOWN = "unknown"  # a newer daemon's word


class Outcome(enum.Enum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CLOSED = "closed"  # by an operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The greatest facts of the job that this node was ever told."""

    job_uid: str = ""
    round: int = 0
    round_uid: str = ""
    group_size: int = 0
    restarts_used: int = 0
    charged_round: int = 0
    charged_round_uid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A seat in a round: what the workers of this node are to be."""

    round: int
    round_uid: str
    group_rank: int
    group_size: int
    first_rank: int
    slots: int
    world_size: int
    role_first_rank: int
    role_world_size: int
    restart_count: int
    max_restarts: int
    master_addr: str
    master_port: int
    master_offer_id: str
    store_generation: str = ""
    notice: str = ""  # what nodes asked for and did not get, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one worker process ended that should not have. `signal` is 0 unless one ended it."""

    rank: int
    local_rank: int
    exit_code: int
    signal: int
    text: str
    ended_at: float
    victim: bool = False  # it looks like the victim of a peer's death
    kind: str = ""  # SPAWN, OOM, NO_RETRY, or nothing special


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a round broke or a job failed, as the daemon sees it."""

    kind: str  # the protocol's name of it; empty: found by this node itself
    node_uid: str = ""
    node_name: str = ""
    failure: Failure | None = None
    text: str = ""
    final: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    reason: WaitReason
    left_s: float = 0.0  # until something is decided anyway; 0: no bound applies


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    outcome: Outcome
    exit_code: int
    cause: Cause | None = None
    may_exit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    by: str
    reason: str
    exit_code: int


Status: TypeAlias = Assignment | Waiting | Ended | Removed


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """All that a daemon says to one node. `valid_round_uid` names the only round whose workers may live."""

    term: str
    revision: int
    job_uid: str
    valid_round_uid: str
    known: Known
    status: Status
    lease_s: float
    sent_at: float | None = None  # what it answers, by CLOCK_BOOTTIME; only with --on-daemon-loss=stop
    daemon_id: str = ""
    cause: Cause | None = None
    explain: str = ""


# ------------------------------------------------------------------------------------------------ what a node says


class Phase(enum.Enum):
    """How the processes of one round do; the meanings are those of the protocol's HeldPhase."""

    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The one round that the processes of this node belong, or belonged, to."""

    assignment: Assignment
    phase: Phase = Phase.STARTING
    spawned: bool = False  # processes were ordered
    gone: bool = False  # and none is left, descendants included; or none was ever ordered and none will be
    ended: frozenset[int] = frozenset()  # local ranks whose own process is over
    started_at: float | None = None  # when all were known to run
    stop_at: float | None = None  # when their stop was ordered
    fenced: bool = False  # because no daemon renewed their lease
    failures: tuple[Failure, ...] = ()  # earliest first
    master_unreachable: bool = False
    store_lost: bool = False

    @property
    def round_uid(self) -> str:
        return self.assignment.round_uid

    @property
    def alive(self) -> int:
        """Processes that live, as far as is known. Until the last descendant is gone at least one does."""
        if not self.spawned or self.gone:
            return 0
        return max(1, self.assignment.slots - len(self.ended))

    @property
    def over(self) -> bool:
        """Whether this node itself knows that the round cannot go on."""
        return self.phase in (Phase.FAILED, Phase.STOPPED, Phase.FENCED) or self.fenced or self.store_lost

    def moved(self, phases: Mapping[Phase, Phase]) -> Held:
        """Return it with its phase mapped; a phase that is not named stays."""
        return replace(self, phase=phases.get(self.phase, self.phase))


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A fresh bootstrap store, and the round that this node knows to be over. No port: it is being opened."""

    offer_id: str
    after: str
    port: int | None = None
    # Whoever it was said to may have dealt it, and be no more. It is not said before it is known who answers now: one
    # that knows nothing of the daemon before it must not deal the store once more.
    doubtful: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How the node stands, whole: what is told to the daemon, apart from what never changes."""

    resumed: bool = False
    lease_s: float = 0.0
    seen_term: str = ""
    seen_revision: int = 0
    known: Known = field(default_factory=Known)
    held: Held | None = None
    offer: Offer | None = None  # with a port
    leaving: str | None = None  # the reason
    outcome_seen: str = ""


# ------------------------------------------------------------------------------------------------ what can happen


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceHeard:
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonAway:
    """An attempt to reach a daemon failed, or the stream to one broke. `text` says which and how."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonRefused:
    """A daemon will not have this node, and asking again would not help."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOpened:
    offer_id: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailed:
    offer_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLost:
    """A store that was open is gone. Empty `offer_id`: all of them."""

    offer_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterReached:
    round_uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterUnreachable:
    round_uid: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStarted:
    round_uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnFailed:
    """A worker could not be started; those that were may live."""

    round_uid: str
    local_rank: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded:
    round_uid: str
    local_rank: int
    exit_code: int
    signal: int  # that ended it, or 0
    at: float
    text: str = ""  # from its error file, or the end of its stderr
    victim: bool = False
    kind: str = ""  # as a Failure's


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersGone:
    """No process of the round is left, descendants included."""

    round_uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAsked:
    """Somebody wants this launcher to end: by a signal, or for another reason (signal 0)."""

    signal: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnds:
    """No daemon has renewed the lease of the workers of a round in time."""

    round_uid: str
    late_s: float  # since they should have been told to stop
    left_s: float  # until they are killed; 0: now


@dataclass(frozen=True, slots=True)
class TimePassed:
    pass


Fact: TypeAlias = (
    PlaceHeard
    | DaemonAway
    | DaemonRefused
    | StoreOpened
    | StoreFailed
    | StoreLost
    | MasterReached
    | MasterUnreachable
    | WorkersStarted
    | SpawnFailed
    | WorkerEnded
    | WorkersGone
    | LeaveAsked
    | LeaseEnds
    | TimePassed
)


# ------------------------------------------------------------------------------------------------ what to do


@dataclass(frozen=True, slots=True)
class OpenStore:
    offer_id: str


@dataclass(frozen=True, slots=True)
class DropStore:
    offer_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachMaster:
    """Find out whether the round's bootstrap store can be reached."""

    round_uid: str
    addr: str
    port: int


@dataclass(frozen=True, slots=True)
class Spawn:
    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End every process of the round: the signal to each worker, TERM to what it leaves behind, SIGKILL to all that is
    there after `grace_s`. `next_round`: others wait for this node to be ready for it."""

    round_uid: str
    signal: int
    grace_s: float
    next_round: bool = False


@dataclass(frozen=True, slots=True)
class Hurry:
    """The grace of the stop under way is over now."""


@dataclass(frozen=True, slots=True)
class CutShort:
    """The same, and stops to come have their grace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """The daemon is to hear this: at once, or with the next heartbeat."""

    standing: Standing
    at_once: bool


class Topic(enum.Enum):
    NEWS = "news"  # said each time
    WAIT = "wait"  # why the node waits; a console repeats it rarely
    CAUSE = "cause"  # why a round broke; may be learnt in two steps
    WARN = "warn"


@dataclass(frozen=True, slots=True)
class Say:
    topic: Topic
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End the launcher. `flush_s`: for so long at most the daemon may still be given to hear the last Tell."""

    code: int
    text: str
    cause: Cause | None = None
    flush_s: float = 0.0


Order: TypeAlias = OpenStore | DropStore | ReachMaster | Spawn | Stop | Hurry | CutShort | Tell | Say | Exit
