"""Nodes whose workers keep failing while those of their peers do not: they sit out.

The record is kept by node name, not by launcher: a launcher that is started again on a bad host inherits it.
"""

from __future__ import annotations

from collections.abc import Iterable

from immutables import Map
from msgspec.structs import replace

from rendezvousd.core.liveness import pause_s
from rendezvousd.core.model import Cause, CauseKind, Job, Node, NodeUid, Round, SitOut, Suspect
from rendezvousd.core.signals import SPAWN
from rendezvousd.core.tally import place_node

# The likeliest causes kept of one round. More cannot change the verdict; 10,000 nodes may all complain at once.
EVIDENCE_MAX = 32
# A failure of this kind would only happen again: the node says so, and the job ends whatever its budget.
NO_RETRY = "no-retry"
# A node that is to blame for so many rounds in a row sits out.
ROUNDS_IN_A_ROW = 2
# Names that are remembered. More bad hosts than this are no longer a matter of bad hosts.
SUSPECTS_MAX = 64


def hopeless(cause: Cause) -> bool:
    """Return whether trying again cannot cure it."""
    return cause.failure is not None and cause.failure.kind == NO_RETRY


def weigh(job: Job, round_: Round, now: float) -> tuple[Job, frozenset[NodeUid]]:
    """Return the job with its suspects brought up to date after `round_` broke, and the nodes that are to sit out.

    The first failure of a node is nothing special. The second in a row, or one right after it sat out, or a failure to
    start its workers at all, makes it sit out, but only if enough other nodes are there for a round.
    """
    assert round_.broken_at is not None
    lasted = round_.broken_at - round_.sealed_at >= job.spec.timing.calm_reset_s
    if round_.cause is None or round_.cause.kind is not CauseKind.WORKER_FAILED:
        return (_clear(job, round_) if lasted else job), frozenset()
    blamed = _to_blame(round_)
    seats = {uid: round_.seats[round_.index[uid]].name for uid in blamed}
    before = job.suspects
    job = _clear(job, round_, keep=set() if lasted else set(seats.values()))
    for name in sorted(set(seats.values())):
        old = job.suspects.get(name, Suspect())
        job = _remember(job, name, replace(old, rounds=old.rounds + 1, round=round_.number))
    spawn = _spawners(round_)
    out = frozenset(uid for uid, name in seats.items() if uid in spawn or _again(job.suspects[name]))
    if not out or hopeless(round_.cause) or pause_s(job.spec.timing, 0) <= 0:
        return job, frozenset()
    out |= _successors(job, round_, {seats[uid] for uid in out if uid not in job.nodes})
    others = job.tally.usable - sum(uid in job.nodes and job.nodes[uid].usable for uid in out)
    if others < job.spec.min_nodes:
        return job, frozenset()
    for uid, name in sorted(seats.items()):
        if uid in out:
            pauses = 0 if lasted else before.get(name, Suspect()).pauses
            until_at = now + pause_s(job.spec.timing, pauses)
            why = SitOut.SPAWN if uid in spawn else SitOut.FAILING
            job = _remember(job, name, replace(job.suspects[name], pauses=pauses + 1, until_at=until_at, why=why))
    return job, out


def _successors(job: Job, round_: Round, names: set[str]) -> frozenset[NodeUid]:
    """Return the launchers that came in place of members of these names, before it was known what broke the round."""
    if not names:
        return frozenset()
    return frozenset(n.uid for n in job.nodes.values() if n.name in names and n.uid not in round_.index)


def inherit(job: Job, node: Node, now: float) -> Node:
    """Return a newcomer that sits out for as long as the node of the same name before it would have to."""
    suspect = job.suspects.get(node.name)
    if suspect is None or suspect.until_at is None or now >= suspect.until_at:
        return node
    return replace(node, cooling_until_at=suspect.until_at, sits_out=suspect.why)


def take_back(job: Job, now: float) -> Job:
    """Return the job in which nodes whose workers failed no longer sit out, if it has too few nodes without them."""
    if not job.gathering or job.judging or not job.tally.suspended or job.tally.usable >= job.spec.min_nodes:
        return job
    for node in list(job.nodes.values()):
        if node.cooling_until_at is not None and node.sits_out in (SitOut.FAILING, SitOut.SPAWN):
            job = place_node(job, replace(node, cooling_until_at=None), now)
    return job


def _to_blame(round_: Round) -> frozenset[NodeUid]:
    """Return the nodes that failed by themselves, if they are few enough for it to be their fault and not the script's.

    One node of any number is few; of several, fewer than half. A failure to start workers is always the node's own.
    """
    own = [cause for cause in round_.evidence if _own(cause)]
    few = frozenset(cause.uid for cause in own)
    counted = len(round_.evidence) < EVIDENCE_MAX or not _own(round_.evidence[-1])
    if counted and (len(few) == 1 or 2 * len(few) < len(round_.seats)):
        return few
    return _spawners(round_) if counted else frozenset()


def _own(cause: Cause) -> bool:
    victim = cause.failure is not None and cause.failure.victim_hint and cause.failure.kind != SPAWN
    return cause.kind is CauseKind.WORKER_FAILED and not victim


def _spawners(round_: Round) -> frozenset[NodeUid]:
    return frozenset(c.uid for c in round_.evidence if c.failure is not None and c.failure.kind == SPAWN)


def _again(suspect: Suspect) -> bool:
    return suspect.rounds >= ROUNDS_IN_A_ROW


def _clear(job: Job, round_: Round, keep: Iterable[str] = ()) -> Job:
    """Return the job in which the members of `round_` are no suspects, but for those to `keep`."""
    if not job.suspects:
        return job
    members = {seat.name for seat in round_.seats} - set(keep)
    gone = [name for name in job.suspects if name in members]
    suspects = job.suspects
    for name in gone:
        suspects = suspects.delete(name)
    return replace(job, suspects=suspects) if gone else job


def _remember(job: Job, name: str, suspect: Suspect) -> Job:
    suspects: Map[str, Suspect] = job.suspects.set(name, suspect)
    if len(suspects) > SUSPECTS_MAX:
        suspects = suspects.delete(min(suspects, key=lambda n: (suspects[n].round, n)))
    return replace(job, suspects=suspects)
