"""Sum up the ranks of all processes with Hugging Face's accelerate, on the CPU."""

from __future__ import annotations

import torch
from accelerate import Accelerator


def main() -> None:
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor([accelerator.process_index]), reduction="sum")
    print(f"process {accelerator.process_index} of {accelerator.num_processes}, sum {int(total.item())}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
