"""Jobs whose workers must not outlive the daemon's word, and such as give up a daemon: whole, with real processes.

All processes of a test are on one host, so that what workers record of CLOCK_BOOTTIME can be compared.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.e2e.kit import Launcher, Stage, World, frozen, until
from tests.e2e.relay import relay
from tests.etcd import etcd
from tests.ports import free_port

STOP = ("--on-daemon-loss=stop", "--start-method=exec")
LEASE = {"lease": "4", "heartbeat": "0.5"}
DEFAULT_LEASE_S = 10.0  # of such a job, with etcd
LEAVES_OFF = r"round \d+ is over on this node: no daemon has renewed its lease of 4 s .*stopping the workers"


def pids(stage: Stage, world: World, node: str) -> set[int]:
    return {pid for pid, name in zip(world.pids, world.nodes, strict=True) if name == node}


def last_sign_of(stage: Stage, gone: set[int]) -> float:
    """When one of these workers last did anything; all of them are no more."""
    until(lambda: not any(p.pid in gone for p in stage.alive()), f"{gone} are gone")
    return max(float(e["at"]) for e in stage.progress() if e["pid"] in gone)


def first_sign_of(stage: Stage, world: World) -> float:
    return min(float(e["at"]) for e in stage.progress(event="start") if e["pid"] in world.pids)


def trains(stage: Stage, pid: int, at: float) -> bool:
    """Whether this worker has made a step after that."""
    return any(e["at"] > at for e in stage.progress(event="step", pid=pid))


def stubborn(stage: Stage, world: World, node: str) -> None:
    """Let the worker on this node ignore that it is told to stop."""
    rank = world.nodes.index(node)
    stage.order(f"rank-{rank}", f"ignore {int(signal.SIGTERM)}")
    stage.until(lambda: stage.progress(event="ignores", node=node), f"{node} ignores SIGTERM")


# ------------------------------------------------------------------------------------- no two at the same time


@pytest.mark.parametrize("obeys", [True, False])
def test_workers_of_a_node_that_is_cut_off_have_ended_before_others_take_their_place(stage: Stage, obeys: bool) -> None:
    served, port = stage.daemon(), free_port()
    with relay(served.port, port) as cable:
        near = stage.launch("near", "1:2", conf=LEASE, options=STOP)
        far = stage.launch("far", "1:2", conf=LEASE, options=STOP, endpoint=f"127.0.0.1:{port}")
        both = stage.world(2)
        if not obeys:
            stubborn(stage, both, "far")
        cable.cut()
        near.says(r"waiting: workers may live on far for \d+ s more: nobody has said that they have stopped")
        alone = stage.world(1, after=both)
        assert alone.nodes == ("near",)
        assert last_sign_of(stage, pids(stage, both, "far")) < first_sign_of(stage, alone)
        far.says(LEAVES_OFF)
        cable.mend()
        again = stage.world(2, after=alone)
        assert (set(again.nodes), again.restart) == ({"near", "far"}, 0)
        stage.order("finish")
        assert (near.ends(), far.ends()) == (0, 0)


def test_the_watchdog_ends_workers_though_their_launcher_is_stopped(stage: Stage) -> None:
    stage.daemon()
    nodes = {name: stage.launch(name, "1:2", conf=LEASE, options=STOP) for name in ("a", "b")}
    both = stage.world(2)
    awake, stuck = (nodes[name] for name in both.nodes)
    with frozen(stuck):
        alone = stage.world(1, after=both)
        assert alone.nodes == (awake.name,)
        assert last_sign_of(stage, pids(stage, both, stuck.name)) < first_sign_of(stage, alone)
    stuck.says("the lease has ended: all processes of this node were killed")
    again = stage.world(2, after=alone)
    assert again.restart == 0, "what the watchdog kills is nobody's failure"
    stage.order("finish")
    assert (awake.ends(), stuck.ends()) == (0, 0)


def test_a_killed_node_is_waited_for_as_well_since_nobody_can_tell(stage: Stage) -> None:
    stage.daemon()
    nodes = {name: stage.launch(name, "1:2", conf=LEASE, options=STOP) for name in ("a", "b")}
    both = stage.world(2)
    stayer, victim = (nodes[name] for name in both.nodes)
    victim.kill()
    stayer.says(rf"waiting: workers may live on {victim.name} for \d+ s more")
    alone = stage.world(1, after=both)
    assert last_sign_of(stage, pids(stage, both, victim.name)) < first_sign_of(stage, alone)
    stage.order("finish")
    assert stayer.ends() == 0


# ------------------------------------------------------------------------------------- the daemon goes, and comes


def two_nodes(stage: Stage, port: int, conf: Mapping[str, str]) -> tuple[Daemon, list[Launcher], World]:
    served = stage.daemon(listen=f"127.0.0.1:{port}")
    nodes = [stage.launch(name, "2", conf=conf, options=STOP) for name in ("a", "b")]
    return served, nodes, stage.world(2)


def test_a_daemon_that_is_back_within_the_lease_stops_nobody(stage: Stage) -> None:
    port = free_port()
    served, nodes, world = two_nodes(stage, port, {"lease": "15", "heartbeat": "0.5"})
    served.process.kill()
    served.process.wait()
    stage.daemon(listen=f"127.0.0.1:{port}")
    stage.goes_on(world)
    stage.order("finish")
    assert [node.ends() for node in nodes] == [0, 0]


def test_without_a_daemon_all_workers_stop_and_start_again_when_there_is_one(stage: Stage) -> None:
    port = free_port()
    served, nodes, world = two_nodes(stage, port, LEASE)
    served.process.kill()
    served.process.wait()
    for node in nodes:
        node.says(LEAVES_OFF)
    gone_at = last_sign_of(stage, set(world.pids))
    stage.daemon(listen=f"127.0.0.1:{port}")
    again = stage.world(2, after=world)
    assert gone_at < first_sign_of(stage, again)
    assert again.restart == 0
    stage.order("finish")
    assert [node.ends() for node in nodes] == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_end_of_a_leader_stops_nobody_with_the_lease_that_such_jobs_get(
    stage: Stage, tmp_path: Path, number: signal.Signals
) -> None:
    with etcd(tmp_path) as cluster:
        options = ("--backend=etcd", f"--etcd-endpoints={','.join(cluster.endpoints)}")
        daemons = [stage.daemon(*options) for _ in range(2)]
        where = ",".join(served.endpoint for served in daemons)
        nodes = [stage.launch(name, "2", options=STOP, endpoint=where) for name in ("a", "b")]
        world = stage.world(2)
        leader = next(served for served in daemons if "round 1 runs" in served.text())
        leader.send(number)
        over_at = max(e["at"] for e in stage.progress()) + DEFAULT_LEASE_S
        stage.until(
            lambda: all(trains(stage, pid, over_at) for pid in world.pids), "all outlive the leader's last word"
        )
        stage.goes_on(world)
        stage.order("finish")
        assert [node.ends() for node in nodes] == [0, 0]
        refused = stage.launch("c", conf=LEASE, options=STOP, endpoint=where, run_id="other")
        assert refused.ends() == 1
        refused.says(r"with a lease of 4 s: it must be more than 8.93 s.*twice --leader-ttl")


# ------------------------------------------------------------------------------------- what is refused, what gives up


def test_a_lease_that_is_too_short_is_refused_with_the_numbers(stage: Stage) -> None:
    stage.daemon()
    node = stage.launch("a", conf={"lease": "2", "heartbeat": "1"}, options=STOP)
    assert node.ends() == 1
    node.says(r"--on-daemon-loss=stop with a lease of 2 s: it must be more than 2.93 s.*Set --rdzv-conf lease=3")


def test_nodes_of_both_kinds_do_not_mix(stage: Stage) -> None:
    stage.daemon()
    stage.launch("a", "2", options=STOP).says("waiting: 1 of 2 nodes")
    other = stage.launch("b", "2")
    assert other.ends() == 2
    other.says("--on-daemon-loss is stop in this job, but this node says continue")


def test_a_launcher_leaves_when_its_daemon_is_away_for_too_long(stage: Stage) -> None:
    served = stage.daemon()
    conf = {"daemon_loss_timeout": "4"}
    node = stage.launch("a", conf=conf, options=("--start-method=exec",))
    world = stage.world(1)
    served.process.kill()
    served.process.wait()
    node.says(r"the daemon is away .*; training goes on for 4 s at most")
    assert node.ends() == 1
    assert "left the job: no daemon at" in node.summary()[0]
    assert "for 4 s (daemon_loss_timeout" in node.summary()[0]
    assert not any(p.pid in world.pids for p in stage.alive())
