"""A worker whose steps are counted in the job's store, together with those of all its peers, by nobody else."""

from __future__ import annotations

import rdzv
from tests.e2e.workers.stand_in import say, train


def main() -> None:
    job = rdzv.Store(scope="job")

    def count(numbers: list[int]) -> list[int]:
        say("counted", count=job.add("steps", 1), current=rdzv.is_current())
        return numbers

    train(count)


main()
