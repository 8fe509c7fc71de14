"""Break, blame and budget (Verdict, Charge, Done is kept, Leaving is a state, Unreachable peers)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rendezvousd.core.codec import dump, load
from rendezvousd.core.model import Cause, CauseKind, Grow, Held, Outcome, Phase
from rendezvousd.core.place import Wait, Waiting
from tests.stage import Player, Stage, failure


def cause(stage: Stage) -> Cause:
    assert stage.round.cause is not None
    return stage.round.cause


def stop(stage: Stage, *players: Player) -> None:
    """These read that the round is over, stop, and say so."""
    for player in players:
        stage.tell(player)
        if player.alive:
            player.stopped()
        stage.hear(player)


def test_a_failure_breaks_the_round_at_once_and_for_all() -> None:
    stage = Stage("2", max_restarts=1)
    a, b = stage.run("a", "b")
    a.fail(stage.now, failure(rank=0, exit_code=3), alive=1)
    stage.hear(a)
    assert stage.job.running is None
    assert isinstance(stage.place(b), Waiting)
    assert cause(stage).text == "rank 0 (local rank 0) on node a failed with exit code 3"


def test_verdict_is_provisional_until_every_members_end_is_known() -> None:
    stage = Stage("1:2", max_restarts=1)
    a, b = stage.run("a", "b")
    a.fail(stage.now, failure())
    stage.hear(a)
    assert "(still being looked into)" in stage.said
    assert stage.job.known.restarts_used == 0
    b.cut = True
    stage.wait(5)
    stage.lose(b, silent_s=6)
    assert stage.job.known.restarts_used in (0, 1)
    assert "(still being looked into)" not in stage.said


@pytest.mark.parametrize("first", [True, False])
def test_verdict_a_failure_that_no_retry_can_cure_ends_the_job_whatever_its_budget(first: bool) -> None:
    """Also when a peer fails before it is heard of: trying again would end the same way."""
    stage = Stage("2", max_restarts=9)
    a, b = stage.run("a", "b")
    if not first:
        b.fail(stage.now, failure(rank=1, exit_code=1))
        stage.hear(b)
        stage.wait(0.1)
    a.fail(stage.now, failure(rank=0, exit_code=64, kind="no-retry"))
    stage.hear(a)
    stop(stage, b)
    ending = stage.job.ending
    assert ending is not None
    assert (ending.outcome, ending.exit_code) == (Outcome.FAILED, 64)
    assert ending.cause is not None
    assert ending.cause.text.endswith("failed with exit code 64, which is not to be tried again")
    assert stage.job.known.restarts_used == 0


def test_verdict_a_worker_killed_for_lack_of_memory_is_said_to_be() -> None:
    stage = Stage("1", max_restarts=0)
    (a,) = stage.run("a")
    a.fail(stage.now, failure(rank=0, exit_code=0, signal=9, kind="oom"))
    stage.hear(a)
    assert "was killed for lack of memory (SIGKILL by the kernel's OOM killer)" in cause(stage).text


def test_verdict_a_lost_node_outranks_failures_that_came_after_it_fell_silent() -> None:
    """A collective fails faster than a lease: a dead host is not blamed on its innocent peer, nor charged."""
    stage = Stage("1:2", max_restarts=0)
    a, b = stage.run("a", "b")
    stage.die(a)
    stage.wait(0.01)
    b.fail(stage.now, failure(rank=1))
    stage.hear(b)
    assert cause(stage).kind is CauseKind.WORKER_FAILED
    stage.wait(1)
    stage.lose(a, silent_s=1.01)
    stage.play()
    assert stage.roster() == ["b"]
    assert stage.job.known.restarts_used == 0
    assert stage.job.last_cause is not None
    assert stage.job.last_cause.kind is CauseKind.NODE_LOST


def test_verdict_a_failure_before_the_loss_counts_as_the_cause() -> None:
    stage = Stage("1:2", max_restarts=1)
    a, b = stage.run("a", "b")
    a.fail(stage.now, failure(), alive=1)
    stage.hear(a)
    stage.wait(3)
    stage.lose(a, silent_s=3)
    stop(stage, b)
    assert stage.job.known.restarts_used == 1


def test_verdict_a_failure_and_the_loss_of_its_own_node_in_the_same_instant_is_a_failure() -> None:
    stage = Stage("1:2", max_restarts=1)
    a, b = stage.run("a", "b")
    stage.wait(60)
    a.fail(stage.now, failure(signal=9), alive=1)
    stage.hear(a)
    stage.lose(a, silent_s=0)
    stop(stage, b)
    assert stage.job.known.restarts_used == 1


def test_verdict_among_failures_the_earliest_counts_by_arrival_minus_age() -> None:
    stage = Stage("2", max_restarts=0)
    a, b = stage.run("a", "b")
    stage.wait(60)
    a.fail(stage.now, failure(rank=0, exit_code=5))
    stage.hear(a)
    stage.wait(1)
    b.fail(stage.now, failure(rank=1, exit_code=7, age_s=1.5))
    stage.hear(b)
    assert stage.ending.exit_code == 7
    assert stage.ending.cause is not None
    assert stage.ending.cause.name == "b"


def test_verdict_victims_of_a_broken_collective_come_last() -> None:
    stage = Stage("2", max_restarts=0)
    a, b = stage.run("a", "b")
    a.fail(stage.now, failure(rank=0, exit_code=1, victim_hint=True))
    stage.hear(a)
    stage.wait(2)
    b.fail(stage.now, failure(rank=1, exit_code=9))
    stage.hear(b)
    assert stage.ending.exit_code == 9


def test_verdict_a_node_that_failed_without_saying_how_is_blamed_all_the_same() -> None:
    stage = Stage("2", max_restarts=1)
    a, b = stage.run("a", "b")
    a.held = Held(round_uid=stage.round.uid, round=1, phase=Phase.FAILED)
    stage.hear(a)
    stop(stage, a, b)
    assert stage.job.known.restarts_used == 1


def test_verdict_workers_that_nobody_asked_to_stop_break_the_round() -> None:
    stage = Stage("2")
    a, b = stage.run("a", "b")
    a.held = Held(round_uid=stage.round.uid, round=1, phase=Phase.FENCED)
    stage.hear(a)
    assert cause(stage).text == "node a stopped its workers because it heard no daemon"
    stop(stage, a, b)
    assert stage.roster() == ["a", "b"]
    assert stage.job.known.restarts_used == 0


# ------------------------------------------------------------------------------------------------------ Charge


def test_charge_a_failure_uses_one_restart_of_the_whole_job() -> None:
    stage = Stage("2", max_restarts=3)
    a, b = stage.run("a", "b")
    for used, culprit in enumerate([a, b, a], start=1):
        stage.wait(60)
        culprit.fail(stage.now, failure())
        stage.play()
        assert stage.job.known.restarts_used == used
        assert stage.round.restart_count == used
    b.fail(stage.now, failure(rank=1, exit_code=3))
    stage.play()
    assert stage.ending.outcome is Outcome.FAILED
    assert stage.ending.exit_code == 3
    assert a.outcome == b.outcome


def test_charge_a_round_is_charged_once_though_all_fail() -> None:
    stage = Stage("3", max_restarts=2)
    for player in stage.run("a", "b", "c"):
        player.fail(stage.now, failure())
    stage.play()
    assert stage.job.known.restarts_used == 1
    assert stage.roster() == ["a", "b", "c"]


def test_charge_a_failure_that_is_told_again_in_the_next_round_changes_nothing() -> None:
    stage = Stage("2", max_restarts=2)
    a, b = stage.run("a", "b")
    a.fail(stage.now, failure())
    said = a.state(stage.now)
    stage.deliver(said)
    stop(stage, a, b)
    assert stage.round.number == 2
    stage.deliver(said)
    assert stage.round.number == 2
    assert stage.roster() == ["a", "b"]


def test_charge_with_no_restarts_the_first_failure_ends_the_job() -> None:
    stage = Stage("1", max_restarts=0)
    (a,) = stage.run("a")
    a.fail(stage.now, failure(signal=11))
    stage.hear(a)
    assert stage.ending.exit_code == 128 + 11
    assert stage.said == "the job has failed: rank 0 (local rank 0) on node a died of signal 11 (SIGSEGV)"


@pytest.mark.parametrize("how", ["lost", "left", "removed", "asked", "grown", "network", "store"])
def test_charge_nothing_but_a_failure_uses_a_restart(how: str) -> None:
    stage = Stage("1:3", max_restarts=0)
    a, b = stage.run("a", "b")
    match how:
        case "lost":
            stage.kill(b)
        case "left":
            b.leave("got SIGTERM")
        case "removed":
            stage.remove(b)
        case "asked":
            stage.restart()
        case "grown":
            stage.join("c")
            stage.wait(5)
        case "network":
            b.held = Held(round_uid=stage.round.uid, round=1, phase=Phase.STARTING)
            b.cannot_reach_master()
        case _:
            a.store_dies()
    stage.play()
    assert stage.round.number == 2
    assert stage.job.running is not None
    assert stage.job.known.restarts_used == 0


def test_an_operators_restart_starts_all_anew() -> None:
    stage = Stage("2")
    stage.run("a", "b")
    stage.restart(by="alice", reason="new data")
    assert cause(stage).text == "alice asked for a restart: new data"
    stage.play()
    assert stage.round.number == 2
    stage.restart()
    stage.restart()
    stage.play()
    assert stage.round.number == 3, "asking twice restarts once"


# ------------------------------------------------------------------------------------------------ Done is kept


def test_done_is_kept_when_a_finished_nodes_launcher_is_terminated() -> None:
    stage = Stage("2")
    a, b = stage.run("a", "b")
    a.finish()
    stage.hear(a)
    stage.wait(20)
    a.leave("got SIGTERM")
    stage.hear(a)
    assert stage.roster() == ["a", "b"]
    assert stage.said == "round 1 runs: 2 nodes, 2 ranks; 1 of 2 nodes have finished"
    b.finish()
    stage.hear(b)
    assert stage.ending.outcome is Outcome.SUCCEEDED


def test_done_is_kept_when_a_finished_node_is_lost() -> None:
    stage = Stage("2")
    a, b = stage.run("a", "b")
    a.finish()
    stage.hear(a)
    stage.kill(a)
    b.finish()
    stage.hear(b)
    assert stage.ending.outcome is Outcome.SUCCEEDED


def test_done_is_kept_and_nobody_is_let_in_any_more() -> None:
    stage = Stage("1:3")
    a, _b = stage.run("a", "b")
    a.finish()
    stage.hear(a)
    (c,) = stage.join("c")
    stage.wait(3600)
    assert stage.round.number == 1
    assert stage.place(c) == Waiting(Wait.SPARE, None)


def test_done_is_kept_only_until_the_round_breaks_for_others() -> None:
    stage = Stage("2", max_restarts=1)
    a, b = stage.run("a", "b")
    a.finish()
    stage.hear(a)
    b.fail(stage.now, failure())
    stage.hear(b)
    stage.play()
    assert stage.roster() == ["a", "b"], "it runs again"
    assert a.held is not None
    assert a.held.phase is Phase.RUNNING


def test_exit_0_after_an_ordered_stop_is_stopped_not_success() -> None:
    stage = Stage("2")
    a, b = stage.run("a", "b")
    stage.restart()
    for player in (a, b):
        player.finish()
        stage.hear(player)
    assert stage.job.ending is None
    stage.play()
    assert stage.round.number == 2


# ------------------------------------------------------------------------------------------- Leaving is a state


def test_leaving_vacates_the_seat_at_once_but_is_waited_for_until_its_workers_are_gone() -> None:
    stage = Stage("2")
    a, b, c = stage.run("a", "b", "c")
    stage.play()
    a.leave("got SIGTERM")
    stage.hear(a)
    assert cause(stage).text == "node a left: got SIGTERM"
    for player in (b, c):
        stage.behave(player)
    assert stage.roster() == []
    a.stopped()
    stage.hear(a)
    assert stage.roster() == ["b", "c"]


def test_leaving_in_the_same_breath_as_having_stopped_is_leaving() -> None:
    stage = Stage("1:2")
    a, b = stage.run("a", "b")
    a.leave("got SIGTERM")
    a.stopped()
    stage.hear(a)
    assert cause(stage).kind is CauseKind.NODE_LEFT
    stop(stage, b)
    assert stage.roster() == ["b"]


def test_a_removed_node_is_out_of_every_later_round() -> None:
    stage = Stage("1:2")
    _a, b = stage.run("a", "b")
    stage.remove(b, by="alice", reason="bad GPU")
    assert cause(stage).text == "node b was removed by alice: bad GPU"
    stage.play()
    assert stage.roster() == ["a"]
    stage.hear(b)
    stage.wait(60)
    assert stage.roster() == ["a"]


# ------------------------------------------------------------------------------------------- Unreachable peers


def unreachable(stage: Stage, *players: Player) -> None:
    for player in players:
        stage.tell(player)
        player.cannot_reach_master()
    for player in players:
        stage.hear(player)


def test_unreachable_a_node_that_cannot_reach_the_bootstrap_store_cools_down() -> None:
    stage = Stage("2:3")
    a, b, c = stage.join("a", "b", "c")
    unreachable(stage, b)
    assert cause(stage).text == (
        "node b cannot reach the bootstrap store at a.net port 1 (on node a); is there a firewall between them, or "
        "should a be started with a --local-addr that its peers reach?"
    )
    stop(stage, a, b, c)
    assert stage.roster() == ["a", "c"]
    assert stage.place(b) == Waiting(Wait.COOLDOWN, 5.0)
    stage.play()
    assert stage.job.tally.newcomers_ready == 0, "it causes no growth while it cools down"
    stage.wait(5)
    assert stage.place(b) == Waiting(Wait.GROWING, 5.0)
    stage.wait(5)
    stage.play()
    assert stage.roster() == ["a", "c", "b"]


def test_unreachable_the_pause_doubles_up_to_a_minute() -> None:
    stage = Stage("2:3", grow=Grow.NOW, short_rounds_max=100)
    a, b, c = stage.join("a", "b", "c")
    pauses = []
    for _ in range(6):
        unreachable(stage, b)
        stop(stage, a, b, c)
        place = stage.place(b)
        assert isinstance(place, Waiting)
        pauses.append(place.left_s)
        stage.play()
        while stage.job.running is not None:
            stage.to_wake()  # it is let in again
        stop(stage, a, b, c)
    assert pauses == [5, 10, 20, 40, 60, 60]


def test_unreachable_if_it_is_out_of_reach_of_most_the_stores_host_cools_down_instead() -> None:
    stage = Stage("2:3")
    a, b, c = stage.join("a", "b", "c")
    unreachable(stage, b, c)
    stop(stage, a, b, c)
    assert stage.roster() == ["c", "b"]
    assert stage.place(a) == Waiting(Wait.COOLDOWN, 5.0)


def test_unreachable_because_its_host_was_lost_nobody_suffers_for_it() -> None:
    stage = Stage("1:3")
    a, b, c = stage.join("a", "b", "c")
    stage.die(a)
    stage.wait(1)
    unreachable(stage, b)
    stage.lose(a, silent_s=1)
    stop(stage, b, c)
    assert stage.roster() == ["c", "b"]


def test_unreachable_with_two_nodes_the_job_goes_on_after_the_pause() -> None:
    stage = Stage("2")
    a, b = stage.join("a", "b")
    unreachable(stage, b)
    stop(stage, a, b)
    assert stage.said.startswith(
        "1 of 2 nodes; waiting for 1 more, 600 s left; b sits out for 5 s: it could not reach its peers; round 1 broke"
    )
    stage.play()
    stage.wait(5)
    assert stage.roster() == ["a", "b"]


def test_a_dead_bootstrap_store_is_a_cause_of_its_own() -> None:
    stage = Stage("2", max_restarts=0)
    a, b = stage.run("a", "b")
    a.store_dies()
    stage.hear(a)
    assert cause(stage).kind is CauseKind.STORE_LOST
    b.fail(stage.now + 0.1, failure(rank=1, victim_hint=True))
    stage.hear(b)
    stop(stage, a)
    stage.play()
    assert stage.roster() == ["a", "b"]


# ------------------------------------------------------------------------------- nodes that do not reach each other


def try_to_meet(stage: Stage, members: list[Player], until: float) -> None:
    """Every node starts what it is assigned, and only the host of the bootstrap store reaches it."""
    while stage.now < until and stage.job.ending is None:
        for player in members:
            stage.tell(player)
        round_ = stage.job.running
        if round_ is not None:
            stage.wait(5)  # they try to reach the store
            unreachable(stage, *(p for p in members if p.uid in round_.index and p.uid != round_.master.uid))
        stop(stage, *members)
        if stage.job.running is None and stage.job.ending is None:
            stage.to_wake()


@pytest.mark.parametrize(("nnodes", "names"), [("2", "ab"), ("2:3", "abc"), ("3:4", "abcd")])
def test_apart_a_job_whose_members_never_meet_ends_at_the_join_timeout(nnodes: str, names: str) -> None:
    stage = Stage(nnodes, join_s=25.0)
    members = stage.join(*names)
    stage.wait(3)
    began_at = stage.now
    try_to_meet(stage, members, stage.now + 3600)
    assert stage.ending.outcome is Outcome.FAILED
    assert stage.ending.cause is not None
    assert stage.ending.cause.kind is CauseKind.JOIN_TIMEOUT
    assert "nodes reach the daemon but not each other for 25 s (join timeout)" in stage.ending.cause.text
    assert "--local-addr" in stage.ending.cause.text
    assert stage.ending.at - began_at <= 25 + 10, "or as soon as it is known that they did not meet once more"


def test_apart_a_job_whose_members_met_goes_on() -> None:
    stage = Stage("2", join_s=25.0, max_restarts=5)
    members = stage.join("a", "b")
    try_to_meet(stage, members, stage.now + 10)
    while not stage.roster():
        stage.to_wake()
        stage.play()
    assert stage.roster() == ["a", "b"]
    stage.wait(3600)
    members[0].fail(stage.now, failure())
    stage.play()
    assert stage.roster() == ["a", "b"]


def test_a_node_that_sits_out_does_not_count_as_there() -> None:
    stage = Stage("2", join_s=4.0)
    a, b = stage.join("a", "b")
    unreachable(stage, b)
    stop(stage, a, b)
    stage.wait(4)
    assert stage.ending.cause is not None
    assert stage.ending.cause.text.startswith("1 of 2 nodes for 4 s (join timeout); ")


@pytest.mark.parametrize("times", [1023, 1024, 10**6])
def test_a_pause_stays_bounded_however_often_a_node_could_not_reach_its_peers(times: int) -> None:
    stage = Stage("2:3")
    a, b, c = stage.join("a", "b", "c")
    node = replace(stage.job.nodes[b.uid], unreachables=times)
    stage.job_or_none = replace(stage.job, nodes=stage.job.nodes.set(b.uid, node))
    unreachable(stage, b)
    stop(stage, a, b, c)
    assert stage.place(b) == Waiting(Wait.COOLDOWN, 60.0)
    record = dump(stage.job)
    loaded = load(record.head, record.parts, seed="new", now=5.0)
    assert loaded.nodes[b.uid].cooling_until_at == 65.0
