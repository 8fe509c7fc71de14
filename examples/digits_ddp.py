"""Handwritten digits, learnt with ordinary DistributedDataParallel, a checkpoint after every epoch and a resume.

It reads what every launcher sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and nothing else:

    torchrun --nproc-per-node=2 examples/digits_ddp.py --checkpoint /tmp/digits.pt
    rdzvrun  --nproc-per-node=2 examples/digits_ddp.py --checkpoint /tmp/digits.pt

When a worker dies, the launcher starts all of them again, and they go on after the last epoch that was saved, be they
as many as before or not.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 64  # samples a step, all ranks together: the same training, whatever the size of the world
SEED = 1797  # of the weights, the split and the order of the samples


@dataclass
class Training:
    """What is saved and what it takes to go on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    epochs_done: int = 0

    def snapshot(self) -> dict[str, Any]:
        """All of it, as `restore` takes it."""
        return {
            "epochs_done": self.epochs_done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Become what was saved."""
        self.epochs_done = snapshot["epochs_done"]
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The 1,797 images of 8 x 8 pixels that come with scikit-learn: for training, and held out."""
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16, labels, test_size=0.2, random_state=SEED, stratify=labels)
    train_x, test_x, train_y, test_y = (torch.as_tensor(part) for part in parts)
    return TensorDataset(train_x.float(), train_y), TensorDataset(test_x.float(), test_y)


def save(training: Training, path: Path) -> None:
    """Replace the checkpoint in one step: whenever we are killed, a whole one is there, the old or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with unfinished.open("wb") as file:
        torch.save(training.snapshot(), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    directory = os.open(path.parent, os.O_RDONLY)  # the new name must be on the disk as well
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def resume(training: Training, path: Path, device: torch.device) -> None:
    """Take up the newest checkpoint that any rank can see, the same one on all ranks.

    A rank on a host that has just come may see no checkpoint, or an old one. So nobody decides for itself: all say
    what they have, and the one with the most tells the others.
    """
    found = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
    mine = torch.tensor([found["epochs_done"] if found else 0], device=device)
    everyones = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    done = [int(epochs.item()) for epochs in everyones]
    if max(done) == 0:
        return
    source = done.index(max(done))
    parcel = [found if dist.get_rank() == source else None]
    dist.broadcast_object_list(parcel, src=source, device=device)
    assert parcel[0] is not None
    training.restore(parcel[0])


def train_epoch(
    ddp: nn.Module, training: Training, loader: DataLoader[tuple[Tensor, ...]], step_delay_s: float
) -> float:
    """Go through the data once. The mean loss over all ranks."""
    device = next(ddp.parameters()).device
    total = torch.zeros(1, device=device)
    for pixels, labels in loader:
        loss = nn.functional.cross_entropy(ddp(pixels.to(device)), labels.to(device))
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        total += loss.detach()
        time.sleep(step_delay_s)
    dist.all_reduce(total)
    return float(total.item() / len(loader) / dist.get_world_size())


def accuracy(model: nn.Module, held_out: TensorDataset, device: torch.device) -> float:
    """The share of held-out digits that are recognised, 0 to 1."""
    pixels, labels = held_out.tensors
    with torch.no_grad():
        guesses: Tensor = model(pixels.to(device)).argmax(dim=1).cpu()
    return float((guesses == labels).float().mean().item())


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train to the end, from wherever the last run got to."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    training = Training(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    resume(training, options.checkpoint, device)
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)

    learn, held_out = digits()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(learn, seed=SEED)
    loader = DataLoader(learn, batch_size=max(1, GLOBAL_BATCH // world), sampler=sampler)
    if rank == 0:
        print(f"world of {world}: training from epoch {training.epochs_done + 1}", flush=True)
    for epoch in range(training.epochs_done, options.epochs):
        sampler.set_epoch(epoch)  # another order each time, and the same one when an epoch is done again
        loss = train_epoch(ddp, training, loader, options.step_delay)
        training.epochs_done = epoch + 1
        if rank == 0:
            save(training, options.checkpoint)
            print(f"epoch {epoch + 1}/{options.epochs}: loss {loss:.4f}, world of {world}", flush=True)
    if rank == 0:
        print(f"accuracy on {len(held_out)} held-out digits: {accuracy(model, held_out, device):.4f}", flush=True)
    dist.barrier()  # nobody leaves while rank 0 still computes: to the others that would look like a death


def main() -> None:
    """Read the options, join the world, train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--epochs", type=int, default=20, help="times through the data (20)")
    parser.add_argument("--checkpoint", type=Path, default=Path("digits.pt"), help="file to save to and resume from")
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="S", help="seconds to dawdle after each step")
    options = parser.parse_args()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    train(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
