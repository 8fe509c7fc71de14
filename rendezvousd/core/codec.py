"""The stored form of a job: facts only.

No instant is stored, as one read from one machine's clock means nothing on another: `load` arms every timer afresh.
Nor is what each node says again by itself when it meets a new leader (its offer, how its workers are), as long as what
followed from it is stored: who ended how, who gave up a seat, what broke the round. So most of what nodes say changes
no record, and a leader that takes over believes members alive until they are heard or their time runs out.

A record is a head and parts, both JSON. A part holds neighbours by order of coming, so that what changes together is
stored together: one node's news rewrites one part, not a megabyte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from immutables import Map
from msgspec.structs import replace

from rendezvousd.core.liveness import pause_s
from rendezvousd.core.model import (
    NO_ROUND,
    Cause,
    End,
    Ending,
    Fence,
    Held,
    Job,
    Node,
    NodeSpec,
    NodeUid,
    Recovery,
    Round,
    Seat,
    SitOut,
    Suspect,
)
from rendezvousd.core.records import (
    DECODERS,
    HEAD_DECODER,
    LISTS,
    MAJOR,
    MINOR,
    RecordError,
    StoredCause,
    StoredCauses,
    StoredEnding,
    StoredFence,
    StoredGone,
    StoredHead,
    StoredMarks,
    StoredNode,
    StoredRecovering,
    StoredRound,
    StoredSuspect,
    StoredWorkers,
    Unknown,
    check_version,
    encode_head,
    encode_part,
    whole_parts,
)
from rendezvousd.core.settings import Timing
from rendezvousd.core.tally import part_open, restance, stance

# Nodes, seats or departures in one part: some 10 KB, which etcd writes as fast as a few bytes, and 160 parts for 10,000
# nodes, so that their names fit into the head with ease.
PER_PART = 64
# Longest part; etcd takes requests of 1.5 MB, and a few names travel with it. Texts of failures can be longer together.
PART_BYTES = 512 << 10

# What broke a round is counted from the takeover, and so long after it (1 ms): a member that is never heard again,
# of which a new leader can only say that it was silent all the time, is taken for the first to fall, and is not charged
# to its peers.
LATER_S = 2**-10


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A job as it is stored. `parts` by name, each at most PART_BYTES long; unchanged ones are the same objects."""

    job: Job
    head: bytes
    parts: Mapping[str, bytes]
    nodes: list[Node]  # of the job, in its order
    whole: Mapping[str, bytes]  # before long ones are cut
    sources: Mapping[str, Sequence[object]]  # what each was made from
    unknown: Unknown | None = field(default=None)


def dump(job: Job, last: Record | None = None, unknown: Unknown | None = None) -> Record:
    """Return the record of a job. Of `last`, a record of the same run id, what has not changed is kept. `unknown` is
    what the record had that this version does not know; that of `last` need not be given again."""
    if unknown is None and last is not None:
        unknown = last.unknown
    nodes = last.nodes if last is not None and last.job.nodes is job.nodes else list(job.nodes.values())
    sources = _sources(job, nodes, last)
    whole = {}
    for name, source in sources.items():
        if last is not None and name in last.sources and _same(last.sources[name], source):
            whole[name] = last.whole[name]
        else:
            kind = name.partition("/")[0]
            whole[name] = encode_part(kind, _PARTS[kind](job, source), unknown)
    parts = {}
    for name, data in whole.items():
        if len(data) <= PART_BYTES:
            parts[name] = data
        else:
            pieces = range(0, len(data), PART_BYTES)
            parts.update({f"{name}+{i}": data[at : at + PART_BYTES] for i, at in enumerate(pieces)})
    if unknown is not None and unknown.uid == job.uid:
        parts.update(unknown.parts)
    head = encode_head(_head(job), unknown)
    return Record(job=job, head=head, parts=parts, nodes=nodes, whole=whole, sources=sources, unknown=unknown)


def load(head: bytes, parts: Mapping[str, bytes], *, seed: str, now: float, overlap_s: float = 0.0) -> Job:
    """Return the stored job, every timer armed afresh at `now`. Until `overlap_s` after it the leader before may have
    answered nodes. Raises RecordError."""
    try:
        check_version("version", msgspec.json.decode(head)["version"], MAJOR)
        return _job(HEAD_DECODER.decode(head), _join(parts), seed, now, now + overlap_s)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise RecordError(f"it is damaged: {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------------------------------------- what is a part


def _sources(job: Job, nodes: list[Node], last: Record | None) -> dict[str, Sequence[object]]:
    """Return what each part is made from: if two are the same, so are the parts."""
    sources = _nodes_sources(job, nodes, last)
    if last is not None and job.gone is last.job.gone:
        sources.update(_kept(last, "gone"))
    else:
        sources.update(_grouped("gone", ((d.order, (uid, d)) for uid, d in job.gone.items())))
    round_, old = job.round, last.job.round if last is not None else None
    if round_ is not None:
        if last is not None and old is not None and old.seats is round_.seats:
            sources.update(_kept(last, "seats"))
        else:
            sources.update(_grouped("seats", ((seat.group_rank, (seat,)) for seat in round_.seats)))
        if round_.ends or round_.forfeits or round_.unreachable:
            sources["marks"] = (round_.uid, round_.ends, round_.forfeits, round_.unreachable)
        if round_.evidence:
            sources["evidence"] = round_.evidence
    if job.fences:
        sources["fences"] = (job.fences,)
    if job.suspects:
        sources["suspects"] = (job.suspects,)
    if job.last_cause is not None or (job.ending is not None and job.ending.cause is not None):
        sources["causes"] = (job.last_cause, job.ending.cause if job.ending is not None else None)
    return sources


def _nodes_sources(job: Job, nodes: list[Node], last: Record | None) -> dict[str, Sequence[object]]:
    """Of `last`, groups are kept in which no node was replaced: one that changed among 10,000 is found within 1 ms."""
    key = _stubs_key(job)
    if last is None or key != _stubs_key(last.job):
        return _grouped("nodes", ((node.arrival, (node,)) for node in nodes), key)
    if nodes is last.nodes:
        return _kept(last, "nodes")
    went, came = _difference(last.nodes, nodes)
    gone = {id(node) for node in went}
    changed: dict[str, list[object]] = {}
    for name in {f"nodes/{node.arrival // PER_PART}" for node in (*went, *came)}:
        changed[name] = [item for item in last.sources.get(name, (key,)) if id(item) not in gone]
    for node in came:
        changed[f"nodes/{node.arrival // PER_PART}"].append(node)
    sources = {**_kept(last, "nodes"), **changed}
    return {name: source for name, source in sources.items() if len(source) > 1}


def _difference(before: list[Node], after: list[Node]) -> tuple[list[Node], list[Node]]:
    """Return which nodes, as objects, are only in the one and only in the other.

    A map keeps its order when one entry changes, so the difference lies between what both begin and end with.
    """
    head = _alike(before, after)
    tail = min(_alike(reversed(before), reversed(after)), min(len(before), len(after)) - head)
    before, after = before[head : len(before) - tail], after[head : len(after) - tail]
    ids_before, ids_after = set(map(id, before)), set(map(id, after))  # both exist, so no id is used twice
    went = [node for node in before if id(node) not in ids_after]
    return went, [node for node in after if id(node) not in ids_before]


def _alike(one: Iterable[Node], other: Iterable[Node]) -> int:
    """Return how many objects both begin with."""
    number = 0
    for a, b in zip(one, other, strict=False):
        if a is not b:
            break
        number += 1
    return number


def _grouped(
    kind: str, items: Iterable[tuple[int, tuple[object, ...]]], *common: object
) -> dict[str, Sequence[object]]:
    groups: dict[int, list[object]] = {}
    for order, item in items:
        groups.setdefault(order // PER_PART, list(common)).extend(item)
    return {f"{kind}/{number}": group for number, group in groups.items()}


def _kept(last: Record, kind: str) -> dict[str, Sequence[object]]:
    return {name: source for name, source in last.sources.items() if name.startswith(f"{kind}/")}


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    """By identity: comparing values would cost as much as encoding them."""
    if one is other:
        return True
    return len(one) == len(other) and all(
        a is b or (type(a) is str and a == b) for a, b in zip(one, other, strict=True)
    )


def _stubs_key(job: Job) -> str:
    """Return what, beside the nodes themselves, decides what is stored of them (see `_stub`)."""
    return job.round.uid if job.round is not None else ""


# -------------------------------------------------------------------------------------------------------- encoding


def _head(job: Job) -> StoredHead:
    round_, ending, recovering = job.round, job.ending, job.recovering
    return StoredHead(
        version=(MAJOR, MINOR),
        run_id=job.run_id,
        uid=job.uid,
        spec=job.spec,
        submission=job.submission,
        arrivals=job.arrivals,
        departures=job.departures,
        known=job.known,
        # of the instant only that there was one
        calm=replace(job.calm, admitted_at=None if job.calm.admitted_at is None else 0.0),
        lease_s=job.lease_s,
        round=None
        if round_ is None
        else StoredRound(
            uid=round_.uid,
            number=round_.number,
            restart_count=round_.restart_count,
            admitted=round_.admitted,
            broken=round_.broken_at is not None,
            final=round_.final,
            done=round_.done,
            notice=round_.notice,
        ),
        recovering=None
        if recovering is None
        else StoredRecovering(uid=recovering.uid, number=recovering.number, size=recovering.size),
        lost=job.lost_at is not None,
        apart=job.apart_at is not None,
        ending=None
        if ending is None
        else StoredEnding(outcome=ending.outcome, exit_code=ending.exit_code, may_exit=ending.may_exit),
    )


def _nodes_part(job: Job, source: Sequence[Any]) -> list[StoredNode]:
    nodes: list[Node] = sorted(source[1:], key=lambda node: node.arrival)
    return [
        StoredNode(
            uid=node.uid,
            name=node.name,
            arrival=node.arrival,
            slots=node.spec.slots,
            role=node.spec.role,
            node_rank=node.spec.node_rank,
            topology=node.spec.topology,
            stop_grace_s=node.spec.stop_grace_s,
            leaving=node.leaving,
            held=_stub(job, node),
            cooling=node.cooling_until_at is not None,
            sits_out=node.sits_out,
            unreachables=node.unreachables,
            overdue=node.overdue,
        )
        for node in nodes
    ]


def _stub(job: Job, node: Node) -> StoredWorkers | None:
    """Return of a node's processes what nothing else tells: that there are some, of a round long over (Quiet)."""
    held = node.held
    if held is None or not held.alive or part_open(job, node):
        return None
    return StoredWorkers(round_uid=held.round_uid, round=held.round, phase=held.phase, alive=held.alive)


def _gone_part(job: Job, source: Sequence[Any]) -> list[StoredGone]:
    pairs = zip(source[::2], source[1::2], strict=True)
    return [StoredGone(uid=uid, departure=gone) for uid, gone in sorted(pairs, key=lambda pair: pair[1].order)]


def _seats_part(job: Job, source: Sequence[Any]) -> Sequence[Seat]:
    return source


def _marks_part(job: Job, source: Sequence[Any]) -> StoredMarks:
    assert job.round is not None
    round_uid, ends, forfeits, unreachable = source
    uids = [seat.uid for seat in job.round.seats]
    return StoredMarks(
        round_uid=round_uid,
        ends="".join(_LETTERS[ends.get(uid)] for uid in uids),
        forfeits="".join(_LETTERS[forfeits.get(uid)] for uid in uids),
        unreachable="".join("x" if uid in unreachable else "." for uid in uids),
    )


def _fences_part(job: Job, source: Sequence[Any]) -> list[StoredFence]:
    return [
        StoredFence(uid=uid, name=found.name, round_uid=found.round_uid, bound_s=found.bound_s)
        for uid, found in sorted(source[0].items())
    ]


def _suspects_part(job: Job, source: Sequence[Any]) -> list[StoredSuspect]:
    return [
        StoredSuspect(
            name=name,
            rounds=it.rounds,
            pauses=it.pauses,
            round=it.round,
            sits_out=it.until_at is not None,
            why=it.why,
        )
        for name, it in sorted(source[0].items())
    ]


def _evidence_part(job: Job, source: Sequence[Any]) -> list[StoredCause]:
    earliest = min(cause.at for cause in source)
    return [_cause(cause, cause.at - earliest) for cause in source]


def _causes_part(job: Job, source: Sequence[Any]) -> StoredCauses:
    last, ending = source
    return StoredCauses(
        last=None if last is None else _cause(last, 0.0),
        ending=None if ending is None else _cause(ending, 0.0),
    )


def _cause(cause: Cause, after_s: float) -> StoredCause:
    return StoredCause(
        kind=cause.kind,
        after_s=after_s,
        text=cause.text,
        note=cause.note,
        uid=cause.uid,
        name=cause.name,
        failure=cause.failure,
    )


_LETTERS: dict[End | None, str] = {
    None: ".",
    End.SUCCEEDED: "s",
    End.FAILED: "f",
    End.STOPPED: "t",
    End.LOST: "l",
    End.LEFT: "e",
    End.OVERRUN: "o",
}
_ENDS = {letter: end for end, letter in _LETTERS.items() if end is not None}
_PARTS = {
    "nodes": _nodes_part,
    "gone": _gone_part,
    "seats": _seats_part,
    "marks": _marks_part,
    "evidence": _evidence_part,
    "causes": _causes_part,
    "fences": _fences_part,
    "suspects": _suspects_part,
}


# -------------------------------------------------------------------------------------------------------- decoding


NO_MARKS = StoredMarks(round_uid=NO_ROUND, ends="", forfeits="", unreachable="")
NO_CAUSES = StoredCauses()


@dataclass(slots=True)
class _Parts:
    """All parts of a record, decoded."""

    nodes: list[StoredNode] = field(default_factory=list)
    gone: list[StoredGone] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)
    evidence: list[StoredCause] = field(default_factory=list)
    fences: list[StoredFence] = field(default_factory=list)
    suspects: list[StoredSuspect] = field(default_factory=list)
    marks: StoredMarks = NO_MARKS
    causes: StoredCauses = NO_CAUSES


def _join(parts: Mapping[str, bytes]) -> _Parts:
    joined = _Parts()
    for (kind, _), data in whole_parts(parts).items():
        found = DECODERS[kind].decode(data)
        if kind in LISTS:
            getattr(joined, kind).extend(found)
        else:
            setattr(joined, kind, found)
    return joined


def _job(head: StoredHead, parts: _Parts, seed: str, now: float, answered_until_at: float) -> Job:
    ending, recovering, causes = head.ending, head.recovering, parts.causes
    job = Job(
        run_id=head.run_id,
        uid=head.uid,
        seed=seed,
        spec=head.spec,
        began_at=now,
        submission=head.submission,
        arrivals=head.arrivals,
        gone=Map((it.uid, it.departure) for it in parts.gone),
        departures=head.departures,
        round=None if head.round is None else _read_round(head.round, parts, now),
        last_cause=_read_cause_or_none(causes.last, now),
        known=head.known,
        calm=replace(head.calm, admitted_at=None if head.calm.admitted_at is None else now),
        suspects=Map([_read_suspect(stored, head.spec.timing, now) for stored in parts.suspects]),
        lease_s=head.lease_s,
        fences=Map([_read_fence(stored, answered_until_at) for stored in parts.fences]),
        answered_until_at=answered_until_at,
        ending=None
        if ending is None
        else Ending(
            outcome=ending.outcome,
            at=now,
            exit_code=ending.exit_code,
            cause=_read_cause_or_none(causes.ending, now),
            may_exit=ending.may_exit,
            timed=False,
        ),
        # the window begins anew, and who was heard says it again
        recovering=None
        if recovering is None
        else Recovery(uid=recovering.uid, number=recovering.number, size=recovering.size, began_at=now, last_at=now),
        lost_at=now if head.lost else None,
        apart_at=now if head.apart else None,
        hold_until_at=now + head.spec.timing.recovery_s if head.lost and parts.nodes else None,
        last_arrival_at=now,
    )
    nodes = [_read_node(job, stored, now) for stored in parts.nodes]
    return restance(replace(job, nodes=Map([(node.uid, node) for node in nodes])), now)


def _read_node(job: Job, stored: StoredNode, now: float) -> Node:
    held, unreachable = stored.held, stored.sits_out is SitOut.UNREACHABLE
    times = stored.unreachables if unreachable else job.suspects.get(stored.name, Suspect()).pauses
    cooldown_s = pause_s(job.spec.timing, times - 1)
    node = Node(
        uid=stored.uid,
        name=stored.name,
        arrival=stored.arrival,
        spec=NodeSpec(
            slots=stored.slots,
            role=stored.role,
            node_rank=stored.node_rank,
            topology=stored.topology,
            stop_grace_s=stored.stop_grace_s,
        ),
        held=None
        if held is None
        else Held(round_uid=held.round_uid, round=held.round, phase=held.phase, alive=held.alive),
        leaving=stored.leaving,
        cooling_until_at=now + cooldown_s if stored.cooling else None,
        sits_out=stored.sits_out,
        unreachables=stored.unreachables,
        overdue=stored.overdue,
    )
    # of an overdue one the stance is what it is overdue in; that of the others is derived when all is there
    return replace(node, stance=stance(job, node)) if node.overdue else node


def _read_suspect(stored: StoredSuspect, timing: Timing, now: float) -> tuple[str, Suspect]:
    until_at = now + pause_s(timing, stored.pauses - 1) if stored.sits_out else None
    return stored.name, Suspect(
        rounds=stored.rounds, pauses=stored.pauses, round=stored.round, until_at=until_at, why=stored.why
    )


def _read_fence(stored: StoredFence, read_at: float) -> tuple[NodeUid, Fence]:
    """The leader before may have read from the node until `read_at`."""
    bound_s = stored.bound_s
    return stored.uid, Fence(name=stored.name, round_uid=stored.round_uid, bound_s=bound_s, until_at=read_at + bound_s)


def _read_round(stored: StoredRound, parts: _Parts, now: float) -> Round:
    seats, marks = tuple(parts.seats), parts.marks
    if not seats:
        raise ValueError("a round without seats")
    return Round(
        uid=stored.uid,
        number=stored.number,
        seats=seats,
        index=Map((seat.uid, seat.group_rank) for seat in seats),
        world_size=sum(seat.slots for seat in seats),
        restart_count=stored.restart_count,
        sealed_at=now,
        admitted=stored.admitted,
        forfeits=Map((seats[i].uid, _ENDS[letter]) for i, letter in enumerate(marks.forfeits) if letter != "."),
        ends=Map((seats[i].uid, _ENDS[letter]) for i, letter in enumerate(marks.ends) if letter != "."),
        evidence=tuple(_read_cause(it, now + LATER_S) for it in parts.evidence),
        unreachable=frozenset(seats[i].uid for i, letter in enumerate(marks.unreachable) if letter != "."),
        broken_at=now if stored.broken else None,
        final=stored.final,
        done=stored.done,
        notice=stored.notice,
    )


def _read_cause_or_none(stored: StoredCause | None, now: float) -> Cause | None:
    return None if stored is None else _read_cause(stored, now)


def _read_cause(stored: StoredCause, now: float) -> Cause:
    return Cause(
        kind=stored.kind,
        at=now + stored.after_s,
        text=stored.text,
        note=stored.note,
        uid=stored.uid,
        name=stored.name,
        failure=stored.failure,
    )
