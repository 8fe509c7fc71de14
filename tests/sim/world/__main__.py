"""Run many seeds, or one with its whole history: `make sim SEEDS=20000`, `make sim SEED=7`."""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import random
import sys
import time

from tests.sim.world.cluster import run, story

PIECE = 50  # seeds that a process takes at a time


def main() -> int:
    """Return 1 if a promise was broken, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.world", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many new seeds to run")
    parser.add_argument("--seed", type=int, help="run this one, and show its history")
    parser.add_argument("--first", type=int, default=random.SystemRandom().randrange(10**9), help="where they begin")
    options = parser.parse_args()
    return _one(options.seed) if options.seed is not None else _many(options.first, options.seeds)


def _one(seed: int) -> int:
    report = run(seed)
    print(report.plan, *report.plan.faults, *report.history, sep="\n")
    if report.failure:
        print(story(report))
    return 1 if report.failure else 0


def _many(first: int, count: int) -> int:
    print(f"{count} seeds from {first}", flush=True)
    began_at = time.monotonic()
    simulated_s, failed, ran = 0.0, 0, 0
    pieces = [range(at, min(at + PIECE, first + count)) for at in range(first, first + count, PIECE)]
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        for seconds, stories in pool.map(_piece, pieces):
            simulated_s, ran = simulated_s + seconds, ran + PIECE
            failed += len(stories)
            print(*stories, sep="\n\n", end="\n\n" if stories else "", flush=True)
    minutes = (time.monotonic() - began_at) / 60
    hours = simulated_s / 3600
    print(
        f"{count} seeds, {failed} failed: {hours:.1f} simulated hours in {minutes:.1f} min, "
        f"{hours / minutes:.1f} h a minute"
    )
    return 1 if failed else 0


def _piece(seeds: range) -> tuple[float, list[str]]:
    """Return the simulated seconds, and what to print of each failure."""
    reports = [run(seed) for seed in seeds]
    return sum(report.simulated_s for report in reports), [story(report) for report in reports if report.failure]


if __name__ == "__main__":
    sys.exit(main())
