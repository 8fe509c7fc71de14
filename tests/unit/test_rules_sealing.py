"""When a round is sealed, and over whom (Offer, Members first, Quiet, Bounded waits)."""

from __future__ import annotations

from msgspec.structs import replace

from rendezvousd.core.model import Held, Offer, Phase, RoundUid, Stance
from rendezvousd.core.place import Wait, Waiting
from tests.stage import Stage, failure


def test_a_first_round_waits_for_the_settle_time_after_the_last_arrival() -> None:
    stage = Stage("1:3")
    stage.join("a")
    assert stage.said == "1 of up to 3 nodes ready, starting in 3 s unless more arrive"
    stage.wait(2)
    (b,) = stage.join("b")
    stage.wait(2)
    assert stage.place(b) == Waiting(Wait.GATHERING, 1.0)
    stage.wait(1)
    assert stage.roster() == ["a", "b"]


def test_a_first_round_is_sealed_at_once_when_it_is_full() -> None:
    stage = Stage("2")
    stage.join("a", "b")
    assert stage.roster() == ["a", "b"]


def test_bounded_waits_stragglers_put_off_a_first_round_for_the_settle_cap_at_most() -> None:
    stage = Stage("1:50")
    begun_at = stage.now
    for i in range(20):
        stage.join(f"n{i}")
        if stage.job.running is not None:
            break
        stage.wait(2)
    assert stage.now - begun_at == 30
    assert len(stage.roster()) == 15


def test_bounded_waits_an_admitted_node_that_is_never_ready_is_bounded_by_the_settle_cap() -> None:
    stage = Stage("1:3")
    a, b = stage.enter("a", "b")
    b.offer = None
    stage.hear(b)
    stage.hear(a)
    stage.wait(29)
    assert stage.roster() == []
    stage.wait(1)
    assert stage.roster() == ["a"]


def test_a_node_lost_before_the_seal_is_not_in_the_round() -> None:
    stage = Stage("1:3")
    a, *_ = stage.join("a", "b")
    stage.kill(a)
    stage.wait(3)
    assert stage.roster() == ["b"]


def test_the_next_round_waits_for_no_strangers() -> None:
    stage = Stage("1:4", max_restarts=1)
    a, _b = stage.run("a", "b")
    before = stage.now
    a.fail(stage.now, failure())
    stage.play()
    assert stage.roster() == ["a", "b"]
    assert stage.now == before, "no settle time after a failure"


def test_too_few_survivors_wait_for_the_settle_time_as_in_a_first_round() -> None:
    stage = Stage("2:4")
    _a, b = stage.run("a", "b")
    stage.kill(b)
    stage.play()
    assert stage.said.startswith("1 of 2 nodes; waiting for 1 more, 600 s left; round 1 broke because node b was lost")
    stage.wait(100)
    stage.join("c")
    assert stage.roster() == []
    stage.wait(3)
    assert stage.roster() == ["a", "c"]


# ------------------------------------------------------------------------------------------------------- Offer


def test_offer_counts_only_if_it_names_the_last_sealed_round() -> None:
    stage = Stage("2", max_restarts=1)
    a, b = stage.run("a", "b")
    a.fail(stage.now, failure())
    stage.hear(a)
    stage.tell(b)
    b.stopped()
    assert b.offer is not None
    b.offer, good = replace(b.offer, after=RoundUid("")), b.offer
    stage.hear(b)
    stage.tell(a)
    stage.hear(a)
    assert stage.roster() == []
    assert stage.said.startswith("waiting for b to be ready")
    b.offer = good
    stage.hear(b)
    assert stage.roster() == ["a", "b"]


def test_offer_that_was_dealt_does_not_count_again() -> None:
    stage = Stage("1:2")
    a, b = stage.enter("a", "b")
    stage.hear(a)
    stage.hear(b)
    assert stage.round.number == 1
    stage.hear(a)  # it has not read its place; it says the same again
    stage.hear(b)
    stage.restart()
    stage.hear(a)
    stage.hear(b)
    assert stage.roster() == [], "both still offer what round 1 was dealt from"


def test_offer_after_a_round_is_the_word_that_nothing_of_it_lives() -> None:
    """A member that was told of the end before it had started anything need not say how that went."""
    stage = Stage("1:2", max_restarts=1)
    a, b = stage.run("a", "b")
    a.fail(stage.now, failure())
    stage.hear(a)
    b.held = Held(round_uid=stage.round.uid, round=1, phase=Phase.STARTING)
    b.offer = Offer(offer_id="fresh", after=stage.round.uid, address="b", port=1)
    stage.hear(b)
    stage.tell(a)
    stage.hear(a)
    assert stage.roster() == ["a", "b"]


# ----------------------------------------------------------------------------------------------- Members first


def test_members_first_both_active_nodes_keep_their_seats_though_two_spares_wait() -> None:
    stage = Stage("2", max_restarts=3)
    a, _b, c, d = stage.run("a", "b", "c", "d")
    a.fail(stage.now, failure())
    stage.hear(a)
    for spare in (c, d):
        stage.behave(spare)
    assert stage.roster() == [], "the quick spares take nobody's seat"
    stage.play()
    assert stage.roster() == ["a", "b"]


def test_members_first_a_seat_given_up_goes_to_the_spare_that_came_first() -> None:
    stage = Stage("2")
    a, *_ = stage.run("a", "b", "c", "d")
    stage.play()
    stage.kill(a)
    stage.play()
    assert stage.roster() == ["b", "c"]


def test_members_first_a_named_successor_gets_its_predecessors_seat() -> None:
    stage = Stage("3")
    _, b, *_ = stage.run("a", "b", "c", "d")
    stage.join("b")
    stage.play()
    stage.kill(b)
    stage.play()
    assert stage.roster() == ["a", "b", "c"]


def test_members_first_a_lost_spare_restarts_nothing() -> None:
    stage = Stage("2")
    *_, c = stage.run("a", "b", "c")
    stage.kill(c)
    stage.play()
    assert stage.round.number == 1
    assert stage.roster() == ["a", "b"]


# ------------------------------------------------------------------------------------------------------- Quiet


def test_quiet_nothing_is_sealed_while_a_member_has_live_workers() -> None:
    stage = Stage("1:2", max_restarts=1)
    a, b = stage.run("a", "b")
    a.fail(stage.now, failure())
    stage.hear(a)
    stage.tell(a)
    stage.hear(a)
    assert stage.roster() == []
    assert stage.said.startswith("waiting for workers to stop on b; round 1 broke because rank 0")
    stage.behave(b)
    assert stage.roster() == ["a", "b"]


def test_quiet_nothing_is_sealed_while_an_outsider_has_live_workers() -> None:
    stage = Stage("1:3", max_restarts=1)
    a, b, c = stage.run("a", "b", "c")
    c.cut = True
    stage.wait(5)
    stage.lose(c)
    c.cut = False
    stage.hear(c)  # back, with the workers of round 1
    stage.behave(a)
    stage.behave(b)
    assert stage.roster() == []
    assert stage.job.nodes[c.uid].stance is Stance.BUSY
    assert stage.said.startswith("waiting for workers to stop on c;")
    stage.behave(c)
    assert sorted(stage.roster()) == ["a", "b", "c"]


def test_quiet_a_member_that_has_not_said_what_it_started_is_waited_for_like_one_with_workers() -> None:
    stage = Stage("1:2")
    a, b = stage.enter("a", "b")
    stage.hear(a)
    stage.hear(b)
    stage.restart()
    assert stage.said.startswith("waiting for workers to stop on a, b;")
    stage.behave(a)
    stage.wait(30)
    assert stage.roster() == []
    stage.wait(5)
    assert stage.roster() == ["a"], "its stop grace and a lease are over"


def test_quiet_a_removed_member_is_waited_for_until_its_workers_are_gone() -> None:
    stage = Stage("1:2")
    _a, b = stage.run("a", "b")
    stage.remove(b)
    stage.behave(stage.players[0])
    assert stage.roster() == []
    stage.behave(b)
    assert stage.roster() == ["a"]
    assert b.exited
    assert b.uid not in stage.job.nodes


# ------------------------------------------------------------------------------------------------ Bounded waits


def test_bounded_waits_a_member_is_waited_for_its_own_stop_grace_plus_a_lease() -> None:
    stage = Stage("1:2")
    a, _ = stage.run("a", stop_grace_s=1.0) + stage.join("b", stop_grace_s=100.0)
    stage.wait(5)
    stage.play()
    assert len(stage.roster()) == 2
    stage.restart()
    stage.behave(a)
    stage.wait(104)
    assert stage.roster() == []
    stage.wait(1)
    assert stage.roster() == ["a"]


def test_bounded_waits_from_stopped_to_offering_takes_30_s_at_most() -> None:
    stage = Stage("1:2")
    a, b = stage.run("a", "b")
    stage.restart()
    stage.behave(a)
    stage.tell(b)
    b.stopped()
    b.offer = None
    stage.hear(b)
    assert stage.said.startswith("waiting for b to be ready; round 1 broke because alice asked for a restart")
    stage.wait(29)
    assert stage.roster() == []
    stage.wait(1)
    assert stage.roster() == ["a"]


def test_bounded_waits_who_was_given_up_is_not_counted_on() -> None:
    stage = Stage("2")
    a, b = stage.enter("a", "b")
    stage.hear(a)
    stage.hear(b)
    stage.restart()
    stage.behave(a)
    stage.wait(35)
    assert stage.said.startswith("1 of 2 nodes; waiting for 1 more, 600 s left")


def test_bounded_waits_who_was_given_up_comes_back_as_a_newcomer() -> None:
    stage = Stage("1:2")
    a, b = stage.run("a", "b")
    stage.restart()
    stage.behave(a)
    stage.wait(35)
    assert stage.roster() == ["a"]
    stage.behave(b)
    assert stage.said.endswith("1 waiting, let in in 5 s")
    stage.wait(5)
    stage.play()
    assert stage.roster() == ["a", "b"]


def test_bounded_waits_a_stale_outsider_does_not_hold_up_a_job_for_ever() -> None:
    stage = Stage("1:2", max_restarts=1)
    a, c = stage.run("a", "c")
    c.cut = True
    stage.wait(5)
    stage.lose(c)
    c.cut = False
    stage.hear(c)
    stage.behave(a)
    stage.wait(34)
    assert stage.roster() == []
    stage.wait(1)
    assert stage.roster() == ["a"]
    stage.hear(c)
    assert stage.roster() == ["a"]


def test_offer_stands_only_as_long_as_the_stream_that_made_it() -> None:
    """A launcher killed while its round is gathered is noticed by its stream before its lease runs out."""
    stage = Stage("2")
    (a,) = stage.join("a")
    stage.die(a)
    stage.break_stream(a)
    stage.join("b")
    assert stage.roster() == []
    stage.wait(1)
    stage.lose(a)
    stage.join("c")
    assert stage.roster() == ["b", "c"]


def test_offer_is_made_again_by_a_stream_that_was_opened_again() -> None:
    stage = Stage("2")
    (a,) = stage.join("a")
    stage.break_stream(a)
    stage.hear(a)
    stage.join("b")
    assert stage.roster() == ["a", "b"]
