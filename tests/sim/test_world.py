"""The whole system in simulated time: real daemons, elections, launchers and sessions; only the machine is not real.

What a seed stands for is drawn before it is run (world/plan.py): a cluster, and a list of faults. After everything that
passes, the judge (world/judge.py) looks whether a promise was broken; in half of the runs the faults stop, and the job
must come to the right end. A seed that fails is printed with the fewest faults that make it fail, and is to be kept in
world/seeds.txt with what was wrong. To hunt longer: make sim SEEDS=20000; to see one again: make sim SEED=7.

Half of the seeds have more than one job whose nodes are all alike (world/wide.py): another job beside it, other tokens
and options, --on-daemon-loss=stop, workers that call the job's store, slow readers, an etcd that takes small requests
only, jobs that are answered as large ones are, and stories that faults at random times do not tell.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim.conftest import FIRST_SEED, SEEDS
from tests.sim.world.bugs import BUGS
from tests.sim.world.cluster import carry_out, run, shrink, story
from tests.sim.world.wide import plan

# A process that is killed leaves what it was about to do.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")

CHUNK = 50
ROOT = Path(__file__).resolve().parents[2]


def kept() -> list[int]:
    """Return the seeds that failed once."""
    lines = (ROOT / "tests/sim/world/seeds.txt").read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("chunk", range((SEEDS + CHUNK - 1) // CHUNK))
def test_no_promise_is_broken_in_any_history(chunk: int) -> None:
    first = FIRST_SEED + chunk * CHUNK
    failed = [report for seed in range(first, first + CHUNK) if (report := run(seed)).failure]
    assert not failed, story(failed[0])


@pytest.mark.parametrize("seed", kept())
def test_a_seed_that_failed_once_fails_no_more(seed: int) -> None:
    report = run(seed)
    assert not report.failure, story(report)


def test_a_seed_is_one_history_whatever_else_differs() -> None:
    """Not the process, not its memory, not the order of its sets."""
    seeds = range(8)
    here = [run(seed).digest for seed in seeds]
    assert [run(seed).digest for seed in seeds] == here
    code = f"from tests.sim.world.cluster import run\nfor seed in {seeds!r}: print(run(seed).digest)"
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        said = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        assert said.stdout.split() == here


def test_different_seeds_are_different_histories() -> None:
    assert len({run(seed).digest for seed in range(10)}) == 10


def test_without_faults_a_job_trains_in_one_round_and_succeeds() -> None:
    for seed in range(10):
        calm = replace(plan(seed, "liveness"), faults=(), loss=0.0, delay_s=0.001, arrivals_s=(0.0,) * plan(seed).nodes)
        report = carry_out(calm)
        assert not report.failure
        assert any("exits with 0: job succeeded" in line for line in report.history)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    with bug.planted():
        assert any(run(seed).failure for seed in bug.seeds)


def test_a_failure_is_told_with_the_fewest_faults_and_how_to_see_it_again() -> None:
    bug = BUGS["a round's number is taken for its identity"]
    with bug.planted():
        report = next(report for seed in bug.seeds if (report := run(seed)).failure)
        shortest = shrink(report)
        told = story(report)
    assert shortest.rule == report.rule
    assert 0 < len(shortest.plan.faults) <= len(report.plan.faults)
    assert f"make sim SEED={report.plan.seed}" in told
    for fault in shortest.plan.faults:
        assert str(fault) in told
