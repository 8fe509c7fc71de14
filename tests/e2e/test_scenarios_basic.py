"""The plain life of a job: start, ranks, failures within and beyond the budget, where the daemon is."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.kit import RDZVRUN, STAND_IN, Stage, until
from tests.ports import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def probed(text: str) -> list[dict[str, Any]]:
    """What each worker of env_probe.py has printed, by rank. Lines of two workers may run into one another."""
    decoder = json.JSONDecoder()
    found = [decoder.raw_decode(text, start.start())[0] for start in re.finditer(r'\{"env"', text)]
    return sorted(found, key=lambda said: int(said["env"]["RANK"]))


# ---------------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_unmodified_script_gets_its_ranks_and_a_process_group(stage: Stage, nodes: int) -> None:
    stage.daemon()
    script = [str(EXAMPLES / "env_probe.py")]
    conf = {"last_call_timeout": "3"}
    started = [
        stage.launch(f"n{i}", str(nodes), nproc=2, restarts=3, run_id="my/job 1", conf=conf, worker=script)
        for i in range(nodes)
    ]
    assert [node.ends() for node in started] == [0] * nodes
    for node in started:
        assert node.summary() == ["job succeeded"]
    said = probed("".join(node.text() for node in started))
    world = 2 * nodes
    assert [[int(s["env"][name]) for name in NAMES] for s in said] == [
        [rank, rank % 2, world, 2, rank // 2, nodes] for rank in range(world)
    ]
    assert [s["sum_of_ranks"] for s in said] == [sum(range(world))] * world
    assert len({(s["env"]["MASTER_ADDR"], s["env"]["MASTER_PORT"]) for s in said}) == 1
    for rank, s in enumerate(said):
        env = s["env"]
        assert (env["ROLE_NAME"], env["ROLE_RANK"], env["ROLE_WORLD_SIZE"]) == ("default", str(rank), str(world))
        assert (env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "3")
        assert env["TORCHELASTIC_RUN_ID"] == "my/job 1"
        assert (env["TORCHELASTIC_USE_AGENT_STORE"], env["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("True", "1")
        assert env["OMP_NUM_THREADS"] == "1"
    assert len({s["env"]["TORCHELASTIC_ERROR_FILE"] for s in said}) == world


def test_unequal_nodes_share_the_ranks_without_gaps(stage: Stage) -> None:
    stage.daemon()
    stage.launch("one", "2", nproc=1)
    stage.launch("three", "2", nproc=3)
    world = stage.world(4)
    assert sorted(world.nodes) == ["one", "three", "three", "three"]
    seats = {e["rank"]: e["env"] for e in stage.progress(event="start")}
    for rank, node in enumerate(world.nodes):
        slots = {"one": "1", "three": "3"}[node]
        assert (seats[rank]["LOCAL_WORLD_SIZE"], seats[rank]["WORLD_SIZE"]) == (slots, "4")
        assert seats[rank]["LOCAL_RANK"] == str(rank - world.nodes.index(node))
    stage.order("finish")
    assert [node.ends() for node in stage.launchers] == [0, 0]


def test_node_ranks_that_were_asked_for_are_given(stage: Stage) -> None:
    stage.daemon()
    for rank, name in ((2, "c"), (0, "a"), (1, "b")):
        stage.launch(name, "3", options=[f"--node_rank={rank}"])
    assert stage.world(3).nodes == ("a", "b", "c")


# ---------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("order", "code", "words"),
    [
        ("exit 1", 1, "exit code 1"),
        ("exit 3", 3, "exit code 3"),
        ("raise", 1, "exit code 1"),
        ("signal 9", 128 + 9, "SIGKILL"),
        ("signal 11", 128 + 11, "SIGSEGV"),
        ("signal 15", 128 + 15, "SIGTERM"),
    ],
)
def test_a_dead_worker_restarts_all_nodes_within_the_budget_and_ends_all_beyond_it(
    stage: Stage, order: str, code: int, words: str
) -> None:
    stage.daemon()
    nodes = {name: stage.launch(name, "2", restarts=1) for name in ("a", "b")}
    first = stage.world(2)
    stage.order("rank-1", order)
    second = stage.world(2, after=first)
    assert (second.nodes, second.restart) == (first.nodes, 1)
    assert not set(first.pids) & set(second.pids)
    culprit = first.nodes[1]
    for rank, name in enumerate(second.nodes):
        cause = nodes[name].says(r"^round 1 is over: (.*)$")[1]
        assert f"rank 1 (local rank 0) on node {culprit}" in cause
        assert words in cause
        nodes[name].says(rf"^round 2: rank {rank} of 2, node {rank} of 2, master .*, restart 1/1$")

    stage.order("rank-1", order)
    assert [node.ends() for node in nodes.values()] == [code, code]
    endings = [node.summary()[0] for node in nodes.values()]
    assert endings[0] == endings[1]
    assert endings[0].startswith(f"job failed: rank 1 (local rank 0) on node {culprit} ")
    assert words in endings[0]
    assert not stage.progress(event="start", round=3)


def test_the_summary_has_the_traceback_that_the_worker_recorded(stage: Stage) -> None:
    stage.daemon()
    nodes = {name: stage.launch(name, "2", worker=[*STAND_IN, "--record"]) for name in ("a", "b")}
    culprit = stage.world(2).nodes[1]
    stage.order("rank-1", "raise")
    assert [node.ends() for node in nodes.values()] == [1, 1]
    summaries = [node.summary() for node in nodes.values()]
    assert summaries[0] == summaries[1]
    head, *rest = summaries[0]
    assert head == f"job failed: rank 1 (local rank 0) on node {culprit} failed with exit code 1"
    assert rest[0].strip() == "it said:"
    assert rest[1].strip().startswith("Traceback (most recent call last)")
    assert "ArithmeticError: the loss is not a number" in rest[-1]


def test_a_traceback_is_shown_once_though_rounds_before_had_one_too(stage: Stage) -> None:
    stage.daemon()
    nodes = {name: stage.launch(name, "2", restarts=1, worker=[*STAND_IN, "--record"]) for name in ("a", "b")}
    first = stage.world(2)
    stage.order("rank-1", "raise 1")
    stage.world(2, after=first)
    stage.order("rank-1", "raise 2")
    assert [node.ends() for node in nodes.values()] == [1, 1]
    for node in nodes.values():
        own = [line for line in node.text().splitlines() if line.startswith(f"[{node.name}] ")]
        told = [line for line in own if "ArithmeticError: the loss is not a number" in line]
        assert [line.rpartition("number")[2] for line in told] == ["!!"]
        assert sum("Traceback (most recent call last)" in line for line in own) == 1


def test_a_traceback_of_any_size_becomes_a_few_lines_that_say_so(stage: Stage) -> None:
    stage.daemon()
    nodes = [stage.launch(name, "2", worker=[*STAND_IN, "--record"]) for name in ("a", "b")]
    stage.world(2)
    stage.order("rank-1", f"raise {50 << 20}")
    assert [node.ends() for node in nodes] == [1, 1]
    for node in nodes:
        summary = "\n".join(node.summary())
        assert "ArithmeticError: the loss is not a number" in summary
        assert re.search(r"\d{6,} bytes cut", summary)
        assert len(summary) < 10_000


# ---------------------------------------------------------------------------------------------------- where


@pytest.mark.parametrize("text", ["localhost:{}", "127.0.0.1:{}", "[::1]:{}"])
def test_an_endpoint_with_a_port_is_found(stage: Stage, text: str) -> None:
    port = stage.daemon(listen="[::]:0").port
    stage.order("finish")
    assert stage.launch("a", endpoint=text.format(port)).ends() == 0


def test_an_endpoint_without_a_port_is_at_the_usual_one(stage: Stage) -> None:
    with socket.socket() as knock:
        if knock.connect_ex(("127.0.0.1", 29400)) == 0:
            pytest.skip("somebody listens on port 29400")
    stage.daemon(listen="[::]:29400")
    stage.order("finish")
    nodes = [stage.launch(f"n{i}", run_id=f"job{i}", endpoint=e) for i, e in enumerate(("localhost", "::1", "[::1]"))]
    assert [node.ends() for node in nodes] == [0, 0, 0]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("--rdzv-endpoint", text) for text in ("host:", "host:65536", "host:abc", "http://h:1")],
        *[("--nnodes", text) for text in ("0", "2:1", "1:2:3", "a", "1:", "-1")],
        *[("--nproc-per-node", text) for text in ("0", "-1", "1.5", "gpu")],
        ("--rdzv-conf", "no_such_key=1"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused_in_one_line(option: str, value: str) -> None:
    command = [str(RDZVRUN), "--rdzv-endpoint=127.0.0.1", "--rdzv-id=job", f"{option}={value}", *STAND_IN]
    if value == "gpu" and Path("/dev/nvidiactl").exists():
        pytest.skip("this host may have a GPU")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"rdzvrun: error: .+\n", done.stderr)
    assert value.removesuffix("=1") in done.stderr
    assert option in done.stderr


def test_a_daemon_that_is_not_there_yet_is_waited_for(stage: Stage) -> None:
    port = free_port()
    node = stage.launch("a", endpoint=f"127.0.0.1:{port}")
    left = node.says(rf"waiting for a daemon: 127\.0\.0\.1:{port}\b.* refused.*; (\d+) s left")
    assert 500 < int(left[1]) <= 600
    stage.daemon(listen=f"127.0.0.1:{port}")
    stage.world(1)
    stage.order("finish")
    assert node.ends() == 0


def test_a_daemon_that_never_comes_ends_the_launcher_at_the_join_timeout(stage: Stage) -> None:
    port = free_port()
    node = stage.launch("a", endpoint=f"localhost:{port}", conf={"join_timeout": "2"})
    assert node.ends() == 1
    assert re.match(rf"no daemon at localhost:{port} for 2 s.* refused.* firewall", node.lines()[-1])


# ---------------------------------------------------------------------------------------------------- side by side


@contextlib.contextmanager
def occupied(port: int) -> Iterator[None]:
    """Somebody listens on this port: we, or whoever had it before."""
    with socket.socket() as listener:
        with contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            listener.listen()
        yield


def test_many_jobs_side_by_side_clash_with_nobody(stage: Stage) -> None:
    with occupied(29500), occupied(29400):
        stage.daemon()
        for i in range(4):
            stage.launch(f"n{i}", run_id=f"job{i}", nproc=2)
        for i in range(4, 6):
            stage.run(f"n{i}", "--standalone", "--nproc-per-node=2", *STAND_IN)
        stage.until(lambda: len({e["pid"] for e in stage.progress(event="step")}) == 12, "six jobs run at once")
        stage.order("finish")
        assert [node.ends() for node in stage.launchers] == [0] * 6
    starts = stage.progress(event="start")
    ports = {(e["node"], e["env"]["MASTER_PORT"]) for e in starts}
    assert len({port for _, port in ports}) == len(ports) == 6
    assert not {"29400", "29500"} & {port for _, port in ports}


def test_one_node_needs_no_daemon_and_no_name(stage: Stage) -> None:
    node = stage.run("alone", "--nproc-per-node=2", *STAND_IN)
    stage.world(2)
    run_id = node.says(r"^run id ([-0-9a-f]{36})$")[1]
    assert {e["env"]["TORCHELASTIC_RUN_ID"] for e in stage.progress(event="start")} == {run_id}
    stage.order("finish")
    assert node.ends() == 0
    assert node.summary() == ["job succeeded"]
    until(lambda: not stage.alive(), "its daemon is gone with it")


def test_standalone_restarts_a_killed_worker_and_passes_its_exit_code_on(stage: Stage) -> None:
    node = stage.run("alone", "--standalone", "--nproc-per-node=2", "--max-restarts=1", *STAND_IN)
    first = stage.world(2)
    stage.order("rank-0", "signal 9")
    second = stage.world(2, after=first)
    assert second.restart == 1
    stage.order("rank-1", "exit 7")
    assert node.ends() == 7
    assert "rank 1 (local rank 1)" in node.summary()[0]
