"""What can happen to a job. Named in the past tense, except `TimePassed`: nothing happened but time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rendezvousd.core.model import Held, JobSpec, Known, NodeSpec, NodeUid, Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHeard:
    """A node said how it stands, whole."""

    uid: NodeUid
    name: str
    job_spec: JobSpec
    spec: NodeSpec
    submission: str = ""
    resumed: bool = False  # it attended a daemon before
    uptime_s: float = 0.0  # how long its launcher has been running
    lease_s: float = 0.0  # that it was last told; 0: none yet
    known: Known = Known()
    held: Held | None = None
    offer: Offer | None = None
    leaving: str | None = None  # the reason
    outcome_seen: str = ""  # uid of the ended job whose outcome it has read


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBroke:
    """The stream of a node broke. It may open another one within its grace, and then says everything again."""

    uid: NodeUid


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """The lease of a node ran out."""

    uid: NodeUid
    silent_s: float  # since it was last heard
    why: str  # "silent for 5 s", "its connection broke"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRemoved:
    """Somebody wants a node out for good."""

    uid: NodeUid
    by: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartAsked:
    by: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseAsked:
    by: str
    reason: str
    success: bool = False


@dataclass(frozen=True, slots=True)
class TimePassed:
    pass


Event: TypeAlias = NodeHeard | StreamBroke | NodeLost | NodeRemoved | RestartAsked | CloseAsked | TimePassed
