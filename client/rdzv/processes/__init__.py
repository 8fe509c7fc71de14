"""The processes of one node.

Who is who, and what each file is for:

    launcher            rdzvrun: asyncio and gRPC threads; it must never fork
      supervisor.py       its processes as it sees them: started, watched and stopped
      facts.py            what it asks for and is told
      spawner_process.py  keeper and spawner as its children: start, death, clearing up after them
      stores.py           the node's bootstrap stores, seen from the launcher
      link.py             a wire served by the launcher's event loop
    └ keeper            keeper.py, run by path: sees to it that nobody outlives the launcher or the spawner, nor the
                        lease of the node, if workers are to end with it
      isolation.py        the PID namespace of --isolate=pid
      └ spawner         a fork of the keeper, spawner.py: watches and clears away everything below it
        starting.py       how what is below it comes to be: by exec, or from the zygote
        ├ zygote        zygote.py, run by path by the workers' python: has imported torch, and forks
        │ hidden.py       what it has imported shows only to who imports it
        │ script.py       running a script as `python -u script.py` would
        │ command_line.py what `ps` shows
        ├ worker        its parent is the spawner, however it was started
        └ store holder  store_holder.py, run by path: serves the bootstrap stores
          bare_torch.py   its import of so much of torch as a store needs
    shared
      wire.py             frames and descriptors between two of them
      dispositions.py     which signals they do not listen to, and how workers find them
      tree.py             who descends from whom
      clearing.py         killing everything below a process

What is run by path uses the standard library alone and imports nothing of this package: keeper and spawner are run by
an interpreter without site-packages, and must be up in a few hundredths of a second; zygote and store holder belong to
an interpreter that may not have this package.

Linux only (subreapers, parent-death signals, pidfds: kernel 5.4 or newer).
"""
