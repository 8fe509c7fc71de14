"""A worker of tests/wire/test_store_torch.py: a real process with torch. Prints one line when all went well.

usage: store_worker.py group-by-store | group-by-url | fork
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import rdzv
import rdzv.store

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def collect() -> None:
    """Use one process group in every way that needs its store."""
    gc.collect()  # nothing but torch refers to the store here
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == WORLD_SIZE
    pairs = [dist.new_group([rank, rank + 1]) for rank in range(0, WORLD_SIZE, 2)]
    gc.collect()
    mine = torch.tensor([float(RANK)])
    dist.all_reduce(mine, group=pairs[RANK // 2])
    assert mine.item() == RANK // 2 * 4 + 1
    everybody: list[object] = [None] * WORLD_SIZE
    dist.all_gather_object(everybody, f"rank {RANK}")
    assert everybody == [f"rank {rank}" for rank in range(WORLD_SIZE)]
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    dist.barrier()
    dist.destroy_process_group()


def group_by_store() -> None:
    dist.init_process_group("gloo", store=rdzv.Store(), rank=RANK, world_size=WORLD_SIZE)
    collect()


def group_by_url() -> None:
    for _ in range(2):  # a group made after another meets none of its keys
        dist.init_process_group("gloo", init_method="rdzv://")
        collect()


def fork() -> None:
    """Children of a process that has used the store use it themselves, and it goes on doing so."""
    store = rdzv.Store()
    store.set("parent", "here")
    for born in range(1, 6):
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            os._exit(0 if store.get("parent") == b"here" and store.add("born", 1) == born else 1)
        status = os.waitpid(pid, 0)[1]
        assert status == 0, f"the child ended with {status}"
        assert store.get("born") == str(born).encode()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # a hang says where
    {"group-by-store": group_by_store, "group-by-url": group_by_url, "fork": fork}[sys.argv[1]]()
    print("all went well", rdzv.round().number)
