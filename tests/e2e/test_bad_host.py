"""One host on which nothing works does not take the job down: whole jobs with real daemons, launchers and workers."""

from __future__ import annotations

import sys

import pytest

from tests.e2e.kit import Stage

AT_ONCE = {
    "the program is missing": {"worker": ("/nowhere/program",), "options": ("--no-python",)},
    "the interpreter is missing": {"env": {"PYTHON_EXEC": "/nowhere/python"}},
    "its log directory fails": {"options": ("--log-dir=/dev/null/logs", "--redirects=3", "--start-method=exec")},
}


@pytest.mark.parametrize("what", AT_ONCE)
def test_a_host_that_cannot_start_its_workers_sits_out_and_uses_no_restart(stage: Stage, what: str) -> None:
    stage.daemon()
    good = [stage.launch(name, "2:3", conf={"last_call_timeout": "10"}) for name in ("a", "b")]
    bad = stage.launch("c", "2:3", conf={"last_call_timeout": "10"}, **AT_ONCE[what])  # type: ignore[arg-type]
    world = stage.world(2)
    assert (set(world.nodes), world.restart) == ({"a", "b"}, 0)
    for node in good:
        node.says(r"round 1 is over: .*could not be started: ")
        node.says(r"\bnode c sits out for 5 s: its workers could not be")  # in that line, or in one of its own
    bad.says(r"waiting: round 2 runs: 2 nodes, 2 ranks; c sits out for \d s: its workers could not be started")
    stage.order("finish")
    assert [node.ends() for node in (*good, bad)] == [0, 0, 0]


def test_a_host_on_which_the_script_always_fails_sits_out_after_two_rounds_and_the_others_train(stage: Stage) -> None:
    stage.daemon()
    good = [stage.launch(name, "2:3", restarts=3, conf={"last_call_timeout": "10"}) for name in ("a", "b")]
    fails = (sys.executable, "-c", "raise SystemExit(3)")
    bad = stage.launch("c", "2:3", restarts=3, conf={"last_call_timeout": "10"}, worker=fails, options=("--no-python",))
    world = stage.world(2)
    assert (set(world.nodes), world.restart, world.round) == ({"a", "b"}, 1, 3)
    for node in good:
        node.says(r"round 2 is over: .*exit code 3")
        node.says(r"\bnode c sits out for 5 s: its workers keep failing while those of")
    stage.order("finish")
    assert [node.ends() for node in (*good, bad)] == [0, 0, 0]
