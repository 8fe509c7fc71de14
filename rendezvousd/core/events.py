"""What can happen to a job. Named in the past tense, except `TimePassed`: nothing happened but time."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from rendezvousd.core.model import Held, JobSpec, Known, NodeSpec, NodeUid, Offer


class NodeHeard(Struct, frozen=True, kw_only=True):
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
    unfit: str = ""  # why no job is to begin with these wishes on this daemon; one that goes on may


class StreamBroke(Struct, frozen=True, kw_only=True):
    """The stream of a node broke. It may open another one within its grace, and then says everything again."""

    uid: NodeUid


class NodeLost(Struct, frozen=True, kw_only=True):
    """The lease of a node ran out."""

    uid: NodeUid
    silent_s: float  # since it was last heard
    why: str  # "silent for 5 s", "its connection broke"


class NodeRemoved(Struct, frozen=True, kw_only=True):
    """Somebody wants a node out for good."""

    uid: NodeUid
    by: str
    reason: str


class RestartAsked(Struct, frozen=True, kw_only=True):
    by: str
    reason: str


class CloseAsked(Struct, frozen=True, kw_only=True):
    by: str
    reason: str
    success: bool = False


class TimePassed(Struct, frozen=True):
    pass


Event: TypeAlias = NodeHeard | StreamBroke | NodeLost | NodeRemoved | RestartAsked | CloseAsked | TimePassed
