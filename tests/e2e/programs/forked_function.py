"""Launch a function in forked workers at the daemon given, and print what they return. Each uses the job's store."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import rdzv
import rdzv.torchrun


def work() -> str:
    """Sum up all ranks, and count them in the store."""
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    store = rdzv.Store()
    store.add("workers", 1)
    dist.barrier()
    counted = store.add("workers", 0)
    dist.barrier()
    dist.destroy_process_group()
    return f"sum {int(total.item())}, counted {counted}"


def main() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5):
        rdzv.torchrun.register()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=4,
        run_id="job",
        rdzv_backend="rendezvousd",
        rdzv_endpoint=sys.argv[1],
        max_restarts=0,
        start_method="fork",
    )
    results = elastic_launch(config, work)()
    print(dict(sorted(results.items())))


if __name__ == "__main__":
    main()
