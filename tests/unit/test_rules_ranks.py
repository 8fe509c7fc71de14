"""Who gets which rank (Deal): kept as far as a gap-free numbering allows, dealt once."""

from __future__ import annotations

import pytest

from tests.stage import Stage


def group(*names: str, nnodes: str = "", min_nodes: int = 1) -> Stage:
    stage = Stage(nnodes or f"{min_nodes}:{len(names)}")
    stage.run(*names)
    assert stage.roster() == list(names)
    return stage


def kill(stage: Stage, *names: str) -> None:
    for name in names:
        stage.kill(next(p for p in stage.players if p.name == name and not p.exited))


def test_a_first_round_goes_by_arrival() -> None:
    assert group("c", "a", "b").roster() == ["c", "a", "b"]


def test_a_first_round_goes_by_explicit_node_rank() -> None:
    stage = Stage("3")
    stage.join("a", node_rank=2)
    stage.join("b", node_rank=0)
    stage.join("c", node_rank=1)
    assert stage.roster() == ["b", "c", "a"]


def test_a_node_rank_that_is_taken_or_too_great_orders_what_is_left() -> None:
    stage = Stage("4")
    stage.join("a")
    stage.join("b", node_rank=9)
    stage.join("c", node_rank=1)
    stage.join("d", node_rank=1)
    assert stage.roster() == ["d", "c", "b", "a"]


def test_a_first_round_goes_by_topology_then_arrival() -> None:
    stage = Stage("4")
    for name, rack in [("a", "r2"), ("b", "r1"), ("c", "r2"), ("d", "r1")]:
        stage.join(name, topology=rack)
    assert stage.roster() == ["b", "d", "a", "c"]


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        (["d"], ["a", "b", "c"]),
        (["b"], ["a", "d", "c"]),  # the last moves into the gap, nobody else moves
        (["a"], ["d", "b", "c"]),  # rank 0 goes to whoever has to move anyway
        (["a", "b"], ["c", "d"]),
        (["a", "d"], ["c", "b"]),
        (["b", "c"], ["a", "d"]),
        (["a", "b", "c"], ["d"]),
    ],
)
def test_survivors_keep_their_rank_as_far_as_a_gap_free_numbering_allows(lost: list[str], left: list[str]) -> None:
    stage = group("a", "b", "c", "d")
    kill(stage, *lost)
    stage.play()
    assert stage.roster() == left


def test_a_replacement_takes_the_vacated_rank() -> None:
    stage = group("a", "b", "c", min_nodes=3)
    stage.join("x")
    stage.play()
    kill(stage, "b")
    stage.play()
    assert stage.roster() == ["a", "x", "c"]


def test_rank_0_stays_with_a_survivor() -> None:
    stage = group("a", "b", "c", min_nodes=3)
    stage.join("x")
    stage.play()
    kill(stage, "a")
    stage.play()
    assert stage.roster() == ["b", "x", "c"], "what rank 0 alone knows is not lost to a newcomer"


def test_a_named_successor_gets_its_predecessors_rank() -> None:
    stage = group("a", "b", "c", min_nodes=3)
    kill(stage, "b", "c")
    stage.join("c", "b")
    stage.wait(3)
    stage.play()
    assert stage.roster() == ["a", "b", "c"]


def test_named_successors_get_their_ranks_back_when_nobody_survived() -> None:
    stage = Stage("3")
    stage.run("a", "b", "c", submission="s")
    kill(stage, "a", "b", "c")
    stage.join("c", "b", "a", submission="s")
    stage.wait(3)
    assert stage.roster() == ["a", "b", "c"]


def test_a_restart_changes_no_rank() -> None:
    stage = group("c", "a", "b")
    for _ in range(3):
        stage.wait(60)
        stage.restart()
        stage.play()
        assert stage.roster() == ["c", "a", "b"]


def test_unequal_slots_tile_the_global_ranks() -> None:
    stage = Stage("3")
    for name, slots in [("a", 1), ("b", 3), ("c", 2)]:
        stage.join(name, slots=slots)
    assert [(s.first_rank, s.slots) for s in stage.round.seats] == [(0, 1), (1, 3), (4, 2)]
    assert stage.round.world_size == 6


def test_role_ranks_tile_each_role_by_itself() -> None:
    stage = Stage("4")
    for name, role, slots in [("a", "trainer", 2), ("b", "reader", 1), ("c", "trainer", 3), ("d", "reader", 4)]:
        stage.join(name, role=role, slots=slots)
    assert [(s.role, s.role_first_rank, s.role_world_size) for s in stage.round.seats] == [
        ("trainer", 0, 5),
        ("reader", 0, 5),
        ("trainer", 2, 5),
        ("reader", 1, 5),
    ]


def test_the_master_is_rank_0s_freshly_offered_store() -> None:
    stage = group("a", "b")
    first = stage.round.master
    stage.restart()
    stage.play()
    assert first.uid == stage.round.master.uid
    assert first.offer_id != stage.round.master.offer_id


# --------------------------------------------------------------------------------- what was asked for and not given


def notice(stage: Stage) -> str:
    assert stage.job.running is not None
    return stage.job.running.notice


def test_three_nodes_that_want_one_rank_are_told_so() -> None:
    stage = Stage("3")
    for name in "abc":
        stage.join(name, node_rank=0)
    assert notice(stage) == "--node-rank=0 was asked for by a, b, c; a has it"
    assert stage.said == f"round 1 runs: 3 nodes, 3 ranks; {notice(stage)}", "and so does the log"


def test_a_rank_beyond_the_world_is_said_to_be() -> None:
    stage = Stage("2")
    stage.join("a", node_rank=7)
    stage.join("b")
    assert notice(stage) == "--node-rank=7 was asked for by a, and there are 2 nodes"


def test_a_rank_that_a_survivor_keeps_is_said_to_be() -> None:
    stage = Stage("1:2")
    stage.run("a")
    stage.join("b", node_rank=0)
    stage.wait(5)
    stage.play()
    assert notice(stage) == "--node-rank=0 was asked for by b, and a has it"
    stage.restart()
    stage.play()
    assert notice(stage) == "", "once is enough"


def test_nodes_that_share_a_name_are_told_so() -> None:
    stage = Stage("3")
    stage.join("x", "y", "x")
    assert notice(stage) == "2 nodes are named x: --rdzv-conf node_name= gives each its own"


def test_wishes_that_are_met_are_no_news() -> None:
    stage = Stage("3")
    for name, rank in [("a", 2), ("b", 0), ("c", 1)]:
        stage.join(name, node_rank=rank)
    assert notice(stage) == ""


def test_what_is_said_is_bounded() -> None:
    stage = Stage("100")
    for i in range(100):
        stage.join(f"n{i}", node_rank=1000 + i)
    assert notice(stage).endswith("; 97 more such")
    stage = Stage("100")
    for i in range(100):
        stage.join(f"n{i}", node_rank=0)
    assert notice(stage) == "--node-rank=0 was asked for by n0, n1, n2 and 97 more; n0 has it"


def test_topology_labels_compare_naturally() -> None:
    stage = Stage("6")
    for name in ("node66", "node8", "rack10-node1", "rack9-node20", "", "8"):
        stage.join(name or "none", topology=name)
    assert stage.roster() == ["none", "8", "node8", "node66", "rack9-node20", "rack10-node1"]
