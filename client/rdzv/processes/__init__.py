"""The processes of one node.

Who is who, and what each file is for:

    launcher            rdzvrun: asyncio and gRPC threads; it must never fork
      supervisor.py       what the launcher asks for and is told about its processes
      spawner_process.py  the spawner as its child: start, death, clearing up after it
      stores.py           the node's bootstrap stores, seen from the launcher
      link.py             a wire served by the launcher's event loop
    spawner             spawner.py, run by path: starts, watches and clears away everything below it
    store holder        store_holder.py, run by path: serves the bootstrap stores; the only one here that imports torch
    shared
      wire.py             frames and descriptors between two of them
      tree.py             who descends from whom

`spawner.py`, `wire.py` and `tree.py` use the standard library alone and import nothing of this package: they are run by
an interpreter without site-packages, and must be up in a few hundredths of a second.

Linux only (subreapers, parent-death signals, pidfds: kernel 5.4 or newer).
"""
