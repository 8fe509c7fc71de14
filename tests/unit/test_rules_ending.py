"""How a job ends, and how everybody gets to know (End, End in two steps), and what it says of itself (Explain)."""

from __future__ import annotations

from rendezvousd.core.machine import wakes_at
from rendezvousd.core.model import Ending, Outcome
from tests.stage import Stage, failure


def test_end_all_members_of_a_round_succeeded() -> None:
    stage = Stage("2")
    a, b = stage.run("a", "b")
    a.finish()
    stage.hear(a)
    assert stage.job.ending is None
    b.finish()
    stage.hear(b)
    assert (stage.ending.outcome, stage.ending.exit_code, stage.ending.cause) == (Outcome.SUCCEEDED, 0, None)
    assert stage.said == "the job has succeeded"


def test_end_spares_are_told_the_outcome_too() -> None:
    stage = Stage("1")
    a, b = stage.run("a", "b")
    a.finish()
    stage.play()
    assert b.outcome == a.outcome == stage.ending


def test_end_below_min_survivors_say_so_and_go_on_when_a_node_returns() -> None:
    stage = Stage("2:3")
    _a, b, c = stage.run("a", "b", "c")
    stage.kill(b)
    stage.play()
    assert stage.roster() == ["a", "c"]
    stage.kill(c)
    stage.play()
    stage.wait(99)
    assert stage.said == (
        "1 of 2 nodes; waiting for 1 more, 501 s left; round 2 broke because node c was lost: its connection broke"
    )
    stage.join("b")
    stage.wait(3)
    assert stage.roster() == ["a", "b"]


def test_end_below_min_for_the_join_timeout_fails_with_what_led_there() -> None:
    stage = Stage("2:3", join_s=60)
    a, b = stage.run("a", "b")
    stage.kill(b)
    stage.play()
    stage.wait(59)
    assert stage.job.ending is None
    stage.wait(1)
    assert (stage.ending.outcome, stage.ending.exit_code) == (Outcome.FAILED, 1)
    assert stage.said == (
        "the job has failed: 1 of 2 nodes for 60 s (join timeout); the last round broke because node b was lost: "
        "its connection broke"
    )
    stage.play()
    assert a.exited


def test_end_a_job_that_never_had_enough_nodes_fails_at_the_join_timeout() -> None:
    stage = Stage("3", join_s=60)
    stage.join("a", "b")
    assert stage.said == "2 of 3 nodes; waiting for 1 more, 60 s left"
    stage.wait(60)
    assert stage.said == "the job has failed: 2 of 3 nodes for 60 s (join timeout)"


def test_end_a_job_of_one_node_that_lost_it_waits_for_another_and_then_fails() -> None:
    stage = Stage("1")
    (a,) = stage.run("a", submission="s")
    stage.kill(a)
    assert stage.said.startswith("0 of 1 node; waiting for 1 more, 600 s left; round 1 broke because node a was lost")
    stage.wait(600)
    assert stage.ending.outcome is Outcome.FAILED


def test_end_the_join_timeout_does_not_overtake_a_verdict() -> None:
    """Also if nodes may take longer to stop than the job waits for others."""
    stage = Stage("2", join_s=10, max_restarts=0)
    a, b = stage.run("a", "b")
    stage.kill(b)
    stage.wait(20)
    assert stage.job.ending is None
    assert stage.said.startswith("waiting for workers to stop on a")
    stage.behave(a)
    assert stage.ending.outcome is Outcome.FAILED


def test_end_in_two_steps_nodes_may_exit_once_all_have_read_the_outcome() -> None:
    stage = Stage("2")
    a, b = stage.run("a", "b")
    for player in (a, b):
        player.finish()
        stage.hear(player)
    assert not stage.may_exit()
    stage.tell(a)
    stage.hear(a)
    assert not stage.may_exit()
    stage.tell(b)
    stage.hear(b)
    assert stage.may_exit()
    stage.tell(a)
    assert a.exited


def test_end_in_two_steps_or_after_one_lease() -> None:
    stage = Stage("2")
    a, b = stage.run("a", "b")
    for player in (a, b):
        player.finish()
        stage.hear(player)
    stage.wait(4.9)
    assert not stage.may_exit()
    stage.wait(0.1)
    assert stage.may_exit()


def test_end_in_two_steps_a_lost_node_is_not_waited_for() -> None:
    stage = Stage("2")
    a, b = stage.run("a", "b")
    for player in (a, b):
        player.finish()
        stage.hear(player)
    stage.tell(a)
    stage.hear(a)
    stage.lose(b)
    assert stage.may_exit()


def test_end_the_outcome_never_changes() -> None:
    stage = Stage("2", max_restarts=0)
    a, b = stage.run("a", "b")
    a.fail(stage.now, failure(exit_code=3))
    stage.hear(a)
    stage.behave(b)
    first = stage.ending
    assert first.exit_code == 3
    stage.close(success=True)
    stage.kill(b)
    stage.remove(a)
    stage.restart()
    assert (stage.ending.outcome, stage.ending.cause) == (first.outcome, first.cause)


def test_end_by_an_operator() -> None:
    stage = Stage("2")
    a, b = stage.run("a", "b")
    stage.close()
    assert (stage.ending.outcome, stage.ending.exit_code) == (Outcome.CLOSED, 1)
    assert stage.said == "the job was closed: alice closed the job"
    stage.play()
    assert a.exited
    assert b.exited


def test_end_nodes_that_come_back_after_the_end_are_told_it() -> None:
    stage = Stage("2")
    a, b = stage.run("a", "b")
    a.cut = True
    b.cut = True
    stage.lose(a)
    stage.lose(b)
    stage.wait(600)
    assert stage.ending.outcome is Outcome.FAILED
    a.cut = False
    stage.hear(a)
    assert isinstance(stage.place(a), Ending)
    stage.behave(a)
    stage.behave(a)
    assert a.exited


# ----------------------------------------------------------------------------------------------------- Explain


def test_explain_names_a_few_and_counts_the_others_in_the_order_of_their_coming() -> None:
    stage = Stage("5")
    stage.run(*"edcba")
    stage.restart()
    assert stage.said == (
        "waiting for workers to stop on e, d, c and 2 more; round 1 broke because alice asked for a restart (still "
        "being looked into)"
    )


def test_explain_a_member_that_was_lost_before_it_said_anything_does_not_hide_who_is_waited_for() -> None:
    stage = Stage("1:2")
    a, b = stage.enter("a", "b")
    stage.hear(a)
    stage.hear(b)
    stage.lose(b)
    assert stage.said.startswith("waiting for workers to stop on a; round 1 broke because node b was lost")


def test_explain_counts_down() -> None:
    stage = Stage("2:4")
    stage.join("a", "b")
    assert stage.said == "2 of up to 4 nodes ready, starting in 3 s unless more arrive"
    stage.wait(1)
    assert stage.said == "2 of up to 4 nodes ready, starting in 2 s unless more arrive"


def test_nothing_wakes_a_job_that_only_events_move() -> None:
    stage = Stage("1")
    stage.run("a")
    assert wakes_at(stage.job) is None
