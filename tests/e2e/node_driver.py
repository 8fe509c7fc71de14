"""Stands for a launcher: starts one worker and says so, then waits to be killed.

`node_driver.py wait PROGRAM...`: until then. `node_driver.py run PROGRAM...`: ends when the worker has.
"""

import asyncio
import os
import resource
import signal
import sys

from rdzv.processes.facts import ProcessFact, WorkerCommand
from rdzv.processes.supervisor import Supervisor


async def main(mode: str, argv: list[str]) -> None:
    facts: asyncio.Queue[ProcessFact] = asyncio.Queue()
    # What a launcher has done to itself by the time it starts workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, int)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    supervisor = await Supervisor.start(facts.put_nowait)
    await supervisor.spawn("round", [WorkerCommand(local_rank=0, argv=tuple(argv), env=dict(os.environ))])
    if mode == "wait":
        print(supervisor.spawner_pid, flush=True)
        await asyncio.Event().wait()
    await facts.get()
    await supervisor.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
