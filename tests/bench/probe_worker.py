"""The smallest worker that shows when a world works: it joins, reduces, says so once, and goes on reducing.

    probe_worker.py EVENTS_FILE

Appends one line of JSON to EVENTS_FILE after its first all-reduce (the fields of harness.FirstReduce). The death of a
peer ends it with an exception, as it would any training script. It gives up by itself after LIFE_S, so that nothing
is left behind whatever happens to its launcher.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

STEP_S = 0.02
LIFE_S = 900.0


def main() -> None:
    """Reduce until somebody stops us."""
    started_at = time.monotonic()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    value = torch.ones(1)
    dist.all_reduce(value)
    event = {
        "t": time.time(),
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "pid": os.getpid(),
        # Every world has a store of its own. The restart count says nothing: each agent of torchrun has another one.
        "world_key": "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ),
    }
    with open(sys.argv[1], "ab", buffering=0) as file:  # one write to a file opened for appending: lines never mix
        file.write(json.dumps(event).encode() + b"\n")
    while time.monotonic() - started_at < LIFE_S:
        dist.all_reduce(value.fill_(1))
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
