"""Letting nodes in that wait while a round runs, and restraint in doing so (Grow, Calm)."""

from __future__ import annotations

from rendezvousd.core.model import CauseKind, Grow, Outcome
from rendezvousd.core.place import Wait, Waiting
from tests.stage import Player, Stage, failure


def test_grow_a_node_that_waits_is_let_in_after_a_quiet_time() -> None:
    stage = Stage("1:2")
    stage.run("a")
    stage.wait(10)
    (b,) = stage.join("b")
    assert stage.place(b) == Waiting(Wait.GROWING, 5.0)
    assert stage.said == "round 1 runs: 1 node, 1 rank; 1 waiting, let in in 5 s"
    stage.wait(5)
    assert stage.round.cause is not None
    assert stage.round.cause.text == "1 waiting node let in"
    stage.play()
    assert stage.roster() == ["a", "b"]


def test_grow_whichever_of_the_two_sorts_first() -> None:
    stage = Stage("1:2")
    stage.run("b")
    stage.wait(10)
    stage.join("a")
    stage.wait(5)
    stage.play()
    assert stage.roster() == ["b", "a"]


def test_grow_ten_nodes_that_arrive_together_cost_one_restart() -> None:
    stage = Stage("1:11")
    stage.run("a")
    for i in range(10):
        stage.join(f"n{i}")
        stage.wait(1)
    stage.wait(5)
    stage.play()
    assert len(stage.roster()) == 11
    assert stage.round.number == 2


def test_grow_trickling_arrivals_put_it_off_for_30_s_at_most() -> None:
    stage = Stage("1:50")
    stage.run("a")
    begun_at = stage.now
    for i in range(40):
        stage.join(f"n{i}")
        if stage.job.running is None:
            break
        stage.wait(1)
    assert stage.now - begun_at == 30


def test_grow_at_once_if_so_asked() -> None:
    stage = Stage("1:2", grow=Grow.NOW)
    stage.run("a")
    stage.join("b")
    stage.play()
    assert stage.roster() == ["a", "b"]


def test_grow_never_waits_for_the_round_to_break_for_another_reason() -> None:
    stage = Stage("1:2", grow=Grow.NEVER, max_restarts=1)
    (a,) = stage.run("a")
    (b,) = stage.join("b")
    stage.wait(3600)
    assert stage.place(b) == Waiting(Wait.SPARE, None)
    a.fail(stage.now, failure())
    stage.play()
    assert stage.roster() == ["a", "b"]


def test_calm_only_ready_nodes_cause_growth() -> None:
    stage = Stage("1:2")
    stage.run("a")
    (b,) = stage.enter("b")
    b.offer = None
    stage.hear(b)
    stage.wait(3600)
    assert stage.round.number == 1
    stage.behave(b)
    stage.wait(4)
    assert stage.round.number == 1
    assert stage.job.running is not None, "the quiet time counts from readiness"
    stage.wait(1)
    assert stage.job.running is None


def test_a_full_round_is_not_broken_for_growth() -> None:
    stage = Stage("1:2", grow=Grow.NOW)
    stage.run("a", "b", "c")
    stage.wait(3600)
    assert stage.round.number == 1


def pass_time(stage: Stage, seconds: int) -> None:
    for _ in range(seconds):
        stage.wait(1)
        stage.play()


def arrivals(stage: Stage, count: int, *, every_s: int) -> int:
    """Nodes come one by one; return how many restarts that costs until all train."""
    stage.join("n0", "n1")
    stage.wait(stage.spec.timing.settle_s)
    stage.play()
    for i in range(2, count):
        pass_time(stage, every_s)
        stage.join(f"n{i}")
    pass_time(stage, 600)
    assert len(stage.roster()) == count
    return stage.round.number - 1


def test_back_off_ten_nodes_that_trickle_in_cost_few_restarts() -> None:
    assert arrivals(Stage("2:10"), 10, every_s=33) == 5


def test_back_off_the_wait_has_a_bound() -> None:
    assert arrivals(Stage("2:100", growth_backoff_max_s=20.0), 10, every_s=33) == 8
    assert arrivals(Stage("2:100", calm_soon_s=0.0), 10, every_s=33) == 8, "and can be switched off"


def let_in(stage: Stage, name: str) -> float:
    """A node comes; return how long it waits until it is let in."""
    came_at = stage.now
    (new,) = stage.join(name)
    stage.play()
    while new.name not in stage.roster():
        stage.to_wake()
        stage.play()
    return stage.now - came_at


def test_back_off_an_admission_soon_after_another_one_waits_twice_as_long_as_that_did() -> None:
    stage = Stage("1:9")
    stage.run("a")
    waits = []
    for name in "bcdef":
        waits.append(let_in(stage, name))
        stage.wait(20)
    assert waits == [5, 10, 20, 40, 80]


def test_back_off_the_first_newcomer_after_a_calm_time_is_let_in_quickly() -> None:
    stage = Stage("1:9")
    stage.run("a")
    for name in "bcd":
        let_in(stage, name)
    stage.wait(300)
    assert let_in(stage, "e") == 5
    stage.wait(290)
    assert let_in(stage, "f") == 10, "and nobody waits longer than until it is calm again"


def test_back_off_says_when_the_next_admission_is_due() -> None:
    stage = Stage("1:9")
    stage.run("a")
    let_in(stage, "b")
    let_in(stage, "c")
    stage.join("d")
    assert stage.said == "round 3 runs: 3 nodes, 3 ranks; 1 waiting, let in in 20 s (growth back-off)"
    stage.wait(15)
    assert stage.said == "round 3 runs: 3 nodes, 3 ranks; 1 waiting, let in in 5 s (growth back-off)"


def test_back_off_ends_at_once_when_the_round_breaks_for_another_reason() -> None:
    stage = Stage("1:9", max_restarts=1)
    (a,) = stage.run("a")
    let_in(stage, "b")
    let_in(stage, "c")
    stage.join("d")
    a.fail(stage.now, failure())
    stage.play()
    assert stage.roster() == ["a", "b", "c", "d"]


def test_back_off_does_not_put_off_who_asked_for_growth_at_once() -> None:
    stage = Stage("1:9", grow=Grow.NOW)
    stage.run("a")
    assert [let_in(stage, name) for name in "bcd"] == [0, 0, 0]


def come_and_go(stage: Stage, name: str, *, after_s: float) -> float:
    """A node is let in and dies `after_s` later; return how long the round before ran until it was let in."""
    sealed_at = stage.round.sealed_at
    (guest,) = stage.join(name)
    while stage.round.cause is None:
        stage.to_wake()
    assert stage.round.cause.kind is CauseKind.GROWTH
    waited_s = stage.now - sealed_at
    stage.play()
    stage.wait(after_s - 1)
    stage.kill(guest)
    stage.play()
    return waited_s


def test_calm_the_next_admission_needs_twice_the_running_time_when_growth_keeps_breaking_rounds() -> None:
    stage = Stage("1:2", short_rounds_max=100)
    stage.run("a")
    waits = [come_and_go(stage, f"g{i}", after_s=20) for i in range(5)]
    assert waits == [5, 40, 80, 160, 320]


def test_calm_is_reset_by_ten_minutes_without_a_break() -> None:
    stage = Stage("1:2", short_rounds_max=100)
    stage.run("a")
    come_and_go(stage, "x", after_s=20)
    stage.wait(600)
    assert come_and_go(stage, "y", after_s=700) == 605
    assert come_and_go(stage, "z", after_s=20) == 5


def short_rounds(stage: Stage, player: Player, count: int) -> None:
    for _ in range(count):
        stage.wait(5)
        player.fail(stage.now, failure(exit_code=4))
        stage.play()


def test_calm_many_short_rounds_in_a_row_fail_the_job() -> None:
    stage = Stage("1", max_restarts=1000, short_rounds_max=3)
    (a,) = stage.run("a")
    short_rounds(stage, a, 3)
    assert stage.ending.outcome is Outcome.FAILED
    assert stage.ending.exit_code == 4
    assert stage.said == (
        "the job has failed: 3 rounds in a row lasted under 10 s; last: rank 0 (local rank 0) on node a failed with "
        "exit code 4"
    )


def test_calm_short_rounds_fail_the_job_whatever_they_were_charged_to() -> None:
    """A launcher killed with its workers is a loss that repeats."""
    stage = Stage("1:2", max_restarts=0, short_rounds_max=3, grow=Grow.NOW, calm_soon_s=0.0)
    a, victim = stage.run("a", "b")
    for _ in range(3):
        stage.wait(2)
        stage.kill(victim)
        stage.play(1)
        (victim,) = stage.join("b")
        stage.play()
    assert stage.ending.cause is not None
    assert stage.ending.cause.kind is CauseKind.SHORT_ROUNDS
    assert a.outcome == stage.ending


def test_calm_a_round_that_lasted_starts_the_count_anew() -> None:
    stage = Stage("1", max_restarts=1000, short_rounds_max=3)
    (a,) = stage.run("a")
    short_rounds(stage, a, 2)
    stage.wait(3600)
    stage.restart()  # also if it was broken on purpose
    stage.play()
    short_rounds(stage, a, 2)
    assert stage.job.ending is None


def test_calm_rounds_broken_on_purpose_are_not_counted() -> None:
    stage = Stage("1", short_rounds_max=3)
    stage.run("a")
    for _ in range(10):
        stage.restart()
        stage.play()
    assert stage.job.running is not None


def test_calm_is_judged_by_the_cause_that_was_found_not_by_the_first_suspicion() -> None:
    """An operator asked for a restart of a round that a failure had just broken."""
    stage = Stage("1", max_restarts=10, short_rounds_max=1)
    (a,) = stage.run("a")
    stage.wait(2)
    a.fail(stage.now - 0.5, failure())
    stage.restart()
    stage.hear(a)
    assert stage.ending.cause is not None
    assert stage.ending.cause.kind is CauseKind.SHORT_ROUNDS
