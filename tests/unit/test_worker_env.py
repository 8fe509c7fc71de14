"""What a worker is started with, against what a real torchrun starts its workers with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rdzv.options import parse
from rdzv.worker_env import script_missing, worker_argv, worker_environment
from rendezvousd.v1.rendezvous_pb2 import Assigned

PROBE = """
import json, os, sys
with open(os.path.join(os.environ["PROBE"], os.environ["RANK"]), "w") as file:
    json.dump({"environ": dict(os.environ), "argv": sys.orig_argv}, file)
"""

ASSIGNED = Assigned(
    round=3,
    round_uid="round-uid",
    group_rank=1,
    group_size=2,
    first_rank=4,
    slots=2,
    world_size=6,
    role_first_rank=1,
    role_world_size=3,
    restart_count=2,
    max_restarts=5,
    master_addr="10.0.0.1",
    master_port=1234,
    store_generation="generation",
)


def environment(base: dict[str, str], local_rank: int = 1, *, virtual: bool = False) -> dict[str, str]:
    return worker_environment(
        base,
        ASSIGNED,
        local_rank,
        run_id="my job",
        role="trainer",
        error_file="/tmp/error.json",
        endpoint="head:29400,other:29400",
        job_uid="job-uid",
        signals_to_handle=("SIGTERM", "SIGINT"),
        virtual_local_rank=virtual,
    )


def test_every_variable_says_what_was_dealt() -> None:
    base = {"PATH": "/bin", "RANK": "stale", "RENDEZVOUSD_ROUND": "stale"}
    assert environment(base) == {
        "PATH": "/bin",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "my job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/tmp/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "RENDEZVOUSD_ENDPOINT": "head:29400,other:29400",
        "RENDEZVOUSD_RUN_ID": "my job",
        "RENDEZVOUSD_JOB_UID": "job-uid",
        "RENDEZVOUSD_ROUND": "3",
        "RENDEZVOUSD_ROUND_UID": "round-uid",
        "RENDEZVOUSD_STORE_GENERATION": "generation",
    }
    assert base["RANK"] == "stale"


def test_what_the_user_has_set_stays() -> None:
    found = environment({"OMP_NUM_THREADS": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"})
    assert (found["OMP_NUM_THREADS"], found["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("7", "3")


def test_a_worker_on_its_own_may_use_all_threads() -> None:
    alone = Assigned(slots=1, world_size=1)
    found = worker_environment(
        {}, alone, 0, run_id="a", role="", error_file="", endpoint="", job_uid="", signals_to_handle=()
    )
    assert "OMP_NUM_THREADS" not in found


def test_a_virtual_local_rank_sees_its_own_device_as_the_first() -> None:
    found = environment({}, virtual=True)
    assert (found["LOCAL_RANK"], found["CUDA_VISIBLE_DEVICES"], found["RANK"]) == ("0", "1", "5")
    assert environment({"CUDA_VISIBLE_DEVICES": "4, 6"}, virtual=True)["CUDA_VISIBLE_DEVICES"] == "6"
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=4 has no device for local rank 1"):
        environment({"CUDA_VISIBLE_DEVICES": "4"}, virtual=True)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([__file__, "--a", "b c"], (sys.executable, "-u", __file__, "--a", "b c")),
        (["-m", "pkg.mod", "x"], (sys.executable, "-u", "-m", "pkg.mod", "x")),
        (["--no-python", "prog", "x"], ("prog", "x")),
        (["--run-path", "--no-python", __file__], (sys.executable, "-u", __file__)),
        (
            ["--no-python", "p", "${local_rank}", "a$local_rank.log", "$local_ranks", "$${local_rank}", "$$x", "$HOME"],
            ("p", "1", "a1.log", "$local_ranks", "${local_rank}", "$$x", "$HOME"),
        ),
    ],
)
def test_the_command_of_a_worker(argv: list[str], expected: tuple[str, ...]) -> None:
    assert worker_argv(parse(argv, {}), {}, 1) == expected


def test_another_interpreter_may_be_named() -> None:
    assert worker_argv(parse(["-m", "a"], {}), {"PYTHON_EXEC": "/opt/python"}, 0) == ("/opt/python", "-u", "-m", "a")


def test_workers_get_what_torchrun_gives_them(tmp_path: Path) -> None:
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    base = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "RANK")}
    base |= {"PROBE": str(tmp_path)}
    args = ["--nproc-per-node", "2", "--max-restarts", "1", "--role", "trainer", str(script), "a${local_rank}", "-x"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run([*torchrun, *args], env=base, check=True, capture_output=True, timeout=120)
    options = parse(["--standalone", *args], base)
    for rank in (0, 1):
        theirs = json.loads((tmp_path / str(rank)).read_text())
        theirs_env: dict[str, str] = theirs["environ"]
        assigned = Assigned(
            round=1,
            group_size=1,
            slots=2,
            world_size=2,
            role_world_size=2,
            max_restarts=1,
            master_addr=theirs_env["MASTER_ADDR"],
            master_port=int(theirs_env["MASTER_PORT"]),
        )
        ours = worker_environment(
            base,
            assigned,
            rank,
            run_id=theirs_env["TORCHELASTIC_RUN_ID"],
            role=options.role,
            error_file=theirs_env["TORCHELASTIC_ERROR_FILE"],
            endpoint="",
            job_uid="",
            signals_to_handle=options.signals_to_handle,
        )
        own = {name for name in ours if name.startswith("RENDEZVOUSD_")}
        assert {name: value for name, value in ours.items() if name not in own} == theirs_env
        assert worker_argv(options, base, rank)[1:] == tuple(theirs["argv"][1:])


def test_a_script_that_has_gone_from_this_host_is_known_to_be_missing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    options = parse([str(script)], {})
    assert not script_missing(options)
    script.unlink()
    assert script_missing(options)
    assert not script_missing(parse(["-m", "nowhere"], {}))
    assert not script_missing(parse(["--no-python", "/nowhere/program"], {}))
