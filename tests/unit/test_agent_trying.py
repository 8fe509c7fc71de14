"""When a node tries again, and when it had better not: failures at start, failures for good, and their kinds."""

from __future__ import annotations

import pytest

from rdzv.agent import PAUSE_MAX_S, standing, wakes_at
from rdzv.model import NO_RETRY, OOM, Exit, LeaveAsked, OpenStore, Say, SpawnFailed, TimePassed, WorkerEnded
from tests.unit.agent_node import GATHERING, Node, none, only


def fail(node: Node, *, after_s: float = 0.2, code: int = 1, signal: int = 0, kind: str = "") -> None:
    """The running round fails here so long after its start, and is over."""
    node.now += after_s
    uid = node.held.round_uid
    node.hear(WorkerEnded(round_uid=uid, local_rank=0, exit_code=code, signal=signal, at=node.now, kind=kind))
    node.gone()


def pauses(node: Node, times: int, **how: object) -> list[float]:
    """How long the node waits before it offers again, after each of so many failures in a row."""
    waited = []
    for number in range(1, times + 1):
        node.running(number)
        fail(node, **how)  # type: ignore[arg-type]
        node.place(GATHERING, known=number)
        began = node.now
        if node.agent.offer is None:
            at = wakes_at(node.agent)
            assert at is not None
            node.now = at - 0.01
            assert none(node.hear(TimePassed()), OpenStore)
            node.now = at
            assert len([order for order in node.hear(TimePassed()) if isinstance(order, OpenStore)]) == 1
            assert wakes_at(node.agent) is None or wakes_at(node.agent) > at  # type: ignore[operator]
        waited.append(node.now - began)
    return waited


def budget(node: Node, left: int) -> Node:
    node.max_restarts = 1 + left  # the seats that the node is dealt are of restart 1
    return node


def test_workers_that_fail_at_once_again_and_again_are_started_ever_more_slowly() -> None:
    node = budget(Node(), 100)
    assert pauses(node, 8) == pytest.approx([0, 1, 2, 4, 8, 16, 16, 16])
    said = [order.text for order in node.orders if isinstance(order, Say) and "before trying" in order.text]
    assert said[1] == "waiting 2 s before trying again: the workers failed within a second 3 times"
    assert PAUSE_MAX_S < 30, "a daemon gives the seat of a node away that makes no offer for so long"


def test_workers_that_cannot_even_be_started_count_as_well() -> None:
    node = budget(Node(), 100)
    for number in (1, 2):
        node.running(number)
        node.hear(SpawnFailed(round_uid=node.held.round_uid, local_rank=1, text="no such program"))
        node.gone()
    assert wakes_at(node.agent) == node.now + 1


@pytest.mark.parametrize("how", [{"after_s": 1.5}, {"signal": 9, "code": 0}])
def test_a_failure_in_the_middle_of_training_or_from_without_is_no_reason_to_wait(how: dict[str, float]) -> None:
    assert pauses(budget(Node(), 100), 5, **how) == [0] * 5


def test_a_round_that_lasted_ends_the_count() -> None:
    node = budget(Node(), 100)
    assert pauses(node, 2) == [0, 1]
    node.running(3)
    fail(node, after_s=50)
    node.place(GATHERING, known=3)
    node.running(4)
    fail(node)
    assert node.agent.offer is not None


def test_the_last_try_is_not_followed_by_a_pause_and_a_pause_holds_up_no_end() -> None:
    node = budget(Node(), 0)
    node.running(1)
    fail(node)
    node.running(2)
    fail(node)
    assert not [order for order in node.orders if isinstance(order, Say) and "before trying" in order.text]
    node = budget(Node(), 100)
    for number in (1, 2):
        node.running(number)
        fail(node)
    assert node.agent.pause_until > node.now
    assert only(node.hear(LeaveAsked(signal=15, reason="SIGTERM")), Exit).code == 143


@pytest.mark.parametrize(("kind", "code", "signal"), [(NO_RETRY, 2, 0), (OOM, 0, 9)])
def test_the_kind_of_a_failure_is_told(kind: str, code: int, signal: int) -> None:
    node = Node().running()
    fail(node, code=code, signal=signal, kind=kind)
    held = standing(node.agent).held
    assert held is not None
    assert held.failures[0].kind == kind
