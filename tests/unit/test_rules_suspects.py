"""A node whose workers keep failing while those of its peers do not sits out (one bad host)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from rendezvousd.core.model import Grow, Outcome
from rendezvousd.core.place import Wait, Waiting
from tests.stage import Player, Stage, failure

KEEPS_FAILING = "its workers keep failing while those of the other nodes do not"


def fails(stage: Stage, *players: Player, after_s: float = 2.0, **more: Any) -> None:
    """The workers of these nodes fail, soon after they were started, and all nodes take it from there."""
    stage.wait(after_s)
    for player in players:
        if player.held is not None and player.valid:
            player.fail(stage.now, failure(rank=stage.players.index(player), **more))
            stage.hear(player)
    stage.play()


def seated(stage: Stage, player: Player) -> None:
    """Wait until the node has a seat again."""
    for _ in range(1000):
        if player.name in stage.roster():
            return
        stage.to_wake()
        stage.play()
    raise AssertionError(stage.said)


def pause_of(stage: Stage, player: Player) -> float:
    place = stage.place(player)
    assert isinstance(place, Waiting), stage.said
    assert place.reason is Wait.COOLDOWN, stage.said
    assert place.left_s is not None
    return place.left_s


def three(nnodes: str = "2:3", *, max_restarts: int = 3, **more: Any) -> tuple[Stage, Player, Player, Player]:
    stage = Stage(nnodes, max_restarts=max_restarts, **more)
    a, b, c = stage.run("a", "b", "c")
    return stage, a, b, c


def test_a_node_to_blame_for_two_rounds_in_a_row_sits_out_and_only_the_first_uses_a_restart() -> None:
    stage, _a, _b, c = three()
    fails(stage, c)
    assert (stage.roster(), stage.job.known.restarts_used) == (["a", "b", "c"], 1)
    fails(stage, c)
    assert (stage.roster(), stage.job.known.restarts_used) == (["a", "b"], 1)
    assert pause_of(stage, c) == 5.0
    assert stage.said == f"round 3 runs: 2 nodes, 2 ranks; c sits out for 5 s: {KEEPS_FAILING}"


def test_the_cause_that_all_nodes_are_told_says_who_sits_out_and_why() -> None:
    stage, _a, _b, c = three()
    fails(stage, c)
    fails(stage, c)
    assert stage.job.last_cause is not None
    assert stage.job.last_cause.text == "rank 2 (local rank 0) on node c failed with exit code 1"
    assert stage.job.last_cause.note == f"node c sits out for 5 s: {KEEPS_FAILING}"


@pytest.mark.parametrize("max_restarts", [1, 3, 10])
def test_a_job_outlives_a_host_on_which_the_script_fails_at_every_start(max_restarts: int) -> None:
    stage, _a, _b, c = three(max_restarts=max_restarts)
    until = stage.now + 3600
    failed = 0
    while stage.now < until:
        if c.name in stage.roster():
            fails(stage, c)
            failed += 1
        else:
            stage.wait(5)
            stage.play()
    assert stage.job.running is not None
    assert stage.job.known.restarts_used == 1
    assert failed <= 14, "it is tried ever more rarely"


def test_it_comes_back_when_its_pause_ends_and_each_failure_on_return_doubles_the_pause() -> None:
    stage, _a, _b, c = three(grow=Grow.NOW, short_rounds_max=100)
    fails(stage, c)
    pauses = []
    for _ in range(6):
        fails(stage, c)
        pauses.append(pause_of(stage, c))
        seated(stage, c)
    assert pauses == [5, 10, 20, 40, 60, 60]
    assert stage.job.known.restarts_used == 1


def test_it_comes_back_when_the_round_breaks_for_another_reason() -> None:
    stage, a, _b, c = three(grow=Grow.NEVER)
    fails(stage, c)
    fails(stage, c)
    stage.wait(60)
    assert stage.roster() == ["a", "b"]
    fails(stage, a)
    assert stage.roster() == ["a", "b", "c"]


def test_ten_minutes_without_a_failure_clear_it() -> None:
    stage, _a, _b, c = three()
    fails(stage, c)
    fails(stage, c)
    seated(stage, c)
    fails(stage, c, after_s=700)
    assert (stage.roster(), stage.job.known.restarts_used) == (["a", "b", "c"], 2)
    fails(stage, c)
    assert pause_of(stage, c) == 5.0


def test_a_failure_elsewhere_in_between_makes_it_no_row() -> None:
    stage, a, _b, c = three()
    for who in (c, a, c):
        fails(stage, who)
        assert stage.roster() == ["a", "b", "c"]
    assert stage.job.known.restarts_used == 3


def test_a_break_that_says_nothing_of_the_workers_does_not_interrupt_the_row() -> None:
    stage, _a, _b, c = three()
    fails(stage, c)
    stage.restart()
    stage.play()
    fails(stage, c)
    assert stage.roster() == ["a", "b"]


def test_a_script_that_fails_on_all_nodes_is_nobodys_fault() -> None:
    stage, a, b, c = three("1:3", max_restarts=2)
    for used in (1, 2):
        fails(stage, c, a, b)
        assert (stage.roster(), stage.job.known.restarts_used) == (["a", "b", "c"], used)
    fails(stage, c, a, b)
    assert stage.ending.outcome is Outcome.FAILED


def test_a_script_that_fails_on_half_of_the_nodes_before_the_others_are_stopped_is_nobodys_fault() -> None:
    stage = Stage("1:4", max_restarts=3)
    *_, c, d = stage.run("a", "b", "c", "d")
    for used in (1, 2):
        fails(stage, c, d)
        assert (stage.roster(), stage.job.known.restarts_used) == (["a", "b", "c", "d"], used)


@pytest.mark.parametrize("victims", [True, False])
def test_peers_that_failed_as_victims_do_not_speak_for_it(victims: bool) -> None:
    stage, a, b, c = three("1:3")
    for _ in range(2):
        stage.wait(2)
        for player in (a, b, c):
            hint = victims and player is not c
            player.fail(stage.now, failure(rank=stage.players.index(player), victim_hint=hint))
            stage.hear(player)
        stage.play()
    assert stage.roster() == (["a", "b"] if victims else ["a", "b", "c"])


def test_two_bad_nodes_of_many_sit_out_together() -> None:
    stage = Stage("2:5", max_restarts=3)
    *_, d, e = stage.run("a", "b", "c", "d", "e")
    fails(stage, d, e)
    fails(stage, d, e)
    assert (stage.roster(), stage.job.known.restarts_used) == (["a", "b", "c"], 1)


def test_two_bad_nodes_one_after_the_other() -> None:
    stage = Stage("2:4", max_restarts=3)
    _a, _b, c, d = stage.run("a", "b", "c", "d")
    for who in (c, c, d, d):
        fails(stage, who, after_s=1)
    assert (stage.roster(), stage.job.known.restarts_used) == (["a", "b"], 2)


@pytest.mark.parametrize("nnodes", ["3", "3:4"])
def test_below_the_minimum_it_is_as_ever(nnodes: str) -> None:
    stage, _a, _b, c = three(nnodes, max_restarts=2)
    for used in (1, 2):
        fails(stage, c)
        assert (stage.roster(), stage.job.known.restarts_used) == (["a", "b", "c"], used)
    fails(stage, c)
    assert stage.ending.outcome is Outcome.FAILED


def test_the_only_node_of_a_job_never_sits_out() -> None:
    stage = Stage("1", max_restarts=2)
    (a,) = stage.run("a")
    for _ in range(3):
        fails(stage, a)
    assert stage.ending.outcome is Outcome.FAILED


def test_a_spare_takes_the_seat_of_a_node_that_sits_out() -> None:
    stage = Stage("2", max_restarts=1)
    _a, b, _c = stage.run("a", "b", "c")
    fails(stage, b)
    fails(stage, b)
    assert (stage.roster(), stage.job.known.restarts_used) == (["a", "c"], 1)


def test_it_is_taken_back_at_once_when_there_are_too_few_others() -> None:
    stage, _a, b, c = three()
    fails(stage, c)
    fails(stage, c)
    stage.kill(b)
    stage.play()
    stage.wait(3)
    assert stage.roster() == ["a", "c"]


def spawn_fails(stage: Stage, *players: Player) -> None:
    fails(stage, *players, after_s=0.1, kind="spawn")


def test_a_node_that_cannot_start_its_workers_sits_out_at_once_and_uses_no_restart() -> None:
    stage, _a, _b, c = three(max_restarts=0)
    spawn_fails(stage, c)
    assert (stage.roster(), stage.job.known.restarts_used) == (["a", "b"], 0)
    assert stage.said == "round 2 runs: 2 nodes, 2 ranks; c sits out for 5 s: its workers could not be started"


def test_a_program_that_is_missing_everywhere_fails_the_job() -> None:
    stage, *everybody = three("1:3", max_restarts=0)
    spawn_fails(stage, *everybody)
    assert stage.ending.outcome is Outcome.FAILED


def test_a_failure_that_no_retry_can_cure_ends_the_job_wherever_it_was() -> None:
    stage, _a, _b, c = three()
    fails(stage, c)
    fails(stage, c, kind="no-retry")
    assert stage.ending.outcome is Outcome.FAILED


# ------------------------------------------------------------------------------------------- another launcher


def again(stage: Stage, player: Player) -> Player:
    """The launcher dies, and another one is started on the same host."""
    stage.kill(player)
    (new,) = stage.join(player.name)
    stage.play()
    return new


def test_a_launcher_that_is_started_again_sits_out_the_rest_of_the_pause() -> None:
    stage, _a, _b, c = three()
    fails(stage, c)
    fails(stage, c)
    c = again(stage, c)
    assert pause_of(stage, c) == 4.0
    seated(stage, c)
    fails(stage, c)
    assert pause_of(stage, c) == 10.0


def test_a_host_whose_launcher_dies_with_its_workers_is_known_again() -> None:
    stage, a, b, c = three()
    for _ in range(2):
        stage.wait(2)
        c.fail(stage.now, failure(rank=2), alive=1)
        stage.hear(c)
        c = again(stage, c)
    assert (stage.roster(), stage.job.known.restarts_used) == (["a", "b"], 1)
    assert pause_of(stage, c) > 3
    assert {a.name, b.name} == set(stage.roster())


def names(suspects: Iterable[str]) -> list[str]:
    return sorted(suspects)


def test_what_is_remembered_of_names_is_bounded() -> None:
    stage = Stage("1:200", max_restarts=200, short_rounds_max=1000, calm_reset_s=1e6)
    players = stage.run(*(f"n{i:03}" for i in range(200)))
    for player in players[1:120]:
        fails(stage, player, after_s=0.1)
        stage.kill(player)  # so that it is in none of the later rounds
        stage.play()
    assert len(stage.job.suspects) <= 64
    assert "n119" in names(stage.job.suspects)
