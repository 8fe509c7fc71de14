"""A node whose workers end with their lease, and one that gives up its daemon: told as stories."""

from __future__ import annotations

from dataclasses import replace

from rdzv.agent import lease_ends_at, standing, wakes_at
from rdzv.fence import UNANSWERED_MAX, Fence, Sendings
from rdzv.model import (
    CutShort,
    DaemonAway,
    Exit,
    Fact,
    LeaseEnds,
    MasterReached,
    OpenStore,
    Order,
    Phase,
    Place,
    PlaceHeard,
    Say,
    Spawn,
    Stop,
    Tell,
    TimePassed,
    Topic,
)
from tests.unit.agent_node import GATHERING, LEASE_S, Node, none, only

DEALT_AT = 5000.0  # by another clock than the agent's `now`
TERM_AT = DEALT_AT + LEASE_S * 3 / 4
KILL_AT = DEALT_AT + LEASE_S - 0.2


class Fenced(Node):
    """A node whose places answer what it sent at `sent_at`."""

    def __init__(self) -> None:
        super().__init__()
        self.sent_at: float | None = DEALT_AT
        self.agent = replace(self.agent, config=replace(self.agent.config, fenced=True))

    def hear(self, fact: Fact) -> list[Order]:
        if isinstance(fact, PlaceHeard):
            fact = PlaceHeard(place=replace(fact.place, sent_at=self.sent_at))
        return super().hear(fact)

    def answered(self, sent_at: float, valid: str = "r1", lease_s: float = LEASE_S) -> list[Order]:
        """A heartbeat is answered, and nothing else has changed."""
        self.sent_at = sent_at
        place = self.agent.place
        assert isinstance(place, Place)
        return self.hear(PlaceHeard(place=replace(place, valid_round_uid=valid, lease_s=lease_s)))

    def phase(self) -> Phase:
        """As a daemon is told."""
        held = standing(self.agent).held
        assert held is not None
        return held.phase

    def lease_ends(self, left_s: float, late_s: float = 0.0) -> list[Order]:
        return self.hear(LeaseEnds(round_uid=self.held.round_uid, late_s=late_s, left_s=left_s))


# ------------------------------------------------------------------------------------------------ the arithmetic


def test_an_answer_renews_from_when_its_heartbeat_was_sent_and_only_the_round_it_names() -> None:
    fence = Fence(round_uid="r1").renewed("r1", 100.0, 8.0)
    assert (fence.until, fence.term_at(grace_s=30.0), fence.term_at(grace_s=0.5)) == (108.0, 106.0, 107.5)
    assert fence.renewed("r2", 200.0, 8.0) is fence
    assert fence.renewed("", 200.0, 8.0) is fence
    assert fence.renewed("r1", 99.0, 8.0) is fence, "a late answer takes nothing away"
    assert fence.renewed("r1", 101.0, 6.0) is fence, "nor does a shorter lease"
    assert fence.renewed("r1", 101.0, 8.0).until == 109.0
    assert fence.term_at(30.0) < fence.kill_at() < fence.until


def test_it_is_known_when_what_is_answered_was_sent() -> None:
    sendings = Sendings()
    assert sendings.answered(0) is None
    for seq in range(1, 5):
        sendings.sent(seq, 10.0 * seq)
    assert sendings.answered(2) == 20.0
    assert sendings.answered(2) == 20.0, "pushed once more, in the midst of nothing"
    assert sendings.answered(4) == 40.0
    for seq in range(5, 6 + UNANSWERED_MAX):
        sendings.sent(seq, 10.0 * seq)
    assert sendings.answered(5) == 40.0, "forgotten: as long ago as the last that is known"
    assert sendings.answered(6) == 60.0


# ------------------------------------------------------------------------------------------------ the node


def test_workers_are_told_to_stop_before_the_lease_ends_and_the_node_says_why_and_offers_itself_anew() -> None:
    node = Fenced().running()
    assert lease_ends_at(node.agent) == TERM_AT
    node.hear(DaemonAway(text="head: silent for 2.2 s"))
    orders = node.lease_ends(left_s=1.0)
    assert only(orders, Stop).grace_s == 1.0
    said = only(orders, Say)
    assert said.topic is Topic.WARN
    assert said.text == (
        "round 1 is over on this node: no daemon has renewed its lease of 5 s (head: silent for 2.2 s); stopping the "
        "workers (--on-daemon-loss=stop)"
    )
    assert node.phase() is Phase.STOPPING
    assert lease_ends_at(node.agent) == KILL_AT
    node.ended(0, signal=15)
    node.ended(1, signal=9)
    assert OpenStore("n-2") in node.gone()
    assert node.phase() is Phase.FENCED
    assert not node.held.failures
    assert lease_ends_at(node.agent) is None
    told = only(node.opened(), Tell).standing
    assert told.offer is not None
    assert told.offer.after == "r1"


def test_answers_renew_the_lease_and_are_no_news_to_anybody() -> None:
    node = Fenced().running()
    assert none(node.answered(DEALT_AT + 3.0), Tell)
    assert lease_ends_at(node.agent) == TERM_AT + 3.0
    node.answered(DEALT_AT + 9.0, valid="")
    assert node.phase() is Phase.STOPPING
    assert lease_ends_at(node.agent) == KILL_AT + 3.0, "it was not named: what is being stopped has the lease it had"


def test_once_they_are_told_to_stop_an_answer_comes_too_late() -> None:
    node = Fenced().running()
    node.lease_ends(left_s=1.0)
    node.answered(DEALT_AT + 4.0)
    assert node.phase() is Phase.STOPPING
    node.gone()
    assert node.phase() is Phase.FENCED
    assert node.agent.offer is not None
    assert node.agent.offer.after == "r1"


def test_a_stop_under_way_is_cut_short_by_the_end_of_the_lease() -> None:
    node = Fenced().running()
    assert only(node.place(GATHERING, known=1), Stop).grace_s == 30.0
    assert none(node.lease_ends(left_s=1.0), Stop, CutShort)
    assert node.lease_ends(left_s=0.0) == [CutShort()]
    assert lease_ends_at(node.agent) is None, "all was said"
    node.gone()
    assert node.phase() is Phase.STOPPED, "somebody had asked for it"


def test_nothing_is_started_when_the_lease_has_ended() -> None:
    node = Fenced()
    node.opened()
    node.seat(1, master=False)
    node.lease_ends(left_s=0.0)
    assert node.phase() is Phase.FENCED
    assert none(node.hear(MasterReached(round_uid="r1")), Spawn)


def test_what_the_watchdog_has_killed_is_nobody_s_failure_though_it_was_noticed_late() -> None:
    node = Fenced().running()
    node.now += 100
    node.lease_ends(left_s=0.0, late_s=99.0)
    node.ended(0, signal=9, at=node.now - 90)
    node.ended(1, signal=9, at=node.now - 90)
    node.gone()
    assert (node.phase(), node.held.failures) == (Phase.FENCED, ())


def test_a_node_of_another_kind_knows_of_no_lease() -> None:
    node = Node().running()
    assert node.agent.fence is None
    assert lease_ends_at(node.agent) is None


# ------------------------------------------------------------------------------------------------ giving up


def patient(timeout_s: float) -> Node:
    node = Node()
    node.agent = replace(node.agent, config=replace(node.agent.config, daemon_loss_timeout_s=timeout_s))
    return node


def test_a_node_leaves_when_its_daemon_has_been_away_for_too_long() -> None:
    node = patient(20.0).running()
    node.hear(DaemonAway(text="connection refused"))
    node.now += 5.0
    (said,) = node.hear(DaemonAway(text="connection refused"))
    assert said == Say(Topic.WARN, "the daemon is away (connection refused); training goes on for 20 s at most")
    assert wakes_at(node.agent) == node.now + 15.0
    node.now += 15.0
    assert only(node.hear(TimePassed()), Stop).grace_s == 30.0
    end = only(node.gone(), Exit)
    assert end.code == 1
    assert "no daemon at head:29400 for 20 s (daemon_loss_timeout; last error: connection refused)" in end.text


def test_a_daemon_that_comes_back_in_time_is_not_given_up() -> None:
    node = patient(20.0).running()
    node.hear(DaemonAway(text="connection refused"))
    node.now += 19.0
    assert node.agent.place is not None
    node.hear(PlaceHeard(place=node.agent.place))
    node.now += 5.0
    assert none(node.hear(TimePassed()), Stop, Exit)
    assert wakes_at(node.agent) is None


def test_a_node_that_is_done_or_has_not_met_a_daemon_yet_has_times_of_its_own() -> None:
    fresh = patient(20.0)
    assert wakes_at(fresh.agent) == fresh.now + 600
    done = patient(20.0).running()
    done.ended(0)
    done.ended(1)
    done.gone()
    done.hear(DaemonAway(text="connection refused"))
    assert wakes_at(done.agent) == done.now + 60
