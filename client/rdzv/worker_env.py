"""What a worker process is started with: its environment, as torchrun sets it, and its command line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rdzv.interpreter import workers_python
from rdzv.processes.facts import ZygotePlan

if TYPE_CHECKING:
    from rdzv.options import Options
    from rendezvousd.v1.rendezvous_pb2 import Assigned

# ${local_rank} or $local_rank; a dollar sign before it keeps it as it is, as in torchrun. Every other dollar sign is
# the script's own and stays (torchrun also halves each "$$").
_LOCAL_RANK = re.compile(r"\$(\$)?(?:\{local_rank\}|local_rank(?![A-Za-z0-9_]))")


def worker_environment(
    base: Mapping[str, str],
    assigned: Assigned,
    local_rank: int,
    *,
    run_id: str,
    role: str,
    error_file: str,
    endpoint: str,
    job_uid: str,
    signals_to_handle: tuple[str, ...],
    virtual_local_rank: bool = False,
) -> dict[str, str]:
    """The environment of the worker `local_rank` of this node: `base`, with torchrun's variables and ours.

    `endpoint` is the daemon's as host:port, or several separated by commas. ValueError: with `virtual_local_rank`, base
    has no visible device left for this worker.
    """
    return {
        **base,
        **standing_defaults(base, assigned.slots),
        **_torchruns(assigned, local_rank, role=role),
        **(_virtual(base, local_rank) if virtual_local_rank else {}),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signals_to_handle),
        "RENDEZVOUSD_ENDPOINT": endpoint,
        "RENDEZVOUSD_RUN_ID": run_id,
        "RENDEZVOUSD_JOB_UID": job_uid,
        "RENDEZVOUSD_ROUND": str(assigned.round),
        "RENDEZVOUSD_ROUND_UID": assigned.round_uid,
        "RENDEZVOUSD_STORE_GENERATION": assigned.store_generation,
    }


def worker_argv(options: Options, environ: Mapping[str, str], local_rank: int) -> tuple[str, ...]:
    """The command of the worker `local_rank`: program first. ${local_rank} is replaced in the script's arguments."""
    args = tuple(_with_local_rank(arg, local_rank) for arg in options.training_script_args)
    if options.no_python:
        return (options.training_script, *args)
    python = workers_python(environ)
    module = ("-m",) if options.module else ()
    return (python, "-u", *module, _with_local_rank(options.training_script, local_rank), *args)


def script_missing(options: Options) -> bool:
    """Whether this host does not have the script. Blocks."""
    return not options.no_python and not options.module and not os.path.exists(options.training_script)


def zygote_plan(options: Options, environ: Mapping[str, str]) -> ZygotePlan | None:
    """What workers are to be forked from; None: they are not."""
    if options.start_method != "zygote":
        return None
    return ZygotePlan(
        worker_argv=worker_argv(options, environ, 0),
        env={**environ, **standing_defaults(environ, options.nproc_per_node)},
        modules=("torch", *options.preload),
        later=tuple(name for name in options.preload_later if name not in options.preload),
    )


def standing_defaults(base: Mapping[str, str], slots: int) -> dict[str, str]:
    """What holds in every round unless the user has set it."""
    found = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")}
    if slots > 1 and "OMP_NUM_THREADS" not in base:
        found["OMP_NUM_THREADS"] = "1"  # every worker would start as many threads as the host has CPUs
    return found


def _torchruns(assigned: Assigned, local_rank: int, *, role: str) -> dict[str, str]:
    return {
        "RANK": str(assigned.first_rank + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(assigned.world_size),
        "LOCAL_WORLD_SIZE": str(assigned.slots),
        "GROUP_RANK": str(assigned.group_rank),
        "GROUP_WORLD_SIZE": str(assigned.group_size),
        "ROLE_NAME": role,
        "ROLE_RANK": str(assigned.role_first_rank + local_rank),
        "ROLE_WORLD_SIZE": str(assigned.role_world_size),
        "MASTER_ADDR": assigned.master_addr,
        "MASTER_PORT": str(assigned.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(assigned.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(assigned.max_restarts),
        # The round's store is there before the workers are: rank 0 must not open one of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _virtual(base: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Each worker sees one device, its own, as number 0."""
    visible = base.get("CUDA_VISIBLE_DEVICES")
    device = str(local_rank)
    if visible is not None:
        devices = visible.split(",")
        if local_rank >= len(devices):
            raise ValueError(f"CUDA_VISIBLE_DEVICES={visible} has no device for local rank {local_rank}")
        device = devices[local_rank].strip()
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device}


def _with_local_rank(arg: str, local_rank: int) -> str:
    return _LOCAL_RANK.sub(lambda found: found[0][1:] if found[1] else str(local_rank), arg)
