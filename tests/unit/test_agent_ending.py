"""How a node ends, and what it does without a daemon, told as stories."""

from __future__ import annotations

from dataclasses import replace

from rdzv.agent import Agent, standing, wakes_at
from rdzv.model import (
    Cause,
    DaemonAway,
    DaemonRefused,
    Ended,
    Exit,
    Hurry,
    Known,
    LeaveAsked,
    Outcome,
    Phase,
    PlaceHeard,
    ReachMaster,
    Removed,
    Say,
    Spawn,
    Stop,
    Tell,
    TimePassed,
    Topic,
    Waiting,
    WaitReason,
)
from tests.unit.agent_node import LEASE_S, Node, none, only

# ------------------------------------------------------------------------------------------------ the end


def test_the_outcome_is_echoed_and_the_node_goes_when_it_may() -> None:
    node = Node().running()
    node.ended(0)
    node.ended(1)
    node.gone()
    success = Ended(outcome=Outcome.SUCCEEDED, exit_code=0)
    orders = node.place(success, known=1)
    assert only(orders, Tell).standing.outcome_seen == "j"
    assert none(orders, Exit)
    assert wakes_at(node.agent) == node.now + LEASE_S
    assert only(node.place(replace(success, may_exit=True), known=1), Exit).code == 0
    assert node.hear(TimePassed()) == []


def test_an_outcome_is_obeyed_after_a_lease_without_word() -> None:
    node = Node().running()
    cause = Cause(kind="WORKER_FAILED", text="rank 3 failed")
    node.place(Ended(outcome=Outcome.FAILED, exit_code=9, cause=cause), known=1)
    node.gone()
    node.now += LEASE_S
    exit_ = only(node.hear(TimePassed()), Exit)
    assert (exit_.code, exit_.cause) == (9, cause)


def test_an_ended_node_waits_for_its_workers_without_a_timer_and_takes_no_seat_any_more() -> None:
    node = Node().running()
    node.place(Ended(outcome=Outcome.CLOSED, exit_code=1), known=1)
    node.now += 2 * LEASE_S
    assert none(node.hear(TimePassed()), Exit)
    assert wakes_at(node.agent) is None
    assert none(node.seat(2, term="t2"), ReachMaster, Spawn)
    orders = node.gone()
    assert none(orders, ReachMaster, Spawn)
    assert only(orders, Exit).code == 1


def test_a_removed_node_stops_and_says_by_whom() -> None:
    node = Node().running()
    only(node.place(Removed(by="operator", reason="maintenance", exit_code=1)), Stop)
    exit_ = only(node.gone(), Exit)
    assert exit_.code == 1
    assert "operator" in exit_.text
    assert "maintenance" in exit_.text


def test_a_signal_stops_with_that_signal_leaves_and_a_second_one_hurries() -> None:
    node = Node().running()
    orders = node.hear(LeaveAsked(signal=2, reason="SIGINT"))
    assert only(orders, Tell).standing.leaving == "SIGINT"
    assert only(orders, Stop).signal == 2
    assert node.hear(LeaveAsked(signal=2, reason="SIGINT")) == [Hurry()]
    node.place(Removed(by="itself", reason="left", exit_code=0))
    exit_ = only(node.gone(), Exit)
    assert exit_.code == 130
    assert exit_.flush_s > 0


def test_a_done_node_that_is_terminated_leaves() -> None:
    node = Node().running()
    node.ended(0)
    node.ended(1)
    node.gone()
    orders = node.hear(LeaveAsked(signal=15, reason="SIGTERM"))
    assert only(orders, Tell).standing.held.phase is Phase.SUCCEEDED  # type: ignore[union-attr]
    assert only(orders, Exit).code == 143


def test_a_refused_node_says_the_words_of_the_daemon() -> None:
    node = Node()
    exit_ = only(node.hear(DaemonRefused(text="nnodes 1:4 here, 2:2 there")), Exit)
    assert exit_.code == 1
    assert "nnodes 1:4 here, 2:2 there" in exit_.text


# ------------------------------------------------------------------------------------------------ without a daemon


def test_nobody_answers_until_the_join_timeout() -> None:
    node = Node()
    assert wakes_at(node.agent) == 700
    node.now += 10
    assert only(node.hear(DaemonAway(text="connection refused")), Say).topic is Topic.WAIT
    node.now = 700.0
    exit_ = only(node.hear(TimePassed()), Exit)
    assert exit_.code == 1
    for word in ("head:29400", "600 s", "connection refused", "firewall"):
        assert word in exit_.text


def test_training_goes_on_without_a_daemon_and_both_ends_of_it_are_said_once() -> None:
    node = Node().running()
    assert none(node.hear(DaemonAway(text="stream broke")), Say), "it may be back at once"
    node.now += 5
    assert only(node.hear(DaemonAway(text="stream broke")), Say).topic is Topic.WARN
    node.now += 5000
    assert node.hear(DaemonAway(text="stream broke")) == []
    assert wakes_at(node.agent) is None
    assert only(node.seat(1), Say).topic is Topic.NEWS
    assert none(node.orders, Stop, Exit)


def test_a_node_without_a_daemon_whose_workers_fail_ends_with_their_code() -> None:
    node = Node().running()
    node.hear(DaemonAway(text="stream broke"))
    node.now += 5000
    node.ended(0, 0, signal=9)
    node.gone()
    assert wakes_at(node.agent) == node.now + 600
    node.now += 600
    assert only(node.hear(TimePassed()), Exit).code == 137


def test_a_done_node_without_a_daemon_ends_well() -> None:
    node = Node().running()
    node.hear(DaemonAway(text="stream broke"))
    node.now += 5000
    node.ended(0)
    node.ended(1)
    node.gone()
    node.now += 60
    assert only(node.hear(TimePassed()), Exit).code == 0


def test_agent_is_a_value() -> None:
    node = Node()
    before = node.agent
    node.opened()
    assert before.offer is not None
    assert before.offer.port is None
    assert isinstance(before, Agent)


def test_what_is_known_of_a_job_that_gave_way_to_an_older_one_is_forgotten() -> None:
    node = Node()
    node.place(Waiting(reason=WaitReason.SPARE), valid="r1", known=1)
    place = node.agent.place
    assert place is not None
    older = Known(job_uid="older", round=1, round_uid="q1", group_size=2)
    node.hear(PlaceHeard(place=replace(place, revision=9, job_uid="older", valid_round_uid="q1", known=older)))
    assert standing(node.agent).known == older
