"""Real training with DistributedDataParallel that comes out the same however often it is interrupted.

Which samples a step learns from depends on the number of the step alone; the ranks share them out, and the gradient is
that of all of them together, whatever the size of the world. So the loss of each step is known in advance, up to the
rounding of sums in another order (float64).

    training.py HISTORY CHECKPOINTS FINISH          as a worker of a job
    training.py --alone STEPS                       the loss of that step, undisturbed
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 24  # of each step, all ranks together
STEP_S = 0.1  # pause after each step
SAVE_EVERY = 10
KEPT = 3  # checkpoints
COLLECTIVE_S = 20.0  # patience with a peer that does not answer
START_S = 120.0  # and with one that still imports torch
SEED = 1797
RATE, MOMENTUM = 0.05, 0.9


def build() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def samples(step: int) -> tuple[Tensor, Tensor]:
    """What a step learns from. There is noise in it, so that learning never comes to rest."""
    chance = torch.Generator().manual_seed(SEED + step)
    inputs = torch.randn(SAMPLES, 8, generator=chance, dtype=torch.float64)
    noise = torch.randn(SAMPLES, 1, generator=chance, dtype=torch.float64)
    return inputs, inputs.prod(dim=1, keepdim=True).sin() + 0.1 * noise


class Descent:
    """Gradient descent with momentum. torch.optim would import torch._dynamo, which takes longer than any recovery."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.velocity = [torch.zeros_like(weights) for weights in model.parameters()]

    def step(self) -> None:
        with torch.no_grad():
            for weights, velocity in zip(self._model.parameters(), self.velocity, strict=True):
                velocity.mul_(MOMENTUM).add_(weights.grad)
                weights.sub_(velocity, alpha=RATE)
                weights.grad = None


def learn(model: nn.Module, descent: Descent, step: int, rank: int, world: int) -> Tensor:
    """One step of this rank, which is the world's step because gradients are averaged. Its share of the loss."""
    inputs, wanted = samples(step)
    error = model(inputs[rank::world]) - wanted[rank::world]
    share = error.square().sum() / SAMPLES
    (share * world).backward()
    descent.step()
    return share.detach()


def alone(steps: int) -> float:
    """The loss of the last of so many steps."""
    model = build()
    descent = Descent(model)
    loss = 0.0
    for step in range(1, steps + 1):
        loss = float(learn(model, descent, step, 0, 1))
    return loss


class Checkpoints:
    """Files, of which the newest counts. A late writer of an older round replaces none that is newer than its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, step: int, state: dict[str, Any]) -> None:
        """It is on the disk when this returns, whole, whenever we are killed."""
        unfinished = self._directory / f".{os.getpid()}"
        with unfinished.open("wb") as file:
            torch.save({"step": step, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(self._directory / f"{step:09}.pt")
        for old in self._all()[:-KEPT]:
            old.unlink(missing_ok=True)

    def newest(self) -> dict[str, Any] | None:
        for path in reversed(self._all()):
            with contextlib.suppress(FileNotFoundError):
                found: dict[str, Any] = torch.load(path, weights_only=True)
                return found
        return None

    def _all(self) -> list[Path]:
        return sorted(self._directory.glob("*.pt"))


def older_workers(history: Path, number: int) -> list[list[object]]:
    """[node, pid, round] of workers of earlier rounds that live."""
    found = []
    for line in history.read_bytes().splitlines()[:-1]:
        if b'"start"' not in line:
            continue
        event = json.loads(line)
        if event["event"] == "start" and event["round"] < number and born_at(event["pid"]) == event["born_at"]:
            found.append([event["node"], event["pid"], event["round"]])
    return found


def born_at(pid: int) -> int:
    """When a process was started, in ticks; 0 if it has ended. With this its number means nobody else."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def train(say: Callable[..., None], checkpoints: Checkpoints, finish: Path) -> None:
    """From the newest checkpoint on, until the file `finish` names a step that was reached."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build()
    descent = Descent(model)
    parcel: list[Any] = [(uuid.uuid4().hex, checkpoints.newest()) if rank == 0 else None]
    dist.broadcast_object_list(parcel, src=0)
    world_uid, found = parcel[0]
    step = 0
    if found is not None:
        step = found["step"]
        model.load_state_dict(found["model"])
        descent.velocity = found["velocity"]
    say("resume", step=step, world_uid=world_uid, world=world)
    ddp = DistributedDataParallel(model)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_S))
    last = sys.maxsize
    while step < last:
        began_at = time.monotonic()
        step += 1
        share = learn(ddp, descent, step, rank, world)
        told = int(finish.read_text()) if rank == 0 and finish.exists() else 0
        total = torch.tensor([float(share), float(told)], dtype=torch.float64)
        dist.all_reduce(total)
        loss, last = float(total[0]), int(total[1]) or sys.maxsize
        say("step", step=step, loss=loss, t0=began_at)
        if step % SAVE_EVERY == 0 and rank == 0:
            checkpoints.save(step, {"model": model.state_dict(), "velocity": descent.velocity})
            say("saved", step=step)
            with contextlib.suppress(OSError):  # a log file on a disk that is full
                print(f"step {step}: loss {loss:.6f}, world of {world}", flush=True)
        time.sleep(STEP_S)
    say("done", step=step, loss=loss)
    dist.barrier()  # nobody leaves while another has still to hear of the last step


def main() -> None:
    if sys.argv[1] == "--alone":
        print(alone(int(sys.argv[2])))
        return
    from tests.chaos.history import Writer

    history, checkpoints, finish = map(Path, sys.argv[1:])
    writer = Writer(history)
    me = {"node": os.environ["CHAOS_NODE"], "launcher": int(os.environ["CHAOS_LAUNCHER"]), "pid": os.getpid()}
    number = os.environ.get("RENDEZVOUSD_ROUND")  # not under torchrun
    me |= {
        "rank": int(os.environ["RANK"]),
        "uid": os.environ.get("RENDEZVOUSD_ROUND_UID", ""),
        "round": int(number or 0),
    }

    def say(event: str, **more: object) -> None:
        writer.say(event, **me, **more)

    say(
        "start",
        world=int(os.environ["WORLD_SIZE"]),
        restart=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        master="{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ),
        job=os.environ.get("RENDEZVOUSD_JOB_UID", ""),
        born_at=born_at(os.getpid()),
        older=older_workers(history, int(number)) if number else [],
    )
    dist.init_process_group("gloo", timeout=timedelta(seconds=START_S))
    train(say, Checkpoints(checkpoints), finish)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
