"""A job all of whose nodes were lost by silence: it stays the same job for those that return, and for who goes on."""

from __future__ import annotations

import pytest

from rendezvousd.core.place import Wait, Waiting
from rendezvousd.core.settings import Timing
from tests.stage import Player, Stage, failure, job_spec

TIMING = Timing()
SOON_S = 0.01


def cut_off(stage: Stage, *players: Player, silent_s: float = TIMING.lease_s) -> None:
    """The players can neither send nor receive for this long, and are lost by that; their workers train on."""
    for player in players:
        player.cut = True
    stage.wait(silent_s)
    for player in players:
        stage.lose(player, silent_s=silent_s, why=f"silent for {silent_s:g} s")


def reconnect(stage: Stage, *players: Player) -> None:
    for player in players:
        player.cut = False
        stage.hear(player)


def test_a_newcomer_does_not_replace_a_job_whose_nodes_are_cut_off() -> None:
    stage = Stage("1:4")
    members = stage.run("a", "b", "c")
    uid = stage.job.uid
    cut_off(stage, *members)
    stage.wait(2)
    (d,) = stage.join("d")
    assert (
        stage.said
        == "this job's nodes were lost 2 s ago; this node goes on with it in 10 s unless they return, restart 0/0"
    )
    assert stage.place(d) == Waiting(Wait.GATHERING, TIMING.recovery_s)
    stage.wait(1)
    reconnect(stage, *members)
    stage.play()
    assert stage.job.uid == uid
    assert sorted(stage.roster()) == ["a", "b", "c", "d"], "all are there, so no node waits any longer"
    assert not any(player.refused or player.outcome for player in stage.players)


def test_the_first_that_returns_ends_the_wait_and_the_others_have_the_settle_time() -> None:
    stage = Stage("1:4")
    a, b = stage.run("a", "b")
    cut_off(stage, a, b)
    stage.join("d")
    reconnect(stage, a)
    stage.play()
    assert stage.roster() == []
    stage.wait(TIMING.settle_s)
    assert sorted(stage.roster()) == ["a", "d"]


def test_a_newcomer_goes_on_with_the_job_when_the_lost_nodes_stay_away() -> None:
    stage = Stage("1:4", max_restarts=3)
    a, b = stage.run("a", "b")
    a.fail(stage.now, failure())
    stage.play()
    uid = stage.job.uid
    cut_off(stage, a, b)
    stage.wait(7)
    stage.join("d")
    assert "were lost 7 s ago; this node goes on with it in 10 s unless they return, restart 1/3" in stage.said
    stage.wait(5)
    stage.join("e")
    assert "2 nodes go on with it in 5 s" in stage.said, "the wait counts from the first that came"
    stage.wait(5 - SOON_S)
    assert stage.roster() == []
    stage.wait(2 * SOON_S)
    assert sorted(stage.roster()) == ["d", "e"]
    assert stage.job.uid == uid
    assert stage.round.restart_count == 1, "the budget is still that of the job"
    reconnect(stage, a)
    stage.play()
    assert not a.alive, "its workers stop: the round is another one now"
    assert not a.refused
    assert a.uid in stage.job.nodes


def test_a_restarted_launcher_takes_the_seat_of_its_predecessor_at_once() -> None:
    stage = Stage("1")
    (a,) = stage.run("a")
    uid = stage.job.uid
    stage.kill(a)
    stage.wait(5)
    stage.join("a")
    assert stage.roster() == ["a"]
    assert (stage.job.uid, stage.round.number) == (uid, 2)


def test_a_successor_waits_for_no_one_and_neither_do_those_with_it() -> None:
    stage = Stage("1:3")
    a, b = stage.run("a", "b")
    cut_off(stage, a, b)
    stage.join("d")
    stage.join("b")
    stage.wait(TIMING.settle_s)
    assert stage.roster() == ["d", "b"], "a successor keeps the rank"


def test_after_the_recovery_bound_a_newcomer_starts_a_new_job() -> None:
    stage = Stage("1:4")
    members = stage.run("a", "b")
    uid = stage.job.uid
    cut_off(stage, *members)
    stage.wait(TIMING.recovery_max_s - SOON_S)
    (d,) = stage.enter("d")
    stage.hear(d)
    assert stage.job.uid == uid
    stage.lose(d)
    stage.wait(2 * SOON_S)
    stage.run("e")
    assert stage.job.uid != uid
    assert stage.roster() == ["e"]


@pytest.mark.parametrize("differs", ["options", "submission", "attempt"])
def test_a_node_that_belongs_to_another_job_waits_for_the_lost_ones_and_never_joins_theirs(differs: str) -> None:
    stage = Stage("1:4")
    tokens = {"options": "", "submission": "slurm-8", "attempt": "slurm-7+1"}
    members = stage.run("a", "b", submission="slurm-7" if tokens[differs] else "")
    old = stage.job.uid
    stage.wait(1)
    cut_off(stage, *members, silent_s=TIMING.lease_s)
    if differs == "options":
        stage.spec = job_spec("2:4")
    (d,) = stage.enter("a", submission=tokens[differs])
    stage.hear(d)
    assert d.uid in stage.outside
    assert "were lost 0 s ago; a new job starts in 10 s unless they return" in stage.outside[d.uid]
    stage.wait(TIMING.recovery_s - SOON_S)
    assert stage.job.uid == old
    stage.wait(2 * SOON_S)
    assert stage.job.uid != old
    assert list(stage.job.nodes) == [d.uid]
    for member in members:
        member.cut = False
        stage.hear(member)
        assert member.refused, "it is told that its job is over"


def test_a_node_of_another_submission_waits_on_when_the_lost_ones_return() -> None:
    stage = Stage("1:4")
    members = stage.run("a", "b", submission="s7")
    old = stage.job.uid
    cut_off(stage, *members)
    (d,) = stage.enter("d", submission="s8")
    stage.hear(d)
    reconnect(stage, *members)
    stage.play()
    stage.wait(60)
    assert stage.job.uid == old
    assert stage.roster() == ["a", "b"]
    assert d.uid in stage.outside


def test_the_same_submission_carries_its_job_on_after_the_wait() -> None:
    stage = Stage("1", max_restarts=1)
    (a,) = stage.run("a", submission="s")
    uid = stage.job.uid
    stage.kill(a)
    stage.join("b", submission="s")
    stage.wait(TIMING.recovery_s)
    assert (stage.job.uid, stage.round.number, stage.roster()) == (uid, 2, ["b"])


def test_a_spare_that_is_left_takes_over_without_that_wait() -> None:
    stage = Stage("1:2")
    a, b, _spare = stage.run("a", "b", "s")
    cut_off(stage, a, b)
    stage.play()
    stage.wait(TIMING.settle_s)
    assert stage.roster() == ["s"]


def test_nodes_that_left_are_not_waited_for_but_those_lost_before_are() -> None:
    stage = Stage("1:3")
    a, b = stage.run("a", "b")
    cut_off(stage, b)
    stage.play()
    a.leave("got SIGTERM")
    stage.play()
    uid = stage.job.uid
    stage.join("d")
    assert stage.job.uid != uid, "the round that was formed without the lost node is what counts"
