"""Stands in for a training: it counts steps, says what it does, and does what a test tells it.

    stand_in.py                 steps by itself; starts in milliseconds, and no worker needs another
    stand_in.py --all-reduce    each step is a collective of all ranks, with torch and gloo
    stand_in.py --cuda          each step is a collective of all ranks, each on the GPU of its local rank, with NCCL
    stand_in.py --hasty         dies at once when a collective fails, as NCCL's watchdog has it
    stand_in.py --record        what goes wrong is also written where torch's `record` writes it

It appends one line of JSON to $STAGE/progress.jsonl for each thing it does (start, step, end), and looks into
$STAGE/orders between two steps: `finish` and `finish-NODE` end it with success; `rank-N` tells that rank to "exit 3",
to "raise 5" bytes of text, to die of "signal 11", or to "ignore 15", once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP_S = 0.05
STAGE = Path(os.environ["STAGE"])
NODE = os.environ["STAGE_NODE"]
RANK = int(os.environ["RANK"])
TOLD = ("TORCH", "RENDEZVOUSD_", "MASTER_", "ROLE_", "GROUP_", "LOCAL_", "OMP_", "RANK", "WORLD_SIZE")

Reduce = Callable[[list[int]], list[int]]  # the greatest of each number among all ranks


def say(event: str, **more: object) -> None:
    """Append one line, in one write: what others say at the same time stays whole too."""
    line: dict[str, object] = {
        "event": event,
        "rank": RANK,
        "world": int(os.environ["WORLD_SIZE"]),
        "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "round": int(os.environ["RENDEZVOUSD_ROUND"]),
        "node": NODE,
        "pid": os.getpid(),
        "at": time.clock_gettime(time.CLOCK_BOOTTIME),
        **more,
    }
    with (STAGE / "progress.jsonl").open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def told_to_finish() -> bool:
    return any((STAGE / "orders" / name).exists() for name in ("finish", f"finish-{NODE}"))


def obey() -> None:
    """Do what this rank was ordered to do, if anything. The order is used up before."""
    try:
        order = (STAGE / "orders" / f"rank-{RANK}").read_text()
    except FileNotFoundError:
        return
    with contextlib.suppress(FileNotFoundError):
        (STAGE / "orders" / f"rank-{RANK}").unlink()
    what, _, argument = order.partition(" ")
    match what:
        case "exit":
            sys.exit(int(argument))
        case "raise":
            raise ArithmeticError("the loss is not a number" + "!" * int(argument or 0))
        case "signal":
            os.kill(os.getpid(), int(argument))
            signal.pause()
        case "ignore":
            signal.signal(int(argument), signal.SIG_IGN)
            say("ignores")
        case _:
            raise ValueError(order)


def train(reduce: Reduce) -> None:
    """Step until told to finish; with collectives, all ranks finish after the same step."""
    say("start", env={name: value for name, value in os.environ.items() if name.startswith(TOLD)})
    step, finish = 0, 0
    while not finish:
        time.sleep(STEP_S)
        obey()
        step += 1
        step, finish = reduce([step, told_to_finish()])
        say("step", step=step)
    say("end")


def train_together(*, hasty: bool, cuda: bool) -> None:
    """The same in a process group of all ranks."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    def greatest(numbers: list[int]) -> list[int]:
        tensor = torch.tensor(numbers, device=device)
        try:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        except RuntimeError:
            say("fails")
            if hasty:
                os._exit(1)
            raise
        return [int(number) for number in tensor]

    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    train(greatest)
    # Older torch (2.4 to 2.6 at least) now and then locks up where a group is destroyed while its own thread still lets
    # go of the last collective's tensor: the one waits for the thread, and the thread for the interpreter lock.
    time.sleep(STEP_S)
    dist.destroy_process_group()


def recorded(body: Callable[[], Any]) -> Callable[[], Any]:
    from torch.distributed.elastic.multiprocessing.errors import record

    wrapped: Callable[[], Any] = record(body)
    return wrapped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all-reduce", action="store_true")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--hasty", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()

    def body() -> None:
        if options.all_reduce or options.hasty or options.cuda:
            train_together(hasty=options.hasty, cuda=options.cuda)
        else:
            train(lambda numbers: numbers)

    recorded(body)() if options.record else body()


if __name__ == "__main__":
    main()
