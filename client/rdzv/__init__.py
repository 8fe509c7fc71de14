"""What a training script may use of rendezvousd. `import rdzv` loads nothing; each name is loaded when first used.

rdzv.Store()   a torch.distributed.Store held by the daemon (rdzv/store.py)
rdzv.round()   which round of its job this worker belongs to (rdzv/worker.py)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rdzv.store import RoundOverError, Store, StoreError, StoreLostError
    from rdzv.worker import NotAWorkerError, Round
    from rdzv.worker import current_round as round  # noqa: A004  # rdzv.round() reads best

__all__ = ["NotAWorkerError", "Round", "RoundOverError", "Store", "StoreError", "StoreLostError", "round"]

_HOMES = {
    "NotAWorkerError": ("rdzv.worker", "NotAWorkerError"),
    "Round": ("rdzv.worker", "Round"),
    "RoundOverError": ("rdzv.store", "RoundOverError"),
    "Store": ("rdzv.store", "Store"),
    "StoreError": ("rdzv.store", "StoreError"),
    "StoreLostError": ("rdzv.store", "StoreLostError"),
    "round": ("rdzv.worker", "current_round"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rdzv' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
