"""Nobody takes the place of workers that may still live (`--on-daemon-loss=stop`).

A node of such a job kills its workers a lease after it *sent* the last heartbeat whose answer named their round as the
valid one. So a daemon that has lost a node knows when they are gone, without a word from it: a lease, and the time from
kill to gone, after it *read* that heartbeat, both stretched by how much the two clocks may differ. Until then a fence
stands where the node was, and no round is sealed. The node's own word that its workers have stopped takes it down.

What the daemon read last, and not what it acknowledged last, is what counts here: it is the same or later.
"""

from __future__ import annotations

from immutables import Map
from msgspec.structs import replace

from rendezvousd.core import liveness
from rendezvousd.core.events import NodeHeard, NodeLost
from rendezvousd.core.liveness import Pace
from rendezvousd.core.model import NO_ROUND, Fence, Job, Node, NodeUid, OnDaemonLoss, Phase, RoundUid
from rendezvousd.core.settings import Timing
from rendezvousd.core.tally import part_open, resumes

# No clock of a node or daemon goes faster or slower than true time by more than this part. NTP slews by at most 500
# millionths, and a quartz is off by some 100.
CLOCK_RATE = 0.001
# A node whose stream was cut needs so long for a round trip, and to set up a connection to a daemon that is there.
ROUND_TRIP_S = 0.2
# TERM is sent up to a quarter of a lease before its end: a daemon must be back by then.
KEPT = 3 / 4
# What a daemon without memory does not know of: whatever ran before it began.
UNKNOWN = NodeUid("")

# A node that says this of a round has no worker of it, and never will have.
OVER = (Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED, Phase.FENCED)


# ------------------------------------------------------------------------------------------------ the arithmetic


def bound_s(lease_s: float, kill_s: float) -> float:
    """Return how long after the daemon read a node's last acknowledged heartbeat its workers may live, in seconds of
    the daemon's clock; `lease_s` is the longest that the node can have been told."""
    return (lease_s / (1 - CLOCK_RATE) + kill_s) * (1 + CLOCK_RATE)


def overlap_s(leader_ttl_s: float) -> float:
    """Return for how long a leader that has been followed may still take itself for one, in seconds of its follower's
    clock. By rights it does not: etcd ends a lease when its holder must know. But a member of an older etcd that was
    stuck while another took over from it ends leases that were renewed there; and so may people."""
    return leader_ttl_s * (1 + CLOCK_RATE) / (1 - CLOCK_RATE)


def outage_s(heartbeat_s: float, takeover_s: float, retry_max_s: float) -> float:
    """Return how long a node may go without an acknowledgement though nothing is wrong but a slow failover: the
    heartbeat that met no leader, until there is one (0: nobody takes over), the node's pause, and its call."""
    return heartbeat_s + takeover_s + retry_max_s + ROUND_TRIP_S


def lease_min_s(timing: Timing, takeover_s: float) -> float:
    """Return what the lease of a job must exceed so that a slow failover stops nobody."""
    return outage_s(timing.heartbeat_s, takeover_s, liveness.pace(timing, 1).retry_max_s) / KEPT


def fenced_timing(timing: Timing, takeover_s: float) -> Timing:
    """Return the timing with a lease that is long enough, in whole seconds if it was not."""
    least_s = lease_min_s(timing, takeover_s)
    if timing.lease_s > least_s:
        return timing
    return replace(timing, lease_intervals=(int(least_s) + 1) / timing.heartbeat_s)


# ------------------------------------------------------------------------------------------------ what nodes are told


def stops(job: Job) -> bool:
    """Return whether the workers of this job end when their nodes hear no daemon."""
    return job.spec.on_daemon_loss is OnDaemonLoss.STOP


def longest_lease_s(job: Job) -> float:
    """Return the longest lease that a node of this job can have been told, in seconds."""
    return max(job.lease_s, liveness.pace(job.spec.timing, len(job.nodes)).lease_s)


def pace(job: Job) -> Pace:
    """Return what the nodes of such a job are told of time: never a lease that is not on record."""
    told = liveness.pace(job.spec.timing, len(job.nodes))
    return replace(told, lease_s=job.lease_s)


def note_lease(job: Job, told_s: float = 0.0) -> Job:
    """Return the job with the longest lease on record that its nodes may be told from now on, or were told before
    (`told_s`). Fences that stand are moved by as much as it grows."""
    if not stops(job):
        return job
    lease_s = max(longest_lease_s(job), told_s)
    if lease_s <= job.lease_s:
        return job
    kill_s = job.spec.timing.kill_s
    more_s = bound_s(lease_s, kill_s) - bound_s(job.lease_s, kill_s)
    fences = Map(
        (uid, replace(f, bound_s=f.bound_s + more_s, until_at=f.until_at + more_s)) for uid, f in job.fences.items()
    )
    return replace(job, lease_s=lease_s, fences=fences)


# ------------------------------------------------------------------------------------------------ fences


def may_live(job: Job, node: Node) -> bool:
    """Return whether workers may live on this node, or be started, that were dealt a place once."""
    held = node.held
    starting = resumes(job, node) and held is not None and held.phase not in OVER
    return bool(node.alive) or starting or part_open(job, node)


def fence(job: Job, uid: NodeUid, name: str, round_uid: RoundUid, read_at: float) -> Job:
    """Return the job waiting for what may live on a node from which the daemon has read nothing since `read_at`."""
    if not stops(job):
        return job
    lasts_s = bound_s(job.lease_s, job.spec.timing.kill_s)
    until_at = max(read_at, job.answered_until_at) + lasts_s
    before = job.fences.get(uid)
    if before is not None and before.until_at >= until_at:
        return job
    new = Fence(name=name, round_uid=round_uid, bound_s=lasts_s, until_at=until_at)
    return replace(job, fences=job.fences.set(uid, new))


def fence_node(job: Job, node: Node, read_at: float) -> Job:
    """Return the job waiting for what may live on this node, if anything."""
    if not may_live(job, node):
        return job
    here = job.round.uid if job.round is not None and part_open(job, node) else NO_ROUND
    round_uid = here or (node.held.round_uid if node.held is not None else NO_ROUND)
    return fence(job, node.uid, node.name, round_uid, read_at)


def fence_lost(job: Job, event: NodeLost, now: float) -> Job:
    """Return the job waiting for what may live on a node that was lost. (If it was read again since it was given up,
    the job is about to hear from it, and waits for it as for anybody who has not stopped.)"""
    node = job.nodes.get(event.uid)
    return job if node is None else fence_node(job, node, now - event.silent_s)


def fence_all(job: Job, read_at: float) -> Job:
    """Return the job waiting for whatever may live of it: its last round, or all of it, gives way to another."""
    for node in job.nodes.values():
        job = fence_node(job, node, read_at)
    return job


def fence_unknown(job: Job) -> Job:
    """Return the job of a daemon that knows nothing from before it began, when its clock stood at 0."""
    return fence(job, UNKNOWN, "", NO_ROUND, 0.0)


def heard(job: Job, event: NodeHeard) -> Job:
    """Return the job knowing that the speaker's workers are gone, if it says so, and under which lease it runs."""
    job = note_lease(job, event.lease_s)
    found = job.fences.get(event.uid)
    if found is None or not _proves(event, found.round_uid):
        return job
    return replace(job, fences=job.fences.delete(event.uid))


def _proves(event: NodeHeard, round_uid: RoundUid) -> bool:
    """To offer is to promise that no process of the round which the offer names, or of an earlier one, lives."""
    held = event.held
    if held is not None and (held.alive or held.round_uid != round_uid):
        return False
    if held is not None and held.phase in OVER:
        return True
    return event.offer is not None and event.offer.after == round_uid


def due_at(job: Job) -> float | None:
    """Return when the last fence falls; None if there is none."""
    return max((f.until_at for f in job.fences.values()), default=None)


def lower(job: Job, now: float) -> Job:
    """Return the job without fences, once the last one's time has come."""
    at = due_at(job)
    return replace(job, fences=Map()) if at is not None and now >= at else job
