"""What only a GPU can show: CUDA in workers that were forked, NCCL, and who may not have touched the device. Skipped
where there is none."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from rdzv.devices import count_devices
from tests.e2e.kit import STAND_IN, Stage

GPUS = count_devices("gpu", os.environ)
pytestmark = pytest.mark.skipif(GPUS == 0, reason="no GPU here")

TRAINING = (*STAND_IN, "--cuda")
EVERY_GPU = "--nproc-per-node=gpu"
FELL_BACK = "the zygote ended"  # what the launcher says when its workers are not forked


def devices(pid: int) -> set[str]:
    """Those of NVIDIA's that a process has open or mapped."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.add(os.readlink(descriptor))
    with suppress(OSError):
        found.update(line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {path for path in found if path.startswith("/dev/nvidia")}


def zygotes(stage: Stage) -> list[int]:
    return [process.pid for process in stage.alive(what="zygote.py")]


def test_forked_workers_train_on_every_gpu_and_again_when_one_was_killed(stage: Stage) -> None:
    stage.daemon()
    node = stage.launch("a", restarts=1, options=[EVERY_GPU], worker=TRAINING)
    first = stage.world(GPUS)
    stage.order("rank-0", "signal 9")
    stage.goes_on(stage.world(GPUS, after=first))
    [zygote] = zygotes(stage)
    assert [devices(zygote), node.said(FELL_BACK)] == [set(), None]
    stage.order("finish")
    assert node.ends() == 0


def test_the_zygotes_heir_is_as_good(stage: Stage) -> None:
    stage.daemon()
    node = stage.launch("a", restarts=1, options=[EVERY_GPU], worker=TRAINING)
    first = stage.world(GPUS)
    [zygote] = zygotes(stage)
    stage.until(lambda: len(zygotes(stage)) == 1 and zygote not in zygotes(stage), "the heir takes over")
    stage.order("rank-0", "signal 9")
    stage.goes_on(stage.world(GPUS, after=first))
    [heir] = zygotes(stage)
    assert [devices(heir), node.said(FELL_BACK)] == [set(), None]


def test_a_preload_that_initialises_cuda_is_refused_by_name(stage: Stage) -> None:
    (stage.directory / "uses_cuda.py").write_text("import torch\ntorch.zeros(1, device='cuda')\n")
    stage.daemon()
    node = stage.launch(
        "a", options=[EVERY_GPU, "--preload=uses_cuda"], worker=TRAINING, env={"PYTHONPATH": str(stage.directory)}
    )
    stage.world(GPUS)
    node.says("--preload uses_cuda: it initialises CUDA")
