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
from dataclasses import dataclass
from typing import Any

import msgspec
from immutables import Map
from msgspec.structs import replace

from rendezvousd.core.model import (
    Calm,
    Cause,
    CauseKind,
    Departure,
    End,
    Ending,
    Failure,
    Fence,
    Grow,
    Held,
    Job,
    JobSpec,
    JobUid,
    Known,
    Node,
    NodeSpec,
    NodeUid,
    OnDaemonLoss,
    Outcome,
    Phase,
    Recovery,
    Round,
    RoundUid,
    Seat,
)
from rendezvousd.core.settings import Timing
from rendezvousd.core.tally import part_open, restance, stance

VERSION = 1
# Nodes, seats or departures in one part: some 10 KB, which etcd writes as fast as a few bytes, and 160 parts for 10,000
# nodes, so that their names fit into the head with ease.
PER_PART = 64
# Longest part; etcd takes requests of 1.5 MB, and a few names travel with it. Texts of failures can be longer together.
PART_BYTES = 512 << 10

# What broke a round is counted from the takeover, and so long after it (1 ms): a member that is never heard again,
# of which a new leader can only say that it was silent all the time, is taken for the first to fall, and is not charged
# to its peers.
LATER_S = 2**-10


class RecordError(Exception):
    """A stored record cannot be read. The text says which and why."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A job as it is stored. `parts` by name, each at most PART_BYTES long; unchanged ones are the same objects."""

    job: Job
    head: bytes
    parts: Mapping[str, bytes]
    nodes: list[Node]  # of the job, in its order
    whole: Mapping[str, bytes]  # before long ones are cut
    sources: Mapping[str, Sequence[object]]  # what each was made from


def dump(job: Job, last: Record | None = None) -> Record:
    """Return the record of a job. Of `last`, a record of the same run id, what has not changed is kept."""
    nodes = last.nodes if last is not None and last.job.nodes is job.nodes else list(job.nodes.values())
    sources = _sources(job, nodes, last)
    whole = {}
    for name, source in sources.items():
        if last is not None and name in last.sources and _same(last.sources[name], source):
            whole[name] = last.whole[name]
        else:
            whole[name] = msgspec.json.encode(_PARTS[name.partition("/")[0]](job, source))
    parts = {}
    for name, data in whole.items():
        if len(data) <= PART_BYTES:
            parts[name] = data
        else:
            pieces = range(0, len(data), PART_BYTES)
            parts.update({f"{name}+{i}": data[at : at + PART_BYTES] for i, at in enumerate(pieces)})
    head = msgspec.json.encode(_head(job))
    return Record(job=job, head=head, parts=parts, nodes=nodes, whole=whole, sources=sources)


def load(head: bytes, parts: Mapping[str, bytes], *, seed: str, now: float, overlap_s: float = 0.0) -> Job:
    """Return the stored job, every timer armed afresh at `now`. Until `overlap_s` after it the leader before may have
    answered nodes. Raises RecordError."""
    try:
        fact = msgspec.json.decode(head)
        version = fact["version"]
        if version != VERSION:
            raise RecordError(f"it is of version {version}, and this daemon reads version {VERSION}")
        return _job(fact, _join(parts), seed, now, now + overlap_s)
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


def _head(job: Job) -> dict[str, Any]:
    spec, round_, ending, known = job.spec, job.round, job.ending, job.known
    return {
        "version": VERSION,
        "run_id": job.run_id,
        "uid": job.uid,
        "spec": {
            "min_nodes": spec.min_nodes,
            "max_nodes": spec.max_nodes,
            "max_restarts": spec.max_restarts,
            "on_daemon_loss": spec.on_daemon_loss.value,
            "grow": spec.grow.value,
            "timing": {name: getattr(spec.timing, name) for name in Timing.__struct_fields__},
        },
        "submission": job.submission,
        "arrivals": job.arrivals,
        "departures": job.departures,
        "known": {name: getattr(known, name) for name in Known.__struct_fields__},
        "calm": {name: getattr(job.calm, name) for name in Calm.__struct_fields__},
        "lease_s": job.lease_s,
        "round": None
        if round_ is None
        else {
            "uid": round_.uid,
            "number": round_.number,
            "restart_count": round_.restart_count,
            "admitted": round_.admitted,
            "broken": round_.broken_at is not None,
            "final": round_.final,
            "done": round_.done,
        },
        "recovering": None
        if job.recovering is None
        else {"uid": job.recovering.uid, "number": job.recovering.number, "size": job.recovering.size},
        "upstart": job.upstart,
        "ending": None
        if ending is None
        else {"outcome": ending.outcome.value, "exit_code": ending.exit_code, "may_exit": ending.may_exit},
    }


def _nodes_part(job: Job, source: Sequence[Any]) -> list[Any]:
    nodes: list[Node] = sorted(source[1:], key=lambda node: node.arrival)
    return [
        [
            node.uid,
            node.name,
            node.arrival,
            node.spec.slots,
            node.spec.role,
            node.spec.node_rank,
            node.spec.topology,
            node.spec.stop_grace_s,
            node.leaving and _departure(node.leaving),
            _stub(job, node),
            node.cooling_until_at is not None,
            node.unreachables,
            node.overdue,
        ]
        for node in nodes
    ]


def _stub(job: Job, node: Node) -> list[Any] | None:
    """Return of a node's processes what nothing else tells: that there are some, of a round long over (Quiet)."""
    held = node.held
    if held is None or not held.alive or part_open(job, node):
        return None
    return [held.round_uid, held.round, held.phase.value, held.alive]


def _gone_part(job: Job, source: Sequence[Any]) -> list[Any]:
    pairs = zip(source[::2], source[1::2], strict=True)
    return [[uid, *_departure(gone)] for uid, gone in sorted(pairs, key=lambda pair: pair[1].order)]


def _departure(gone: Departure) -> list[Any]:
    return [gone.by, gone.reason, gone.exit_code, gone.removed, gone.order]


def _seats_part(job: Job, source: Sequence[Any]) -> list[Any]:
    return [[getattr(seat, name) for name in _SEAT] for seat in source]


def _marks_part(job: Job, source: Sequence[Any]) -> list[str]:
    """Return one letter for each seat: how its holder's part ended, how it gave it up, whether it saw the master."""
    assert job.round is not None
    _, ends, forfeits, unreachable = source
    uids = [seat.uid for seat in job.round.seats]
    return [
        "".join(_LETTERS[ends.get(uid)] for uid in uids),
        "".join(_LETTERS[forfeits.get(uid)] for uid in uids),
        "".join("x" if uid in unreachable else "." for uid in uids),
    ]


def _fences_part(job: Job, source: Sequence[Any]) -> list[Any]:
    return [[uid, found.name, found.round_uid, found.bound_s] for uid, found in sorted(source[0].items())]


def _evidence_part(job: Job, source: Sequence[Any]) -> list[Any]:
    earliest = min(cause.at for cause in source)
    return [_cause(cause, cause.at - earliest) for cause in source]


def _causes_part(job: Job, source: Sequence[Any]) -> list[Any]:
    return [cause and _cause(cause, 0.0) for cause in source]


def _cause(cause: Cause, after_s: float) -> list[Any]:
    failure = cause.failure and [getattr(cause.failure, name) for name in _FAILURE]
    return [cause.kind.value, after_s, cause.text, cause.uid, cause.name, failure]


_SEAT = Seat.__struct_fields__
_FAILURE = Failure.__struct_fields__
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
}


# -------------------------------------------------------------------------------------------------------- decoding


def _join(parts: Mapping[str, bytes]) -> dict[str, list[Any]]:
    """Return the lists by kind, in order, whatever they were cut into."""

    def order(name: str) -> tuple[str, int, int]:
        name, _, piece = name.partition("+")
        kind, _, number = name.partition("/")
        return kind, int(number or 0), int(piece or 0)

    whole: dict[tuple[str, int], list[bytes]] = {}
    for name in sorted(parts, key=order):
        kind, number, _ = order(name)
        whole.setdefault((kind, number), []).append(parts[name])
    joined: dict[str, list[Any]] = {}
    for (kind, _), pieces in whole.items():
        joined.setdefault(kind, []).extend(msgspec.json.decode(b"".join(pieces)))
    return joined


def _job(
    fact: Mapping[str, Any], parts: Mapping[str, list[Any]], seed: str, now: float, answered_until_at: float
) -> Job:
    spec, ending, recovering = fact["spec"], fact["ending"], fact["recovering"]
    last_cause, end_cause = (c and _read_cause(c, now) for c in parts.get("causes", (None, None)))
    gone = [(NodeUid(uid), _read_departure(rest)) for uid, *rest in parts.get("gone", ())]
    job = Job(
        run_id=fact["run_id"],
        uid=JobUid(fact["uid"]),
        seed=seed,
        spec=JobSpec(
            min_nodes=spec["min_nodes"],
            max_nodes=spec["max_nodes"],
            max_restarts=spec["max_restarts"],
            on_daemon_loss=OnDaemonLoss(spec["on_daemon_loss"]),
            grow=Grow(spec["grow"]),
            timing=Timing(**spec["timing"]),
        ),
        began_at=now,
        submission=fact["submission"],
        arrivals=fact["arrivals"],
        gone=Map(gone),
        departures=fact["departures"],
        round=fact["round"] and _read_round(fact["round"], parts, now),
        last_cause=last_cause,
        known=Known(**fact["known"]),
        calm=Calm(**fact["calm"]),
        lease_s=fact.get("lease_s", 0.0),  # not in records of before there was one
        fences=Map([_read_fence(stored, answered_until_at) for stored in parts.get("fences", ())]),
        answered_until_at=answered_until_at,
        ending=ending
        and Ending(
            outcome=Outcome(ending["outcome"]),
            at=now,
            exit_code=ending["exit_code"],
            cause=end_cause,
            may_exit=ending["may_exit"],
        ),
        # the window begins anew, and who was heard says it again
        recovering=recovering
        and Recovery(
            uid=RoundUid(recovering["uid"]),
            number=recovering["number"],
            size=recovering["size"],
            began_at=now,
            last_at=now,
        ),
        upstart=fact["upstart"],
        last_arrival_at=now,
    )
    nodes = [_read_node(job, stored, now) for stored in parts.get("nodes", ())]
    return restance(replace(job, nodes=Map([(node.uid, node) for node in nodes])), now)


def _read_node(job: Job, stored: Sequence[Any], now: float) -> Node:
    uid, name, arrival, slots, role, node_rank, topology, stop_grace_s, leaving, held, *rest = stored
    cooling, unreachables, overdue = rest
    timing = job.spec.timing
    cooldown_s = min(timing.cooldown_s * 2.0 ** max(0, unreachables - 1), timing.cooldown_max_s)
    node = Node(
        uid=NodeUid(uid),
        name=name,
        arrival=arrival,
        spec=NodeSpec(slots=slots, role=role, node_rank=node_rank, topology=topology, stop_grace_s=stop_grace_s),
        held=held and Held(round_uid=RoundUid(held[0]), round=held[1], phase=Phase(held[2]), alive=held[3]),
        leaving=leaving and _read_departure(leaving),
        cooling_until_at=now + cooldown_s if cooling else None,
        unreachables=unreachables,
        overdue=overdue,
    )
    # of an overdue one the stance is what it is overdue in; that of the others is derived when all is there
    return replace(node, stance=stance(job, node)) if overdue else node


def _read_fence(stored: Sequence[Any], read_at: float) -> tuple[NodeUid, Fence]:
    """The leader before may have read from the node until `read_at`."""
    uid, name, round_uid, bound_s = stored
    return NodeUid(uid), Fence(name=name, round_uid=RoundUid(round_uid), bound_s=bound_s, until_at=read_at + bound_s)


def _read_departure(stored: Sequence[Any]) -> Departure:
    by, reason, exit_code, removed, order = stored
    return Departure(by=by, reason=reason, exit_code=exit_code, removed=removed, order=order)


def _read_round(fact: Mapping[str, Any], parts: Mapping[str, list[Any]], now: float) -> Round:
    seats = tuple(Seat(**dict(zip(_SEAT, stored, strict=True))) for stored in parts["seats"])
    ends, forfeits, unreachable = parts.get("marks", ("", "", ""))
    return Round(
        uid=RoundUid(fact["uid"]),
        number=fact["number"],
        seats=seats,
        index=Map((seat.uid, seat.group_rank) for seat in seats),
        world_size=sum(seat.slots for seat in seats),
        restart_count=fact["restart_count"],
        sealed_at=now,
        admitted=fact["admitted"],
        forfeits=Map((seats[i].uid, _ENDS[letter]) for i, letter in enumerate(forfeits) if letter != "."),
        ends=Map((seats[i].uid, _ENDS[letter]) for i, letter in enumerate(ends) if letter != "."),
        evidence=tuple(_read_cause(stored, now + LATER_S) for stored in parts.get("evidence", ())),
        unreachable=frozenset(seats[i].uid for i, letter in enumerate(unreachable) if letter != "."),
        broken_at=now if fact["broken"] else None,
        final=fact["final"],
        done=fact["done"],
    )


def _read_cause(stored: Sequence[Any], now: float) -> Cause:
    kind, after_s, text, uid, name, failure = stored
    return Cause(
        kind=CauseKind(kind),
        at=now + after_s,
        text=text,
        uid=NodeUid(uid),
        name=name,
        failure=failure and Failure(**dict(zip(_FAILURE, failure, strict=True))),
    )
