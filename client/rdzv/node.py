"""The state of one node's launcher: what `agent.step` turns over."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rdzv.fence import Fence
from rdzv.model import Ended, Held, Known, LeaveAsked, Offer, Phase, Place, Removed, Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What never changes about this node."""

    node_uid: str
    endpoints: str  # for people
    stop_grace_s: float = 30.0
    join_timeout_s: float = 600.0  # without a daemon and without workers for so long: give up
    fenced: bool = False  # workers end with the lease (--on-daemon-loss=stop)
    daemon_loss_timeout_s: float | None = None  # without a daemon that was there, for so long: give up, workers or not


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """No daemon is heard."""

    since: float
    text: str  # the last error
    said: bool = False  # that training goes on without it


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTrouble:
    since: float
    retry_at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """All that a node knows. A value: every fact makes a new one."""

    config: Config
    away: Away | None
    idle_at: float  # when it last came to have no processes
    place: Place | None = None
    known: Known = field(default_factory=Known)
    earlier_term: bool = False  # it obeyed another term before the one it obeys now
    cause_said: tuple[str, str] = ("", "")  # the round, and why it broke, that people were told of last
    held: Held | None = None
    fence: Fence | None = None  # of the held round, until nothing of it lives; only if `config.fenced`
    offer: Offer | None = None  # standing, or being opened
    hosted: str = ""  # the offer whose store serves the held round; empty: none
    offers: int = 0  # made so far
    trouble: StoreTrouble | None = None
    instant: int = 0  # rounds in a row whose workers here failed as soon as they were started
    pause_until: float = 0.0  # no offer before
    leaving: LeaveAsked | None = None
    over: Ended | Removed | None = None
    over_at: float = 0.0
    refused: str = ""
    exited: bool = False

    @property
    def doomed(self) -> bool:
        """Whether this launcher only winds up."""
        return self.leaving is not None or self.over is not None or bool(self.refused)

    @property
    def idle(self) -> bool:
        """Whether no process of any round lives here."""
        return self.held is None or self.held.gone

    @property
    def done(self) -> bool:
        """Whether all workers here succeeded and nothing that was heard since has undone it."""
        return self.valid and self.held is not None and self.held.phase is Phase.SUCCEEDED and not self.held.store_lost

    @property
    def valid(self) -> bool:
        """Whether the held round is the one whose workers may live."""
        return self.held is not None and self.place is not None and self.place.valid_round_uid == self.held.round_uid

    @property
    def lease_s(self) -> float:
        """The lease under which it runs; 0 before the first place."""
        return self.place.lease_s if self.place is not None else 0.0


def standing(agent: Agent) -> Standing:
    """Return how the node stands, as a daemon is told."""
    place, offer = agent.place, agent.offer
    ended = isinstance(agent.over, Ended)
    return Standing(
        resumed=agent.earlier_term or (place is not None and agent.away is not None),
        lease_s=agent.lease_s,
        seen_term=place.term if place is not None else "",
        seen_revision=place.revision if place is not None else 0,
        known=agent.known,
        held=agent.held,
        offer=offer if offer is not None and offer.port is not None and not offer.doubtful else None,
        leaving=agent.leaving.reason if agent.leaving is not None else None,
        outcome_seen=place.job_uid if ended and place is not None else "",
    )


def material(said: Standing) -> Standing:
    """What a daemon acts on, as against what it only keeps: the rest may wait for the next heartbeat."""
    return replace(said, seen_term="", seen_revision=0, lease_s=0.0, known=Known(), resumed=False)
