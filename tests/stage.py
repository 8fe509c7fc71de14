"""A small theatre for the core: launchers that keep to the protocol, and a clock that the story holds.

Nothing here decides anything. A `Player` obeys places as a launcher does and says how it stands; the `Stage` carries
what is said into the job, as the daemon's engine does, and lets time pass. What happens in between is up to the test.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from rendezvousd.core.events import (
    CloseAsked,
    Event,
    NodeHeard,
    NodeLost,
    NodeRemoved,
    RestartAsked,
    StreamBroke,
    TimePassed,
)
from rendezvousd.core.explain import explain
from rendezvousd.core.machine import step, wakes_at
from rendezvousd.core.model import (
    Departure,
    Ending,
    Failure,
    Grow,
    Held,
    Job,
    JobSpec,
    JobUid,
    Known,
    NodeSpec,
    NodeUid,
    Offer,
    Phase,
    Round,
    RoundUid,
)
from rendezvousd.core.place import Assigned, Place, place, valid_round_uid
from rendezvousd.core.rules.admit import Instance, found, in_the_way, instance, superseding, why_it_waits
from rendezvousd.core.settings import Limits, Timing
from tests.ledger import Ledger

LIVE = (Phase.STARTING, Phase.RUNNING)


@dataclass(frozen=True, slots=True)
class Told:
    """What one message of the daemon says to a node."""

    job_uid: JobUid
    known: Known
    valid: RoundUid
    place: Place


@dataclass(eq=False)
class Player:
    """One launcher process and its workers, keeping to the protocol. `held.alive` is the truth about its processes."""

    uid: NodeUid
    name: str
    job_spec: JobSpec
    spec: NodeSpec
    submission: str = ""
    born_at: float = 0.0
    known: Known = Known()
    held: Held | None = None
    offer: Offer | None = None
    offers: int = 0
    told: Told | None = None
    leaving: str | None = None
    outcome: Ending | Departure | None = None
    outcome_seen: str = ""
    refused: bool = False
    exited: bool = False
    cut: bool = False  # neither hears nor is heard
    failed_at: dict[int, float] = field(default_factory=dict)  # by rank, in the held round; what is still to be told
    outbox: list[NodeHeard] = field(default_factory=list)
    mail: list[Told] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._keep_offer()

    # ------------------------------------------------------------------------------------------ what it does

    @property
    def alive(self) -> int:
        return self.held.alive if self.held is not None else 0

    @property
    def doomed(self) -> bool:
        return self.leaving is not None or self.outcome is not None or self.refused

    @property
    def valid(self) -> bool:
        """Whether the round it holds is the one whose workers may live, as far as it knows."""
        return self.held is not None and self.told is not None and self.held.round_uid == self.told.valid

    def obey(self, told: Told) -> None:
        """Take in a place, and do at once what it asks for."""
        self.told = told
        self.known = told.known
        if isinstance(told.place, Ending | Departure):
            self.outcome = told.place
            if isinstance(told.place, Ending):
                self.outcome_seen = told.job_uid
        self._settle()

    def start(self) -> None:
        """Start the workers of the seat it was dealt."""
        assert self.held is not None
        assert self.held.phase is Phase.STARTING
        self.held = replace(self.held, phase=Phase.RUNNING, alive=self.spec.slots)

    def finish(self) -> None:
        """All workers end with 0."""
        assert self.held is not None
        assert self.held.phase in LIVE
        self.held = replace(self.held, phase=Phase.SUCCEEDED, alive=0)

    def fail(self, now: float, failure: Failure, *, alive: int = 0) -> None:
        """A worker fails; `alive` of the others are still to be stopped."""
        assert self.held is not None
        failures = (*self.held.failures, failure)
        self.held = replace(self.held, phase=Phase.FAILED, alive=alive, failures=failures)
        self.failed_at[failure.rank] = now

    def stopped(self) -> None:
        """What was being stopped is gone."""
        assert self.held is not None
        phase = Phase.STOPPED if self.held.phase is Phase.STOPPING else self.held.phase
        self.held = replace(self.held, phase=phase, alive=0)
        self._settle()

    def cannot_reach_master(self) -> None:
        assert self.held is not None
        assert self.held.phase is Phase.STARTING
        self.held = replace(self.held, phase=Phase.STOPPED, alive=0, master_unreachable=True)

    def store_dies(self) -> None:
        assert self.held is not None
        self.held = replace(self.held, store_lost=True)
        self._settle()

    def leave(self, reason: str) -> None:
        self.leaving = reason
        self._settle()

    def refuse(self) -> None:
        """The daemon wants nothing more to do with it."""
        self.refused = True
        self._settle()

    def _settle(self) -> None:
        held = self.held
        may_live = self.valid and not self.doomed and held is not None and not held.store_lost
        if held is not None and held.phase in LIVE and not may_live:
            self.held = replace(held, phase=Phase.STOPPING if held.alive else Phase.STOPPED)
        self._take_seat()
        self._keep_offer()
        over = self.refused or isinstance(self.outcome, Departure) or (self.outcome and self.outcome.may_exit)
        self.exited = self.exited or (bool(over) and not self.alive)

    def _take_seat(self) -> None:
        if self.told is None or self.doomed or self.alive or not isinstance(self.told.place, Assigned):
            return
        round_ = self.told.place.round
        if round_.uid != self.told.valid or (self.held is not None and round_.number <= self.held.round):
            return
        self.held = Held(round_uid=round_.uid, round=round_.number, phase=Phase.STARTING)
        self.failed_at.clear()
        self.offer = None

    def _keep_offer(self) -> None:
        in_round = self.held is not None and self.valid and self.held.phase in (*LIVE, Phase.SUCCEEDED)
        if self.doomed or self.alive or in_round:
            self.offer = None
            return
        after = self.told.known.round_uid if self.told is not None else RoundUid("")
        if self.offer is None or self.offer.after != after:
            self.offers += 1
            self.offer = Offer(offer_id=f"{self.uid}-{self.offers}", after=after, address=f"{self.name}.net", port=1)

    # ----------------------------------------------------------------------------------------- what it says

    def state(self, now: float) -> NodeHeard:
        """Return how it stands. The age of a failure is that of its first telling."""
        held = self.held
        if held is not None and any(f.rank in self.failed_at for f in held.failures):
            aged = tuple(
                replace(f, age_s=f.age_s + now - self.failed_at.pop(f.rank)) if f.rank in self.failed_at else f
                for f in held.failures
            )
            held = self.held = replace(held, failures=aged)
        return NodeHeard(
            uid=self.uid,
            name=self.name,
            job_spec=self.job_spec,
            spec=self.spec,
            submission=self.submission,
            uptime_s=now - self.born_at,
            known=self.known,
            held=held,
            offer=self.offer,
            leaving=self.leaving,
            outcome_seen=self.outcome_seen,
        )


def job_spec(nnodes: str = "1:4", **more: object) -> JobSpec:
    """Return what all nodes of a job want. Keywords that are no field of it are durations and counts of `Timing`."""
    low, _, high = nnodes.partition(":")
    timing = {k: more.pop(k) for k in list(more) if k in Timing.__struct_fields__}
    return JobSpec(
        min_nodes=int(low),
        max_nodes=int(high or low),
        timing=Timing(**timing),  # type: ignore[arg-type]
        given=tuple(timing),
        **more,  # type: ignore[arg-type]
    )


class Stage:
    """One run id on one daemon, and the launchers that call it. Every event passes the `ledger`, which checks it."""

    def __init__(self, nnodes: str = "1:4", *, ledger: Ledger | None = None, **more: object) -> None:
        self.spec = job_spec(nnodes, **more)
        self.limits = Limits()
        self.now = 1000.0
        self.job_or_none: Job | None = None
        self.players: list[Player] = []
        self.heard_at: dict[NodeUid, float] = {}
        self.outside: dict[NodeUid, str] = {}  # launchers that wait for the end of a job that is not theirs, and why
        self.ledger = ledger if ledger is not None else Ledger()
        self._minted = 0

    @property
    def job(self) -> Job:
        assert self.job_or_none is not None
        return self.job_or_none

    @property
    def round(self) -> Round:
        assert self.job.round is not None
        return self.job.round

    @property
    def ending(self) -> Ending:
        assert self.job.ending is not None
        return self.job.ending

    def may_exit(self) -> bool:
        return self.ending.may_exit

    @property
    def said(self) -> str:
        return explain(self.job, self.now)

    def roster(self) -> list[str]:
        """Return the names in the running round, by group rank; empty if none runs."""
        return [seat.name for seat in self.job.running.seats] if self.job.running is not None else []

    def place(self, player: Player) -> Place:
        return place(self.job, player.uid, self.now)

    # ------------------------------------------------------------------------------------- what happens to all

    def mint(self, name: str) -> str:
        self._minted += 1
        return f"{name}#{self._minted}"

    def enter(
        self, *names: str, slots: int = 1, age_s: float = 0.0, submission: str = "", **spec: object
    ) -> list[Player]:
        """Start launchers that have not spoken yet."""
        new = [
            Player(
                uid=NodeUid(self.mint(name)),
                name=name,
                job_spec=self.spec,
                spec=NodeSpec(slots=slots, **spec),  # type: ignore[arg-type]
                submission=submission,
                born_at=self.now - age_s,
            )
            for name in names
        ]
        self.players.extend(new)
        return new

    def join(self, *names: str, **spec: object) -> list[Player]:
        """Start launchers, and let them be heard, ready, in this order."""
        new = self.enter(*names, **spec)  # type: ignore[arg-type]
        for player in new:
            self.hear(player)
        for player in new:
            self.tell(player)
            self.hear(player)
        return new

    def hear(self, player: Player) -> None:
        """The daemon hears how the player stands now."""
        self.deliver(player.state(self.now))

    def deliver(self, said: NodeHeard) -> None:
        match instance(self.job_or_none, said, self.now):
            case Instance.NEW:
                self._new_job(said)
            case Instance.SUPERSEDED:
                self.player(said.uid).refuse()
                return
            case Instance.WAITS:
                self.outside[said.uid] = why_it_waits(self.job, said, self.now)
                return
            case Instance.THIS:
                pass
        self.outside.pop(said.uid, None)
        self.heard_at[said.uid] = self.now
        self.apply(said)

    def _new_job(self, said: NodeHeard) -> None:
        uid, seed, old = JobUid(self.mint("job")), self.mint("seed"), self.job_or_none
        if old is None:
            self.job_or_none = found("run", said, uid=uid, seed=seed, now=self.now)
        else:
            for player in self.players:
                if player.uid in old.nodes:
                    player.refuse()
            self.job_or_none = superseding(old, said, uid=uid, seed=seed, now=self.now)
        self.ledger.new_job(self.job)

    def forget(self) -> None:
        """The daemon drops the job, which ended some time ago."""
        self.job_or_none = None
        self.ledger.forgotten()

    def apply(self, event: Event) -> None:
        before = self.job
        self.job_or_none = step(before, event, self.now, self.limits)
        self.ledger.saw(before, event, self.job, self.now)

    def tell(self, player: Player) -> None:
        """The player reads its place as it is now."""
        player.obey(self.told(player))

    def told(self, player: Player) -> Told:
        return Told(self.job.uid, self.job.known, valid_round_uid(self.job), place(self.job, player.uid, self.now))

    def player(self, uid: NodeUid) -> Player:
        return next(p for p in self.players if p.uid == uid)

    def lose(self, player: Player, silent_s: float = 1.0, why: str = "its connection broke") -> None:
        """The daemon gives the player up. What it says of its silence is at most what is true."""
        silent_s = min(silent_s, self.now - self.heard_at.get(player.uid, self.now))
        self.apply(NodeLost(uid=player.uid, silent_s=silent_s, why=why))

    def break_stream(self, player: Player) -> None:
        """The player's stream breaks, and with it goes what was on the way."""
        player.outbox.clear()
        player.mail.clear()
        if self.job_or_none is not None:
            self.apply(StreamBroke(uid=player.uid))

    def kill(self, player: Player) -> None:
        """The player's launcher and workers die at once, and the daemon notices by the broken stream."""
        self.die(player)
        self.break_stream(player)
        self.wait(1)
        self.lose(player, silent_s=1)

    def die(self, player: Player) -> None:
        player.exited = player.cut = True
        if player.held is not None:
            player.held = replace(player.held, alive=0)

    def remove(self, player: Player, by: str = "alice", reason: str = "") -> None:
        self.apply(NodeRemoved(uid=player.uid, by=by, reason=reason))

    def restart(self, by: str = "alice", reason: str = "") -> None:
        self.apply(RestartAsked(by=by, reason=reason))

    def close(self, *, success: bool = False) -> None:
        self.apply(CloseAsked(by="alice", reason="", success=success))

    # ---------------------------------------------------------------------------------------------- time

    def wait(self, seconds: float) -> None:
        """Let time pass; the daemon wakes when it asked to."""
        end_at = self.now + seconds
        while self.job_or_none is not None and (at := wakes_at(self.job)) is not None and at <= end_at:
            assert at > self.now, "woken for the past"
            self.now = at
            self.apply(TimePassed())
            if self.job.ending is not None and self.now >= self.job.ending.at + self.spec.timing.ended_s:
                break  # as the engine does, the story forgets it
        self.now = end_at
        if self.job_or_none is not None:
            self.apply(TimePassed())
        self._let_in()

    def _let_in(self) -> None:
        """As the engine does: who waited for the end of another job is heard again when that is not in the way."""
        if self.outside and not in_the_way(self.job, self.now):
            for uid in list(self.outside):
                self.hear(self.player(uid))

    def to_wake(self) -> None:
        at = wakes_at(self.job)
        if at is not None:
            self.wait(at - self.now)

    # ------------------------------------------------------------------------------- everybody behaves well

    def present(self) -> Iterable[Player]:
        return [p for p in self.players if not p.exited and not p.cut]

    def play(self, times: int = 6) -> None:
        """Let everybody who is there read, obey, start and stop what they must, and say so: no time passes.

        Enough times for a broken round to become the next one. Whoever runs goes on running.
        """
        for _ in range(times):
            for player in self.present():
                self.behave(player)

    def behave(self, player: Player, *, speak: bool = True) -> None:
        player.mail.clear()
        if self.job_or_none is not None and player.uid in self.heard_at:
            self.tell(player)
        if player.held is not None and player.held.phase is Phase.STARTING and player.valid:
            player.start()
        if player.alive and (player.held is None or player.held.phase not in LIVE):
            player.stopped()
        if speak and not player.refused:
            for said in [*player.outbox, player.state(self.now)]:  # the last word of one that exits, too
                self.deliver(said)
        player.outbox.clear()
        if player.exited and self.job_or_none is not None:
            self.break_stream(player)

    def run(self, *names: str, **spec: object) -> list[Player]:
        """Join these nodes and bring the first round to running."""
        new = self.join(*names, **spec)
        if self.job.running is None:
            self.wait(self.spec.timing.settle_s)
        self.play(2)
        return new


def failure(rank: int = 0, exit_code: int = 1, **more: object) -> Failure:
    return Failure(rank=rank, exit_code=exit_code, **more)  # type: ignore[arg-type]


__all__ = ["Grow", "Player", "Stage", "Told", "failure", "job_spec"]
