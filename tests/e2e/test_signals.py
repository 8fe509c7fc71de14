"""Signals to a launcher, codes that it exits with, and when it does not try again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rendezvousd.core.settings import Timing
from tests.e2e.kit import RDZVRUN, STAND_IN, Launcher, Stage, frozen
from tests.e2e.speaking import SPEAKER, said, start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP])
def test_workers_are_stopped_with_the_signal_that_the_launcher_got(stage: Stage, number: signal.Signals) -> None:
    launcher = start(stage, "--nproc-per-node=2", SPEAKER, "signals")
    said(stage, 0, 1)
    launcher.send(number)
    assert launcher.ends() == 128 + number
    assert sorted((e["rank"], e["name"]) for e in stage.progress()) == [(0, number.name), (1, number.name)]
    launcher.says(f"^got {number.name}: stopping the workers and leaving$")
    assert launcher.summary() == [f"left the job: got {number.name}"]


def test_a_hangup_that_was_to_be_ignored_is(stage: Stage) -> None:
    process = subprocess.Popen(
        ["nohup", RDZVRUN, SPEAKER, "signals"],
        env=stage.environment("a"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    launcher = Launcher("a", process, stage.directory / "none")
    launcher.log.touch()
    stage.launchers.append(launcher)
    said(stage, 0)
    launcher.send(signal.SIGHUP)
    launcher.send(signal.SIGTERM)
    assert launcher.ends() == 128 + signal.SIGTERM
    assert [e["name"] for e in stage.progress()] == ["SIGTERM"]


def test_a_schedulers_warning_is_passed_on_when_it_is_named(stage: Stage) -> None:
    launcher = start(stage, "--nproc-per-node=2", "--signals-to-handle=SIGTERM,SIGUSR1", SPEAKER, "signals")
    said(stage, 0, 1)
    launcher.send(signal.SIGUSR1)
    stage.until(lambda: len(stage.progress(name="SIGUSR1")) == 2, "both workers have got it")
    launcher.says("^got SIGUSR1: passed on to 2 workers$")
    stage.order("finish")
    assert launcher.ends() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.1, 0.2, 0.4])
def test_a_signal_that_comes_while_the_launcher_starts_ends_it_without_a_traceback(
    stage: Stage, number: signal.Signals, after_s: float
) -> None:
    """From its first instruction: before that it is Python that starts, and a signal ends that."""
    launcher = stage.run("a", "--no-python", "sleep", "60")
    stage.until(lambda: _handles(launcher, signal.SIGTERM), "the launcher handles signals")
    time.sleep(after_s)
    launcher.send(number)
    assert launcher.ends() == 128 + number
    assert "Traceback" not in launcher.text()


@pytest.mark.parametrize("code", [0, 78])
@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05])
def test_a_signal_after_the_outcome_does_not_take_its_place(stage: Stage, code: int, after_s: float) -> None:
    launcher = stage.run("a", "--start-method=exec", "--no-python", "sh", "-c", f"exit {code}")
    stage.until(lambda: "job succeeded" in launcher.text() or "job failed" in launcher.text(), "the outcome is said")
    time.sleep(after_s)
    with contextlib.suppress(ProcessLookupError):
        launcher.send(signal.SIGTERM)
    assert launcher.ends() == code


def _handles(launcher: Launcher, number: signal.Signals) -> bool:
    status = Path(f"/proc/{launcher.process.pid}/status").read_text()
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("zygote", [True, False], ids=["zygote", "exec"])
def test_a_signal_to_every_process_of_a_node_breaks_nothing(stage: Stage, zygote: bool) -> None:
    """As a scheduler sends its warning, and systemctl kill: workers get it, and what serves them lives on."""
    named = "--signals-to-handle=SIGTERM,SIGUSR1"
    launcher = start(stage, "--nproc-per-node=2", named, SPEAKER, "signals", zygote=zygote)
    said(stage, 0, 1)
    root = psutil.Process(launcher.process.pid)
    below = {process.pid: process.create_time() for process in root.children(recursive=True)}
    workers = {int((stage.directory / f"said-{rank}").read_text()) for rank in (0, 1)}
    root.send_signal(signal.SIGUSR1)
    for process in root.children(recursive=True):
        process.send_signal(signal.SIGUSR1)
        if process.pid not in workers:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGXCPU):
                process.send_signal(number)
    stage.until(lambda: {e["rank"] for e in stage.progress(name="SIGUSR1")} == {0, 1}, "both workers have got it")
    launcher.says("^got SIGUSR1: passed on to 2 workers$")
    after = {process.pid: process.create_time() for process in root.children(recursive=True)}
    assert after == below, "no process has ended"
    stage.order("finish")
    assert launcher.ends() == 0
    launcher.says("^round 1: ")
    assert not launcher.said("round 2")


def test_a_standalone_launcher_that_is_stopped_for_longer_than_a_lease_finds_its_workers_well(stage: Stage) -> None:
    """Ctrl-Z and fg, or a debugger: no other node could have taken their place."""
    launcher = stage.run("a", "--nproc-per-node=2", "--start-method=exec", *STAND_IN)
    world = stage.world(2)
    with frozen(launcher):
        time.sleep(2 * Timing().lease_s)
        stage.goes_on(world)
    stage.goes_on(world)
    stage.order("finish")
    assert launcher.ends() == 0
    assert {e["round"] for e in stage.progress()} == {1}


@pytest.mark.parametrize("how", ["blocked", "ignored"])
@pytest.mark.parametrize("method", ["zygote", "exec"])
def test_a_launcher_started_with_sigchld_switched_off_notices_ends_and_workers_find_it_so(
    stage: Stage, how: str, method: str
) -> None:
    switch = {
        "blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])",
        "ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    }[how]
    before = [sys.executable, "-c", f"import os, signal, sys; {switch}; os.execv(sys.argv[1], sys.argv[1:])"]
    found = (
        "import signal; blocked = signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, []); "
        "ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN; "
        "print('FOUND', 'blocked' if blocked else 'ignored' if ignored else 'default'); raise SystemExit(5)"
    )
    script = stage.directory / "script.py"
    script.write_text(found)
    launcher = stage.run("a", f"--start-method={method}", str(script), before=before)
    assert launcher.ends() == 5
    assert f"FOUND {how}" in launcher.text()


# ---------------------------------------------------------------------------------------------------- outcomes


def test_a_node_that_finished_early_ends_with_the_outcome_of_the_job(stage: Stage) -> None:
    stage.daemon()
    nodes = {name: stage.launch(name, "2") for name in ("a", "b")}
    world = stage.world(2)
    stage.order("finish-a")
    stage.until(lambda: [n for n in stage.job().nodes if n.state == "succeeded"], "a is known to have finished")
    stage.order(f"rank-{world.nodes.index('b')}", "exit 5")
    assert [node.ends() for node in nodes.values()] == [5, 5]
    assert nodes["a"].summary() == nodes["b"].summary()


def test_an_exit_code_that_no_retry_can_cure_ends_the_job_at_once(stage: Stage) -> None:
    stage.daemon()
    options = ["--no-retry-exit-codes=2,64-78"]
    nodes = [stage.launch(name, "2", restarts=9, options=options) for name in ("a", "b")]
    first = stage.world(2)
    stage.order("rank-0", "exit 63")
    second = stage.world(2, after=first)
    assert second.restart == 1
    stage.order("rank-1", "exit 78")
    assert [node.ends() for node in nodes] == [78, 78]
    for node in nodes:
        assert node.summary()[0].endswith("failed with exit code 78, which is not to be tried again")


def test_workers_that_fail_at_once_again_and_again_do_not_burn_the_restarts(stage: Stage) -> None:
    launcher = start(stage, "--max-restarts=3", "--no-python", "sh", "-c", "echo no such module >&2; exit 4")
    assert launcher.ends() == 4
    text = "\n".join(launcher.lines())
    pauses = [
        f"waiting {s} s before trying again: the workers failed within a second {n} times" for s, n in ((1, 2), (2, 3))
    ]
    for pause in pauses:
        assert pause in text
    assert text.index(pauses[0]) < text.index("round 3: ") < text.index(pauses[1]) < text.index("round 4: ")
    assert launcher.summary()[-1].strip() == "no such module"


# ---------------------------------------------------------------------------------------------------- corners


def test_a_launcher_removes_what_a_killed_one_left_behind(stage: Stage) -> None:
    scratch = stage.directory / "tmp"
    scratch.mkdir()
    killed = start(stage, SPEAKER, "signals", env={"TMPDIR": str(scratch)})
    said(stage, 0)
    killed.kill()
    (left,) = scratch.iterdir()
    launcher = start(stage, SPEAKER, "signals", env={"TMPDIR": str(scratch)})
    stage.until(lambda: not left.exists(), "it is removed")
    launcher.send(signal.SIGTERM)
    launcher.ends()
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(
    ("option", "address"),
    [("", "::1"), ("--local-addr=127.0.0.1", "127.0.0.1"), ("--local-addr=localhost", "localhost")],
)
def test_peers_are_told_the_address_towards_the_daemon_or_the_one_given(
    stage: Stage, option: str, address: str
) -> None:
    served = stage.daemon(listen="[::]:0")
    stage.order("finish")
    options = [option] if option else []
    assert stage.launch("a", endpoint=f"[::1]:{served.port}", options=options).ends() == 0
    (began,) = stage.progress(event="start")
    assert began["env"]["MASTER_ADDR"] == address


def test_a_job_without_a_name_has_that_of_the_scheduler_or_none(stage: Stage) -> None:
    served = stage.daemon()
    stage.order("finish")
    where = f"--rdzv-endpoint={served.endpoint}"
    launcher = stage.run("a", where, *STAND_IN, env={"SLURM_JOB_ID": "4711"})
    assert launcher.ends() == 0
    assert launcher.lines()[0] == "run id 4711 (the scheduler's job id; no --rdzv-id given)"
    nameless = stage.run("b", where, *STAND_IN)
    assert nameless.ends() == 2
    assert "--rdzv-id is missing" in nameless.text()


def test_a_script_that_is_not_there_is_a_mistake_in_the_command_line(stage: Stage) -> None:
    missing = str(stage.directory / "missing.py")
    done = subprocess.run([RDZVRUN, missing], env=os.environ, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, Path(missing).exists()) == (2, False)
    assert done.stderr == f"rdzvrun: error: training script {missing}: no such file; give the path of a Python file\n"
