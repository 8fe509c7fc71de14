"""What must hold after every event, whatever came before (DESIGN, Invariants).

The ledger keeps its own books from the events alone and compares them with the job. It calls nothing that decides:
only `place`, `explain` and `wakes_at`, whose answers are what is judged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

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
    CauseKind,
    Grow,
    Job,
    JobUid,
    Node,
    NodeUid,
    OnDaemonLoss,
    Outcome,
    Phase,
    Round,
    RoundUid,
    Seat,
    SitOut,
    Stance,
    Tally,
)
from rendezvousd.core.place import Assigned, place, valid_round_uid

ENDS = (Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED, Phase.FENCED)


@dataclass
class Evidence:
    victim: bool
    at: float
    kind: CauseKind
    uid: NodeUid
    hopeless: bool = False
    spawn: bool = False


@dataclass
class Book:
    """What the ledger knows of the last sealed round."""

    uid: RoundUid
    seats: tuple[Seat, ...]
    sealed_at: float
    evidence: list[Evidence] = field(default_factory=list)
    told: dict[NodeUid, set[object]] = field(default_factory=dict)  # what each member already complained of
    ended: set[NodeUid] = field(default_factory=set)
    done: set[NodeUid] = field(default_factory=set)
    out: set[NodeUid] = field(default_factory=set)  # lost, left or removed since
    unreachable: set[NodeUid] = field(default_factory=set)
    suspended: set[NodeUid] = field(default_factory=set)  # sit out because of their workers' failures
    broken_at: float | None = None

    @property
    def members(self) -> set[NodeUid]:
        return {s.uid for s in self.seats}


class Ledger:
    def __init__(self) -> None:
        self.rosters: dict[RoundUid, tuple[Seat, ...]] = {}
        self.stores: set[str] = set()  # offers that were dealt
        self.charged: set[RoundUid] = set()
        self.greatest = 0
        self.book: Book | None = None
        self.words: dict[NodeUid, NodeHeard] = {}  # the last of each attached node
        self.busy_since: dict[NodeUid, float] = {}
        self.barred: set[NodeUid] = set()
        self.content = True  # no promise was broken so far
        self.faulty: dict[str, tuple[int, int]] = {}  # by name: rounds in a row to blame for, pauses in a row
        self.unheard: dict[NodeUid, float] = {}  # lost, and workers may live there: when it was last heard
        self.spoken: dict[NodeUid, list[NodeHeard]] = {}  # all words, for saying them again

    def new_job(self, job: Job) -> None:
        """A new submission took the run id: all but the numbers starts anew."""
        assert job.ending is None
        assert job.known.restarts_used == 0
        assert job.known.round >= self.greatest
        self.book = None
        self.faulty.clear()
        self.words.clear()
        self.busy_since.clear()

    def saw(self, before: Job, event: Event, after: Job, now: float) -> None:
        """Take in one step of the job. Raises AssertionError when it broke a promise."""
        self.content = False
        self._hear(before, event, now)
        self._refused(before, event, after)
        self._depart(before, after, now)
        if before.running is not None and after.running is not before.running and self._breaks(before, after):
            self._broke(before, event, now)
        self._verdict(before, after, now)
        if after.round is not None and (self.book is None or after.round.uid != self.book.uid):
            self._sealed(before, after, after.round, now)
        self._ended(before, after)
        self._standing(after, event, now)
        self.content = True

    # ----------------------------------------------------------------------------------- keeping the books

    def _hear(self, before: Job, event: Event, now: float) -> None:
        match event:
            case NodeHeard():
                if event.uid not in self.barred or event.uid in before.nodes:
                    self._words(before, event, now)
            case StreamBroke():
                self._stream_broke(before, event.uid, now)
            case NodeLost():
                self._lost(before, event, now - event.silent_s)
            case NodeRemoved():
                self._removed(before, event, now)
            case RestartAsked():
                if before.running is not None:
                    self._evidence(before, Evidence(False, now, CauseKind.OPERATOR, NodeUid("")))
            case CloseAsked() | TimePassed():
                pass
            case _:
                assert_never(event)

    def _stream_broke(self, before: Job, uid: NodeUid, now: float) -> None:
        word = self.words.get(uid)
        if word is None:
            return
        stopped = not self._may_live(uid) or self._overstayed(before, uid, now)
        if before.ending is not None and word.outcome_seen and stopped:
            del self.words[uid]  # it has read the outcome, and exits
        else:  # what it offered stands no longer
            self.words[uid] = replace(word, offer=None)

    def _lost(self, before: Job, event: NodeLost, silent_since: float) -> None:
        # Of whoever is not in the last round, the workers were waited for when that was sealed.
        concerned = self.book is None or event.uid in self.book.members
        if event.uid in self.words and concerned and self._may_live(event.uid):
            # Once the round is broken no answer names it, and none prolongs its leases.
            broken_at = self.book.broken_at if self.book is not None else None
            self.unheard[event.uid] = silent_since if broken_at is None else min(silent_since, broken_at)
        self._gone(before, event.uid, CauseKind.NODE_LOST, silent_since)
        self.words.pop(event.uid, None)
        self.busy_since.pop(event.uid, None)

    def _removed(self, before: Job, event: NodeRemoved, now: float) -> None:
        if event.uid in self.words:
            self.barred.add(event.uid)
            self._gone(before, event.uid, CauseKind.NODE_REMOVED, now, alive=self._may_live(event.uid))

    def _breaks(self, before: Job, after: Job) -> bool:
        """Whether the running round broke, also if the next was sealed in the same step."""
        assert before.running is not None
        if after.round is None or after.round.uid != before.running.uid:
            return True
        return after.round.broken_at is not None

    def _refused(self, before: Job, event: Event, after: Job) -> None:
        """Nobody is refused but for a different spec, or for want of room."""
        if not isinstance(event, NodeHeard) or event.uid in before.nodes or event.uid in self.barred:
            return
        if event.uid in after.gone:
            assert event.job_spec != before.spec or event.leaving or "the most" in after.gone[event.uid].reason
            self.barred.add(event.uid)

    def forgotten(self) -> None:
        """The job was dropped, some time after its end; nothing is known of it any more."""
        self.greatest = 0
        self.book = None
        self.barred.clear()
        self.unheard.clear()

    def _depart(self, before: Job, after: Job, now: float) -> None:
        """Whoever was shown out is forgotten once nothing lives there."""
        for uid in self.words.keys() - set(after.nodes):
            assert uid in self.barred, f"{uid} was forgotten"
            assert not self._may_live(uid) or self._overstayed(before, uid, now), f"{uid} was not waited for"
            del self.words[uid]
            if self.book is not None and uid in self.book.members:
                self.book.ended.add(uid)

    def _may_live(self, uid: NodeUid) -> bool:
        """Whether processes of the last round may live there, as far as it has said."""
        word, book = self.words[uid], self.book
        alive = word.held is not None and word.held.alive > 0
        return alive or (book is not None and uid in book.members and uid not in book.ended)

    def _words(self, before: Job, event: NodeHeard, now: float) -> None:
        book, held = self.book, event.held
        if (held is None or not held.alive) and (event.offer is not None or (held is not None and held.phase in ENDS)):
            self.unheard.pop(event.uid, None)
        self.words[event.uid] = event
        self.spoken.setdefault(event.uid, []).append(event)
        if book is not None and event.uid in book.members:
            if held is not None and held.round_uid == book.uid and event.uid not in book.out:
                self._complaints(before, book, event, now)
            if held is None or held.alive == 0:
                self._part_ends(before, book, event, now)
        alive = held is not None and held.alive > 0
        if event.leaving is not None:
            self._gone(before, event.uid, CauseKind.NODE_LEFT, now, alive=alive)
            self.barred.add(event.uid)
        runs = book is not None and event.uid in book.members - book.out and before.running is not None
        if alive and not runs:
            self.busy_since.setdefault(event.uid, now)
        elif not alive:
            self.busy_since.pop(event.uid, None)

    def _complaints(self, before: Job, book: Book, event: NodeHeard, now: float) -> None:
        assert event.held is not None
        told = book.told.setdefault(event.uid, set())
        for failure in event.held.failures:
            if failure.rank not in told:
                told.add(failure.rank)
                at = now - failure.age_s
                hopeless, spawn, victim = failure.kind == "no-retry", failure.kind == "spawn", failure.victim_hint
                fault = Evidence(victim, at, CauseKind.WORKER_FAILED, event.uid, hopeless, spawn)
                self._evidence(before, fault)
        if event.held.phase is Phase.FAILED and not event.held.failures and "failed" not in told:
            told.add("failed")
            self._evidence(before, Evidence(False, now, CauseKind.WORKER_FAILED, event.uid))
        for what, kind in (("store_lost", CauseKind.STORE_LOST), ("master_unreachable", CauseKind.NETWORK)):
            if getattr(event.held, what) and what not in told:
                told.add(what)
                if kind is CauseKind.NETWORK:
                    book.unreachable.add(event.uid)
                self._evidence(before, Evidence(False, now, kind, event.uid))

    def _part_ends(self, before: Job, book: Book, event: NodeHeard, now: float) -> None:
        held = event.held
        if held is not None and held.round_uid == book.uid and held.phase in ENDS:
            if held.phase is Phase.SUCCEEDED and before.running is not None and event.uid not in book.ended:
                book.done.add(event.uid)
        elif event.offer is None or event.offer.after != book.uid:
            return
        book.ended.add(event.uid)

    def _gone(self, before: Job, uid: NodeUid, kind: CauseKind, at: float, *, alive: bool = False) -> None:
        """A member gave up its seat."""
        book = self.book
        if book is None or uid not in book.members:
            return
        if uid not in book.out and uid not in book.done and not self._has_succeeded(uid):
            self._evidence(before, Evidence(False, at, kind, uid))
        book.out.add(uid)
        if not alive:
            book.ended.add(uid)

    def _has_succeeded(self, uid: NodeUid) -> bool:
        """Whether its workers had all succeeded when it went, be it after the round broke: that broke nothing."""
        held = self.words[uid].held if uid in self.words else None
        return (
            self.book is not None
            and held is not None
            and (held.round_uid, held.phase) == (self.book.uid, Phase.SUCCEEDED)
        )

    def _evidence(self, before: Job, evidence: Evidence) -> None:
        if self.book is not None and before.round is not None and not before.round.final and before.ending is None:
            self.book.evidence.append(evidence)

    # ---------------------------------------------------------------------------------------- what is judged

    def _broke(self, before: Job, event: Event, now: float) -> None:
        book = self.book
        assert book is not None
        assert before.round is not None
        book.broken_at = now
        for uid in book.members - book.ended:
            self.busy_since.setdefault(uid, now)
        if book.evidence or _stopped_unasked(event, book):
            return
        # nobody complained: it can only be growth
        assert before.spec.grow is not Grow.NEVER
        assert len(book.seats) < before.spec.max_nodes
        assert not book.done, "nobody is let in once a member is done"
        assert self._ready_strangers(book.uid)
        if before.spec.grow is Grow.QUIET and isinstance(event, TimePassed):
            assert now - book.sealed_at >= min(before.spec.timing.grow_s, before.spec.timing.grow_max_s)
        book.evidence.append(Evidence(False, now, CauseKind.GROWTH, NodeUid("")))

    def _ready_strangers(self, after: RoundUid) -> list[NodeUid]:
        assert self.book is not None
        return [
            uid
            for uid, word in self.words.items()
            if (uid not in self.book.members or uid in self.book.out | self.book.unreachable | self.book.suspended)
            and word.offer is not None
            and word.offer.after == after
            and uid not in self.barred
        ]

    def _sealed(self, before: Job, after: Job, round_: Round, now: float) -> None:
        """A new round: who sits in it, with what right."""
        last = self.book
        assert round_.uid not in self.rosters, "a round uid is used once"
        assert round_.number > self.greatest, "numbers only grow"
        assert after.known.round == round_.number
        assert after.known.round_uid == round_.uid
        assert before.ending is None
        self.greatest = round_.number
        self.rosters[round_.uid] = round_.seats
        _ranks_tile(round_)
        for seat in round_.seats:
            word = self.words[seat.uid]  # attached, or this raises
            assert seat.uid not in self.barred, "nobody who left or was removed is seated"
            assert word.offer is not None
            assert word.offer.offer_id == seat.offer_id
            assert word.offer.after == before.known.round_uid, "it named the last round as over"
            assert word.held is None or word.held.alive == 0, "no process of an older round lives there"
            assert seat.offer_id not in self.stores, "a store serves one round"
            self.stores.add(seat.offer_id)
        assert before.spec.min_nodes <= len(round_.seats) <= before.spec.max_nodes
        for uid, word in self.words.items():
            if word.held is not None and word.held.alive:
                assert self._overstayed(before, uid, now), f"sealed over live workers on {uid}"
        if last is not None:
            self._verdict_is_complete(before, last, now)
            self._members_first(before, last, round_, now)
            if not last.unreachable:  # who had to cool down, and is back already, is a newcomer
                late = last.suspended | {
                    uid for uid in last.members & set(before.nodes) if self._could_overstay(before, uid, now)
                }
                _ranks_kept(last, last.out, late, round_)
        assert round_.restart_count == after.known.restarts_used
        if before.spec.on_daemon_loss is OnDaemonLoss.STOP:
            gone_s = before.lease_s + before.spec.timing.kill_s
            assert all(now > at + gone_s for at in self.unheard.values()), (
                f"workers may live where nobody hears: {self.unheard}, now {now}, gone after {gone_s}"
            )
        self.unheard.clear()
        self.book = Book(uid=round_.uid, seats=round_.seats, sealed_at=now)

    def _overstayed(self, job: Job, uid: NodeUid, now: float) -> bool:
        """Whether a node had its grace, or the time from stopped to offering, and did not use it."""
        since = self.busy_since.get(uid, now)
        if self.book is not None and self.book.broken_at is not None and uid in self.book.members:
            since = min(since, self.book.broken_at)
        grace_s = job.nodes[uid].spec.stop_grace_s + job.spec.timing.lease_s if uid in job.nodes else 0.0
        alive = (held := self.words[uid].held) is not None and held.alive > 0
        return now - since >= (grace_s if alive else min(grace_s, job.spec.timing.offer_s)) - 1e-6

    def _could_overstay(self, job: Job, uid: NodeUid, now: float) -> bool:
        """Whether enough time has passed since the break that a node may have given up its seat by being late."""
        timing = job.spec.timing
        wait_s = min(timing.offer_s, job.nodes[uid].spec.stop_grace_s + timing.lease_s)
        return self.book is not None and self.book.broken_at is not None and now - self.book.broken_at >= wait_s - 1e-6

    def _members_first(self, before: Job, last: Book, round_: Round, now: float) -> None:
        seated = {s.uid for s in round_.seats}
        assert last.broken_at is not None
        for uid in last.members - last.out - seated:
            excused = bool(last.unreachable) or uid in last.suspended or self._overstayed(before, uid, now)
            assert excused, f"live member {uid} lost its seat"

    def _verdict_is_complete(self, job: Job, book: Book, now: float) -> None:
        for uid in book.members - book.ended:
            attached = uid in self.words
            assert attached, f"{uid} is gone, and so is its part"
            assert self._overstayed(job, uid, now), f"the end of {uid} was not waited for"

    def _verdict(self, before: Job, after: Job, now: float) -> None:
        """The cause, once fixed, is the right one; it is charged once if it is a worker's failure, and never else."""
        charged = after.known.restarts_used - before.known.restarts_used
        assert charged in (0, 1)
        assert after.known.restarts_used <= after.spec.max_restarts
        book, broken = self.book, before.round
        sealed = after.round is not before.round and (
            broken is None or after.round is None or after.round.uid != broken.uid
        )
        final = after.round.final if after.round is not None and not sealed else True
        if book is None or broken is None or broken.final or not final or book.broken_at is None:
            assert not charged
            return
        self._verdict_is_complete(before, book, now)
        first = min(book.evidence, key=lambda e: (not e.hopeless, e.victim, e.at))
        if after.round is not None and not sealed:  # else the next round hides it
            assert after.round.cause is not None
            blamed = after.round.cause
            assert (blamed.kind, blamed.uid) == (first.kind, first.uid), f"blamed {blamed.kind} of {blamed.uid}: {book}"
        fault = first.kind is CauseKind.WORKER_FAILED
        if first.uid in self._suspended(before, after, book, first, now):
            why = after.ending.cause if after.ending is not None else None
            assert after.ending is None or (why is not None and why.kind is not CauseKind.WORKER_FAILED)
            assert first.uid not in after.nodes or after.nodes[first.uid].cooling_until_at is not None
            fault = False
        elif fault and (first.hopeless or before.known.restarts_used == after.spec.max_restarts):
            assert after.ending is not None
            assert after.ending.outcome is Outcome.FAILED
            fault = False
        assert charged == fault, f"{first.kind} was charged {charged} times"
        if charged:
            assert broken.uid not in self.charged
            self.charged.add(broken.uid)

    def _suspended(self, before: Job, after: Job, book: Book, first: Evidence, now: float) -> set[NodeUid]:
        """Return who sits out because its workers keep failing, and not those of its peers; and remember."""
        assert book.broken_at is not None
        names = {s.uid: s.name for s in book.seats}
        lasted = book.broken_at - book.sealed_at >= before.spec.timing.calm_reset_s
        own = [e for e in book.evidence if e.kind is CauseKind.WORKER_FAILED and (e.spawn or not e.victim)]
        if first.kind is not CauseKind.WORKER_FAILED:
            blamed: set[NodeUid] = set()
        elif len({e.uid for e in own}) == 1 or 2 * len({e.uid for e in own}) < len(book.seats):
            blamed = {e.uid for e in own}
        else:
            blamed = {e.uid for e in own if e.spawn}
        was = dict(self.faulty) if not lasted else {}
        if lasted or first.kind is CauseKind.WORKER_FAILED:
            for name in names.values():
                self.faulty.pop(name, None)
        for name in {names[uid] for uid in blamed}:
            rounds, pauses = was.get(name, (0, 0))
            self.faulty[name] = (rounds + 1, pauses)
        spawn = {e.uid for e in own if e.spawn}
        out = {uid for uid in blamed if uid in spawn or self.faulty[names[uid]] != (1, 0)}
        gone = {names[uid] for uid in out if uid not in before.nodes or uid not in after.nodes}
        out |= {uid for uid, node in after.nodes.items() if node.name in gone and uid not in names}
        if first.hopeless or _others(before, after, out, now) < before.spec.min_nodes:
            return set()
        for uid in sorted(out & blamed):
            rounds, _ = self.faulty[names[uid]]
            self.faulty[names[uid]] = (rounds, was.get(names[uid], (0, 0))[1] + 1)
        book.suspended = out
        return out

    def _ended(self, before: Job, after: Job) -> None:
        if before.ending is not None and before.uid == after.uid:
            assert after.ending is not None
            was, is_ = before.ending, after.ending
            assert (was.outcome, was.at, was.exit_code, was.cause) == (is_.outcome, is_.at, is_.exit_code, is_.cause)
            assert is_.may_exit or not was.may_exit
        if after.ending is not None and after.ending.outcome is Outcome.SUCCEEDED and after.ending.cause is None:
            assert self.book is not None
            assert self.book.done == self.book.members

    def _standing(self, job: Job, event: Event, now: float) -> None:
        """What holds at every moment."""
        assert job.tally == _count(job)
        for uid, node in job.nodes.items():
            assert uid in self.words
            assert node.leaving is None or uid in self.barred
        assert self.barred.isdisjoint(self._attached_for_good(job))
        line = explain(job, now)
        assert line
        assert "\n" not in line
        wake = wakes_at(job)
        assert wake is None or wake > now or _forgettable(job, now), f"never asleep: {line}"
        if job.ending is not None or (job.gathering and job.nodes):
            assert wake is not None, f"nobody waits without a timer: {line}"
        assert step(job, event, now) == job or not isinstance(event, NodeHeard), "said twice is said once"
        assert step(job, TimePassed(), now) == job, "what holds now, held already"
        self._places(job, now)

    def _attached_for_good(self, job: Job) -> set[NodeUid]:
        return {uid for uid, node in job.nodes.items() if node.leaving is None}

    def _places(self, job: Job, now: float) -> None:
        """What nodes are told agrees among them."""
        places = {uid: place(job, uid, now) for uid in job.nodes}
        seats = [p for p in places.values() if isinstance(p, Assigned)]
        if job.ending is not None:
            assert valid_round_uid(job) == ""
            told = [p for uid, p in places.items() if job.nodes[uid].leaving is None]
            assert all(p is job.ending for p in told), "all print the same outcome"
            return
        assert {p.round.uid for p in seats} <= {valid_round_uid(job)} - {""}
        if job.running is not None and self.book is not None:
            assert {p.seat.uid for p in seats} == self.book.members - self.book.out
            assert self.book.members - self.book.out <= set(job.nodes), "a round without a member does not run"
            assert self.book.out <= self.book.done, "only whoever is done may go without breaking it"
            assert job.running.seats == self.rosters[job.running.uid], "one roster for ever"


def _others(before: Job, after: Job, out: set[NodeUid], now: float) -> int:
    """Count the nodes without `out` that may be in the next round."""
    cooling = {
        uid
        for job in (before, after)
        for uid, node in job.nodes.items()
        if node.cooling_until_at is not None and node.cooling_until_at > now
    }
    others = set(after.nodes) - out - cooling
    return sum(after.nodes[uid].leaving is None and not after.nodes[uid].overdue for uid in others)


def _forgettable(job: Job, now: float) -> bool:
    return job.ending is not None and now >= job.ending.at + job.spec.timing.ended_s


def _stopped_unasked(event: Event, book: Book) -> bool:
    """A member whose workers were stopped, or which offers itself anew, though nobody asked."""
    if not isinstance(event, NodeHeard) or event.uid not in book.ended - book.done:
        return False
    book.evidence.append(Evidence(False, float("inf"), CauseKind.NETWORK, event.uid))
    return True


def _ranks_tile(round_: Round) -> None:
    taken = [r for s in round_.seats for r in range(s.first_rank, s.first_rank + s.slots)]
    assert taken == list(range(round_.world_size)), "global ranks tile"
    assert [s.group_rank for s in round_.seats] == list(range(len(round_.seats)))
    assert {s.uid: s.group_rank for s in round_.seats} == dict(round_.index.items())
    for role in {s.role for s in round_.seats}:
        seats = [s for s in round_.seats if s.role == role]
        ranks = [r for s in seats for r in range(s.role_first_rank, s.role_first_rank + s.slots)]
        assert ranks == list(range(seats[0].role_world_size)), "role ranks tile"


def _ranks_kept(last: Book, out: set[NodeUid], late: set[NodeUid], round_: Round) -> None:
    """Judge the ranks of survivors; some of those that are `late` may have given up their seats, and be newcomers."""
    old = {s.uid: s.group_rank for s in last.seats if s.uid not in out | late}
    new = {s.uid: s.group_rank for s in round_.seats}
    survivors = old.keys() & new.keys()
    if not survivors:
        return
    assert round_.seats[0].uid in survivors | late, "rank 0 stays with a survivor"
    moved = [u for u in survivors if old[u] < len(new) and old[u] != new[u]]
    assert len(moved) <= 1, "survivors keep their rank"
    if moved:
        assert new[moved[0]] == 0, "a survivor moves only to keep rank 0 among survivors"


def _count(job: Job) -> Tally:
    """Count the nodes by what the fields say."""
    round_, nodes = job.round, list(job.nodes.values())

    def seated(n: Node) -> bool:
        kept = round_ is not None and n.uid in round_.index and n.uid not in round_.forfeits
        return kept and n.leaving is None and not n.overdue

    ready = [n for n in nodes if n.stance is Stance.READY]
    usable = [n for n in nodes if n.leaving is None and not n.overdue and n.cooling_until_at is None]
    out = [n for n in nodes if n.leaving is None and n.cooling_until_at is not None]
    return Tally(
        members=sum(map(seated, nodes)),
        members_ready=sum(map(seated, ready)),
        newcomers_ready=sum(not seated(n) and n in usable for n in ready),
        usable=len(usable),
        unready=sum(n.stance is Stance.UNREADY for n in usable),
        busy=sum(n.stance is Stance.BUSY and not n.overdue for n in nodes),
        sitting_out=len(out),
        suspended=sum(n.sits_out is not SitOut.UNREACHABLE for n in out),
        seen=sum(n.outcome_seen for n in nodes),
    )


__all__ = ["Book", "JobUid", "Ledger"]
