"""A worker that meets its peers through `rdzv.Store` and keeps something there that outlives the round.

In the first round rank 0 waits for a key that never comes while rank 1 dies; in the second all goes well.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

import rdzv
import rdzv.store  # makes torch know rdzv://
from tests.e2e.workers.stand_in import RANK, say


def main() -> None:
    first = rdzv.round().restart_count == 0
    if first:
        dist.init_process_group("gloo", store=rdzv.Store(), rank=RANK, world_size=int(os.environ["WORLD_SIZE"]))
    else:
        dist.init_process_group("gloo", init_method="rdzv://")
    total = torch.tensor([RANK + 1])
    dist.all_reduce(total)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][RANK]
    own = torch.tensor([RANK + 1])
    dist.all_reduce(own, group=alone)

    job, mine = rdzv.Store(scope="job"), rdzv.Store(prefix="mine")
    fresh = not mine.check(["been here"])
    dist.barrier()
    mine.set("been here", "yes")
    job.add("rounds", 1)
    say("met", total=int(total), own=int(own), fresh=fresh)
    dist.barrier()
    if first:
        be_cut_short(job, mine)
    say("kept", position=job.get("position").decode(), starts=job.add("rounds", 0))
    dist.barrier()
    dist.destroy_process_group()


def be_cut_short(job: rdzv.Store, mine: rdzv.Store) -> None:
    """The round ends while rank 0 waits."""
    if RANK == 1:
        mine.wait(["rank 0 is about to wait"])
        sys.exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job.set("position", "17")
    mine.set("rank 0 is about to wait", "")
    try:
        mine.get("what never comes")
    except rdzv.RoundOverError as error:
        say("cut short", text=str(error))
    sys.exit(0)


if __name__ == "__main__":
    main()
