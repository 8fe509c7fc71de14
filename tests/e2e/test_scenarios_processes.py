"""What the processes of a node do to a job when they die, or will not."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress

import psutil

from tests.e2e.kit import Stage


def test_a_worker_that_will_not_end_is_killed_before_the_next_round_begins(stage: Stage) -> None:
    stage.daemon()
    nodes = [stage.launch(name, "2", restarts=1, options=["--shutdown-timeout=1"]) for name in ("a", "b")]
    first = stage.world(2)
    stage.order("rank-1", f"ignore {signal.SIGTERM:d}")
    stage.until(lambda: stage.progress(event="ignores"), "rank 1 ignores SIGTERM")
    stage.order("rank-0", "exit 1")
    stage.until(lambda: stage.progress(event="start", round=2), "the next round begins")
    assert not any(psutil.pid_exists(pid) for pid in first.pids)
    assert stage.world(2, after=first).restart == 1
    stage.order("finish")
    assert [node.ends() for node in nodes] == [0, 0]


def test_a_second_signal_hurries_a_launcher_whose_workers_take_their_time(stage: Stage) -> None:
    stage.daemon()
    node = stage.launch("a", options=["--shutdown-timeout=3600"])
    stage.world(1)
    stage.order("rank-0", f"ignore {signal.SIGTERM:d}")
    stage.until(lambda: stage.progress(event="ignores"), "the worker ignores SIGTERM")
    node.send(signal.SIGTERM)
    node.says("got SIGTERM: stopping the workers and leaving")
    node.send(signal.SIGTERM)
    assert node.ends() == 128 + signal.SIGTERM


def test_a_host_that_dies_with_all_its_processes_is_lost_and_costs_no_restart(stage: Stage) -> None:
    stage.daemon()
    nodes = {name: stage.launch(name, "1:2") for name in ("a", "b")}
    both = stage.world(2)
    survivor, victim = both.nodes
    for process in stage.alive(victim):
        with suppress(psutil.NoSuchProcess):  # it died of the one before
            process.kill()
    alone = stage.world(1, after=both)
    assert (alone.nodes, alone.restart) == ((survivor,), 0)
    nodes[survivor].says(rf"round \d+ is over: node {victim} was lost")
    stage.order("finish")
    assert nodes[survivor].ends() == 0


def test_a_bootstrap_store_that_dies_is_a_cause_of_its_own(stage: Stage) -> None:
    stage.daemon()
    nodes = {name: stage.launch(name, "2") for name in ("a", "b")}
    first = stage.world(2)
    (holder,) = stage.alive(first.nodes[0], "store_holder")
    holder.kill()
    second = stage.world(2, after=first)
    assert second.restart == 0
    for node in nodes.values():
        node.says(rf"round 1 is over: the bootstrap store on node {first.nodes[0]} died")
    stage.order("finish")
    assert [node.ends() for node in nodes.values()] == [0, 0]


def test_the_death_of_the_process_between_launcher_and_workers_is_survived(stage: Stage) -> None:
    stage.daemon()
    nodes = {name: stage.launch(name, "2", restarts=1) for name in ("a", "b")}
    first = stage.world(2)
    spawner = psutil.Process(first.pids[1]).parent()
    assert spawner is not None
    spawner.kill()
    second = stage.world(2, after=first)
    assert not any(psutil.pid_exists(pid) for pid in first.pids)
    stage.order("finish")
    assert [node.ends() for node in nodes.values()] == [0, 0]
    assert second.nodes == first.nodes


def test_a_launcher_without_a_free_descriptor_goes_on_when_it_has_some(stage: Stage) -> None:
    stage.daemon()
    nodes = {name: stage.launch(name, "2", restarts=1000) for name in ("a", "b")}
    first = stage.world(2)
    poor = nodes[first.nodes[1]]
    pid = poor.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1, before[1]))
    psutil.Process(first.pids[1]).kill()
    poor.says("Too many open files")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert stage.world(2, after=first).nodes == first.nodes
    stage.order("finish")
    assert [node.ends() for node in nodes.values()] == [0, 0]


def test_a_launcher_brings_its_own_daemon_back(stage: Stage) -> None:
    node = stage.run("alone", "--nproc-per-node=2", "tests/e2e/workers/stand_in.py")
    first = stage.world(2)
    (own,) = stage.alive(what="-m rendezvousd")
    own.kill()
    stage.goes_on(first)
    stage.until(lambda: stage.alive(what="-m rendezvousd"), "there is a daemon again")
    stage.order("finish")
    assert node.ends() == 0
    assert node.summary() == ["job succeeded"]
