"""Stock torchrun, and what is built on its launcher, at our daemon."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.e2e.kit import CONF, STAND_IN, TOGETHER, Event, Launcher, Stage, World

PROGRAMS = Path(__file__).with_name("programs")
ENV_PROBE = str(Path(__file__).resolve().parents[2] / "examples" / "env_probe.py")
TORCH = tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))
# torch 2.4 does not look at entry points yet.
TORCHRUN = (
    (str(Path(sys.executable).with_name("torchrun")),) if TORCH >= (2, 5) else (sys.executable, "-m", "rdzv.torchrun")
)

# Workers of torch 2.4 and 2.5 meet under the restart count, which is therefore the job's on each node. Others are told
# what their own agent has counted: one.
COUNTED = int(TORCH >= (2, 6))


def torchrun(
    stage: Stage,
    name: str,
    nnodes: str,
    *,
    nproc: int = 1,
    restarts: int = 0,
    conf: Mapping[str, str] | None = None,
    endpoint: str | None = None,
    options: Sequence[str] = (),
    worker: Sequence[str] = STAND_IN,
    program: Sequence[str] = TORCHRUN,
) -> Launcher:
    """Start a stock torchrun at the stage's daemon."""
    texts = {**CONF, "node_name": name, **(conf or {})}
    where = endpoint if endpoint is not None else stage.daemons[-1].endpoint
    return start(
        stage,
        name,
        *program,
        "--rdzv-backend=rendezvousd",
        f"--rdzv-endpoint={where}",
        "--rdzv-id=job",
        f"--rdzv-conf={','.join(f'{k}={v}' for k, v in texts.items())}",
        f"--nnodes={nnodes}",
        f"--nproc-per-node={nproc}",
        f"--max-restarts={restarts}",
        *options,
        *worker,
    )


def start(stage: Stage, name: str, *command: str, **env: str) -> Launcher:
    """Start a program as one of the stage's launchers."""
    log = stage.directory / f"{name}-{len(stage.launchers)}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=stage.environment(name, env),
            cwd=stage.directory,
            start_new_session=True,
        )
    launcher = Launcher(name, process, log)
    stage.launchers.append(launcher)
    return launcher


def kill_node(launcher: Launcher) -> None:
    """SIGKILL to the agent and its workers, as when the host dies."""
    agent = psutil.Process(launcher.process.pid)
    everybody = [agent, *agent.children(recursive=True)]
    agent.suspend()  # so that it sees nothing of what happens to its workers
    for process in everybody:
        process.kill()
    launcher.process.wait()


def starts(stage: Stage, world: World, node: str) -> Sequence[Event]:
    """What the workers of a node said when they began, by local rank."""
    found = [e for e in stage.progress(event="start", node=node) if e["round"] == world.round]
    return sorted(found, key=lambda e: int(e["env"]["LOCAL_RANK"]))


def finish(stage: Stage, *launchers: Launcher) -> None:
    """All workers end with success, and so does everything else."""
    stage.order("finish")
    for launcher in launchers:
        assert launcher.ends() == 0, launcher.text()
    job = stage.job()
    assert (job.phase, job.ended.outcome) == (pb.JOB_ENDED, pb.OUTCOME_SUCCEEDED)


def test_two_nodes_of_two_workers(stage: Stage) -> None:
    """Ranks and environment are those that torchrun's own rendezvous would give, and each round has its own store."""
    stage.daemon()
    nodes = [torchrun(stage, name, "2", nproc=2, restarts=3, worker=TOGETHER) for name in "ab"]
    world = stage.world(4)
    assert sorted(world.nodes[::2]) == ["a", "b"]
    stores = set()
    for group_rank, name in enumerate(world.nodes[::2]):
        for local_rank, event in enumerate(starts(stage, world, name)):
            env, rank = event["env"], 2 * group_rank + local_rank
            stores.add((env["MASTER_ADDR"], env["MASTER_PORT"]))
            assert {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "GROUP_RANK": str(group_rank),
                "ROLE_RANK": str(rank),
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_WORLD_SIZE": "2",
                "ROLE_WORLD_SIZE": "4",
                "ROLE_NAME": "default",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "3",
                "TORCHELASTIC_RUN_ID": "job",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "RENDEZVOUSD_RUN_ID": "job",
            }.items() <= env.items()
            assert "GRPC_VERBOSITY" not in env
    assert len(stores) == 1
    finish(stage, *nodes)


def test_a_lost_node_costs_the_survivors_no_restart(stage: Stage) -> None:
    """Their workers notice nothing by themselves: the agents are told to start them anew. Rank 0 stays where it is."""
    stage.daemon()
    nodes = {name: torchrun(stage, name, "2:3") for name in "abc"}
    first = stage.world(3)
    kill_node(nodes.pop(first.nodes[2]))
    second = stage.world(2, after=first)
    assert (second.restart, second.nodes) == (0, first.nodes[:2])
    finish(stage, *nodes.values())


def test_a_lost_node_costs_no_restart_though_collectives_fail(stage: Stage) -> None:
    """The workers die of the loss before anybody is told of it. It is found out, and not counted."""
    stage.daemon()
    nodes = {name: torchrun(stage, name, "2:3", restarts=1, worker=TOGETHER) for name in "abc"}
    first = stage.world(3)
    kill_node(nodes.pop(first.nodes[0]))
    second = stage.world(2, after=first)
    for name in nodes:
        [event] = starts(stage, second, name)
        assert event["restart"] == 0
    assert stage.job().known.restarts_used == 0
    finish(stage, *nodes.values())


def test_a_second_run_of_the_same_submission_is_a_job_of_its_own(stage: Stage) -> None:
    stage.daemon()
    uids, last = [], 0
    for name in ("a", "b"):
        node = torchrun(stage, name, "1", conf={"submission": "4711"})
        last = stage.world(1, after=last).round
        uids.append(stage.job().job_uid)
        stage.order(f"finish-{name}")
        assert node.ends() == 0, node.text()
    assert uids[0] != uids[1]


def test_a_failed_worker_is_counted_by_its_own_agent(stage: Stage) -> None:
    stage.daemon()
    nodes = [torchrun(stage, name, "2", restarts=1) for name in "ab"]
    first = stage.world(2)
    stage.order("rank-1", "exit 3")
    second = stage.world(2, after=first)
    assert second.nodes == first.nodes
    assert [starts(stage, second, name)[0]["restart"] for name in second.nodes] == [0, COUNTED]
    assert stage.job().known.restarts_used == 0
    finish(stage, *nodes)


def test_a_second_node_is_let_in(stage: Stage) -> None:
    """The nodes find each other though their agents have counted different numbers of restarts."""
    stage.daemon()
    a = torchrun(stage, "a", "1:2", restarts=1, worker=TOGETHER)
    first = stage.world(1)
    stage.order("rank-0", "exit 3")
    alone = stage.world(1, after=first)
    assert alone.restart == COUNTED
    b = torchrun(stage, "b", "1:2", restarts=1, worker=TOGETHER)
    both = stage.world(2, after=alone)
    assert both.nodes == ("a", "b")
    assert [starts(stage, both, name)[0]["restart"] for name in "ab"] == [COUNTED, 0]
    finish(stage, a, b)


def test_a_node_that_is_done_early_disturbs_nobody(stage: Stage) -> None:
    """It waits for the others, as its host may serve their store. When they start anew, it goes."""
    stage.daemon()
    nodes = {name: torchrun(stage, name, "1:2", restarts=1) for name in "ab"}
    first = stage.world(2)
    early, late = first.nodes
    stage.order(f"finish-{early}")
    stage.until(lambda: "1 of 2 nodes have finished" in stage.job().explain, "the daemon hears of it")
    assert nodes[early].process.poll() is None
    stage.order("rank-1", "exit 3")
    second = stage.world(1, after=first)
    assert (second.round, second.nodes) == (first.round + 1, (late,))
    assert nodes[early].ends() == 0
    finish(stage, nodes[late])


def test_a_node_that_gives_up_closes_nothing(stage: Stage) -> None:
    stage.daemon()
    nodes = {name: torchrun(stage, name, "1:2") for name in "ab"}
    first = stage.world(2)
    stays, goes = first.nodes
    stage.order("rank-1", "exit 3")
    assert nodes[goes].ends() == 1
    second = stage.world(1, after=first)
    assert (second.restart, second.nodes) == (0, (stays,))
    assert f"node {goes} left: rank 1 failed (exit code 3), and torchrun has given up" in stage.daemons[-1].text()
    finish(stage, nodes[stays])


def test_a_node_that_is_terminated_says_so(stage: Stage) -> None:
    """Its agent does not shut its rendezvous down; the others need not wait for a lease all the same."""
    stage.daemon()
    nodes = {name: torchrun(stage, name, "1:2") for name in "ab"}
    first = stage.world(2)
    stays, goes = first.nodes
    nodes[goes].send(signal.SIGTERM)
    second = stage.world(1, after=first)
    assert second.nodes == (stays,)
    assert f"node {goes} left: its launcher ends" in stage.daemons[-1].text()
    assert nodes[goes].ends() == 1
    finish(stage, nodes[stays])


def test_a_surplus_node_waits_and_ends_with_the_job(stage: Stage) -> None:
    stage.daemon()
    a = torchrun(stage, "a", "1")
    stage.world(1)
    # torch 2.4 has no entry points; this way of starting it needs none
    b = torchrun(stage, "b", "1", program=[sys.executable, "-m", "rdzv.torchrun"])
    stage.until(lambda: "1 spare" in stage.job().explain, "the second node waits")
    finish(stage, a, b)


def test_the_daemon_may_be_restarted(stage: Stage) -> None:
    """One without memory learns of the round from its nodes, and no worker notices."""
    served = stage.daemon()
    nodes = [torchrun(stage, name, "2", endpoint=f"127.0.0.1:1,{served.endpoint}") for name in "ab"]
    world = stage.world(2)
    served.process.kill()
    served.process.wait()
    stage.daemon(listen=served.endpoint)
    stage.until(lambda: running(stage, 2), "the new daemon has the job")
    stage.goes_on(world)
    finish(stage, *nodes)


def running(stage: Stage, nodes: int) -> bool:
    """Whether the job runs with so many nodes, as far as its daemon knows."""
    try:
        job = stage.job()
    except Exception:  # noqa: BLE001  it may not know the job yet
        return False
    return job.phase == pb.JOB_RUNNING and [n.state for n in job.nodes] == ["running"] * nodes


def test_torchrun_and_rdzvrun_form_one_world(stage: Stage) -> None:
    stage.daemon()
    ours = stage.launch("ours", "2", nproc=3, restarts=1, worker=TOGETHER)
    theirs = torchrun(stage, "theirs", "2", nproc=2, restarts=1, worker=TOGETHER)
    first = stage.world(5)
    check_mixed(stage, first)
    stage.order("rank-0", f"signal {int(signal.SIGKILL)}")
    second = stage.world(5, after=first)
    assert second.nodes == first.nodes
    check_mixed(stage, second)
    finish(stage, ours, theirs)


def check_mixed(stage: Stage, world: World) -> None:
    """Both launchers tell their workers the same world."""
    told = [starts(stage, world, name) for name in dict.fromkeys(world.nodes)]
    assert [len(events) for events in told] == ([3, 2] if world.nodes[0] == "ours" else [2, 3])
    for group_rank, events in enumerate(told):
        for event in events:
            env = event["env"]
            assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == (str(group_rank), "2")
            assert (env["WORLD_SIZE"], env["ROLE_WORLD_SIZE"]) == ("5", "5")
            assert env["LOCAL_WORLD_SIZE"] == str(len(events))
    envs = [event["env"] for events in told for event in events]
    assert [env["RANK"] for env in envs] == [env["ROLE_RANK"] for env in envs] == list("01234")
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"], env["RENDEZVOUSD_ROUND_UID"]) for env in envs}) == 1


def test_no_daemon_is_said_in_words(stage: Stage) -> None:
    node = torchrun(stage, "a", "1", endpoint="127.0.0.1:1", conf={"join_timeout": "1"})
    assert node.ends() == 1
    assert "RendezvousConnectionError: no daemon at 127.0.0.1:1 for 1 s" in node.text()


def test_too_few_nodes_are_a_timeout(stage: Stage) -> None:
    stage.daemon()
    node = torchrun(stage, "a", "2", conf={"join_timeout": "1"})
    assert node.ends() == 1
    assert "RendezvousTimeoutError: job failed: 1 of 2 nodes for 1 s (join timeout)" in node.text()


def test_a_wrong_number_of_slots_is_refused(stage: Stage) -> None:
    stage.daemon()
    node = torchrun(stage, "a", "1", conf={"slots": "3"})
    assert node.ends() == 1
    assert "the daemon was told of 3 workers on this node, and there are 1: give --rdzv-conf slots=1" in node.text()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--rdzv-conf=gorw=now", "unknown key gorw: did you mean grow?"),
        ("--rdzv-endpoint=http://head", "--rdzv-endpoint: 'http://head' is a URL or a path"),
        ("--rdzv-endpoint=", "--rdzv-endpoint=HOST[:PORT]"),
    ],
)
def test_wrong_options_are_named(stage: Stage, option: str, words: str) -> None:
    node = torchrun(stage, "a", "1", endpoint="127.0.0.1:1", options=[option])
    assert node.ends() == 1
    assert words in node.text()


def test_elastic_launch(stage: Stage) -> None:
    """Two programs that launch a function return what their workers did."""
    endpoint = stage.daemon().endpoint
    nodes = [start(stage, name, sys.executable, str(PROGRAMS / "launch_function.py"), endpoint) for name in "ab"]
    assert [node.ends() for node in nodes] == [0, 0]
    results = sorted(node.text().splitlines()[-1] for node in nodes)
    assert results == ["{0: '0 of 4, sum 6', 1: '1 of 4, sum 6'}", "{2: '2 of 4, sum 6', 3: '3 of 4, sum 6'}"]


@pytest.mark.skipif(TORCH < (2, 5), reason="torch 2.4 finds no backends of others, and accelerate registers none")
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_launch(stage: Stage) -> None:
    host, _, port = stage.daemon().endpoint.rpartition(":")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=2"]
    place = [f"--main_process_ip={host}", f"--main_process_port={port}", "--rdzv_backend=rendezvousd"]
    script = [*place, "--num_processes=4", str(PROGRAMS / "accelerated.py")]
    offline = {"PET_RDZV_ID": "job", "HF_HUB_OFFLINE": "1", "HF_HOME": str(stage.directory / "hf")}
    # The machine rank is not used, but where it is 0 accelerate insists on a free port, which is the daemon's here.
    nodes = [start(stage, name, *command, "--machine_rank=1", *script, **offline) for name in "ab"]
    assert [node.ends() for node in nodes] == [0, 0], "\n".join(node.text() for node in nodes)
    # torch's launcher lets two workers write into one line.
    said = sorted(words for node in nodes for words in re.findall(r"process \d of 4, sum \d", node.text()))
    assert said == [f"process {rank} of 4, sum 6" for rank in range(4)]
    assert stage.job().ended.outcome == pb.OUTCOME_SUCCEEDED
