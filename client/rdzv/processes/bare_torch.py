"""torch's TCPStore without the rest of torch, of which a store has no use: a quarter of the processor time of
`import torch`, and half of the memory (torch 2.13, CPU build).

The class is one of the extension module `torch._C`, which is imported here with empty packages around it. torch
promises nothing of the kind. So it is done only with versions with which it was tried, and who does it must be ready to
start anew, in another process, and import the whole.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

TYPE_CHECKING = False  # as in typing, which costs milliseconds to import
if TYPE_CHECKING:
    from typing import Any

TRIED = (2, 4), (2, 13)  # the first and the last version; and of those between 2.6, 2.8, 2.9, 2.10, 2.12


class WholeTorch(Exception):
    """Import torch as usual. Nothing of it was imported here."""


def tcp_store() -> Any:
    """The class. Raises WholeTorch; after any other error this process can import no torch any more."""
    _put_packages()
    import torch._C

    if not torch._C._c10d_init():
        raise ImportError("torch._C has no c10d")
    from torch._C._distributed_c10d import TCPStore

    return TCPStore


def version() -> tuple[int, int]:
    """torch's first two numbers, whether all of it was imported or not."""
    from torch.version import __version__

    first, second = __version__.split(".")[:2]
    return int(first), int(second)


def _put_packages() -> None:
    spec = importlib.util.find_spec("torch")
    # Another loader: this was forked from a zygote, which has imported torch.
    if spec is None or not isinstance(spec.loader, SourceFileLoader) or not spec.origin:
        raise WholeTorch
    folders = {"torch": os.path.dirname(spec.origin)}
    folders["torch.distributed"] = os.path.join(folders["torch"], "distributed")
    for name, folder in folders.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [folder]
    if not TRIED[0] <= version() <= TRIED[1]:
        for name in ("torch.version", *folders):
            del sys.modules[name]
        raise WholeTorch
