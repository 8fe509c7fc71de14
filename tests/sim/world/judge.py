"""What must hold in any history, judged from without: from what nodes were told, what daemons read and kept, and what
workers did. Nothing here asks the code that is judged.

The rules carry the names of the protocol. Each complaint begins with one of them.
"""

from __future__ import annotations

import re
from typing import Any

from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.sim.world.book import Book, Facts, Word
from tests.sim.world.instances import Instances
from tests.sim.world.machines import Process, World
from tests.sim.world.network import Stream
from tests.sim.world.texts import place_text, state_text
from tests.sim.world.training import Worker

LEADER = b"/rendezvousd/leader"
SEQ_BYTES = 8
ROUND_UID = re.compile(rb"(?<![0-9a-f])[0-9a-f]{24}(?![0-9a-f])")
# From reading to folding, and a busy daemon's turns.
FOLD_S = 0.05
# Of a commit, when etcd is well.
COMMIT_S = 0.5
# Workers end within the grace, and are found to be gone.
CLEAR_S = 1.5
LEASE_S = 5.0
# How long a daemon without memory may take to hear of what ran before it.
RECOVERY_MAX_S = 60.0
# What a broken stream is forgiven, at least.
GRACE_S = 1.0
# The daemon looks at deadlines ten times a second, by a clock of its own.
SLACK_S = 0.3


class Judge:
    def __init__(self, world: World, cluster: Any, job: Any) -> None:
        self.world, self.cluster, self.job = world, cluster, job
        self.instances = Instances(self)
        self.books: dict[str, Book] = {}
        self.durable: set[str] = set()
        self.words: dict[str, dict[str, Word]] = {}  # by daemon process and node
        self.last: dict[str, str] = {}  # round uid that each daemon process told last as the greatest
        self.valid: dict[str, str] = {}  # and as the one that may run
        self.greatest: dict[str, Any] = {}  # by node: the greatest Known it was told
        self.causes: dict[str, tuple[str, str]] = {}  # by node: the valid round, and why one before broke
        self.barred: dict[str, float] = {}  # nodes told to go for good, or leaving by their own word
        self.charges: dict[str, tuple[str, int]] = {}  # by charged round: the job, and restarts used
        self.endings: dict[str, tuple[Any, ...]] = {}  # by job
        self.stores: dict[str, str] = {}  # by offer: the round whose workers met there
        self.troubled: dict[str, float] = {}  # machines whose connections had trouble, and until when
        self.exits: list[tuple[str, int, str]] = []
        self.said: dict[str, tuple[int, str]] = {}  # by job: how the first of its nodes exited
        self.newest = ""  # the round that was sealed last, of those that etcd keeps
        self.sealed = self.started = 0

    # ------------------------------------------------------------------------------------------------ what passes

    def data(self, stream: Stream, way: str, data: bytes) -> None:
        """A message was said, read, told or heard. Those that repeat the last one are no news."""
        body = data[:-SEQ_BYTES]
        daemon = stream.server.process
        assert daemon is not None
        if way == "told":
            self._leads(daemon, stream)
        if stream.last.get(way) == body:
            if way == "read":
                word = self.words[daemon.name].get(stream.note)
                if word is not None:
                    if self.world.now - word.at > LEASE_S - SLACK_S:
                        word.back_at, word.before_at = self.world.now, word.at
                    word.at = self.world.now
            return
        stream.last[way] = body
        if way in ("said", "read"):
            state = pb.NodeState.FromString(data)
            stream.note, stream.number = state.node_uid, state.stream_no
            if way == "said":
                self._said(stream, state)
            else:
                self._read(daemon, state)
        else:
            place = pb.Place.FromString(data)
            if way == "told":
                self._told(daemon, place)
                self.instances.told(daemon, _owner(stream), place)
            else:
                self._heard(_owner(stream), place)

    def _said(self, stream: Stream, state: Any) -> None:
        node = _owner(stream)
        self.world.say(f"{node.uid} says {state_text(state)}")
        if state.HasField("offer") and node.living():
            self.world.fail("Offer", f"{node.uid} offers itself while {node.living()[0]} lives")

    def _read(self, daemon: Process, state: Any) -> None:
        words = self.words.setdefault(daemon.name, {})
        uid, now = state.node_uid, self.world.now
        old = words.get(uid)
        if old is not None and old.stream_no > state.stream_no:
            return
        word = words[uid] = Word(now, state.stream_no, state)
        if old is not None:
            word.offered, word.busy_since, word.missed = old.offered, old.busy_since, old.missed
            word.back_at, word.before_at = old.back_at, old.before_at
            away_s = now - old.over_at if old.over_at is not None else 0.0
            if away_s > GRACE_S - SLACK_S or now - old.at > LEASE_S - SLACK_S:
                word.missed = self.last.get(daemon.name, "")
                word.back_at, word.before_at = now, max(old.at, old.over_at or 0.0)
                word.busy_since = None  # it is another node to the daemon
        if state.HasField("offer"):
            word.offered = word.offered | {state.offer.after_round_uid}
        if state.held.alive and state.held.assignment.round_uid != self.valid.get(daemon.name, ""):
            word.busy_since = now if word.busy_since is None else word.busy_since
        elif not state.held.alive:
            word.busy_since = None
        if state.HasField("leaving"):
            self.barred.setdefault(uid, now)

    def stream_over(self, stream: Stream) -> None:
        """A daemon sees that a stream has ended."""
        daemon = stream.server.process
        if daemon is not None and stream.note:
            word = self.words.get(daemon.name, {}).get(stream.note)
            if word is not None and word.stream_no == stream.number and word.over_at is None:
                word.over_at = self.world.now

    # ----------------------------------------------------------------------------------------- what daemons keep

    def written(self, daemon: Process | None, data: bytes) -> None:
        """A daemon asks etcd to keep something: what it seals is sealed now, and durable later."""
        if daemon is not None:
            for found in ROUND_UID.findall(data):
                self._seal(daemon, found.decode())

    def etcd_wrote(self, value: bytes) -> None:
        found = {uid.decode() for uid in ROUND_UID.findall(value)}
        self.durable |= found
        kept = [book for uid in found | {self.newest} if (book := self.books.get(uid)) is not None]
        self.newest = max(kept, key=lambda book: book.sealed_at).uid if kept else ""

    def stored(self, daemon: Process, round_uid: str, roster: list[str]) -> None:
        """A daemon keeps a job in its memory, whose last round has these members."""
        if round_uid:
            if round_uid not in self.books:
                self._seal(daemon, round_uid)
                for uid in roster:
                    self._seated(self.books[round_uid], uid)
            self.durable.add(round_uid)

    def _seal(self, daemon: Process, uid: str) -> None:
        if uid in self.books:
            return
        now, name = self.world.now, daemon.name
        facts = {}
        for node, word in self.words.get(name, {}).items():
            state = word.state
            facts[node] = Facts(
                over_for_s=now - word.over_at if word.over_at is not None else 0.0,
                silent_s=now - word.at,
                alive=state.held.alive,
                held=state.held.assignment.round_uid,
                busy_for_s=now - word.busy_since if word.busy_since is not None else 0.0,
                offer_after=state.offer.after_round_uid if state.HasField("offer") else None,
                offered=word.offered,
                missed=word.missed,
                leaving=state.HasField("leaving"),
            )
        self.books[uid] = Book(uid, now, self._round_before(daemon), facts, daemon)
        self.sealed += 1
        self.world.say(f"{name} seals {uid[:6]}")
        slack = SLACK_S + (0.0 if self.cluster.calm_backend() else 60.0)
        for node, fact in facts.items():
            attached = fact.over_for_s < FOLD_S and fact.silent_s < LEASE_S - SLACK_S and not self.instances.over(node)
            patience = self.job.plan.grace_s + LEASE_S - slack
            # One that returned in this instant may not have been folded yet.
            known = FOLD_S < fact.busy_for_s < patience
            if attached and fact.alive and fact.held != uid and known:
                self.world.fail(
                    "Quiet", f"{uid[:6]} is sealed while {node} says that {fact.alive} live of {fact.held[:6]}"
                )

    def _round_before(self, daemon: Process) -> str:
        """Return the last round that a daemon knows of: it told of it, found it in etcd, or heard of it."""
        if (told := self.last.get(daemon.name)) is not None:
            return told
        if self.cluster.etcd is not None:
            return self.newest
        heard = [word.state.known for word in self.words.get(daemon.name, {}).values()]
        return max(((known.round, known.round_uid) for known in heard), default=(0, ""))[1]

    # ------------------------------------------------------------------------------------------- what nodes are told

    def _leads(self, daemon: Process, stream: Stream) -> None:
        etcd = self.cluster.etcd
        if etcd is None:
            return
        leader = etcd.kvs.get(LEADER)
        if leader is not None and leader.value.decode() != daemon.owner.address:
            self.world.fail("One leader", f"{daemon.name} tells {stream.note} though {leader.value.decode()} leads")

    def _told(self, daemon: Process, place: Any) -> None:
        for uid in (place.known.round_uid, place.valid_round_uid):
            if uid and uid not in self.durable:
                self.world.fail("Durable before visible", f"{daemon.name} tells of {uid[:6]}, which nobody keeps")
        if place.known.round_uid:
            self.last[daemon.name] = place.known.round_uid
        if self.valid.get(daemon.name) != place.valid_round_uid and place.job_uid:
            broken = self.valid.get(daemon.name, "")
            self._stopped_for(daemon, broken, place.valid_round_uid)
            self.valid[daemon.name] = place.valid_round_uid
            if broken in self.books and self.books[broken].broken_at is None:
                self.books[broken].broken_at = self.world.now
            for word in self.words.get(daemon.name, {}).values():
                if word.state.held.alive and word.state.held.assignment.round_uid != place.valid_round_uid:
                    word.busy_since = self.world.now if word.busy_since is None else word.busy_since

    def _stopped_for(self, daemon: Process, broken: str, later: str) -> None:
        """A round that runs gives way to a later one of an earlier daemon only if that is complete, or soon."""
        book = self.books.get(later)
        if not broken or book is None or book.daemon is daemon or self.cluster.etcd is not None or daemon.pauses:
            return
        words = self.words.get(daemon.name, {})
        there = {uid for uid, word in words.items() if word.state.held.assignment.round_uid == later}
        late = self.world.now > daemon.began_at + RECOVERY_MAX_S + SLACK_S
        if late and (book.told is None or len(there) < book.told[1]):
            self.world.fail(
                "Recover", f"{daemon.name} stops {broken[:6]} for {later[:6]}, of which it heard {len(there)}"
            )

    def _heard(self, node: Any, place: Any) -> None:
        self.world.say(f"{node.uid} hears {place_text(place)}")
        self._known(node, place)
        self._cause(node, place)
        kind = place.WhichOneof("status")
        if kind == "assigned":
            self._assigned(node, place.assigned)
        elif kind == "removed":
            self.barred.setdefault(node.uid, self.world.now)
        elif kind == "ended":
            self._ended(node, place)
        elif kind == "waiting" and not place.explain:
            self.world.fail("Explain", f"{node.uid} waits without a reason")
        if place.job_uid:
            for worker in node.living():
                if worker.round_uid != place.valid_round_uid:
                    patience = self.job.plan.grace_s + CLEAR_S
                    self.world.after(patience, self._cleared, node, node.process, worker)

    def _cleared(self, node: Any, process: Process, worker: Worker) -> None:
        """No process of a stopped round survives its grace."""
        if worker.alive and node.process is process and not process.dead and not self._in_trouble(node.name, 60.0):
            self.world.fail("Stop", f"{worker} lives on, long after {node.uid} heard that its round is over")

    def _known(self, node: Any, place: Any) -> None:
        known, before = place.known, self.greatest.get(node.uid)
        if not known.job_uid:
            return
        if before is not None and before.job_uid == known.job_uid:
            if known.round < before.round:
                self.world.fail("Numbers grow", f"{node.uid} hears of round {known.round} after {before.round}")
            # (a daemon that has no memory, and does not hear of the last round, makes another one of that number)
            remembers = self.cluster.etcd is not None
            if remembers and known.round == before.round and known.round_uid != before.round_uid:
                self.world.fail("Identity", f"{node.uid} hears of two rounds {known.round}")
            if known.restarts_used < before.restarts_used:
                self.world.fail("Charge", f"{node.uid} hears of fewer restarts than before")
        if known.restarts_used > self.job.restarts_max:
            self.world.fail("Charge", f"{known.restarts_used} restarts used of {self.job.restarts_max}")
        self.greatest[node.uid] = known
        uid = known.charged_round_uid
        if uid:
            used = self.charges.setdefault(uid, (known.job_uid, known.charged_round))
            if used != (known.job_uid, known.charged_round):
                self.world.fail("Charge", f"round {uid[:6]} has two numbers")
            self._charged(uid, known)

    def _charged(self, uid: str, known: Any) -> None:
        book = self.books.get(uid)
        if book is None:
            self.world.fail("Charge", f"{uid[:6]}, which was never sealed, is charged")
            return
        if not book.failures:
            self.world.fail("Charge", f"{uid[:6]} is charged, and no worker of it failed")
        elif self.cluster.plan.all_gentle and book.deaths and not any(w.own_fault for w in book.failures):
            self.world.fail("Charge", f"{uid[:6]} is charged for the loss of {book.deaths[0]}")

    def _cause(self, node: Any, place: Any) -> None:
        """Nobody is lost who was there. What broke a round is told as long as the next one runs, and judged once."""
        cause = place.break_cause
        valid, said = self.causes.get(node.uid, ("", ""))
        self.causes[node.uid] = place.valid_round_uid, cause.text
        over = place.WhichOneof("status") == "ended"  # with a round that may not have broken
        old = cause.text == said and (over or not valid or valid == place.valid_round_uid)
        if old or cause.kind != pb.NODE_LOST or not self.cluster.plan.all_punctual:
            return
        lost = self.cluster.node_of(cause.node_uid)
        if not cause.node_uid:  # some did not come back to a new daemon
            if not any(self._in_trouble(name, 120.0) for name in self.job.nodes):
                self.world.fail("Stall", f"nodes are given up ({cause.text}), and none was away")
        elif lost is not None and lost.uid == cause.node_uid and not self._in_trouble(lost.name, 60.0):
            self.world.fail("Stall", f"{lost.uid} is given up ({cause.text}), and was there all the time")

    def _in_trouble(self, machine: str, within_s: float) -> bool:
        return self.world.now - within_s < self.troubled.get(machine, -1e9)

    def _ended(self, node: Any, place: Any) -> None:
        ended = place.ended
        told = (ended.outcome, ended.exit_code, ended.root_cause.text, ended.root_cause.node_uid)
        key = place.job_uid if self.cluster.etcd is not None else f"{place.term} {place.job_uid}"
        if self.endings.setdefault(key, told) != told:
            self.world.fail("One outcome", f"{node.uid} hears of {told}, others of {self.endings[key]}")

    # -------------------------------------------------------------------------------------------------- rounds

    def _assigned(self, node: Any, seat: Any) -> None:
        uid = node.uid
        book = self.books.get(seat.round_uid)
        if book is None:
            self.world.fail("Durable before visible", f"{uid} is dealt a seat of {seat.round_uid[:6]}, never sealed")
            return
        told = (
            seat.round,
            seat.group_size,
            seat.world_size,
            seat.master_addr,
            seat.master_port,
            seat.master_offer_id,
            seat.restart_count,
        )
        book.told = book.told or told
        if book.told != told:
            self.world.fail("One roster", f"members of {seat.round_uid[:6]} are told {book.told} and {told}")
        place = (uid, seat.first_rank, seat.slots)
        first = seat.group_rank not in book.seats
        if book.seats.setdefault(seat.group_rank, place) != place:
            self.world.fail("One roster", f"group rank {seat.group_rank} of {book.uid[:6]}: {place} and others")
        if first:
            book.number = seat.round
            self._tiles(book, seat)
            self._seated(book, uid)
            self.instances.seated(node, book.members, book.daemon)
            if len(book.seats) == seat.group_size:
                self._members_first(book)

    def _tiles(self, book: Book, seat: Any) -> None:
        taken: dict[int, str] = {}
        for uid, first, slots in book.seats.values():
            for rank in range(first, first + slots):
                if rank in taken or rank >= seat.world_size:
                    self.world.fail(
                        "Ranks tile", f"rank {rank} of {seat.world_size} in {book.uid[:6]} is dealt wrongly"
                    )
                taken[rank] = uid
        if len(book.seats) == seat.group_size and len(taken) != seat.world_size:
            self.world.fail("Ranks tile", f"{book.uid[:6]} has {len(taken)} of {seat.world_size} ranks")

    def _seated(self, book: Book, uid: str) -> None:
        """Whether this node was rightly dealt a seat when the round was sealed."""
        fact = book.facts.get(uid)
        if fact is None:
            self.world.fail("Offer", f"{uid} has a seat in {book.uid[:6]} and was never heard by {book.daemon.name}")
            return
        if self.barred.get(uid, 1e9) < book.sealed_at - FOLD_S - COMMIT_S:
            self.world.fail("Leaving", f"{uid} is gone for good, and dealt a seat of {book.uid[:6]}")
        if book.before not in fact.offered:
            named = sorted(after[:6] for after in fact.offered)
            self.world.fail("Offer", f"{uid} is dealt a seat after {book.before[:6]}, having named {named} as over")
        tolerance = FOLD_S + 20 * book.daemon.turn_s + (COMMIT_S if self.cluster.etcd is not None else 0.0)
        if fact.over_for_s > tolerance and self.cluster.calm_backend():
            self.world.fail(
                "Offer", f"{uid} is dealt a seat of {book.uid[:6]}, its stream gone for {fact.over_for_s:.2f} s"
            )

    def _members_first(self, book: Book) -> None:
        last = self.books.get(book.before)
        if last is None or last.broken_at is None or not last.seats or not book.members - last.members:
            return
        for uid in sorted(last.members - book.members):
            fact = book.facts.get(uid)
            if fact is None or fact.leaving or uid in self.barred or fact.over_for_s > 0 or fact.silent_s > 2.5:
                continue
            if fact.missed == book.before:
                continue  # it was lost, and is a newcomer now
            if self._failed_twice(uid, last):
                continue  # it may sit out
            if (
                fact.offer_after == book.before
                and not fact.alive
                and last.told is not None
                and not self.cluster.plan.any_harsh
            ):
                self.world.fail("Members first", f"{uid} loses its seat in {book.uid[:6]} to a newcomer")

    def _failed_twice(self, uid: str, last: Book) -> bool:
        """Return whether workers of this node failed in this round and in the one before."""
        before = self.books.get(last.before)
        return before is not None and all(
            any(worker.node.uid == uid for worker in book.failures) for book in (last, before)
        )

    # -------------------------------------------------------------------------------------------------- workers

    def worker_started(self, worker: Worker) -> None:
        self.started += 1
        self.world.say(f"{worker} starts")
        for other in worker.node.living():
            if other.round_uid != worker.round_uid:
                self.world.fail("Quiet", f"{worker} starts while {other} lives")
        if self.job.plan.wide.stop:
            for other in [other for node in self.job.nodes.values() for other in node.living()]:
                if other.round_uid != worker.round_uid:
                    self.world.fail("Daemon loss", f"{worker} starts while {other} lives")
        book = self.books.get(worker.round_uid)
        if book is None or book.told is None:
            self.world.fail("One roster", f"{worker} starts, of a round that nobody was told of")
        elif (worker.world_size, *worker.master, worker.restart_count) != (*book.told[2:5], book.told[6]):
            self.world.fail("One roster", f"{worker} is told other things than its round's members")

    def worker_met(self, worker: Worker, offer_id: str) -> None:
        book = self.books[worker.round_uid]
        if offer_id != book.told[5]:
            self.world.fail("Namespaces", f"{worker} meets at the store of {offer_id}, not of {book.told[5]}")
        if self.stores.setdefault(offer_id, worker.round_uid) != worker.round_uid:
            self.world.fail("Namespaces", f"{worker} meets at a store of {self.stores[offer_id][:6]}")

    def worker_ended(self, worker: Worker) -> None:
        how = f"signal {worker.signal}" if worker.signal else f"code {worker.exit_code}"
        self.world.say(f"{worker} ends ({how}{', as told' if worker.told_to_stop else ''})")
        book = self.books.get(worker.round_uid)
        if book is not None and (worker.exit_code or worker.signal) and not worker.told_to_stop:
            book.failures.append(worker)

    def node_died(self, node: Any) -> None:
        self.trouble(node.name)
        for book in self.books.values():
            if book.broken_at is None and node.uid in book.members:
                book.deaths.append(node.uid)

    def trouble(self, machine: str, seconds: float = 0.0) -> None:
        """A machine's connections have an excuse until some time from now."""
        self.troubled[machine] = max(self.world.now + seconds, self.troubled.get(machine, -1e9))

    def exited(self, node: Any, code: int, text: str) -> None:
        self.trouble(node.name)
        said = text.partition("] ")[2]
        self.world.say(f"{node.uid} exits with {code}: {said}")
        if not said.startswith("job "):
            return
        first = self.said.setdefault(self.instances.of.get(node.uid, ""), (code, said))
        if self.cluster.etcd is not None and first != (code, said):
            self.world.fail("One outcome", f"{node.uid} exits with {code}: {said}; others with {first}")
        self.exits.append((node.uid, code, said))


def _owner(stream: Stream) -> Any:
    """Return the node whose stream it is."""
    assert stream.client.process is not None
    return stream.client.process.owner
