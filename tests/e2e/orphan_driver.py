"""Stands for a launcher with everything below it: a zygote that imports MODULE, a helper, a worker that was forked and
one that was not, both of them difficult. Says who is who, as JSON, and waits to be killed.

`orphan_driver.py MODULE ISOLATE`, the latter "isolate" or empty.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from rdzv.processes import tree
from rdzv.processes.facts import ProcessFact, WorkerCommand, ZygotePlan
from rdzv.processes.supervisor import Supervisor
from tests.e2e.processes_kit import zygote_among

DIFFICULT = str(Path(__file__).with_name("difficult_worker.py"))


async def main(module: str, isolate: bool) -> None:
    argv = (sys.executable, "-u", DIFFICULT, "deaf")
    facts: asyncio.Queue[ProcessFact] = asyncio.Queue()
    plan = ZygotePlan(worker_argv=argv, env=dict(os.environ), modules=(module,))
    supervisor = await Supervisor.start(facts.put_nowait, zygote=plan, isolate=isolate)
    await supervisor.start_helper("helper", ["sleep", "3600"], os.environ)
    commands = [WorkerCommand(local_rank=rank, fork=rank == 0, argv=argv, env=dict(os.environ)) for rank in range(2)]
    await supervisor.spawn("round", commands)
    who = {"launcher": os.getpid(), "keeper": supervisor.keeper_pid, "spawner": supervisor.spawner_pid}
    who["zygote"] = await zygote_among(lambda: tree.children(supervisor.spawner_pid))
    print(json.dumps(who), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], bool(sys.argv[2])))
