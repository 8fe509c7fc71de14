"""The same run id again: launchers that are restarted, cut off or requeued, and other jobs that come with it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.e2e.kit import Launcher, Stage, until
from tests.e2e.relay import relay
from tests.ports import free_port

BATCH = {"SLURM_JOB_ID": "4711"}
PBS = {"PBS_JOBID": "4711.head"}


def test_a_launcher_that_is_restarted_later_than_its_lease_goes_on_with_its_job(stage: Stage) -> None:
    stage.daemon()
    old = stage.launch("a", restarts=1)
    first = stage.world(1)
    job = stage.job()
    old.kill()
    until(lambda: not stage.job().nodes, "the daemon knows that the node is lost")
    new = stage.launch("a", restarts=1)
    stage.world(1, after=first)
    new.says(r"^round 2: rank 0 of 1")
    assert stage.job().job_uid == job.job_uid
    stage.order("finish")
    assert new.ends() == 0


def test_a_newcomer_does_not_take_over_a_job_whose_nodes_are_cut_off(stage: Stage) -> None:
    """Its nodes train on, and come back to it."""
    served, port = stage.daemon(), free_port()
    with relay(served.port, port) as cable:
        members = [stage.launch(name, "1:4", endpoint=f"127.0.0.1:{port}") for name in ("a", "b")]
        first = stage.world(2)
        job = stage.job()
        cable.cut()
        until(lambda: not stage.job().nodes, "the daemon has lost both")
        newcomer = stage.launch("d", "1:4", endpoint=served.endpoint)
        newcomer.says(
            r"^waiting: this job's nodes were lost \d+ s ago; this node goes on with it in \d+ s unless they "
        )
        stage.goes_on(first)
        cable.mend()
        stage.world(3, after=first)
        assert stage.job().job_uid == job.job_uid
    stage.order("finish")
    assert [node.ends() for node in (*members, newcomer)] == [0, 0, 0]


@pytest.mark.parametrize("environ", [BATCH, PBS], ids=["slurm", "pbs"])
def test_two_programs_of_one_allocation_both_run(stage: Stage, environ: Mapping[str, str]) -> None:
    stage.daemon()
    uids = []
    seen = 0
    for name in ("a", "b"):
        node = stage.launch(name, env=environ)
        world = stage.world(1, after=seen)
        uids.append(stage.job().job_uid)
        seen = world.round
        stage.order(f"finish-{name}")
        assert node.ends() == 0
    assert uids[0] != uids[1]


def test_a_requeued_job_does_not_get_the_failure_of_the_attempt_before(stage: Stage) -> None:
    stage.daemon()
    old = stage.launch("a", env=BATCH)
    first = stage.world(1)
    stage.order("rank-0", "exit 7")
    assert old.ends() == 7
    new = stage.launch("a", env={**BATCH, "SLURM_RESTART_COUNT": "1"})
    stage.world(1, after=first)
    stage.order("finish")
    assert new.ends() == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-ends-first", "last-ends-first"])
def test_two_nodes_that_run_two_programs_meet_twice(stage: Stage, order: tuple[int, int]) -> None:
    """Whichever of the launchers is the first to be started again."""
    stage.daemon()
    names = ("a", "b")
    old: list[Launcher] = [stage.launch(name, "2", env=BATCH) for name in names]
    first = stage.world(2)
    job = stage.job()
    stage.order("finish-a")
    stage.order("finish-b")
    new = []
    for at in order:
        assert old[at].ends() == 0
        new.append(stage.launch(f"{names[at]}2", "2", env=BATCH, conf={"node_name": names[at]}))
    stage.world(2, after=first)
    assert stage.job().job_uid != job.job_uid
    stage.order("finish")
    assert [node.ends() for node in new] == [0, 0]


def test_a_job_of_another_allocation_waits_until_the_first_is_over_and_says_so(stage: Stage) -> None:
    stage.daemon()
    first = stage.launch("a", "1:2", env=BATCH)
    world = stage.world(1)
    second = stage.launch("b", "1:2", env={"SLURM_JOB_ID": "4712"})
    second.says(r"^waiting: job 'job' belongs to submission 4711, and this node to 4712; this node waits until ")
    stage.goes_on(world)
    stage.order("finish-a")
    assert first.ends() == 0
    stage.world(1, after=world)
    stage.order("finish-b")
    assert second.ends() == 0
