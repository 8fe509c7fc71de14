"""Who belongs to a job, and to which one of the same name (Admit, Key, Instance)."""

from __future__ import annotations

import enum

from msgspec.structs import replace

from rendezvousd.core.events import NodeHeard
from rendezvousd.core.model import Departure, Job, JobSpec, JobUid, Known, Node, NodeUid
from rendezvousd.core.rules import fence, lost
from rendezvousd.core.rules.recover import begin, stands_alone
from rendezvousd.core.settings import Limits
from rendezvousd.core.tally import drop_node, restance

DAEMON = "rendezvousd"
# The keys of --rdzv-conf that set these.
OPTIONS = {
    "join_s": "join_timeout",
    "settle_s": "last_call_timeout",
    "settle_max_s": "settle_max",
    "grow_s": "grow_timeout",
    "grow_max_s": "grow_max",
    "heartbeat_s": "heartbeat",
    "lease_s": "lease",
    "short_round_s": "short_round",
}
USAGE = 2  # exit code of a launcher that was called wrongly


class Instance(enum.Enum):
    """Which job a node means by a run id."""

    THIS = "this"  # the job that is there
    NEW = "new"  # a new submission: the job that is there gives way
    WAITS = "waits"  # a new submission, for which it is too early: the job that is there is not over yet
    SUPERSEDED = "superseded"  # an earlier one that has given way


def instance(job: Job | None, event: NodeHeard, now: float) -> Instance:
    """Return which job the speaker belongs to.

    An ended job's outcome is for nodes that were in it and for launchers that were started before it ended. A job with
    no node left gives way to a new submission, but for some time not if its nodes were lost by silence: they may return
    with their workers, and a node that agrees with the job's options goes on with it. Submission tokens keep live jobs
    apart and together; a node whose token is another one waits until the job is over.
    """
    if job is None:
        return Instance.NEW
    if event.uid in job.nodes or event.uid in job.gone or event.known.job_uid == job.uid:
        return Instance.THIS
    if gives_way(job, event, now):
        return Instance.THIS
    waited = now < job.provisional_until_at and event.resumed and event.known.round == 0
    if waited and not _other_submission(job, event):
        return Instance.THIS  # it was waiting for a first round when the daemon was restarted, as this job is
    if not waited and event.known.job_uid and (job.known.round > 0 or event.known.round == 0):
        return Instance.SUPERSEDED
    if _joins(job, event, now):
        return Instance.THIS
    return Instance.WAITS if in_the_way(job, now) else Instance.NEW


def _joins(job: Job, event: NodeHeard, now: float) -> bool:
    """Return whether a launcher that was never in this job has a part in it."""
    if _other_submission(job, event):
        return False
    if job.ending is not None:
        return job.ending.timed and event.uptime_s >= now - job.ending.at
    if job.nodes:
        return True
    if disagreement(job.spec, event.job_spec):
        return False
    same = bool(event.submission) and event.submission == job.submission
    return same or job.recovering is not None or lost.may_return(job, now)


def _other_submission(job: Job, event: NodeHeard) -> bool:
    """Return whether both have a token, and not the same one."""
    return bool(event.submission) and bool(job.submission) and event.submission != job.submission


def in_the_way(job: Job, now: float) -> bool:
    """Return whether a new submission must still wait for this job to be over."""
    if job.ending is not None:  # its nodes read the outcome first
        return bool(job.nodes) and now < job.ending.at + fence.longest_lease_s(job)
    return bool(job.nodes) or job.recovering is not None or lost.expected(job, now)


def why_it_waits(job: Job, event: NodeHeard, now: float) -> str:
    """Return why a node has no part in the job of its run id and waits for the end of it, for people."""
    if job.ending is not None:
        return f"job {job.run_id!r} has ended, and its nodes are reading the outcome; then a new one starts"
    if _other_submission(job, event):
        who = f"belongs to submission {job.submission}, and this node to {event.submission}"
    else:
        who = f"has other options ({disagreement(job.spec, event.job_spec)})"
    if job.lost_at is not None and not job.nodes:
        ago_s, left_s = now - job.lost_at, job.lost_at + job.spec.timing.recovery_s - now
        until = (
            f"its nodes were lost {ago_s:.0f} s ago; a new job starts in {max(0.0, left_s):.0f} s unless they return"
        )
    else:
        count = len(job.nodes)
        until = f"this node waits until its {count} node{'s' * (count != 1)} are gone, then it starts a new job"
    return f"job {job.run_id!r} {who}; {until}"


def gives_way(job: Job, event: NodeHeard, now: float) -> bool:
    """Return whether a newcomer began this job though an older one, of which the speaker tells, is still alive."""
    provisional = now < job.provisional_until_at
    return provisional and event.resumed and event.known.round > 0 and event.known.job_uid != job.uid


def found(run_id: str, event: NodeHeard, *, uid: JobUid, seed: str, now: float, remembers: bool = True) -> Job:
    """Return a new job for its first node, which still is to be admitted.

    Numbers go on from the greatest that this node ever heard; its own word for the job's identity is taken, so that the
    nodes of a job whose daemon lost its memory find each other again. `remembers`: what ran before this daemon began,
    when its clock stood at 0, would be known.
    """
    known = event.known if event.known.job_uid else Known(job_uid=uid)
    job = Job(
        run_id=run_id,
        uid=known.job_uid,
        seed=seed,
        spec=event.job_spec,
        began_at=now,
        known=known,
        submission=event.submission,
        provisional_until_at=0.0 if remembers or known.round else event.job_spec.timing.recovery_max_s,
    )
    job = fence.note_lease(job, event.lease_s)
    if not remembers:
        job = fence.lower(fence.fence_unknown(job), now)
    return begin(job, known, now) if known.round else job


def superseding(old: Job, event: NodeHeard, *, uid: JobUid, seed: str, now: float) -> Job:
    """Return a new job that takes over the run id of `old`.

    Rounds go on, so that an offer made before must be made anew, and whoever was shown out stays out: a launcher that
    has not read yet that it is out of the old job could not tell the new one from it.
    """
    job = found(old.run_id, event, uid=uid, seed=seed, now=now)
    old = fence.fence_all(old, now if old.ending is None else old.ending.at)
    job = replace(job, gone=old.gone, departures=old.departures, recovering=None, fences=old.fences)
    if job.known.round >= old.known.round:
        return job
    return replace(job, known=replace(job.known, round=old.known.round, round_uid=old.known.round_uid))


def admit(job: Job, event: NodeHeard, limits: Limits, now: float) -> tuple[Job, Node | None]:
    """Return the job and the node that the speaker becomes in it, still to be placed; None if it was refused."""
    difference = disagreement(job.spec, event.job_spec)
    if difference and job.ending is None:  # whoever comes after the end is only told of it
        gone = Departure(by=DAEMON, reason=f"refused: {difference}", exit_code=USAGE)
        return bar(job, event.uid, gone, limits), None
    if len(job.nodes) >= limits.nodes_per_job:
        reason = f"refused: job {job.run_id!r} has {len(job.nodes)} nodes, the most this daemon attends"
        return bar(job, event.uid, Departure(by=DAEMON, reason=reason, exit_code=1), limits), None
    node = Node(uid=event.uid, name=event.name, arrival=job.arrivals, spec=event.spec)
    job = lost.admitted(job, event.uid, event.name, now)
    return replace(job, arrivals=job.arrivals + 1, last_arrival_at=now), node


def bar(job: Job, uid: NodeUid, departure: Departure, limits: Limits) -> Job:
    """Return the job in which this node is no longer attached and never will be again. The oldest are forgotten."""
    gone = job.gone.set(uid, replace(departure, order=job.departures))
    if len(gone) > limits.tombstones:
        gone = gone.delete(min(gone, key=lambda u: gone[u].order))
    return replace(drop_node(job, uid), gone=gone, departures=job.departures + 1)


def disagreement(job: JobSpec, node: JobSpec) -> str:
    """Return how a node's wishes differ from the job's, for people; empty if they do not.

    A duration that the node does not give is its daemon's default, and no wish: it is taken from the job, which may
    have begun on a daemon with other options.
    """
    parts = []
    if (job.min_nodes, job.max_nodes) != (node.min_nodes, node.max_nodes):
        parts.append(
            f"--nnodes is {job.min_nodes}:{job.max_nodes} in this job, but this node says "
            f"{node.min_nodes}:{node.max_nodes}"
        )
    for name, ours, theirs in (
        ("--max-restarts", job.max_restarts, node.max_restarts),
        ("--on-daemon-loss", job.on_daemon_loss.value, node.on_daemon_loss.value),
        ("grow", job.grow.value, node.grow.value),
    ):
        if ours != theirs:
            parts.append(f"{name} is {ours} in this job, but this node says {theirs}")
    for name in node.given:
        ours, theirs = getattr(job.timing, name), getattr(node.timing, name)
        if round(ours * 1000) != round(theirs * 1000):  # a lease is a quotient on the way here
            default = "" if name in job.given else " by default"
            parts.append(f"{OPTIONS.get(name, name)} is {ours:g} in this job{default}, but this node says {theirs:g}")
    return "; ".join(parts)


def learn(job: Job, event: NodeHeard, now: float) -> Job:
    """Return the job knowing what this node was once told: numbers never go back, restarts are never forgotten.

    A later round than the one that runs was sealed by a daemon before this one. While other members of it may come
    back, they are waited for. After that, a node that was away does not stop a round whose members are all here: only
    the numbers go on from what it tells, unless the later round is complete, too.
    """
    known, mine = event.known, job.known
    if known.job_uid != mine.job_uid or (
        known.round <= mine.round
        and known.restarts_used <= mine.restarts_used
        and known.charged_round <= mine.charged_round
    ):
        return job
    later = known.round > mine.round
    if later:
        mine = replace(mine, round=known.round, round_uid=known.round_uid, group_size=known.group_size)
    if known.restarts_used > mine.restarts_used:
        mine = replace(mine, restarts_used=known.restarts_used)
    if known.charged_round > mine.charged_round:
        mine = replace(mine, charged_round=known.charged_round, charged_round_uid=known.charged_round_uid)
    job = replace(job, known=mine)
    learning = job.running is None or now < job.spec.timing.recovery_max_s or stands_alone(event)
    return begin(job, known, now) if later and learning else restance(job, now)


def give_way(job: Job, event: NodeHeard, now: float) -> Job:
    """Return the job as the older one that the speaker tells of. Whatever was formed meanwhile is over."""
    known = replace(event.known, round=max(event.known.round, job.known.round))
    job = fence.fence_all(job, now)
    job = replace(job, uid=event.known.job_uid, known=known, round=None, last_cause=None, ending=None)
    job = replace(job, provisional_until_at=0.0)
    return begin(job, event.known, now)
