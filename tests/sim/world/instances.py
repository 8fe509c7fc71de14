"""Which job a run id means: a job whose workers can still run is never replaced, and no job gives way for no reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.sim.world.book import Word
from tests.sim.world.machines import Process

if TYPE_CHECKING:
    from tests.sim.world.judge import Judge

# A job whose members were lost by silence stays the same for so long after the last loss (--recovery-max) ...
KEPT_S = 60.0
# ... and so long if the newcomer is of another submission, or has other options: a lease.
KEPT_FROM_OTHERS_S = 5.0
SLACK_S = 1.0
WRITES_S = 1.0  # to etcd, when that is well
YOUNG_S = 60.0  # for so long a daemon without memory may yet hear what was before it


@dataclass
class Found:
    """A job as one daemon, or all daemons of one etcd, have made it known."""

    job_uid: str
    token: str  # and options of the node that was the first to be told of it
    agrees: bool
    formed: bool = False  # it had a round
    members: set[str] = field(default_factory=set)  # that had a seat


class Instances:
    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.of: dict[str, str] = {}  # by node: the job that it was told of last
        self._now: dict[str, Found] = {}  # by daemon without memory; "": all that have one
        self._order: list[str] = []  # jobs, as they appeared
        self._ended: set[str] = set()
        self._tokens: dict[str, str] = {}  # by node that had a seat
        self._mixed: set[str] = set()  # nodes of a job that took others in when it was given way to
        self._gave_way = False
        self._removed: set[str] = set()

    def told(self, daemon: Process, node: Any, place: Any) -> None:
        """A daemon tells a node its place."""
        job = self.judge.job
        if place.WhichOneof("status") == "removed":
            self._refused(node, place)
            return
        if not place.job_uid:
            return
        scope = "" if self.judge.cluster.etcd is not None else daemon.name
        found = self._now.get(scope)
        if found is None or found.job_uid != place.job_uid:
            if found is not None and not self.judge.world.failure:
                self._replaced(daemon, found, node, place.job_uid)
            found = self._now[scope] = Found(place.job_uid, node.options.submission, job.agrees(node))
            self._order += [place.job_uid] if place.job_uid not in self._order else []
        if place.WhichOneof("status") == "assigned":
            found.members.add(node.uid)
        found.formed = found.formed or bool(place.known.round_uid in self.judge.books and place.valid_round_uid)
        if place.WhichOneof("status") == "ended":
            self._ended.add(place.job_uid)
        self.of[node.uid] = place.job_uid

    def seated(self, node: Any, members: set[str], daemon: Process) -> None:
        """A node has a seat beside these: all of the same submission.

        (Where a daemon without memory lets a job that newcomers began give way to an older one, they stay in it.)
        """
        token = node.options.submission
        young = self.judge.cluster.etcd is None and self.judge.world.now < daemon.began_at + YOUNG_S + SLACK_S
        if young and self._gave_way:
            self._mixed |= {node.uid, *members}
        if node.uid in self._mixed:
            return
        for uid in members:
            other = self._tokens.get(uid, "")
            if token and other and token != other:
                self.judge.world.fail("Instance", f"{node.uid} of submission {token} sits beside {uid}, of {other}")
        self._tokens[node.uid] = token

    def removed(self, name: str) -> None:
        """An operator has removed the nodes of this name."""
        self._removed |= {uid for uid in self.of if uid.startswith(f"{name}.")}

    def closed(self) -> None:
        """An operator has closed the job."""
        self._ended |= {found.job_uid for found in self._now.values()}

    def over(self, uid: str) -> bool:
        """Return whether the job has ended, or was replaced, that a node was told of last: another one of its name need
        not wait for its workers."""
        job_uid = self.of.get(uid, "")
        replaced = bool(job_uid) and all(job_uid != found.job_uid for found in self._now.values())
        return job_uid in self._ended or replaced

    def _replaced(self, daemon: Process, old: Found, node: Any, job_uid: str) -> None:
        world = self.judge.world
        text = f"{daemon.name} tells {node.uid} of job {job_uid[:6]}, in the place of {old.job_uid[:6]}"
        if job_uid in self._order:
            self._gave_way = True
            self._gives_way(daemon, old, text)
            return
        if old.job_uid in self._ended or not old.formed:
            return
        if self._used_up(old):
            return
        alike = node.options.submission == old.token and self.judge.job.agrees(node) == old.agrees
        kept_s = KEPT_S if alike else KEPT_FROM_OTHERS_S
        heard = {uid: at for uid in old.members if (at := self._heard_at(uid)) is not None}
        if not heard:
            return
        last = max(heard, key=lambda uid: heard[uid])
        if world.now < heard[last] + kept_s - SLACK_S:
            silent_s = world.now - heard[last]
            world.fail("Instance", f"{text}, of which {last} was heard {silent_s:.1f} s ago, and did not leave")

    def _used_up(self, old: Found) -> bool:
        """Return whether a job may have failed of its workers when none of its nodes was there to be told."""
        judge = self.judge
        failed = any(book.failures and book.members & old.members for book in judge.books.values())
        used = max((judge.greatest[uid].restarts_used for uid in old.members if uid in judge.greatest), default=0)
        return failed and used >= judge.job.plan.max_restarts

    def _gives_way(self, daemon: Process, old: Found, text: str) -> None:
        """To an older job, of which a node tells a daemon that has no memory, and that is young."""
        if self.judge.cluster.etcd is not None:
            self.judge.world.fail("Instance", f"{text}, which was there before, and etcd forgets nothing")
        elif daemon.pauses == 0 and self.judge.world.now > daemon.began_at + YOUNG_S + SLACK_S and old.formed:
            self.judge.world.fail("Instance", f"{text}, long after its start")

    def _heard_at(self, uid: str) -> float | None:
        """Return when a daemon last read from a node, or saw its stream end. None: it left, or was removed."""
        judge = self.judge
        if uid in judge.barred or uid in self._removed:
            return None
        words = [of_daemon[uid] for of_daemon in judge.words.values() if uid in of_daemon]
        if any(word.state.HasField("leaving") for word in words):
            return None
        return max((self._counts(word) for word in words), default=None)

    def _counts(self, word: Word) -> float:
        """Return when it was heard last, not counting what came while a job was written that was founded before."""
        judge = self.judge
        writes_s = 0.1 if judge.cluster.etcd is None else WRITES_S if judge.cluster.calm_backend() else KEPT_S
        late = word.back_at > judge.world.now - writes_s
        return word.before_at if late else max(word.at, word.over_at or 0.0)

    def _refused(self, node: Any, place: Any) -> None:
        self._removed.add(node.uid)
        job, reason = self.judge.job, place.removed.reason
        if not reason.startswith("refused:") or not job.agrees(node):
            return
        if all(found.agrees for found in self._now.values()):
            self.judge.world.fail("Options", f"{node.uid}, whose options are those of all, is {reason}")
