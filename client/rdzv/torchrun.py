"""The plugin through which stock `torchrun` meets at our daemon: `torchrun --rdzv-backend=rendezvousd ...`.

torch loads what the entry points of the group `torchrun.handlers` name as soon as `torch.distributed.elastic` is
imported, in every program that does so. So nothing is imported here before a handler is really wanted.

torch 2.4 does not look at entry points yet. There, and wherever this package is used without being installed,
`python -m rdzv.torchrun` stands in for `torchrun`: the same program, which knows the backend. Programs that launch from
Python call `register` first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BACKEND = "rendezvousd"  # the entry point's name, and what --rdzv-backend says


def get_handler() -> Callable[[Any], Any]:
    """Return what makes a torch RendezvousHandler of torch's RendezvousParameters."""
    return create_handler


def create_handler(params: Any) -> Any:
    """Return the handler of one node. ValueError, for people: the parameters make no sense.

    No daemon is called before the handler's first rendezvous.
    """
    from rdzv.plugin.handler import Handler
    from rdzv.plugin.settings import settings
    from rdzv.plugin.stock import launch_config

    return Handler(settings(params, launch_config()))


def register() -> None:
    """Let torch know the backend, where it has not found it by itself."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    # By its importable name: run with -m, this very module is another one.
    from rdzv.torchrun import create_handler as creator

    rendezvous_handler_registry.register(BACKEND, creator)


def main() -> None:
    """Run torchrun, with the backend registered."""
    from torch.distributed.run import main as torchrun

    register()
    torchrun()


if __name__ == "__main__":
    main()
