"""Launch a function with torch's elastic_launch at the daemon given, and print what its workers return."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import rdzv.torchrun


def work(greeting: str) -> str:
    """Sum up all ranks."""
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return f"{os.environ['RANK']} {greeting} {os.environ['WORLD_SIZE']}, sum {int(total.item())}"


def main() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5):
        rdzv.torchrun.register()
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=2,
        run_id="job",
        rdzv_backend="rendezvousd",
        rdzv_endpoint=sys.argv[1],
        max_restarts=0,
    )
    results = elastic_launch(config, work)("of")
    print(dict(sorted(results.items())))


if __name__ == "__main__":
    main()
