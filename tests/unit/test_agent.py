"""What a node does next, told as stories. No loop, no clock, no processes."""

from __future__ import annotations

from dataclasses import replace

from rdzv.agent import standing, wakes_at
from rdzv.model import (
    Cause,
    DaemonAway,
    DropStore,
    Exit,
    MasterReached,
    MasterUnreachable,
    OpenStore,
    Order,
    Phase,
    PlaceHeard,
    ReachMaster,
    Say,
    Spawn,
    SpawnFailed,
    Stop,
    StoreFailed,
    StoreLost,
    Tell,
    TimePassed,
    Topic,
    Waiting,
    WaitReason,
    WorkerEnded,
    WorkersStarted,
)
from tests.unit.agent_node import GATHERING, Node, none, only

# ------------------------------------------------------------------------------------------------ offers


def test_a_store_is_opened_before_anybody_is_heard_and_offered_when_bound() -> None:
    node = Node()
    assert node.last == [OpenStore("n-1")]
    assert standing(node.agent).offer is None
    tell = only(node.opened(), Tell)
    assert tell.at_once
    assert (tell.standing.offer.offer_id, tell.standing.offer.after, tell.standing.offer.port) == ("n-1", "", 4000)  # type: ignore[union-attr]


def test_a_latecomer_offers_anew_when_told_of_a_round_it_is_not_in() -> None:
    node = Node()
    node.opened()
    orders = node.place(Waiting(reason=WaitReason.SPARE), valid="r7", known=7)
    assert DropStore("n-1") in orders
    assert OpenStore("n-2") in orders
    assert standing(node.agent).offer is None
    node.opened()
    assert standing(node.agent).offer.after == "r7"  # type: ignore[union-attr]
    assert none(node.place(Waiting(reason=WaitReason.SPARE), valid="", known=7), OpenStore, DropStore)
    assert OpenStore("n-3") in node.place(Waiting(reason=WaitReason.SPARE), valid="r8", known=8)


def test_no_offer_while_a_process_of_the_last_round_lives() -> None:
    node = Node().running()
    assert none(node.place(GATHERING, known=1), OpenStore)
    node.ended(0, signal=15)
    assert none(node.ended(1, signal=15), OpenStore)
    assert only(node.gone(), OpenStore) == OpenStore("n-2")
    assert node.agent.offer is not None
    assert node.agent.offer.after == "r1"


def test_the_store_of_a_round_lives_until_the_round_is_over_and_the_workers_gone() -> None:
    node = Node().running()
    node.ended(1, 3)
    assert none(node.gone(), DropStore), "peers may still use it"
    assert OpenStore("n-2") in node.orders
    assert only(node.place(GATHERING, known=1), DropStore) == DropStore("n-1")


def test_a_dealt_offer_is_dropped_by_those_who_do_not_host_the_round() -> None:
    node = Node()
    node.opened()
    assert DropStore("n-1") in node.seat(1, master=False)
    assert standing(node.agent).offer is None


def test_a_store_that_cannot_be_opened_is_tried_again_and_given_up_in_the_end() -> None:
    node = Node()
    assert node.agent.offer is not None
    node.hear(StoreFailed(offer_id=node.agent.offer.offer_id, text="no port free"))
    for _ in range(30):
        assert node.agent.offer is not None
        orders = node.hear(StoreFailed(offer_id=node.agent.offer.offer_id, text="no port free"))
        assert wakes_at(node.agent) == node.now + 1
        assert none(orders, OpenStore, Exit)
        node.now += 1
        node.hear(TimePassed())
    assert only(node.orders, Say).topic is Topic.WARN
    assert node.agent.offer is not None
    node.hear(StoreFailed(offer_id=node.agent.offer.offer_id, text="no port free"))
    assert only(node.orders, Exit).code == 1
    assert "no port free" in only(node.orders, Exit).text


def test_a_store_that_dies_again_and_again_is_given_up_too() -> None:
    node = Node()
    for _ in range(40):
        if node.agent.offer is not None:
            node.opened()
            node.hear(StoreLost(offer_id="", text="no torch"))
        node.now += 1
        node.hear(TimePassed())
    assert "no torch" in only(node.orders, Exit).text


def test_a_lost_standing_store_is_replaced_under_a_new_name() -> None:
    node = Node()
    node.opened()
    orders = node.hear(StoreLost(offer_id="", text="killed"))
    assert only(orders, OpenStore) == OpenStore("n-2")
    assert only(orders, Tell).standing.offer is None


def test_a_store_that_a_lost_daemon_may_have_dealt_is_not_offered_to_another_one() -> None:
    node = Node()
    node.opened()
    node.place(GATHERING, daemon_id="one")
    only(node.hear(DaemonAway(text="it ended the stream")), Tell)
    assert standing(node.agent).offer is None, "until it is known who answers"
    again = only(node.place(GATHERING, daemon_id="one"), Tell)
    assert again.standing.offer is not None
    assert (again.at_once, again.standing.offer.offer_id) == (True, "n-1")
    node.hear(DaemonAway(text="it ended the stream"))
    orders = node.place(GATHERING, daemon_id="two", term="t2")
    assert [type(order) for order in orders if not isinstance(order, Say)] == [Tell, DropStore, OpenStore]
    assert only(orders, DropStore).offer_id == "n-1"
    told = only(node.opened(), Tell).standing.offer
    assert told is not None
    assert told.offer_id == "n-2"


def test_a_store_that_nobody_may_have_heard_of_is_offered_to_whoever_comes() -> None:
    node = Node()
    node.hear(DaemonAway(text="no connection"))
    node.opened()
    assert standing(node.agent).offer is not None
    assert none(node.place(GATHERING, daemon_id="one"), DropStore)


# ------------------------------------------------------------------------------------------------ a seat


def test_the_host_of_the_round_starts_at_once_and_the_others_look_first() -> None:
    host = Node()
    host.opened()
    assert only(host.seat(1), Spawn).assignment.round_uid == "r1"
    peer = Node()
    peer.opened()
    orders = peer.seat(1, master=False)
    assert only(orders, ReachMaster) == ReachMaster(round_uid="r1", addr="10.0.0.1", port=4000)
    assert none(orders, Spawn)
    assert only(orders, Tell).standing.held.alive == 0  # type: ignore[union-attr]
    assert only(peer.hear(MasterReached(round_uid="r1")), Spawn).assignment.first_rank == 2
    assert none(peer.hear(MasterReached(round_uid="r1")), Spawn)


def test_an_unreachable_store_is_said_and_nothing_is_started() -> None:
    node = Node()
    node.opened()
    node.seat(1, master=False)
    orders = node.hear(MasterUnreachable(round_uid="r1", text="cannot reach 10.0.0.1:4000"))
    held = only(orders, Tell).standing.held
    assert held is not None
    assert (held.phase, held.alive, held.master_unreachable) == (Phase.STOPPED, 0, True)
    assert none(node.orders, Spawn)
    assert OpenStore("n-2") in orders


def test_a_host_that_has_lost_the_dealt_store_says_so() -> None:
    node = Node()
    node.opened()
    node.hear(StoreLost(offer_id="n-1", text="killed"))
    orders = node.seat(1, master=False, rank=0)
    assert only(orders, Tell).standing.held.store_lost  # type: ignore[union-attr]
    assert none(node.orders, Spawn)


def test_the_same_place_again_changes_nothing() -> None:
    node = Node().running()
    place = node.agent.place
    assert place is not None
    assert node.hear(PlaceHeard(place=place)) == []
    assert node.hear(PlaceHeard(place=replace(place, explain="round 1 runs"))) == []


def test_an_older_place_of_the_same_term_is_ignored_and_a_new_term_is_not() -> None:
    node = Node().running()
    place = node.agent.place
    assert place is not None
    old = replace(place, revision=place.revision - 1, valid_round_uid="", status=GATHERING)
    assert node.hear(PlaceHeard(place=old)) == []
    assert only(node.hear(PlaceHeard(place=replace(old, term="t2", revision=1))), Stop).signal == 15
    assert standing(node.agent).resumed


def test_a_round_that_breaks_before_anything_was_started_starts_nothing() -> None:
    node = Node()
    node.opened()
    node.seat(1, master=False)
    orders = node.place(GATHERING, known=1)
    assert none(orders, Stop)
    assert node.held.phase is Phase.STOPPED
    assert node.hear(MasterReached(round_uid="r1")) == []


def test_the_next_round_waits_until_the_last_is_gone() -> None:
    node = Node().running()
    assert none(node.seat(2, master=False), ReachMaster, Spawn)
    assert none(node.ended(0, signal=15), ReachMaster)
    assert only(node.gone(), ReachMaster).round_uid == "r2"


# ------------------------------------------------------------------------------------------------ the end of a round


def test_a_failure_is_told_before_the_rest_is_stopped_and_repeated_until_the_next_round() -> None:
    node = Node().running()
    tell, stop = node.ended(1, 3)
    assert isinstance(tell, Tell)
    assert tell.at_once
    held = tell.standing.held
    assert held is not None
    assert (held.phase, held.alive, held.failures[0].rank, held.failures[0].exit_code) == (Phase.FAILED, 1, 1, 3)
    assert stop == Stop(round_uid="r1", signal=15, grace_s=30, next_round=True)
    node.ended(0, signal=15)
    assert len(node.held.failures) == 1, "it died because it was told to"
    tell = only(node.gone(), Tell)
    assert tell.standing.held.alive == 0  # type: ignore[union-attr]
    node.place(GATHERING, known=1)
    node.opened()
    assert standing(node.agent).held.failures  # type: ignore[union-attr]
    node.seat(2)
    assert not standing(node.agent).held.failures  # type: ignore[union-attr]


def test_of_two_failures_the_earlier_comes_first_whenever_it_is_heard() -> None:
    node = Node().running()
    node.now = 110
    node.ended(0, 1, at=109.5)
    node.ended(1, 7, at=109.4)
    assert [f.exit_code for f in node.held.failures] == [7, 1]


def test_a_failure_just_before_an_ordered_stop_is_still_a_failure() -> None:
    node = Node().running()
    node.now = 110
    node.place(GATHERING, known=1)
    node.ended(0, 1, at=109.9)
    assert node.held.phase is Phase.FAILED
    node.ended(1, 1, at=110.1)
    assert len(node.held.failures) == 1


def test_exit_0_after_an_ordered_stop_is_no_success() -> None:
    node = Node().running()
    node.place(GATHERING, known=1)
    node.ended(0)
    node.ended(1)
    node.gone()
    assert node.held.phase is Phase.STOPPED


def test_long_texts_are_cut_between_characters_and_the_cut_is_said() -> None:
    node = Node().running()
    text = "first line\n" + "ü" * 1_000_000 + "\nValueError: last line"
    node.hear(WorkerEnded(round_uid="r1", local_rank=0, exit_code=1, signal=0, at=node.now, text=text))
    cut = node.held.failures[0].text
    assert len(cut.encode()) <= 8192
    assert cut.startswith("first line")
    assert cut.endswith("ValueError: last line")
    assert "bytes cut" in cut


def test_only_the_first_failures_are_told() -> None:
    node = Node(slots=64).running()
    for rank in range(64):
        node.ended(rank, 1, at=99.0 + rank / 100)
    assert [f.local_rank for f in node.held.failures] == list(range(8))


def test_a_worker_that_cannot_be_started_is_a_failure() -> None:
    node = Node()
    node.opened()
    node.seat(1)
    orders = node.hear(SpawnFailed(round_uid="r1", local_rank=1, text="exec: no such file"))
    assert only(orders, Stop).round_uid == "r1"
    assert node.held.failures[0].kind == "spawn"


def test_a_lost_store_of_a_running_round_stops_it_and_is_said() -> None:
    node = Node().running()
    orders = node.hear(StoreLost(offer_id="", text="killed"))
    assert only(orders, Tell).standing.held.store_lost  # type: ignore[union-attr]
    only(orders, Stop)


def test_a_done_node_keeps_its_store_and_runs_again_when_others_break_the_round() -> None:
    node = Node().running()
    node.ended(0)
    orders = node.ended(1)
    assert only(orders, Tell).standing.held.phase is Phase.SUCCEEDED  # type: ignore[union-attr]
    assert none(node.gone(), DropStore, OpenStore, Exit)
    orders = node.place(GATHERING, known=1)
    assert DropStore("n-1") in orders
    assert OpenStore("n-2") in orders
    node.opened()
    only(node.seat(2), Spawn)


# ------------------------------------------------------------------------------------------------ what people are told


FAILED = Cause(kind="WORKER_FAILED", text="rank 0 failed with exit code 3")


def causes(orders: list[Order]) -> list[str]:
    return [order.text for order in orders if isinstance(order, Say) and order.topic is Topic.CAUSE]


def failed(*, waits: bool) -> Node:
    """A node whose worker has failed in round 1, with a store for the next; `waits`: it was told to wait, and why."""
    node = Node().running()
    node.ended(0, 3)
    node.gone()
    if waits:
        assert causes(node.place(GATHERING, known=1, cause=FAILED)) == [f"round 1 is over: {FAILED.text}"]
    node.opened()
    return node


def test_why_a_round_broke_is_said_once_also_where_the_next_one_follows_at_once() -> None:
    said = [f"round 1 is over: {FAILED.text}"]
    for waits in (True, False):
        node = failed(waits=waits)
        assert causes(node.seat(2, cause=FAILED)) == ([] if waits else said)
        assert causes(node.seat(2, cause=FAILED)) == []
        assert causes(node.orders) == said


def test_why_a_round_broke_is_said_again_when_the_next_one_breaks_of_the_same() -> None:
    node = failed(waits=True)
    for number in (2, 3):
        assert causes(node.seat(number, cause=FAILED)) == []
        node.hear(WorkersStarted(round_uid=f"r{number}"))
        assert causes(node.seat(number, cause=FAILED)) == [], "while it runs it is still the cause of the one before"
        node.ended(0, signal=9)
        node.gone()
        waiting = node.place(GATHERING, known=number, cause=FAILED)
        assert causes(waiting) == [f"round {number} is over: {FAILED.text}"]
        assert causes(node.place(GATHERING, known=number, cause=FAILED)) == []
        node.opened()


def test_what_nodes_asked_for_and_did_not_get_is_said_once_on_each() -> None:
    notice = "--node-rank=0 was asked for by a, b; a has it"
    for master in (True, False):
        node = Node()
        node.opened()
        said = [order for order in node.seat(1, master=master, notice=notice) if isinstance(order, Say)]
        assert [(it.topic, it.text) for it in said[:1]] == [(Topic.WARN, notice)]
        again = [order for order in node.seat(1, master=master, notice=notice) if isinstance(order, Say)]
        assert again == []


def test_of_a_cause_that_grows_only_what_is_new_is_said() -> None:
    node = failed(waits=True)
    more = replace(FAILED, text=f"{FAILED.text}; node a sits out for 5 s: its workers keep failing")
    assert causes(node.place(GATHERING, known=1, cause=more)) == ["node a sits out for 5 s: its workers keep failing"]
    assert causes(node.place(GATHERING, known=1, cause=more)) == []
