"""What a training script may use of rendezvousd. `import rdzv` loads nothing; each name is loaded when first used.

rdzv.Store()   a torch.distributed.Store held by the daemon (rdzv/store.py)
rdzv.round()   which round of its job this worker belongs to (rdzv/worker.py)
rdzv.is_current()   whether that round still is the one that runs (rdzv/current.py)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rdzv.current import DaemonUnreachableError, is_current
    from rdzv.store import RoundOverError, Store, StoreError, StoreLostError
    from rdzv.worker import NotAWorkerError, Round
    from rdzv.worker import current_round as round  # noqa: A004  # rdzv.round() reads best

__all__ = [
    "DaemonUnreachableError",
    "NotAWorkerError",
    "Round",
    "RoundOverError",
    "Store",
    "StoreError",
    "StoreLostError",
    "is_current",
    "round",
]

_HOMES = {
    "DaemonUnreachableError": ("rdzv.current", "DaemonUnreachableError"),
    "is_current": ("rdzv.current", "is_current"),
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
