"""Nodes of one job that were given different run ids are told so."""

from __future__ import annotations

from rendezvousd.core.lookalikes import FRESH_S, Lookalikes
from rendezvousd.core.model import Job, JobUid
from rendezvousd.core.rules.admit import found
from tests.stage import Stage


def waiting(run_id: str, nnodes: str = "3", nodes: int = 1) -> Job:
    """Return a job with so many nodes, which never had a round."""
    stage = Stage(nnodes)
    players = stage.enter(*(f"{run_id}-{i}" for i in range(nodes)))
    said = players[0].state(stage.now)
    stage.job_or_none = found(run_id, said, uid=JobUid(run_id), seed="seed", now=stage.now)
    for player in players:
        stage.heard_at[player.uid] = stage.now
        stage.apply(player.state(stage.now))
    return stage.job


def told(job: Job, *others: Job) -> str:
    return Lookalikes().explain(job, [job, *others], 1000.0)


def test_other_jobs_of_the_same_size_that_wait_are_named() -> None:
    jobs = [waiting(run_id) for run_id in ("1000", "1017", "1034")]
    assert told(*jobs) == (
        "2 other jobs with the same --nnodes wait here with 1 node each (1017, 1034): do all nodes give the same "
        "--rdzv-id?"
    )
    assert told(*jobs[:2]) == (
        "1 other job with the same --nnodes waits here with 1 node (1017): do all nodes give the same --rdzv-id?"
    )
    assert told(jobs[0], waiting("x", "4", 2), waiting("y", "4", 3)) == ""
    assert "with 1 or 2 nodes each (x, y)" in told(jobs[0], waiting("x", nodes=1), waiting("y", nodes=2))


def test_no_more_than_three_are_named() -> None:
    line = told(*(waiting(f"r{i}") for i in range(9)))
    assert "8 other jobs with the same --nnodes wait here with 1 node each (r1, r2, r3 and 5 more)" in line


def test_a_job_with_enough_nodes_or_a_round_behind_it_is_no_lookalike() -> None:
    alone = waiting("alone")
    ran = Stage("3")
    a, *_ = ran.run("a", "b", "c")
    ran.kill(a)
    ran.play()
    assert told(alone, waiting("full", nodes=3), ran.job) == ""
    assert told(ran.job, alone) == ""
    assert told(waiting("full", nodes=3), alone) == ""


def test_one_look_serves_all_jobs_for_a_while() -> None:
    jobs = [waiting(f"r{i}") for i in range(5)]
    looked = 0

    def look() -> list[Job]:
        nonlocal looked
        looked += 1
        return jobs

    lookalikes = Lookalikes()

    class Counted:
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(look())

    for job in jobs:
        assert "4 other jobs" in lookalikes.explain(job, Counted(), 1000.0)
    assert looked == 1
    jobs.pop()
    assert "3 other jobs" in lookalikes.explain(jobs[0], Counted(), 1000.0 + FRESH_S)
    assert looked == 2
