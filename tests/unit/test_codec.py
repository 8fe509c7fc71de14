"""The stored form of a job: what is a fact comes back, what is none does not, and little is written for little news."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from immutables import Map
from msgspec.structs import replace

from rendezvousd.core.codec import LATER_S, PART_BYTES, PER_PART, Record, dump, load
from rendezvousd.core.events import NodeHeard, NodeLost
from rendezvousd.core.liveness import pause_s
from rendezvousd.core.machine import step
from rendezvousd.core.model import (
    Assignment,
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
    Offer,
    OnDaemonLoss,
    Outcome,
    Phase,
    Recovery,
    Round,
    RoundUid,
    Seat,
    SitOut,
    Stance,
    Suspect,
    Tally,
)
from rendezvousd.core.records import RecordError, find_unknown
from rendezvousd.core.rules.admit import found
from rendezvousd.core.settings import Timing
from rendezvousd.core.tally import part_open, recount, restance, stance
from tests.stage import Stage, failure

T = TypeVar("T")
THEN, NOW = 500.0, 77.0  # before and after the takeover, on two clocks
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
UIDS = st.text(string.hexdigits, min_size=1, max_size=4)
INSTANTS = st.integers(0, 4000).map(lambda eighths: eighths / 8)  # differences are exact


BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    "str": TEXT,
    "int": st.integers(0, 99),
    "bool": st.booleans(),
    "float": INSTANTS,
    "float | None": st.none() | INSTANTS,
    "NodeUid": UIDS,
    "RoundUid": UIDS,
    "JobUid": UIDS,
    **{
        kind.__name__: st.sampled_from(kind) for kind in (CauseKind, Grow, OnDaemonLoss, Outcome, Phase, SitOut, Stance)
    },
}


def every(kind: type[T], **given: st.SearchStrategy[Any]) -> st.SearchStrategy[T]:
    """Return any value of this kind: also fields that have a default vary, so none is forgotten here or stored."""
    hints = kind.__annotations__
    fields = {name: given[name] if name in given else BY_TYPE[hints[name]] for name in hints}
    return st.fixed_dictionaries(fields).map(lambda values: kind(**values))


CAUSES = every(Cause, failure=st.none() | every(Failure))
DEPARTURES = every(Departure, order=st.integers(0, 3 * PER_PART))
NODES = every(
    Node,
    spec=every(NodeSpec, node_rank=st.none() | st.integers(0, 9)),
    held=st.none()
    | every(Held, alive=st.integers(0, 3), failures=st.just(()), assignment=st.none() | every(Assignment)),
    offer=st.none() | every(Offer),
    leaving=st.none() | DEPARTURES,
    unreachables=st.integers(0, 9),
)
SEATS = every(Seat, slots=st.integers(1, 9))
JOBS = every(
    Job,
    seed=st.just("new"),
    spec=every(JobSpec, timing=every(Timing), given=st.lists(st.sampled_from(Timing.__struct_fields__)).map(tuple)),
    nodes=st.just(Map()),
    gone=st.dictionaries(UIDS.map(lambda uid: NodeUid(f"gone {uid}")), DEPARTURES, max_size=3).map(Map),
    round=st.none(),
    last_cause=st.none() | CAUSES,
    known=every(Known),
    calm=every(Calm),
    ending=st.none() | every(Ending, cause=st.none() | CAUSES),
    recovering=st.none() | every(Recovery, heard=st.just(Map())),
    fences=st.dictionaries(UIDS.map(NodeUid), every(Fence), max_size=3).map(Map),
    suspects=st.dictionaries(TEXT, every(Suspect), max_size=2).map(Map),
    tally=st.just(Tally()),
)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Any job, its parts in agreement with each other as the rules keep them."""
    uids = draw(st.lists(UIDS.map(NodeUid), max_size=4, unique=True))
    seated = uids[: draw(st.integers(0, len(uids)))]
    nodes = {uid: replace(draw(NODES), uid=uid, arrival=order * PER_PART // 2) for order, uid in enumerate(uids)}
    job = replace(draw(JOBS), nodes=Map(nodes), round=draw(rounds(seated)) if seated else None)
    return restance(job, THEN)


@st.composite
def rounds(draw: st.DrawFn, uids: list[NodeUid]) -> Round:
    seats = tuple(replace(draw(SEATS), uid=uid, group_rank=rank) for rank, uid in enumerate(uids))
    ends = st.dictionaries(st.sampled_from(uids), st.sampled_from(End)).map(Map)
    round_ = draw(
        every(
            Round,
            seats=st.just(seats),
            index=st.just(Map((seat.uid, seat.group_rank) for seat in seats)),
            world_size=st.just(sum(seat.slots for seat in seats)),
            forfeits=ends,
            ends=ends,
            evidence=st.lists(CAUSES, max_size=2).map(tuple),
            unreachable=st.frozensets(st.sampled_from(uids)),
        )
    )
    return round_


def rearmed(suspect: Suspect, timing: Timing) -> Suspect:
    if suspect.until_at is None:
        return suspect
    return replace(suspect, until_at=NOW + pause_s(timing, suspect.pauses - 1))


def as_stored(job: Job) -> Job:
    """Return the job without what is no fact: instants, and what nodes say again by themselves."""
    timing, round_, ending = job.spec.timing, job.round, job.ending
    if round_ is not None:
        earliest = min((cause.at for cause in round_.evidence), default=0.0)
        round_ = replace(
            round_,
            sealed_at=NOW,
            broken_at=None if round_.broken_at is None else NOW,
            evidence=tuple(replace(cause, at=NOW + LATER_S + (cause.at - earliest)) for cause in round_.evidence),
        )
    if ending is not None:
        ending = replace(ending, at=NOW, timed=False, cause=ending.cause and replace(ending.cause, at=NOW))
    facts = replace(
        job,
        began_at=NOW,
        round=round_,
        ending=ending,
        last_cause=job.last_cause and replace(job.last_cause, at=NOW),
        recovering=job.recovering and replace(job.recovering, began_at=NOW, last_at=NOW),
        last_arrival_at=NOW,
        answered_until_at=NOW,
        fences=Map((uid, replace(fence, until_at=NOW + fence.bound_s)) for uid, fence in job.fences.items()),
        calm=replace(job.calm, admitted_at=None if job.calm.admitted_at is None else NOW),
        suspects=Map((name, rearmed(suspect, timing)) for name, suspect in job.suspects.items()),
        enough_at=None,
        short_at=None,
        apart_at=None if job.apart_at is None else NOW,
        waiting_at=None,
        lost_at=None if job.lost_at is None else NOW,
        hold_until_at=NOW + timing.recovery_s if job.lost_at is not None and job.nodes else None,
        provisional_until_at=0.0,
    )
    nodes = {}
    for uid, node in job.nodes.items():
        held, unreachable = node.held, node.sits_out is SitOut.UNREACHABLE
        times = node.unreachables if unreachable else job.suspects.get(node.name, Suspect()).pauses
        if held is not None:
            lingers = held.alive > 0 and not part_open(job, node)
            stub = Held(round_uid=held.round_uid, round=held.round, phase=held.phase, alive=held.alive)
            held = stub if lingers else None
        node = replace(node, held=held, offer=None, outcome_seen=False, due_at=None)
        if node.cooling_until_at is not None:
            node = replace(node, cooling_until_at=NOW + pause_s(timing, times - 1))
        nodes[uid] = replace(node, stance=stance(facts, node)) if node.overdue else node
    return restance(replace(facts, nodes=Map(nodes)), NOW)


def again(record: Record) -> Job:
    return load(record.head, record.parts, seed="new", now=NOW)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(jobs(), jobs())
def test_what_is_stored_comes_back(job: Job, older: Job) -> None:
    record = dump(job)
    loaded = again(record)
    assert loaded == as_stored(job)
    assert loaded.tally == recount(loaded)
    anew = dump(loaded)
    assert (anew.head, anew.parts) == (record.head, record.parts)
    changed = dump(job, dump(older))  # nothing of an older record shines through
    assert (changed.head, changed.parts) == (record.head, record.parts)


# ----------------------------------------------------------------------------------------------- what a leader needs


def taken_over(stage: Stage) -> None:
    """Another leader goes on with the record, its clock being another one."""
    stage.now += 1.0
    record = dump(stage.job)
    stage.job_or_none = load(record.head, record.parts, seed="new", now=stage.now)


def test_a_running_round_goes_on_and_its_members_are_believed_alive() -> None:
    stage = Stage("2")
    a, b = stage.run("a", "b")
    before = stage.round
    taken_over(stage)
    assert stage.job.running is not None
    assert stage.round.seats == before.seats
    assert set(stage.job.nodes) == {a.uid, b.uid}
    stage.play(1)
    assert stage.roster() == ["a", "b"]
    assert stage.round.uid == before.uid


@pytest.mark.parametrize("change_after", range(4))
def test_a_failure_is_charged_once_whenever_the_leader_changes(change_after: int) -> None:
    stage = Stage("2", max_restarts=3)
    a, b = stage.run("a", "b")
    a.fail(stage.now, failure(rank=0), alive=1)
    for number, (do, player) in enumerate([(stage.hear, a), (stage.tell, b), (stage.hear, b), (stage.tell, a)]):
        do(player)
        if number == change_after:
            taken_over(stage)
    stage.play(6)
    assert stage.roster() == ["a", "b"]
    assert (stage.round.number, stage.job.known.restarts_used) == (2, 1)


def test_a_success_is_kept_though_its_node_is_never_heard_again() -> None:
    stage = Stage("2")
    a, b = stage.run("a", "b")
    a.finish()
    stage.hear(a)
    taken_over(stage)
    stage.kill(a)
    b.finish()
    stage.hear(b)
    assert stage.ending.exit_code == 0


def test_a_removed_node_stays_out() -> None:
    stage = Stage("1:2")
    a, _ = stage.run("a", "b")
    stage.remove(a, reason="bad memory")
    stage.play(2)
    taken_over(stage)
    stage.hear(a)
    assert isinstance(stage.place(a), Departure)


def test_a_member_that_vanished_with_the_leader_outranks_the_failures_it_caused() -> None:
    stage = Stage("2", max_restarts=3)
    a, b = stage.run("a", "b")
    stage.die(b)
    a.fail(stage.now, failure(rank=0))
    stage.hear(a)
    taken_over(stage)
    # all that the new leader can say of b is that it has been silent since the takeover
    lost = NodeLost(uid=b.uid, silent_s=10.0, why="not heard since another daemon took over")
    job = step(stage.job, lost, stage.now + 10.0)
    assert job.round is not None
    assert job.round.final
    assert job.known.restarts_used == 0


def test_nothing_is_sealed_over_workers_that_only_the_old_leader_heard_of() -> None:
    stage = Stage("1:2", settle_s=0.0)
    stage.run("a")
    (stranger,) = stage.enter("b")
    stranger.held = Held(round_uid=RoundUid("older"), round=1, phase=Phase.STOPPING, alive=1)
    stranger.offer = None
    stage.hear(stranger)
    taken_over(stage)
    assert stage.job.tally.busy == 1


# ------------------------------------------------------------------------------------------------------------- size


def crowd(size: int) -> Job:
    """A job whose first round runs, all nodes having gone through the rules."""
    spec = JobSpec(min_nodes=size, max_nodes=size, max_restarts=1)
    job: Job | None = None
    for number in range(size):
        said = _says(number, spec)
        job = job if job is not None else found("run", said, uid=JobUid("j"), seed="s", now=0.0)
        job = step(job, said, 0.0)
    assert job is not None
    assert job.running is not None
    return job


def _says(number: int, spec: JobSpec, **more: Any) -> NodeHeard:
    uid = NodeUid(f"{number:032x}")
    offer = Offer(offer_id=f"{number:032x}", after=RoundUid(""), address=f"node{number}.cluster", port=40000)
    return NodeHeard(
        **{"uid": uid, "name": f"node{number}", "job_spec": spec, "spec": NodeSpec(), "offer": offer, **more}
    )


def test_ten_thousand_nodes_come_back_and_no_part_is_too_long() -> None:
    job = crowd(10_000)
    record = dump(job)
    assert max(map(len, record.parts.values())) <= PART_BYTES
    assert len(record.head) < 2000
    loaded = again(record)
    assert loaded.round is not None
    assert job.round is not None
    assert loaded.round.seats == job.round.seats
    assert len(loaded.nodes) == 10_000


def test_little_news_rewrites_little() -> None:
    job = crowd(1000)
    record = dump(job)
    assert job.round is not None
    running = Held(round_uid=job.round.uid, round=1, phase=Phase.RUNNING, alive=1)
    job = step(job, _says(700, job.spec, held=running, known=job.known, offer=None), 1.0)
    quiet = dump(job, record)
    assert (_changed(record.parts, quiet.parts), quiet.head) == (set(), record.head)
    job = step(job, _says(700, job.spec, held=running, known=job.known, offer=None, leaving="SIGTERM"), 2.0)
    broken = dump(job, quiet)
    assert _changed(quiet.parts, broken.parts) == {f"nodes/{700 // PER_PART}", "marks", "evidence"}


def _changed(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> set[str]:
    return {name for name in {*old, *new} if old.get(name) != new.get(name)}


def test_long_texts_are_cut_into_parts_that_fit() -> None:
    stage = Stage("2", max_restarts=1)
    a, _ = stage.run("a", "b")
    a.fail(stage.now, Failure(rank=0, text="\0" * PART_BYTES))
    stage.hear(a)
    record = dump(stage.job)
    assert max(map(len, record.parts.values())) == PART_BYTES
    assert again(record).round == as_stored(stage.job).round


# ----------------------------------------------------------------------------------------------------- what is refused


def test_a_record_of_another_major_version_is_refused_with_words() -> None:
    record = dump(crowd(1))
    head = json.dumps({**json.loads(record.head), "version": [2, 5]}).encode()
    with pytest.raises(RecordError, match=r"its version is 2\.5, and this daemon reads 1\.x"):
        load(head, record.parts, seed="s", now=0.0)


def test_what_a_newer_minor_version_added_is_kept_with_its_object_and_goes_with_it() -> None:
    stage = Stage("2", max_restarts=3)
    _, b = stage.run("a", "b")
    b.fail(stage.now, failure(rank=1))
    stage.hear(b)
    record = dump(stage.job)
    head = json.loads(record.head)
    head = {**head, "version": [1, 9], "new": 1}
    head["spec"]["timing"]["new_s"], head["known"]["new"], head["round"]["new"] = 2.0, [3], {"deep": 4}
    parts = {name: json.loads(data) for name, data in record.parts.items()}
    for name in ("nodes/0", "seats/0", "evidence"):
        for number, it in enumerate(parts[name]):
            it["new"] = f"{name} {number}"
    parts["evidence"][0]["failure"]["new"] = "?"
    parts["marks"]["new"] = "marks"
    newer = (json.dumps(head).encode(), {n: json.dumps(p).encode() for n, p in parts.items()} | {"later/0": b"\0"})
    unknown = find_unknown(*newer)
    stage.job_or_none = load(*newer, seed="new", now=stage.now)
    record = dump(stage.job, unknown=unknown)
    assert json.loads(record.head) == head
    assert {n: json.loads(p) for n, p in record.parts.items() if n != "later/0"} == parts
    assert record.parts["later/0"] == b"\0"

    seats = tuple(replace(seat, offer_id=f"another {seat.offer_id}") for seat in stage.round.seats)
    round_ = replace(stage.round, uid=RoundUid("another"), seats=seats, ends=Map(), evidence=())
    later = dump(replace(stage.job, round=round_, nodes=stage.job.nodes.delete(b.uid)), record)
    head = json.loads(later.head)
    assert (head["version"], head["new"], head["known"]["new"]) == ([1, 9], 1, [3])
    assert "new" not in head["round"]
    assert [node.get("new") for node in json.loads(later.parts["nodes/0"])] == ["nodes/0 0"]
    assert [seat.get("new") for seat in json.loads(later.parts["seats/0"])] == [None, None]
    assert later.parts["later/0"] == b"\0"


def test_of_a_record_of_this_version_nothing_is_unknown() -> None:
    record = dump(crowd(2))
    assert find_unknown(record.head, record.parts) is None


@pytest.mark.parametrize("part", ["nodes/0", "seats/0"])
def test_a_damaged_record_is_refused(part: str) -> None:
    record = dump(crowd(1))
    for damage in (b"", b"[[1]]", record.parts[part][:-5]):
        with pytest.raises(RecordError, match="damaged"):
            load(record.head, {**record.parts, part: damage}, seed="s", now=0.0)
    with pytest.raises(RecordError, match="damaged"):
        load(b"{}", record.parts, seed="s", now=0.0)
