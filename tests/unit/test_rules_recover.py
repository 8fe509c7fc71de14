"""Recover: a daemon without memory learns what ran before it, and never forms two worlds of it."""

from __future__ import annotations

from msgspec.structs import replace

from rendezvousd.core.events import CloseAsked, Event, NodeHeard, NodeLost, TimePassed
from rendezvousd.core.explain import explain
from rendezvousd.core.machine import step, wakes_at
from rendezvousd.core.model import (
    Assignment,
    CauseKind,
    Failure,
    Held,
    Job,
    JobSpec,
    JobUid,
    Known,
    NodeSpec,
    NodeUid,
    Offer,
    Outcome,
    Phase,
    RoundUid,
)
from rendezvousd.core.place import Assigned, Waiting, place, valid_round_uid
from rendezvousd.core.rules.admit import Instance, found, instance
from rendezvousd.core.settings import Timing
from rendezvousd.core.tally import recount

TIMING = Timing()
SPEC = JobSpec(min_nodes=1, max_nodes=3, max_restarts=2)
ROUND = RoundUid("r7")
KNOWN = Known(job_uid=JobUid("elder"), round=7, round_uid=ROUND, group_size=2, restarts_used=1)


class NewDaemon:
    """A daemon that has just begun, and one job of it."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.now = 0.0
        self.superseded: list[str] = []

    def hear(self, event: NodeHeard) -> Job:
        match instance(self.job, event, self.now):
            case Instance.NEW:
                self.job = found("job", event, uid=JobUid("mine"), seed="s", now=self.now, remembers=False)
            case Instance.SUPERSEDED:
                self.superseded.append(event.name)
                assert self.job is not None
                return self.job
            case Instance.THIS | Instance.WAITS:
                pass
        return self.step(event)

    def step(self, event: Event) -> Job:
        assert self.job is not None
        self.job = step(self.job, event, self.now)
        assert self.job.tally == recount(self.job)
        if self.job.ending is None:
            wake = wakes_at(self.job)
            assert wake is None or wake > self.now
        return self.job

    def wait(self, seconds: float) -> Job:
        self.now += seconds
        return self.step(TimePassed())

    def told(self, name: str) -> object:
        assert self.job is not None
        return place(self.job, NodeUid(name), self.now)


def member(name: str, rank: int, phase: Phase = Phase.RUNNING, *failures: Failure, known: Known = KNOWN) -> NodeHeard:
    """A node of round 7 that had two nodes with two workers each."""
    alive = 2 if phase in (Phase.RUNNING, Phase.STARTING) else 0
    seat = Assignment(
        group_rank=rank,
        group_size=2,
        first_rank=2 * rank,
        slots=2,
        world_size=4,
        role_first_rank=2 * rank,
        role_world_size=4,
        restart_count=1,
        master_addr="h",
        master_port=1234,
        master_offer_id="m",
    )
    held = Held(round_uid=ROUND, round=7, phase=phase, alive=alive, failures=failures, assignment=seat)
    offer = Offer(offer_id=f"{name}8", after=ROUND, address="h", port=1) if phase is Phase.STOPPED else None
    return replace(newcomer(name), known=known, held=held, resumed=True, offer=offer, spec=NodeSpec(slots=2))


def newcomer(name: str, after: str = "") -> NodeHeard:
    offer = Offer(offer_id=f"{name}{after}", after=RoundUid(after), address="h", port=1)
    return NodeHeard(uid=NodeUid(name), name=name, job_spec=SPEC, spec=NodeSpec(), offer=offer)


def test_a_complete_round_is_adopted_and_nobody_is_told_to_stop() -> None:
    daemon = NewDaemon()
    job = daemon.hear(member("a", 0))
    assert valid_round_uid(job) == ROUND
    assert isinstance(daemon.told("a"), Waiting)
    assert "1 of 2 nodes of round 7 came back" in explain(job, daemon.now)
    job = daemon.hear(member("b", 1))
    assert job.uid == "elder"
    told = daemon.told("b")
    assert isinstance(told, Assigned)
    assert (told.round.uid, told.round.number, told.seat.group_rank, told.seat.first_rank) == (ROUND, 7, 1, 2)
    assert (told.round.world_size, told.round.restart_count) == (4, 1)
    assert (told.round.master.address, told.round.master.port, told.round.master.offer_id) == ("h", 1234, "m")
    assert (job.known.restarts_used, job.known.round) == (1, 7)


def test_a_member_that_does_not_come_back_is_lost_after_the_window() -> None:
    daemon = NewDaemon()
    daemon.hear(member("a", 0))
    job = daemon.wait(TIMING.recovery_s - 0.1)
    assert valid_round_uid(job) == ROUND
    job = daemon.wait(0.2)
    assert valid_round_uid(job) == ""
    assert job.round is not None
    assert job.round.cause is not None
    assert job.round.cause.kind is CauseKind.NODE_LOST
    daemon.hear(member("a", 0, Phase.STOPPED))
    told = daemon.told("a")
    assert isinstance(told, Assigned)
    assert (told.round.number, told.seat.group_rank, told.round.world_size) == (8, 0, 2)
    assert daemon.job is not None
    assert daemon.job.known.restarts_used == 1, "a loss uses no restart"


def test_the_window_begins_anew_with_each_member_but_is_bounded() -> None:
    spec = replace(SPEC, max_nodes=20)
    known = replace(KNOWN, group_size=20)
    daemon = NewDaemon()
    for i in range(10):
        job = daemon.hear(replace(member(f"n{i}", i, known=known), job_spec=spec))
        daemon.now += TIMING.recovery_s - 1
        job = daemon.step(TimePassed())
        if daemon.now < TIMING.recovery_max_s:
            assert valid_round_uid(job) == ROUND
    assert valid_round_uid(job) == ""


def test_spares_and_newcomers_that_speak_first_wait() -> None:
    daemon = NewDaemon()
    spare = replace(newcomer("s", ROUND), known=KNOWN, resumed=True)
    job = daemon.hear(spare)
    job = daemon.wait(5)
    assert job.running is None, "a round is known to have run"
    daemon.hear(member("a", 0))
    job = daemon.hear(member("b", 1))
    assert job.running is not None
    assert [seat.uid for seat in job.running.seats] == ["a", "b"]


def test_a_round_that_newcomers_formed_before_the_elders_came_back_gives_way() -> None:
    daemon = NewDaemon()
    daemon.hear(newcomer("x"))
    job = daemon.wait(TIMING.settle_s)
    assert job.running is not None
    young = job.running.uid
    x = replace(
        newcomer("x"), known=job.known, held=Held(round_uid=young, round=1, phase=Phase.RUNNING, alive=1), offer=None
    )
    daemon.hear(x)
    job = daemon.hear(member("a", 0))
    assert (job.uid, valid_round_uid(job)) == ("elder", ROUND)
    daemon.hear(x)
    job = daemon.hear(member("b", 1))
    assert isinstance(daemon.told("a"), Assigned)
    assert isinstance(daemon.told("x"), Waiting)
    assert job.running is not None
    assert "x" not in job.running.index


def test_the_greatest_round_heard_of_counts_and_holders_of_an_earlier_one_must_stop() -> None:
    daemon = NewDaemon()
    late = Known(job_uid=JobUid("elder"), round=6, round_uid=RoundUid("r6"), group_size=2)
    behind = member("c", 1, known=late)
    assert behind.held is not None
    daemon.hear(replace(behind, held=replace(behind.held, round_uid=RoundUid("r6"), round=6)))
    assert daemon.job is not None
    assert valid_round_uid(daemon.job) == "r6"
    daemon.hear(member("a", 0))
    assert valid_round_uid(daemon.job) == ROUND
    daemon.hear(member("b", 1))
    assert daemon.job.running is not None
    assert daemon.job.running.uid == ROUND
    assert isinstance(daemon.told("c"), Waiting)


def test_a_failure_that_happened_meanwhile_is_charged_once_and_one_charged_before_is_not_charged_again() -> None:
    for charged, used in ((RoundUid(""), 2), (ROUND, 1)):
        known = replace(KNOWN, charged_round=7 if charged else 0, charged_round_uid=charged)
        daemon = NewDaemon()
        daemon.hear(member("a", 0, Phase.STOPPED, known=known))
        job = daemon.hear(member("b", 1, Phase.FAILED, Failure(rank=2, exit_code=3), known=known))
        assert job.round is not None
        assert job.round.cause is not None
        assert job.round.cause.failure is not None
        assert job.known.restarts_used == used


def test_a_job_whose_members_have_all_succeeded_has_succeeded_also_if_some_have_gone() -> None:
    daemon = NewDaemon()
    daemon.hear(member("a", 0, Phase.SUCCEEDED))
    job = daemon.hear(member("b", 1, Phase.SUCCEEDED))
    assert job.ending is not None
    assert job.ending.outcome is Outcome.SUCCEEDED

    daemon = NewDaemon()
    daemon.hear(member("a", 0, Phase.SUCCEEDED))
    job = daemon.wait(TIMING.recovery_s)
    assert job.ending is not None
    assert job.ending.outcome is Outcome.SUCCEEDED


def test_a_round_that_was_being_stopped_is_followed_by_the_next_at_once() -> None:
    daemon = NewDaemon()
    daemon.hear(member("a", 0, Phase.STOPPED))
    job = daemon.hear(member("b", 1, Phase.STOPPED))
    assert job.running is not None
    assert (job.running.number, job.known.restarts_used) == (8, 1)
    assert job.last_cause is not None
    assert job.last_cause.kind is CauseKind.DAEMON_RESTARTED


def test_a_member_that_goes_while_the_others_are_awaited_does_not_come_back() -> None:
    daemon = NewDaemon()
    daemon.hear(member("a", 0))
    daemon.step(NodeLost(uid=NodeUid("a"), silent_s=1, why="its connection broke"))
    job = daemon.hear(member("b", 1))
    assert job.running is None
    assert job.round is not None
    daemon.hear(member("b", 1, Phase.STOPPED))
    told = daemon.told("b")
    assert isinstance(told, Assigned)
    assert told.round.world_size == 2


def test_nobody_resumed_means_no_wait_at_all() -> None:
    daemon = NewDaemon()
    for name in ("a", "b", "c"):
        job = daemon.hear(newcomer(name))
    assert job.running is not None
    assert job.running.number == 1


def test_a_job_may_be_closed_while_it_is_learnt_about() -> None:
    daemon = NewDaemon()
    daemon.hear(member("a", 0))
    job = daemon.step(CloseAsked(by="op", reason=""))
    assert job.ending is not None
    assert valid_round_uid(job) == ""


def test_a_second_restart_changes_nothing() -> None:
    for _ in range(2):
        daemon = NewDaemon()
        daemon.hear(member("b", 1))
        job = daemon.hear(member("a", 0))
        assert job.running is not None
        assert job.running.uid == ROUND


def test_a_node_that_waited_for_a_first_round_before_the_restart_waits_for_it_now() -> None:
    daemon = NewDaemon()
    daemon.hear(newcomer("x"))
    waited = replace(newcomer("a"), known=Known(job_uid=JobUid("of the daemon before")), resumed=True)
    daemon.hear(waited)
    assert not daemon.superseded
    job = daemon.wait(TIMING.settle_s)
    assert job.running is not None
    assert sorted(seat.uid for seat in job.running.seats) == ["a", "x"]


def test_a_node_of_another_submission_that_waited_before_the_restart_does_not_join_the_job() -> None:
    daemon = NewDaemon()
    daemon.hear(replace(newcomer("x"), submission="one"))
    waited = replace(newcomer("a"), known=Known(job_uid=JobUid("of the daemon before")), resumed=True)
    assert instance(daemon.job, replace(waited, submission="one"), daemon.now) is Instance.THIS
    assert instance(daemon.job, replace(waited, submission="another"), daemon.now) is Instance.WAITS


def test_the_restarts_that_any_node_was_told_of_are_used() -> None:
    daemon = NewDaemon()
    daemon.hear(member("a", 0))
    later = replace(KNOWN, restarts_used=2, charged_round=6, charged_round_uid=RoundUid("r6"))
    job = daemon.hear(member("b", 1, known=later))
    assert job.known.restarts_used == 2
    assert (job.known.charged_round, job.known.charged_round_uid) == (6, "r6")
    assert daemon.hear(member("a", 0)).known.restarts_used == 2


def test_a_job_that_is_still_learning_is_not_replaced_by_a_newcomer() -> None:
    daemon = NewDaemon()
    daemon.hear(replace(newcomer("spare", ROUND), known=KNOWN, resumed=True))
    daemon.step(NodeLost(uid=NodeUid("spare"), silent_s=1.0, why="its connection broke"))
    job = daemon.hear(newcomer("x"))
    assert job.uid == "elder", "its members may come back"
    daemon.hear(member("a", 0))
    job = daemon.hear(member("b", 1))
    assert valid_round_uid(job) == ROUND
    assert job.running is not None


def test_a_job_that_newcomers_began_gives_way_only_while_others_may_come_back() -> None:
    daemon = NewDaemon()
    daemon.hear(newcomer("x"))
    job = daemon.wait(TIMING.recovery_max_s)
    assert job.running is not None
    daemon.hear(member("stale", 0))
    assert daemon.superseded == ["stale"]
    assert daemon.job is not None
    assert daemon.job.uid == "mine"
    assert valid_round_uid(daemon.job) == job.running.uid


def test_a_job_gives_way_to_none_where_the_backend_remembers() -> None:
    job = step(found("job", newcomer("x"), uid=JobUid("mine"), seed="s", now=0.5), newcomer("x"), 0.5)
    job = step(job, TimePassed(), 5.0)
    assert job.running is not None
    assert instance(job, member("stale", 0), 5.1) is Instance.SUPERSEDED


LATER = replace(KNOWN, round=8, round_uid=RoundUid("r8"))


def straggler(size: int = 2) -> NodeHeard:
    """A member of a round after the one that the others know of."""
    said = member("c", 0)
    assert said.held is not None
    held = replace(said.held, round_uid=LATER.round_uid, round=8)
    return replace(said, known=replace(LATER, group_size=size), held=held)


def stopped(said: NodeHeard) -> NodeHeard:
    assert said.held is not None
    return replace(said, held=replace(said.held, phase=Phase.STOPPED, alive=0))


def test_a_straggler_of_a_later_round_does_not_stop_a_round_that_runs() -> None:
    daemon = NewDaemon()
    daemon.hear(member("a", 0))
    daemon.hear(member("b", 1))
    daemon.wait(TIMING.recovery_max_s)
    job = daemon.hear(straggler())
    assert valid_round_uid(job) == ROUND
    assert job.running is not None
    assert job.known.round == 8, "its number is never used again"
    assert isinstance(daemon.told("c"), Waiting)
    job = daemon.step(NodeLost(uid=NodeUid("b"), silent_s=1.0, why="its connection broke"))
    for said in (member("a", 0, Phase.STOPPED), stopped(straggler())):
        job = daemon.hear(replace(said, known=job.known, offer=newcomer(said.name, LATER.round_uid).offer))
    assert job.running is not None
    assert [seat.uid for seat in job.running.seats] == ["a", "c"]
    assert job.running.number == 9


def test_while_nodes_come_back_a_straggler_s_round_is_learnt_about_first() -> None:
    daemon = NewDaemon()
    daemon.hear(member("a", 0))
    daemon.hear(member("b", 1))
    assert valid_round_uid(daemon.hear(straggler())) == LATER.round_uid


def test_a_later_round_that_is_complete_takes_the_place_of_one_that_runs() -> None:
    daemon = NewDaemon()
    daemon.hear(member("a", 0))
    daemon.hear(member("b", 1))
    daemon.wait(TIMING.recovery_max_s)
    job = daemon.hear(straggler(size=1))
    assert valid_round_uid(job) == LATER.round_uid
    assert job.running is not None
    assert [seat.uid for seat in job.running.seats] == ["c"]


def test_a_node_that_says_it_had_a_seat_that_the_round_did_not_have_is_no_member() -> None:
    daemon = NewDaemon()
    daemon.hear(member("a", 0))
    daemon.hear(member("c", 4))
    daemon.hear(member("d", 0))  # nor can two have had the same one
    job = daemon.hear(member("b", 1))
    job = daemon.wait(TIMING.recovery_s + 0.1)
    assert job.round is not None
    assert [seat.group_rank for seat in job.round.seats] == [0, 1]
    assert "c" not in job.round.index
