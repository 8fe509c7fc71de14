"""`rdzvrun --chaos`: a job is struck on purpose, and says so."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.kit import Stage


def test_workers_are_killed_now_and_then_and_the_job_recovers_each_time(stage: Stage) -> None:
    stage.daemon()
    # A strike in the very instant in which a round forms makes it a short one; no run of them is to end this test.
    conf = {"short_rounds_max": "1000"}
    struck = stage.launch("a", "2", nproc=2, restarts=1000, conf=conf, options=["--chaos=kill-worker=1500ms,seed=11"])
    other = stage.launch("b", "2", nproc=1, restarts=1000, conf=conf)
    struck.says(r"^warning: chaos is on: kill-worker every 1.5 s on average, on this node \(seed=11\)$")
    stage.until(
        lambda: any(event["round"] >= 4 for event in stage.progress(event="step")),
        "three rounds were struck, and a later one trains",
    )
    stage.order("finish")
    assert (struck.ends(), other.ends()) == (0, 0)
    assert len([line for line in struck.lines() if "chaos: SIGKILL to local rank" in line]) >= 3
    assert other.said("chaos") is None


def test_a_node_is_killed_and_nothing_of_it_is_left(stage: Stage) -> None:
    stage.daemon()
    survivor = stage.launch("a", "1:2")
    struck = stage.launch("b", "1:2", options=["--chaos=kill-node=4s,seed=6"])
    struck.says("^warning: chaos is on: kill-node every 4 s")
    assert struck.ends() == -signal.SIGKILL
    struck.says("^warning: chaos: SIGKILL to this launcher$")
    stage.until(lambda: not stage.alive("b"), "nothing of b is left")
    stage.until(lambda: [n.node_name for n in stage.job().nodes] == ["a"], "the daemon misses b")
    stage.goes_on(stage.world(1))
    stage.order("finish")
    assert survivor.ends() == 0


@pytest.mark.parametrize("text", ["kill-worker=often", "kill-nobody=1s"])
def test_a_bad_value_is_refused_before_anything_starts(stage: Stage, text: str) -> None:
    refused = stage.run("a", f"--chaos={text}", "tests/e2e/workers/stand_in.py")
    assert refused.ends() == 2
    assert len(refused.text().splitlines()) == 1
    assert refused.text().startswith("rdzvrun: error: --chaos: ")
