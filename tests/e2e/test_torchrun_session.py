"""torchrun's process has no gRPC in it: another one speaks to the daemon for it."""

from __future__ import annotations

import contextlib
import signal
import sys

import psutil
import pytest

from tests.e2e.kit import Launcher, Stage, until
from tests.e2e.test_torchrun_plugin import PROGRAMS, finish, start, torchrun


def speaker_of(stage: Stage, node: Launcher) -> psutil.Process:
    """The process that speaks to the daemon."""

    def find() -> list[psutil.Process]:
        children = psutil.Process(node.process.pid).children(recursive=True)
        return [child for child in children if "session_process" in " ".join(_command(child))]

    return stage.until(find, "there is a process that speaks to the daemon")[0]


def _command(process: psutil.Process) -> list[str]:
    words: list[str] = []
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        words = process.cmdline()
    return words


def _is_over(process: psutil.Process) -> bool:
    """Whether nothing of it runs; who has adopted it may be slow to bury it."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("again", range(3))
def test_forked_workers_run_and_may_use_the_store(stage: Stage, again: int) -> None:
    """A fork of a process with gRPC in it crashed about every second time on a busy machine."""
    node = start(stage, "a", sys.executable, str(PROGRAMS / "forked_function.py"), stage.daemon().endpoint)
    assert node.ends() == 0, node.text()
    said = "'sum 6, counted 4'"
    assert node.text().splitlines()[-1] == f"{{0: {said}, 1: {said}, 2: {said}, 3: {said}}}"


def test_when_that_process_dies_another_one_speaks(stage: Stage) -> None:
    stage.daemon()
    node = torchrun(stage, "a", "1")
    stage.world(1)
    first = speaker_of(stage, node)
    first.kill()
    stage.until(lambda: speaker_of(stage, node).pid != first.pid, "there is another one")
    stage.until(lambda: [n for n in stage.job().nodes if n.state == "running"], "the daemon hears of the node")
    finish(stage, node)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_does_not_outlive_torchrun(stage: Stage, number: signal.Signals) -> None:
    """Also where forked workers hold its socket."""
    stage.daemon()
    node = torchrun(stage, "a", "1")
    stage.world(1)
    speaker = speaker_of(stage, node)
    workers = [p for p in psutil.Process(node.process.pid).children(recursive=True) if p != speaker]
    node.send(number)
    node.process.wait()
    until(lambda: _is_over(speaker), "it has ended")
    for worker in workers:  # a torchrun that is killed leaves its workers behind
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    until(lambda: not stage.job().nodes, "the daemon knows that the node is gone")


def test_a_signal_to_all_processes_does_not_silence_it(stage: Stage) -> None:
    """It says that the node leaves, after torchrun has stopped its workers."""
    stage.daemon()
    node = torchrun(stage, "a", "1")
    stage.world(1)
    speaker = speaker_of(stage, node)
    for _ in range(2):
        speaker.send_signal(signal.SIGTERM)
        speaker.send_signal(signal.SIGINT)
    stage.until(lambda: speaker.is_running(), "it is still there")
    finish(stage, node)
