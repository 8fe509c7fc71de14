"""Who belongs to a job, and to which one of the same name (Admit, Key, Instance)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rendezvousd.core.model import Departure, Ending, Grow, JobSpec, OnDaemonLoss, Outcome
from rendezvousd.core.place import Wait, Waiting
from rendezvousd.core.rules.admit import disagreement
from rendezvousd.core.settings import Limits, Timing
from rendezvousd.rpc.convert import read_spec
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.stage import Stage, failure, job_spec


def test_admit_a_node_whose_spec_disagrees_is_refused_with_the_difference() -> None:
    stage = Stage("2:3", max_restarts=1)
    stage.join("a")
    (b,) = stage.enter("b")
    b.job_spec = job_spec("1:4", max_restarts=2)
    stage.hear(b)
    assert stage.place(b) == Departure(
        by="rendezvousd",
        reason="refused: --nnodes is 2:3 in this job, but this node says 1:4; "
        "--max-restarts is 1 in this job, but this node says 2",
        exit_code=2,
    )
    assert list(stage.job.nodes) == [stage.players[0].uid], "nobody else is harmed"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"min_nodes": 1}, "--nnodes is 2:2 in this job, but this node says 1:2"),
        ({"on_daemon_loss": OnDaemonLoss.STOP}, "--on-daemon-loss is continue in this job, but this node says stop"),
        ({"grow": Grow.NEVER}, "grow is quiet in this job, but this node says never"),
        (
            {"timing": Timing(join_s=60), "given": ("join_s",)},
            "join_timeout is 600 in this job by default, but this node says 60",
        ),
        ({"timing": Timing(join_s=600), "given": ("join_s",)}, ""),
        ({"timing": Timing(join_s=60)}, ""),
        (
            {"timing": Timing(short_rounds_max=3), "given": ("short_rounds_max",)},
            "short_rounds_max is 20 in this job by default, but this node says 3",
        ),
        ({}, ""),
    ],
)
def test_admit_the_difference_is_spelled_out(change: dict[str, object], told: str) -> None:
    spec = JobSpec(min_nodes=2, max_nodes=2)
    assert disagreement(spec, replace(spec, **change)) == told


def test_admit_what_may_differ_from_node_to_node_does() -> None:
    stage = Stage("2")
    stage.join("a", slots=1)
    stage.join("b", slots=8, stop_grace_s=5.0, role="evaluator")
    assert stage.roster() == ["a", "b"]


def test_admit_a_surplus_node_becomes_a_spare_and_never_disturbs() -> None:
    stage = Stage("1:4")
    *_, e = stage.run("a", "b", "c", "d", "e")
    assert stage.roster() == ["a", "b", "c", "d"]
    assert stage.place(e) == Waiting(Wait.SPARE, None)
    assert stage.said == "round 1 runs: 4 nodes, 4 ranks; 1 spare"
    stage.wait(3600)
    assert stage.round.number == 1


def test_admit_more_nodes_than_the_daemon_attends_are_refused_by_name() -> None:
    stage = Stage("1:2")
    stage.limits = Limits(nodes_per_job=2)
    *_, c = stage.join("a", "b", "c")
    assert stage.place(c) == Departure(
        by="rendezvousd", reason="refused: job 'run' has 2 nodes, the most this daemon attends", exit_code=1
    )


def test_key_a_restarted_launcher_is_not_taken_for_its_dead_predecessor() -> None:
    stage = Stage("2")
    a, _ = stage.run("a", "b")
    stage.die(a)
    (again,) = stage.join("a")
    assert stage.round.number == 1, "a successor evicts nobody"
    assert isinstance(stage.place(again), Waiting)
    stage.wait(1)
    stage.lose(a)
    stage.play()
    assert [s.uid for s in stage.round.seats] == [stage.players[1].uid, again.uid]


def test_leaving_is_final_for_that_process() -> None:
    stage = Stage("1:2")
    a, _b = stage.run("a", "b")
    a.leave("got SIGTERM")
    a.stopped()
    stage.hear(a)
    assert a.uid not in stage.job.nodes
    a.leaving = None
    stage.hear(a)  # a late heartbeat
    assert a.uid not in stage.job.nodes
    assert stage.place(a) == Departure(by="a", reason="got SIGTERM")


def test_removed_nodes_are_remembered_up_to_a_limit() -> None:
    stage = Stage("5")
    stage.limits = Limits(tombstones=2)
    for player in stage.join("a", "b", "c", "d")[:3]:
        stage.remove(player)
    assert set(stage.job.gone) == {p.uid for p in stage.players[1:3]}, "the oldest is forgotten first"


def test_instance_an_ended_jobs_outcome_is_for_those_who_were_in_it() -> None:
    stage = Stage("2")
    a, b = stage.run("a", "b")
    b.cut = True
    a.fail(stage.now, failure())
    stage.hear(a)
    stage.wait(5)
    stage.lose(b)
    assert stage.ending.outcome is Outcome.FAILED
    b.cut = False
    b.stopped()
    stage.hear(b)  # it comes back
    assert stage.place(b) == stage.ending


def test_instance_a_run_after_the_end_is_a_new_job_though_the_scheduler_gave_it_the_same_token() -> None:
    """A requeued batch job, and the second program of one allocation, come with the token of the first."""
    stage = Stage("1")
    stage.run("a", submission="slurm-7")
    old = stage.job.uid
    stage.close()
    stage.wait(60)
    stage.run("a", submission="slurm-7")
    assert stage.job.uid != old
    assert stage.roster() == ["a"]


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_instance_two_nodes_that_run_twice_in_one_allocation_meet_in_a_second_job(order: tuple[str, str]) -> None:
    """One of them starts again while the other has not read the outcome yet."""
    stage = Stage("2")
    players = dict(zip("ab", stage.run("a", "b", submission="pbs-7"), strict=True))
    old = stage.job.uid
    for player in players.values():
        player.finish()
        stage.hear(player)
    first, last = (players[name] for name in order)
    stage.behave(first)
    stage.wait(0.1)
    (again,) = stage.enter(order[0], submission="pbs-7")
    stage.hear(again)
    assert again.uid in stage.outside
    assert "has ended, and its nodes are reading the outcome" in stage.outside[again.uid]
    stage.behave(last)
    assert isinstance(last.outcome, Ending)
    assert last.outcome.outcome is Outcome.SUCCEEDED, "it gets its outcome, and not the other job"
    stage.play()
    assert first.exited
    assert last.exited
    stage.wait(0.1)
    stage.run(order[1], submission="pbs-7")
    assert stage.job.uid != old
    assert sorted(stage.roster()) == ["a", "b"]


def test_instance_an_outcome_that_nobody_reads_is_in_the_way_for_one_lease() -> None:
    stage = Stage("1")
    (a,) = stage.run("a")
    a.cut = True
    stage.close()
    stage.wait(0.1)
    (b,) = stage.enter("b")
    stage.hear(b)
    assert b.uid in stage.outside
    stage.wait(stage.spec.timing.lease_s)
    assert not stage.outside
    assert list(stage.job.nodes) == [b.uid]


@pytest.mark.parametrize("age_s", [0.0, 3600.0])
def test_instance_an_end_of_which_only_the_fact_is_known_is_for_those_who_were_in_it(age_s: float) -> None:
    """A daemon that takes over does not know when a job ended, so it cannot tell who was started before."""
    stage = Stage("1")
    (a,) = stage.run("a")
    stage.close()
    stage.play()
    ending = replace(stage.ending, at=stage.now, timed=False)
    stage.job_or_none = replace(stage.job, ending=ending)
    stage.hear(a)
    assert stage.place(a) == ending
    stage.lose(a)
    (b,) = stage.enter("b", age_s=age_s)
    old = stage.job.uid
    stage.hear(b)
    assert stage.job.uid != old


def test_instance_an_ended_jobs_outcome_is_for_launchers_older_than_its_end() -> None:
    stage = Stage("1")
    stage.run("a")
    stage.close()
    stage.wait(60)
    (older,) = stage.enter("b", age_s=61)
    stage.hear(older)
    assert isinstance(stage.place(older), Ending)


def test_instance_the_outcome_is_told_to_a_latecomer_whose_spec_disagrees_too() -> None:
    stage = Stage("1")
    stage.run("a")
    stage.close()
    (older,) = stage.enter("b", age_s=61)
    older.job_spec = job_spec("3")
    stage.hear(older)
    assert isinstance(stage.place(older), Ending)


@pytest.mark.parametrize("how", ["success", "failure"])
def test_instance_the_same_run_id_after_an_end_is_a_new_job(how: str) -> None:
    stage = Stage("1", max_restarts=1)
    (a,) = stage.run("a")
    a.fail(stage.now, failure())
    stage.play()
    assert stage.job.known.restarts_used == 1
    a.finish() if how == "success" else a.fail(stage.now, failure())
    stage.play()
    old = stage.job
    assert old.ending is not None
    stage.wait(1)
    (b,) = stage.run("b")
    assert stage.job.uid != old.uid
    assert stage.job.known.restarts_used == 0, "the budget is the new submission's own"
    assert stage.round.number == old.known.round + 1, "numbers only grow"
    assert stage.roster() == ["b"]
    assert b.held is not None


def test_instance_a_job_whose_nodes_have_left_gives_way_to_a_fresh_submission_at_once() -> None:
    stage = Stage("1", max_restarts=1)
    (a,) = stage.run("a")
    a.leave("got SIGTERM")
    a.stopped()
    stage.hear(a)
    assert stage.said.startswith("0 of 1 node; waiting for 1 more")
    uid, stage.spec = stage.job.uid, job_spec("1:2", max_restarts=5)
    stage.run("b")
    assert stage.job.uid != uid
    assert stage.job.spec.max_restarts == 5


def test_instance_a_node_of_a_superseded_job_is_turned_away() -> None:
    stage = Stage("1")
    (a,) = stage.run("a")
    a.cut = True
    stage.wait(5)
    stage.lose(a)
    stage.wait(stage.spec.timing.recovery_max_s)
    stage.run("b")
    a.cut = False
    stage.hear(a)
    assert a.refused
    assert stage.roster() == ["b"]


def test_instance_another_submission_waits_until_a_live_job_is_over() -> None:
    stage = Stage("1:4")
    (a,) = stage.run("a", submission="slurm-7")
    (b,) = stage.enter("b", submission="slurm-8")
    stage.hear(b)
    assert stage.outside[b.uid] == (
        "job 'run' belongs to submission slurm-7, and this node to slurm-8; "
        "this node waits until its 1 node are gone, then it starts a new job"
    )
    stage.wait(600)
    assert list(stage.job.nodes) == [a.uid]
    old = stage.job.uid
    a.finish()
    stage.play()
    stage.wait(0.1)
    assert stage.job.uid != old
    assert list(stage.job.nodes) == [b.uid], "it does not take the outcome of the other for its own"


def test_instance_a_node_without_a_token_belongs_to_the_job_that_is_there() -> None:
    stage = Stage("1:4")
    stage.run("a", submission="slurm-7")
    stage.join("by hand")
    assert len(stage.job.nodes) == 2


def test_instance_who_was_shown_out_of_the_old_job_does_not_slip_into_the_new() -> None:
    """Its launcher has not read yet that it is out, so it says what a fresh one would."""
    stage = Stage("1:2")
    (a,) = stage.enter("a")
    stage.hear(a)
    stage.remove(a)
    (b,) = stage.join("b")
    stage.hear(a)
    stage.wait(30)
    assert isinstance(stage.place(a), Departure)
    assert stage.roster() == [b.name]


def test_instance_an_offer_made_to_the_old_job_does_not_count_in_the_new() -> None:
    stage = Stage("1")
    (a,) = stage.enter("a")
    stage.hear(a)
    assert stage.roster() == ["a"], "its store was dealt, though it does not know yet"
    stage.lose(a)
    (b,) = stage.join("b")
    stage.lose(b)
    stage.hear(a)
    assert stage.roster() == []


# ------------------------------------------------------------------------------ another daemon, with other options


def wishes(options: Timing, **given: int) -> JobSpec:
    """Return what a node that gives these wants of its job, on a daemon with these options."""
    spec = pb.Spec(min_nodes=2, max_nodes=2, slots=1, timeouts=pb.Timeouts(**given))
    return read_spec(spec, options, Limits()).job


BEFORE, AFTER = Timing(), Timing(settle_s=5, heartbeat_s=2, join_s=60, calm_soon_s=7, kill_s=9, short_rounds_max=3)


@pytest.mark.parametrize("given", [{}, {"lease_ms": 10_000}, {"settle_ms": 4000}, {"heartbeat_ms": 500}])
def test_options_a_node_that_agrees_with_the_job_is_admitted_by_a_daemon_with_others(given: dict[str, int]) -> None:
    assert disagreement(wishes(BEFORE, **given), wishes(AFTER, **given)) == ""


def test_options_what_a_node_does_not_give_is_taken_from_the_job() -> None:
    stage = Stage("2")
    stage.spec = wishes(BEFORE, settle_ms=4000)
    stage.join("a")
    stage.spec = wishes(AFTER)
    stage.join("b")
    assert stage.roster() == ["a", "b"]
    assert stage.job.spec.timing == Timing(settle_s=4)


def test_options_what_a_node_gives_is_compared_with_what_is_in_force_whoever_set_it() -> None:
    by_default, by_a_node = wishes(BEFORE), wishes(BEFORE, settle_ms=3000)
    for job in (by_default, by_a_node):
        assert disagreement(job, wishes(AFTER, settle_ms=3000)) == ""
        assert "but this node says 5" in disagreement(job, wishes(AFTER, settle_ms=5000)), (
            "though it is AFTER's default"
        )
    assert "lease is 5 in this job by default, but this node says 6" in disagreement(
        by_default, wishes(AFTER, lease_ms=6000)
    )


def test_options_a_lease_that_only_this_daemon_finds_too_short_is_for_new_jobs_alone() -> None:
    spec = pb.Spec(min_nodes=1, max_nodes=1, slots=1, timeouts=pb.Timeouts(lease_ms=6000))
    assert read_spec(spec, Timing(heartbeat_s=4), Limits()).unfit.startswith("spec.timeouts: a lease of 6 s is less")
    assert read_spec(spec, Timing(), Limits()).unfit == ""
    spec.on_daemon_loss = pb.ON_DAEMON_LOSS_STOP
    assert read_spec(spec, Timing(), Limits(), 0.0).unfit == ""
    assert "--leader-ttl" in read_spec(spec, Timing(), Limits(), 5.0).unfit
