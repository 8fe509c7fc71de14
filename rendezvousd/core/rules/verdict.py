"""Break, blame and budget (Verdict, Charge, Done is kept).

A round breaks on the first evidence. Its cause stays provisional until every member's end is known; then it is fixed
once and charged once.
"""

from __future__ import annotations

from msgspec.structs import replace

from rendezvousd.core.liveness import pause_s
from rendezvousd.core.model import Cause, CauseKind, End, Ending, Job, Node, NodeUid, Outcome, Round, SitOut
from rendezvousd.core.rules.fence import fence_node
from rendezvousd.core.rules.growth import calm_after
from rendezvousd.core.rules.suspects import EVIDENCE_MAX, hopeless, weigh
from rendezvousd.core.tally import drop_node, place_node, restance, sooner, stance

# Nodes that sit out by what is to blame on one round, and are named with it.
NAMES_MAX = 3


def blame(job: Job, cause: Cause, now: float) -> Job:
    """Return the job with `cause` known of its last round, which breaks by it if it was running."""
    round_ = job.round
    if job.ending is not None or round_ is None or round_.final:
        return job
    evidence = tuple(sorted((*round_.evidence, cause), key=_order)[:EVIDENCE_MAX])
    if round_.broken_at is not None:
        return replace(job, round=replace(round_, evidence=evidence))
    round_ = replace(round_, evidence=evidence, broken_at=now)
    return restance(replace(job, round=round_, short_at=None, enough_at=None, waiting_at=None), now)


def end_part(job: Job, uid: NodeUid, end: End) -> Job:
    """Return the job knowing how this member's part in the last round ended. The first word stands."""
    round_ = job.round
    if round_ is None or uid not in round_.index or uid in round_.ends:
        return job
    done = round_.done + (end is End.SUCCEEDED and round_.broken_at is None)
    return replace(job, round=replace(round_, ends=round_.ends.set(uid, end), done=done))


def forfeit(job: Job, uid: NodeUid, end: End) -> Job:
    """Return the job in which this member has given up its seat for good. Its node, if attached, needs a new stance."""
    round_ = job.round
    if round_ is None or uid not in round_.index or uid in round_.forfeits:
        return job
    return replace(job, round=replace(round_, forfeits=round_.forfeits.set(uid, end)))


def done(job: Job, uid: NodeUid) -> bool:
    """Return whether the member's success in the last round is kept: it came before anything broke it."""
    return job.round is not None and job.round.ends.get(uid) is End.SUCCEEDED


def vanish(job: Job, uid: NodeUid, end: End, cause: Cause, now: float) -> Job:
    """Return the job without the node, whose part in the last round ended so; what it breaks is blamed on `cause`."""
    member = job.round is not None and uid in job.round.index and uid not in job.round.forfeits
    kept = done(job, uid)
    job = drop_node(job, uid)
    if not member:
        return end_part(job, uid, end)
    job = end_part(forfeit(job, uid, end), uid, end)
    return job if kept else blame(job, cause, now)


def fix_verdict(job: Job, now: float) -> Job:
    """Return the job with the cause of its broken round fixed and charged, if every member's end is known."""
    round_ = job.round
    if job.ending is not None or round_ is None or round_.broken_at is None or round_.final:
        return job
    if len(round_.ends) < len(round_.seats):
        return job
    assert round_.cause is not None
    apart_at = _apart_at(job, round_)
    job = replace(job, round=replace(round_, final=True), calm=calm_after(job, round_), apart_at=apart_at)
    job, out = weigh(job, round_, now)
    if out:
        job = _suspend(job, out, now)
    if round_.cause.kind is CauseKind.WORKER_FAILED and round_.cause.uid not in out:
        return _charge(job, round_, round_.cause, now)
    if round_.cause.kind is CauseKind.NETWORK:  # who cannot reach a lost host does not suffer for it
        return _cool_down(job, round_, now)
    return job


def _apart_at(job: Job, round_: Round) -> float | None:
    """Return since when members of round after round have not reached each other; None: they have."""
    assert round_.broken_at is not None
    if round_.unreachable:
        return job.apart_at if job.apart_at is not None else round_.sealed_at
    lasted = round_.broken_at - round_.sealed_at >= job.spec.timing.short_round_s
    return None if lasted else job.apart_at  # a short one may have broken before anybody noticed


def give_up_overdue(job: Job, now: float) -> Job:
    """Return the job with every wait that has run out given up. Looks at every node, but only when one is due."""
    if job.scan_at is None or now < job.scan_at:
        return job
    for node in list(job.nodes.values()):
        if node.cooling_until_at is not None and now >= node.cooling_until_at:
            job = place_node(job, replace(node, cooling_until_at=None), now)
            node = job.nodes[node.uid]
        if node.due_at is not None and now >= node.due_at and not node.overdue and job.ending is None:
            job = _give_up(job, node, now)
    scan_at = None
    for node in job.nodes.values():
        scan_at = sooner(scan_at, node)
    return replace(job, scan_at=scan_at)


def _give_up(job: Job, node: Node, now: float) -> Job:
    job = fence_node(job, node, now)
    if job.running is None:
        job = end_part(forfeit(job, node.uid, End.OVERRUN), node.uid, End.OVERRUN)
    # its stance is what it is overdue in: place_node would take a changed one for a step forward
    return place_node(job, replace(node, overdue=True, member=False, stance=stance(job, node)), now)


def _order(cause: Cause) -> tuple[bool, bool, float]:
    """Losses count from when the node fell silent, failures from when they happened; victims of others come last, and
    what cannot be cured by trying again comes first."""
    return (not hopeless(cause), cause.failure is not None and cause.failure.victim_hint, cause.at)


def _charge(job: Job, round_: Round, cause: Cause, now: float) -> Job:
    """Use one restart, or end the job when none is left. A round is charged at most once."""
    known = job.known
    if known.charged_round_uid == round_.uid:
        return job
    if known.restarts_used >= job.spec.max_restarts or hopeless(cause):
        return end_failed(job, cause, now)
    known = replace(
        known, restarts_used=known.restarts_used + 1, charged_round=round_.number, charged_round_uid=round_.uid
    )
    return replace(job, known=known)


def end_failed(job: Job, cause: Cause, now: float) -> Job:
    """Return the job ended as failed, with the exit code of its root cause (128 + n for a signal), else 1."""
    code = 1
    if cause.failure is not None:
        code = 128 + cause.failure.signal if cause.failure.signal else cause.failure.exit_code or 1
    return conclude(job, Ending(outcome=Outcome.FAILED, at=now, exit_code=min(code, 255), cause=cause), now)


def conclude(job: Job, ending: Ending, now: float) -> Job:
    """Return the job ended so. Nothing is waited for any more."""
    return restance(replace(job, ending=ending, short_at=None, enough_at=None, waiting_at=None), now)


def _cool_down(job: Job, round_: Round, now: float) -> Job:
    """Let those that could not reach the bootstrap store sit out; if that is most members, its host instead."""
    culprits = round_.unreachable
    if len(culprits) > 1 and 2 * len(culprits) > len(round_.seats) - 1:
        culprits = frozenset({round_.master.uid})
    for uid in culprits:
        node = job.nodes.get(uid)
        if node is None:
            continue
        until_at = now + pause_s(job.spec.timing, node.unreachables)
        node = replace(node, unreachables=node.unreachables + 1)
        job = _sit_out(job, node, until_at, SitOut.UNREACHABLE, now)
    return job


def _suspend(job: Job, out: frozenset[NodeUid], now: float) -> Job:
    """Let those sit out whose workers keep failing; the cause notes it, as all nodes are told that."""
    said: dict[str, None] = {}
    for node in sorted((job.nodes[uid] for uid in out if uid in job.nodes), key=lambda n: n.arrival):
        suspect = job.suspects[node.name]
        assert suspect.until_at is not None
        said[f"node {node.name} sits out for {suspect.until_at - now:g} s: {suspect.why.text}"] = None
        job = _sit_out(job, node, suspect.until_at, suspect.why, now)
    assert job.round is not None
    cause, *others = job.round.evidence
    cause = replace(cause, note="; ".join(list(said)[:NAMES_MAX]))
    return replace(job, round=replace(job.round, evidence=(cause, *others)))


def _sit_out(job: Job, node: Node, until_at: float, why: SitOut, now: float) -> Job:
    job = forfeit(job, node.uid, End.STOPPED)
    return place_node(job, replace(node, cooling_until_at=until_at, sits_out=why), now)
