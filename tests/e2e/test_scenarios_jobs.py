"""Jobs beside and after one another, and what befalls the daemon and its clock."""

from __future__ import annotations

import shutil
import signal
import subprocess

import pytest

from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.e2e.kit import RDZVRUN, Launcher, Stage, World, frozen, until
from tests.e2e.relay import relay
from tests.ports import free_port

# A library that makes every process which loads it believe that it is 15 minutes later.
WRONG_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

#define WRONG_S (15 * 60)

int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, at);
    if (!failed && id == CLOCK_REALTIME) at->tv_sec += WRONG_S;
    return failed;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


# ---------------------------------------------------------------------------------------------------- beside each other


def test_a_job_never_notices_that_another_one_fails(stage: Stage) -> None:
    stage.daemon()
    calm = stage.launch("calm", run_id="train")
    world = stage.world(1)
    doomed = stage.launch("doomed", nproc=2, run_id="train/1")
    stage.world(2)
    stage.order("rank-1", "exit 3")
    assert doomed.ends() == 3
    stage.goes_on(world)
    stage.order("finish")
    assert calm.ends() == 0
    assert {e["round"] for e in stage.progress(node="calm")} == {1}
    assert calm.lines()[0] == "run id train"
    assert calm.lines()[2:] == ["job succeeded"]


def test_two_launchers_of_one_name_are_two_nodes(stage: Stage) -> None:
    stage.daemon()
    nodes = [stage.launch("same", "2", restarts=1) for _ in range(2)]
    first = stage.world(2)
    stage.order("rank-1", "exit 1")
    second = stage.world(2, after=first)
    assert second.restart == 1
    stage.order("finish")
    assert [node.ends() for node in nodes] == [0, 0]


# ---------------------------------------------------------------------------------------------------- after each other


@pytest.mark.parametrize(("order", "code"), [("finish-a", 0), ("rank-0", 1)])
def test_a_name_can_be_used_again_after_the_job_has_ended(stage: Stage, order: str, code: int) -> None:
    stage.daemon()
    old = stage.launch("a")
    first = stage.world(1)
    stage.order(order, "exit 1")
    assert old.ends() == code
    old_uid = stage.job().job_uid
    new = stage.launch("b", "1:2", restarts=2)  # of another shape, too: nothing of the old one binds it
    stage.world(1, after=first)
    assert stage.job().job_uid != old_uid
    new.says(r"^round \d+: rank 0 of 1, .* restart 0/2$")
    stage.order("finish")
    assert new.ends() == 0


def test_a_name_can_be_used_again_while_the_old_job_waits_with_nobody_alive(stage: Stage) -> None:
    stage.daemon()
    old = [stage.launch(name, "2", restarts=1) for name in ("a", "b")]
    first = stage.world(2)
    stage.order("rank-0", "exit 1")
    second = stage.world(2, after=first)
    for node in old:
        node.kill()
    until(lambda: not stage.job().nodes, "the daemon knows that nobody is alive")
    new = stage.launch("c", "1", restarts=1)
    third = stage.world(1, after=second)
    assert third.restart == 0
    stage.order("finish")
    assert new.ends() == 0


def test_a_launcher_older_than_the_end_of_its_job_exits_with_the_outcome(stage: Stage) -> None:
    served = stage.daemon()
    port = free_port()
    late = stage.launch("late", "1:2", endpoint=f"127.0.0.1:{port}")
    late.says("waiting for a daemon")
    node = stage.launch("a", "1:2", endpoint=served.endpoint)
    stage.world(1)
    stage.order("rank-0", "exit 5")
    assert node.ends() == 5
    with relay(served.port, port):
        assert late.ends() == 5
    assert late.summary() == node.summary()
    assert not stage.progress(node="late")


# ---------------------------------------------------------------------------------------------------- ending


def _finishes_first(stage: Stage, name: str) -> None:
    stage.order(f"finish-{name}")
    stage.until(
        lambda: [n for n in stage.job().nodes if (n.node_name, n.state) == (name, "succeeded")],
        f"the daemon knows that {name} has succeeded",
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_node_that_has_finished_may_go_and_the_job_still_succeeds(stage: Stage, number: signal.Signals) -> None:
    stage.daemon()
    conf = {"last_call_timeout": "10", "grow": "now"}
    nodes = {name: stage.launch(name, "1:3", conf=conf) for name in ("a", "b")}
    world = stage.world(2)
    _finishes_first(stage, "a")
    nodes["a"].send(number)
    nodes["a"].ends()
    stage.until(lambda: "a" not in [n.node_name for n in stage.job().nodes], "the daemon misses a")
    more = stage.launch("c", "1:3", conf=conf)
    more.says("waiting: .* spare")  # nobody is let in any more: that would be for nothing
    mine = tuple(pid for pid, node in zip(world.pids, world.nodes, strict=True) if node == "b")
    stage.goes_on(World(world.round, world.restart, ("b",), mine))
    stage.order("finish")
    assert (nodes["b"].ends(), more.ends()) == (0, 0)
    assert {e["round"] for e in stage.progress(event="start")} == {world.round}


def test_a_pipe_that_reads_the_output_ends_with_the_launcher(stage: Stage) -> None:
    command = f"'{RDZVRUN}' --no-python echo hello | cat"
    done = subprocess.run(
        ["sh", "-c", command], env=stage.environment("a"), capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "hello\n"
    assert done.stderr.splitlines()[-1] == "[rdzvrun] job succeeded"


# ---------------------------------------------------------------------------------------------------- the daemon


def test_nobody_is_lost_when_the_daemon_stands_still_for_longer_than_a_lease(stage: Stage) -> None:
    served = stage.daemon()
    conf = {"lease": "2", "heartbeat": "0.4"}
    nodes = [stage.launch(name, "1:2", conf={**conf, "last_call_timeout": "10"}) for name in ("a", "b")]
    world = stage.world(2)
    with frozen(served):
        for node in nodes:  # 2 s of silence at least, and no connection for 3 s
            node.says(r"warning: the daemon is away \(.*\); training goes on")
        stage.goes_on(world)
    for node in nodes:
        node.says("the daemon is back")
    stage.goes_on(world)
    stage.order("finish")
    assert [node.ends() for node in nodes] == [0, 0]
    assert "lost" not in served.text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_notices_that_the_daemon_was_started_again_with_an_empty_memory(
    stage: Stage, number: signal.Signals
) -> None:
    port = free_port()
    served = stage.daemon(listen=f"127.0.0.1:{port}")
    nodes = [stage.launch(name, "2", restarts=1) for name in ("a", "b")]
    first = stage.world(2)
    stage.order("rank-1", "exit 1")
    second = stage.world(2, after=first)
    served.send(number)
    served.process.wait(60)
    for node in nodes:
        node.says(r"warning: the daemon is away \(.*\); training goes on")
    stage.goes_on(second)
    stage.daemon(listen=f"127.0.0.1:{port}")
    for node in nodes:
        node.says("the daemon is back")
    stage.until(lambda: (stage.job().phase, stage.job().world_size) == (pb.JOB_RUNNING, 2), "the job runs again")
    stage.goes_on(second)  # the new daemon has learnt of it from the nodes
    stage.order("finish")
    assert [node.ends() for node in nodes] == [0, 0]


# ---------------------------------------------------------------------------------------------------- clocks


@pytest.mark.skipif(shutil.which("cc") is None, reason="the clock is bent by a library that must be compiled")
def test_a_node_whose_clock_is_15_minutes_wrong_is_a_node_like_any_other(stage: Stage) -> None:
    library = stage.directory / "wrong_clock.so"
    source = library.with_suffix(".c")
    source.write_text(WRONG_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    stage.daemon()
    a = stage.launch("a", "2:3", restarts=1)
    b = stage.launch("b", "2:3", restarts=1, env={"LD_PRELOAD": str(library)})
    nodes: dict[str, Launcher] = {"a": a, "b": b}
    first = stage.world(2)
    stage.order(f"rank-{first.nodes.index('b')}", "exit 1")
    second = stage.world(2, after=first)
    assert second.restart == 1
    for node in nodes.values():
        node.says("round 1 is over: rank . .* on node b failed with exit code 1")
    stage.goes_on(second)
    stage.order("finish")
    assert [node.ends() for node in nodes.values()] == [0, 0]


def test_two_daemons_that_share_nothing_are_refused_behind_one_endpoint_list(stage: Stage) -> None:
    first, second = stage.daemon(), stage.daemon()
    node = stage.launch("a", endpoint=f"{first.endpoint},{second.endpoint}")
    assert node.ends() == 1
    assert f"the daemon at {second.endpoint} knows nothing of the one that attends this node" in node.text()
    assert "--backend etcd" in node.text()


def test_a_job_beyond_the_daemons_limit_waits_and_says_why_until_another_one_has_ended(stage: Stage) -> None:
    stage.daemon("--max-jobs=1")
    first = stage.launch("a", run_id="first")
    stage.world(1, run="first")
    second = stage.launch("b", run_id="second")
    stage.until(lambda: "this daemon attends 1 job, the most it may (--max-jobs)" in second.text(), "it says why")
    stage.order("finish-a")
    assert first.ends() == 0
    stage.world(1, run="second")
    stage.order("finish-b")
    assert second.ends() == 0
    assert second.summary() == ["job succeeded"]


def test_nodes_that_were_given_different_run_ids_are_told_of_each_other(stage: Stage) -> None:
    stage.daemon()
    nodes = [stage.launch(f"n{run_id}", "3", run_id=run_id) for run_id in ("1000", "1017", "1034")]
    nodes[0].says(
        r"waiting: 1 of 3 nodes; .*; 2 other jobs with the same --nnodes wait here with 1 node each "
        r"\((1017, 1034|1034, 1017)\): do all nodes give the same --rdzv-id\?"
    )
