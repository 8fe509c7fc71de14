"""Nodes come and go: whole jobs with real daemons, launchers and workers."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.kit import HASTY, TOGETHER, Stage, World, frozen, until
from tests.e2e.relay import relay
from tests.ports import free_port


def gone_from_job(stage: Stage, name: str) -> None:
    """Wait until the daemon has noticed that a node is no more."""
    until(lambda: name not in [node.node_name for node in stage.job().nodes], f"the daemon misses {name}")


# ---------------------------------------------------------------------------------------------------- arriving


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_a_second_node_is_let_into_a_running_job_whichever_sorts_first(stage: Stage, first: str, second: str) -> None:
    stage.daemon()
    early = stage.launch(first, "1:2")
    alone = stage.world(1)
    late = stage.launch(second, "1:2")
    both = stage.world(2, after=alone)
    assert both.nodes == (first, second)  # rank 0 stays with the survivor
    assert both.restart == 0
    early.says("is over: 1 waiting node let in")
    early.says(r"round \d+: rank 0 of 2, node 0 of 2, master .+:\d+, restart 0/0")
    late.says(r"round \d+: rank 1 of 2, node 1 of 2, master .+:\d+, restart 0/0")
    stage.order("finish")
    assert (early.ends(), late.ends()) == (0, 0)


def test_a_node_killed_before_the_round_is_sealed_is_not_in_it(stage: Stage) -> None:
    stage.daemon()
    stage.launch("a", "3").says("waiting: 1 of 3 nodes; waiting for 2 more")
    dead = stage.launch("dead", "3")
    stage.until(lambda: "dead" in [n.node_name for n in stage.job().nodes if n.state == "ready"], "dead has joined")
    dead.kill()
    for name in ("b", "c"):
        stage.launch(name, "3")
    world = stage.world(3)
    assert sorted(world.nodes) == ["a", "b", "c"]
    assert world.round == 1
    assert {e["round"] for e in stage.progress(event="start")} == {1}
    stage.order("finish")


# ---------------------------------------------------------------------------------------------------- spares


@pytest.mark.parametrize("rank", [1, 0])
def test_a_spare_takes_the_place_and_the_rank_of_a_killed_node(stage: Stage, rank: int) -> None:
    stage.daemon()
    nodes = {name: stage.launch(name, "2") for name in ("a", "b")}
    before = stage.world(2)
    spare = stage.launch("spare", "2")
    spare.says("waiting: .* spare")
    stage.goes_on(before)
    nodes[before.nodes[rank]].kill()
    after = stage.world(2, after=before)
    survivor = before.nodes[1 - rank]
    assert after.nodes == (survivor, "spare")  # rank 0 is always a survivor's
    assert after.restart == 0
    spare.says(r"round 2: rank 1 of 2, node 1 of 2")
    stage.order("finish")
    assert (nodes[survivor].ends(), spare.ends()) == (0, 0)


def test_nothing_restarts_when_a_spare_is_killed(stage: Stage) -> None:
    stage.daemon()
    members = [stage.launch(name, "2") for name in ("a", "b")]
    world = stage.world(2)
    spare = stage.launch("spare", "2")
    spare.says("waiting: .* spare")
    spare.kill()
    gone_from_job(stage, "spare")
    stage.goes_on(world)
    stage.order("finish")
    assert [member.ends() for member in members] == [0, 0]


def test_one_node_too_many_waits_and_harms_nobody(stage: Stage) -> None:
    stage.daemon()
    members = [stage.launch(name, "4") for name in ("a", "b", "c", "d")]
    world = stage.world(4)
    fifth = stage.launch("e", "4")
    fifth.says("waiting: round 1 runs: 4 nodes, 4 ranks; 1 spare")
    stage.goes_on(world)
    stage.order("finish")
    assert [x.ends() for x in (*members, fifth)] == [0] * 5
    assert fifth.summary() == ["job succeeded"]


def test_active_nodes_keep_their_seats_when_a_worker_fails_though_spares_wait(stage: Stage) -> None:
    stage.daemon()
    active = [stage.launch(name, "2", restarts=1) for name in ("a", "b")]
    before = stage.world(2)
    spares = [stage.launch(name, "2", restarts=1) for name in ("c", "d")]
    for spare in spares:
        spare.says("waiting: .* spare")
    stage.order("rank-1", "exit 1")
    after = stage.world(2, after=before)
    assert (after.nodes, after.restart) == (before.nodes, 1)
    assert {e["node"] for e in stage.progress()} == {"a", "b"}
    stage.order("finish")
    assert [x.ends() for x in (*active, *spares)] == [0] * 4


# ---------------------------------------------------------------------------------------------------- losses


def test_survivors_of_a_killed_launcher_go_on_and_below_min_they_wait_until_a_node_returns(stage: Stage) -> None:
    stage.daemon()
    nodes = {name: stage.launch(name, "2:3") for name in ("a", "b", "c")}
    three = stage.world(3)  # no collective runs: nobody but the launchers can notice
    first, second, third = (nodes[name] for name in three.nodes)
    third.kill()
    two = stage.world(2, after=three)
    assert two.nodes == three.nodes[:2]
    assert two.restart == 0
    first.says(rf"round \d+ is over: node {third.name} was lost: its connection broke")

    second.kill()
    first.says(rf"round \d+ is over: node {second.name} was lost")
    left = first.says(rf"waiting: 1 of 2 nodes; waiting for 1 more, (\d+) s left; .*node {second.name} was lost")
    assert 500 < int(left[1]) <= 600
    returned = stage.launch(second.name, "2:3")
    again = stage.world(2, after=two)
    assert again.nodes == two.nodes
    stage.order("finish")
    assert (first.ends(), returned.ends()) == (0, 0)


def test_below_min_a_job_fails_at_the_join_timeout(stage: Stage) -> None:
    stage.daemon()
    conf = {"join_timeout": "3"}
    a, b = (stage.launch(name, "2:3", conf=conf) for name in ("a", "b"))
    stage.world(2)
    b.kill()
    assert a.ends() == 1
    (last,) = a.summary()
    assert last.startswith(
        "job failed: 1 of 2 nodes for 3 s (join timeout); the last round broke because node b was lost"
    )


def test_a_launcher_that_is_stuck_is_lost_within_its_lease_and_let_in_again_when_it_wakes(stage: Stage) -> None:
    stage.daemon()
    conf = {"lease": "2", "heartbeat": "0.4"}
    nodes = {name: stage.launch(name, "1:2", conf=conf) for name in ("a", "b")}
    both = stage.world(2)
    awake, stuck = (nodes[name] for name in both.nodes)
    with frozen(stuck):
        alone = stage.world(1, after=both)
        awake.says(rf"round \d+ is over: node {stuck.name} was lost: silent for 2 s")
        assert alone.nodes == (awake.name,)
    again = stage.world(2, after=alone)
    assert (again.nodes, again.restart) == (both.nodes, 0)
    assert not any(e["pid"] in both.pids for e in stage.progress(round=again.round))
    stage.order("finish")
    assert (awake.ends(), stuck.ends()) == (0, 0)


def test_a_node_that_is_cut_off_trains_on_until_it_hears_that_the_others_went_on_without_it(stage: Stage) -> None:
    served, port = stage.daemon(), free_port()
    conf = {"lease": "2", "heartbeat": "0.4"}
    with relay(served.port, port) as cable:
        near = stage.launch("near", "1:2", conf=conf)
        far = stage.launch("far", "1:2", conf=conf, endpoint=f"127.0.0.1:{port}")
        both = stage.world(2)
        cable.cut()
        alone = stage.world(1, after=both)
        near.says(r"round \d+ is over: node far was lost: silent for 2 s")
        far.says(r"warning: the daemon is away \(.*\); training goes on")
        island = World(both.round, both.restart, ("far",), (both.pids[both.nodes.index("far")],))
        stage.goes_on(island)
        cable.mend()
        again = stage.world(2, after=alone)
        assert (again.nodes, again.restart) == (("near", "far"), 0)
        stage.order("finish")
        assert (near.ends(), far.ends()) == (0, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_told_to_end_leaves_and_the_others_go_on_without_it(stage: Stage, number: signal.Signals) -> None:
    stage.daemon()
    nodes = {name: stage.launch(name, "1:2") for name in ("a", "b")}
    both = stage.world(2)
    leaver, stayer = (nodes[name] for name in both.nodes)
    leaver.send(number)
    assert leaver.ends() == 128 + number
    assert leaver.summary() == [f"left the job: got {number.name}"]
    alone = stage.world(1, after=both)
    assert (alone.nodes, alone.restart) == ((stayer.name,), 0)
    stayer.says(rf"round \d+ is over: node {leaver.name} left: got {number.name}")
    stage.order("finish")
    assert stayer.ends() == 0


# ---------------------------------------------------------------------------------------------------- blame


def test_a_node_killed_in_a_collective_is_the_cause_and_costs_no_restart(stage: Stage) -> None:
    stage.daemon()
    nodes = {name: stage.launch(name, "2", restarts=0, worker=HASTY) for name in ("a", "b")}
    before = stage.world(2)
    survivor, victim = (nodes[name] for name in before.nodes)
    victim.kill()
    stage.until(lambda: stage.progress(event="fails", node=survivor.name), "the survivor fails in its collective")
    survivor.says(rf"waiting: 1 of 2 nodes; .*; round 1 broke because node {victim.name} was lost")
    told = [line for line in survivor.lines() if line.startswith("round 1 is over")]
    assert "rank 0" in told[0]  # all that was known at first
    assert told[-1] == f"round 1 is over: node {victim.name} was lost: its connection broke"
    returned = stage.launch(victim.name, "2", restarts=0, worker=HASTY)
    after = stage.world(2, after=before)
    assert (after.nodes, after.restart) == (before.nodes, 0)
    stage.order("finish")
    assert (survivor.ends(), returned.ends()) == (0, 0)


def test_the_first_failure_is_the_cause_and_not_those_that_follow_from_it(stage: Stage) -> None:
    stage.daemon()
    nodes = {name: stage.launch(name, "2", restarts=0, worker=TOGETHER) for name in ("a", "b")}
    culprit = stage.world(2).nodes[1]
    stage.order("rank-1", "exit 1")
    assert [node.ends() for node in nodes.values()] == [1, 1]
    for node in nodes.values():
        assert node.summary()[0] == f"job failed: rank 1 (local rank 0) on node {culprit} failed with exit code 1"
