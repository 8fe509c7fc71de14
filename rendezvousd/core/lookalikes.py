"""Jobs that wait for their first round side by side, and may be one: their nodes were given different run ids."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from rendezvousd.core.model import Job

# Jobs looked at, and for how long what was found is used for all of them: a look costs a millisecond or two.
LOOKED_AT_MAX = 4096
FRESH_S = 0.5
# Run ids spelled out before "and N more".
NAMED_MAX = 3


def waits_alone(job: Job) -> bool:
    """Return whether the job has never had a round, and too few nodes for one."""
    too_few = 0 < job.tally.usable < job.spec.min_nodes
    return too_few and job.gathering and job.known.round == 0 and job.recovering is None


class Lookalikes:
    """Those of all jobs, by what they wait for. One look serves all who ask within FRESH_S."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], dict[str, int]] = {}  # nodes by run id, by --nnodes
        self._fresh_until = float("-inf")

    def explain(self, job: Job, jobs: Iterable[Job], now: float) -> str:
        """Return which other jobs of the same size wait as this one does, for people; empty: none, or it does not."""
        if not waits_alone(job):
            return ""
        if now >= self._fresh_until:
            self._look(jobs)
            self._fresh_until = now + FRESH_S
        alike = self._found.get((job.spec.min_nodes, job.spec.max_nodes), {})
        others = len(alike) - (job.run_id in alike)
        if others <= 0:
            return ""
        named = list(islice((run_id for run_id in alike if run_id != job.run_id), NAMED_MAX))
        counts = sorted({alike[run_id] for run_id in named})
        nodes = " or ".join(map(str, counts)) + (" node" if counts == [1] else " nodes")
        jobs_wait = "1 other job with the same --nnodes waits"
        if others > 1:
            jobs_wait, nodes = f"{others} other jobs with the same --nnodes wait", f"{nodes} each"
        more = f" and {others - NAMED_MAX} more" if others > NAMED_MAX else ""
        return f"{jobs_wait} here with {nodes} ({', '.join(named)}{more}): do all nodes give the same --rdzv-id?"

    def _look(self, jobs: Iterable[Job]) -> None:
        self._found = {}
        for job in islice(jobs, LOOKED_AT_MAX):
            if waits_alone(job):
                size = (job.spec.min_nodes, job.spec.max_nodes)
                self._found.setdefault(size, {})[job.run_id] = job.tally.usable
