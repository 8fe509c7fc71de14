"""A worker of tests/wire/test_store_torch.py: a real process with torch. Prints one line when all went well.

usage: store_worker.py group-by-store | group-by-url | fork
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
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
    """Children of a process that uses the store, also at this very moment, use it themselves."""
    store = rdzv.Store()
    store.set("parent", "here")
    waiting = threading.Thread(target=store.get, args=("children",))
    waiting.start()
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if store.get("parent") == b"here" and store.add("born", 1) else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert store.get("parent") == b"here"
    assert store.get("born") == b"5"
    store.set("children", "done")
    waiting.join()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(120, exit=True)  # a hang says where
    {"group-by-store": group_by_store, "group-by-url": group_by_url, "fork": fork}[sys.argv[1]]()
    print("all went well", rdzv.round().number)
