"""Print what the launcher told this worker, as one line of JSON, and the sum of all ranks from an all_reduce.

    rdzvrun --nproc-per-node=2 examples/env_probe.py

It shows that a launcher does its part: ranks, world, master address, and a process group that works.
"""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist

NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "OMP_NUM_THREADS",
)


def main() -> None:
    """Say who we are, and that the others are there."""
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    told = {name: os.environ[name] for name in NAMES if name in os.environ}
    print(json.dumps({"env": told, "sum_of_ranks": int(total.item()), "pid": os.getpid()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
