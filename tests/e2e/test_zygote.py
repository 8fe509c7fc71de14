"""The zygote: what it forks, what becomes of it, and what happens without it. Most of these zygotes import something
small: torch takes longer than all the rest, and test_zygote_fidelity.py has it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import le
from pathlib import Path

import pytest

from rdzv.processes import tree
from rdzv.processes.facts import (
    HeirEnded,
    HelperEnded,
    SpawnerEnded,
    SpawnFailed,
    WorkerCommand,
    WorkerEnded,
    ZygoteEnded,
    ZygotePlan,
)
from rdzv.processes.supervisor import Supervisor
from tests.e2e import difficult_worker
from tests.e2e.kit import Stage
from tests.e2e.processes_kit import LIMIT_S, Node, cmdline, fds, marked, script, state, until, zygote_among

DIFFICULT = Path(__file__).with_name("difficult_worker.py")
HOUR_S = 3600.0
SLEEP = ["import time", "time.sleep(3600)"]


class WarmNode(Node):
    """A node with a zygote."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def script(self, name: str, *lines: str) -> Path:
        return script(self.folder / name, lines)

    def forked(self, local_rank: int, *argv: str | Path, **env: str) -> WorkerCommand:
        """One that runs this script, from the zygote."""
        words = (sys.executable, "-u", *map(str, argv))
        return WorkerCommand(local_rank=local_rank, fork=True, argv=words, env=self.env(**env))

    async def ready(self) -> None:
        """Returns when the zygote has forked something."""
        await self.supervisor.begin_helper("ready", [sys.executable, os.devnull], self.env(), fork=True)
        assert (await self.fact(HelperEnded)).exit_code == 0

    async def zygote_pid(self) -> int:
        return await zygote_among(lambda: marked(self.mark))


@asynccontextmanager
async def warm(
    folder: Path, *modules: str, python: str = sys.executable, later: tuple[str, ...] = ()
) -> AsyncIterator[WarmNode]:
    """Modules are looked for in the folder as well. Whatever was started is gone afterwards."""
    self = WarmNode(folder)
    worker_argv = (python, "-u", str(folder / "worker.py"))
    modules = modules or ("textwrap",)
    plan = ZygotePlan(worker_argv=worker_argv, env=self.env(), modules=modules, later=later, later_s=0.0)
    self.supervisor = await Supervisor.start(self.facts.put_nowait, zygote=plan)
    try:
        yield self
    finally:
        await self.supervisor.close()
    await until(lambda: not marked(self.mark), "everything is gone after close")


# ---------------------------------------------------------------------------------------------------- forking


def test_workers_differ_in_what_is_random_and_in_nothing_that_was_imported(tmp_path: Path) -> None:
    """With the real torch: four workers of two rounds."""
    lines = ["import json, os, random, sys, uuid, numpy, torch, multiprocessing, tempfile", "print(json.dumps(["]
    lines += ["random.random(), numpy.random.rand(), torch.initial_seed(), torch.rand(1).item(), str(uuid.uuid4()),"]
    lines += ["multiprocessing.current_process().authkey.hex(), os.path.basename(tempfile.mktemp()),"]
    lines += ["torch.randperm(1000)[:4].tolist(), os.getppid(), torch.get_num_threads()]))"]

    async def story() -> None:
        async with warm(tmp_path, "torch") as n:
            draw = n.script("draw.py", *lines)
            seen = []
            for round_ in ("r1", "r2"):
                outs = [tmp_path / f"{round_}-{rank}" for rank in range(2)]
                commands = []
                for rank, out in enumerate(outs):
                    command = n.forked(rank, draw)
                    fd = os.open(out, os.O_WRONLY | os.O_CREAT)
                    commands.append(
                        WorkerCommand(local_rank=rank, fork=True, argv=command.argv, env=command.env, stdout=fd)
                    )
                await n.supervisor.spawn(round_, commands)
                for command in commands:
                    os.close(command.stdout)
                    assert (await n.fact(WorkerEnded)).exit_code == 0
                seen += [json.loads(out.read_text()) for out in outs]
            *random, parents, threads = zip(*seen, strict=True)
            assert [len(set(map(str, drawn))) for drawn in random] == [4] * len(random)
            assert set(parents) == {n.supervisor.spawner_pid}
            assert len(set(threads)) == 1

    asyncio.run(story())


@pytest.mark.parametrize("wishes", [[], ["deaf"], ["stopped"]])
def test_stop_leaves_nobody_but_helpers_and_the_zygote(tmp_path: Path, wishes: list[str]) -> None:
    async def story() -> None:
        async with warm(tmp_path) as n:
            helper = n.script("helper.py", *SLEEP)
            await n.supervisor.begin_helper("h", [sys.executable, str(helper)], n.env(), fork=True)
            await n.supervisor.spawn("r1", [n.forked(rank, DIFFICULT, *wishes) for rank in range(2)])
            # Who replaces itself may be missed by one look.
            everybody = 2 * (difficult_worker.PROCESSES - 1) + 2
            await until(lambda: len(marked(n.mark)) >= everybody, "all have started")
            assert await n.supervisor.stop(grace_s=0.2) == 0
            assert set(marked(n.mark)) == {await n.zygote_pid(), *tree.children(n.supervisor.spawner_pid)}
            assert len(marked(n.mark)) == 2
            assert {(await n.fact(WorkerEnded)).local_rank for _ in range(2)} == {0, 1}

    asyncio.run(story())


def test_rounds_leave_no_descriptors_behind(tmp_path: Path) -> None:
    async def story() -> None:
        async with warm(tmp_path) as n:
            sleeper = n.script("sleeper.py", *SLEEP)
            await n.ready()
            pids = os.getpid(), n.supervisor.spawner_pid, await n.zygote_pid()

            def counts() -> list[int]:
                return [fds(pid) for pid in pids]

            seen = []
            for number in range(20):
                await n.supervisor.spawn(f"r{number}", [n.forked(rank, sleeper) for rank in range(2)])
                assert await n.supervisor.stop(grace_s=HOUR_S) == 0
                for _ in range(2):
                    assert (await n.fact(WorkerEnded)).signal == signal.SIGTERM
                seen.append(counts())
            # Somebody may still be closing its copies when it is looked at.
            fewest = [min(of_one) for of_one in zip(*seen, strict=True)]
            await until(lambda: all(map(le, counts(), fewest)), f"no more than {fewest}")

    asyncio.run(story())


# ---------------------------------------------------------------------------------------------------- without it


def test_a_killed_zygote_touches_no_worker_and_the_next_are_started_by_exec(tmp_path: Path) -> None:
    async def story() -> None:
        async with warm(tmp_path) as n:
            sleeper = n.script("sleeper.py", *SLEEP)
            await n.supervisor.spawn("r1", [n.forked(0, sleeper)])
            os.kill(await n.zygote_pid(), signal.SIGKILL)
            assert await n.fact(ZygoteEnded) == ZygoteEnded(text="signal 9 (SIGKILL)", missing=False)
            await n.supervisor.spawn("r2", [n.forked(1, n.script("exits.py", "raise SystemExit(4)"))])
            end = await n.fact(WorkerEnded)
            assert (end.round_uid, end.local_rank, end.exit_code) == ("r2", 1, 4)
            assert list(n.supervisor.pids()) == [0]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["import no_such_module"], "import module: No module named 'no_such_module'"),
        (["def f(:"], "import module: SyntaxError"),
        (["raise SystemExit(3)"], "import module: SystemExit: 3"),
        (["import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], "signal 11 (SIGSEGV)"),
        (["import os; os.closerange(3, 1000); import time; time.sleep(3600)"], "signal 9 (SIGKILL)"),
        (
            ["import threading, time; threading.Thread(target=time.sleep, args=[3600], daemon=True).start()"],
            "--preload module: it starts 1 thread(s)",
        ),
    ],
)
def test_a_zygote_that_cannot_be_is_explained_and_not_needed(tmp_path: Path, lines: list[str], text: str) -> None:
    script(tmp_path / "module.py", lines)

    async def story() -> None:
        async with warm(tmp_path, "textwrap", "module") as n:
            await n.supervisor.spawn("r1", [n.forked(0, n.script("exits.py", "raise SystemExit(4)"))])
            fact = await n.fact(ZygoteEnded)
            assert fact.text.startswith(text)
            assert not fact.missing
            assert (await n.fact(WorkerEnded)).exit_code == 4

    asyncio.run(story())


def test_a_module_that_initialises_cuda_is_refused_by_name(tmp_path: Path) -> None:
    """A stand-in for torch says, as the real one does in a fork, that CUDA was initialised before that."""
    script(tmp_path / "torch.py", ["import os", "class cuda:", "    pid = 0", "    @classmethod"])
    with (tmp_path / "torch.py").open("a") as file:
        file.write("    def _is_in_bad_fork(cls): return cls.pid not in (0, os.getpid())\n")
    script(tmp_path / "uses_cuda.py", ["import os, torch", "torch.cuda.pid = os.getpid()"])

    async def story() -> None:
        async with warm(tmp_path, "torch", "uses_cuda") as n:
            assert (await n.fact(ZygoteEnded)).text.startswith("--preload uses_cuda: it initialises CUDA")

    asyncio.run(story())


def test_where_there_is_no_torch_nothing_is_wrong(tmp_path: Path) -> None:
    bare = script(tmp_path / "python", ["#!/bin/sh", f'exec {sys.executable} -S "$@"'])
    bare.chmod(0o755)

    async def story() -> None:
        async with warm(tmp_path, "torch", python=str(bare)) as n:
            assert (await n.fact(ZygoteEnded)).missing

    asyncio.run(story())


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    async def story() -> None:
        async with warm(tmp_path, python="/no/such/python") as n:
            assert "cannot run /no/such/python" in (await n.fact(ZygoteEnded)).text

    asyncio.run(story())


def test_a_new_spawner_has_a_zygote_of_its_own(tmp_path: Path) -> None:
    async def story() -> None:
        async with warm(tmp_path) as n:
            await n.ready()
            first = await n.zygote_pid()
            os.kill(n.supervisor.spawner_pid, signal.SIGKILL)
            await n.fact(SpawnerEnded)
            await n.ready()
            assert await n.zygote_pid() != first

    asyncio.run(story())


# ---------------------------------------------------------------------------------------------------- while it is busy


def test_who_waits_for_the_zygote_can_be_withdrawn_and_who_is_not_starts_later(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    script(tmp_path / "slow.py", [f"open({str(tmp_path / 'gate')!r}).read()"])

    async def story() -> None:
        async with warm(tmp_path, "slow") as n:
            exits = n.script("exits.py", "raise SystemExit(4)")
            await n.supervisor.begin_helper("h", [sys.executable, str(exits)], n.env(), fork=True)
            spawn = asyncio.create_task(n.supervisor.spawn("r1", [n.forked(0, exits)]))
            await until(lambda: n.supervisor.alive() == 1, "the worker is ordered")
            n.supervisor.withdraw()
            with pytest.raises(SpawnFailed, match="stopped before it was started"):
                await spawn
            assert await n.supervisor.stop(grace_s=HOUR_S) == 0
            assert n.facts.empty()
            await asyncio.to_thread((tmp_path / "gate").write_text, "open")
            assert await n.fact(HelperEnded) == HelperEnded(name="h", exit_code=4, signal=0)
            await n.supervisor.spawn("r2", [n.forked(0, exits)])
            assert (await n.fact(WorkerEnded)).exit_code == 4

    asyncio.run(story())


def test_a_zygote_that_is_stuck_holds_up_no_stop(tmp_path: Path) -> None:
    async def story() -> None:
        async with warm(tmp_path) as n:
            sleeper = n.script("sleeper.py", *SLEEP)
            await n.ready()
            pid = await n.zygote_pid()
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: state(pid) == "T", "it is stopped")
            spawn = asyncio.create_task(n.supervisor.spawn("r1", [n.forked(0, sleeper)]))
            await until(lambda: n.supervisor.alive() == 1, "the worker is ordered")
            stop = asyncio.create_task(n.supervisor.stop(grace_s=0.0))
            with pytest.raises(SpawnFailed, match="stopped before it was started"):
                await asyncio.wait_for(spawn, LIMIT_S)
            assert await stop == 0
            assert (await n.fact(ZygoteEnded)).text == "signal 9 (SIGKILL)"

    asyncio.run(story())


# ---------------------------------------------------------------------------------------------------- its heir

# A module that takes until there is a file `go`, and says so by one named `begun`.
SLOW = [
    "import os, pathlib, time",
    "HERE, PID = pathlib.Path(__file__).parent, os.getpid()",
    "(HERE / 'begun').touch()",
    "while not (HERE / 'go').exists(): time.sleep(0.01)",
]
# A worker that exits with 0 if the module was there before it imported it, and was not to be seen.
ASKS = ["import os, sys", "assert 'slow' not in sys.modules", "import slow", "sys.exit(slow.PID == os.getpid())"]


async def expecting(n: WarmNode) -> tuple[int, Path, Path]:
    """A round runs, and an heir imports SLOW. Returns the pid of the zygote, and the scripts of workers."""
    n.script("slow.py", *SLOW)
    sleeper, asks = n.script("sleeper.py", *SLEEP), n.script("asks.py", *ASKS)
    await n.ready()
    former = await n.zygote_pid()
    await n.supervisor.spawn("r1", [n.forked(0, sleeper)])
    await until((n.folder / "begun").exists, "the heir imports")
    return former, sleeper, asks


async def replaced(n: WarmNode, former: int) -> None:
    """Returns when the zygote is another process."""
    await until(lambda: former not in marked(n.mark), "the former zygote has ended")
    assert await n.zygote_pid() != former


def test_what_is_imported_beside_the_first_round_is_there_in_the_next(tmp_path: Path) -> None:
    async def story() -> None:
        async with warm(tmp_path, later=("slow",)) as n:
            former, sleeper, asks = await expecting(n)
            await n.supervisor.spawn("r1", [n.forked(1, sleeper)])  # nobody waits for it
            (tmp_path / "go").touch()
            await replaced(n, former)
            assert n.supervisor.alive() == 2
            await n.supervisor.spawn("r2", [n.forked(0, asks)])
            assert (await n.fact(WorkerEnded)).exit_code == 0
            assert await n.supervisor.stop(grace_s=0.2) == 0
            assert marked(n.mark) == [await n.zygote_pid()]

    asyncio.run(story())


def test_an_heir_outlives_the_stop_of_the_round_and_the_death_of_the_zygote(tmp_path: Path) -> None:
    async def story() -> None:
        async with warm(tmp_path, later=("slow",)) as n:
            former, _, asks = await expecting(n)
            assert await n.supervisor.stop(grace_s=0.2) == 0
            await n.fact(WorkerEnded)
            os.kill(former, signal.SIGKILL)
            await n.fact(ZygoteEnded)
            (tmp_path / "go").touch()
            forked = False
            while not forked:  # by exec until the heir takes over
                await n.supervisor.spawn("r2", [n.forked(0, asks)])
                forked = (await n.fact(WorkerEnded)).exit_code == 0
            assert marked(n.mark) == [await n.zygote_pid()]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["raise OSError('no such luck')"], "import slow: OSError: no such luck"),
        (["import threading, time", "threading.Thread(target=time.sleep, args=[3600], daemon=True).start()"],
         "--preload-later slow: it starts 1 thread(s), which forked workers would lack"),
        (["import os, signal", "os.kill(os.getpid(), signal.SIGKILL)"], "signal 9 (SIGKILL)"),
    ],
    ids=["fails", "starts a thread", "dies"],
)  # fmt: skip
def test_without_an_heir_the_zygote_goes_on(tmp_path: Path, lines: list[str], text: str) -> None:
    async def story() -> None:
        async with warm(tmp_path, later=("slow",)) as n:
            n.script("slow.py", *lines)
            sleeper = n.script("sleeper.py", *SLEEP)
            await n.ready()
            former = await n.zygote_pid()
            await n.supervisor.spawn("r1", [n.forked(0, sleeper)])
            assert (await n.fact(HeirEnded)).text == text
            assert await n.zygote_pid() == former
            await n.ready()

    asyncio.run(story())


def test_an_heir_imports_at_a_low_priority_and_those_it_forks_run_at_the_usual_one(tmp_path: Path) -> None:
    async def story() -> None:
        async with warm(tmp_path, later=("slow",)) as n:
            n.script("slow.py", "import os", "NICE = os.getpriority(os.PRIO_PROCESS, 0)")
            lines = ["import os, slow, sys", "here = os.getpriority(os.PRIO_PROCESS, 0)"]
            asks = n.script("asks.py", *lines, "sys.exit(slow.NICE != min(here + 10, 19))")
            sleeper = n.script("sleeper.py", *SLEEP)
            await n.ready()
            former = await n.zygote_pid()
            await n.supervisor.spawn("r1", [n.forked(0, sleeper)])
            await replaced(n, former)
            await n.supervisor.spawn("r2", [n.forked(0, asks)])
            assert (await n.fact(WorkerEnded)).exit_code == 0

    asyncio.run(story())


# ---------------------------------------------------------------------------------------------------- the command


def test_rdzvrun_warns_once_and_goes_on_without_a_zygote(stage: Stage) -> None:
    module = script(stage.directory / "starts_a_thread.py", ["import threading, time"])
    module.write_text(module.read_text() + "threading.Thread(target=time.sleep, args=[3600], daemon=True).start()\n")
    hello = script(stage.directory / "hello.py", ["import os", "print('hello from', os.environ['RANK'])"])
    node = stage.run("a", "--nproc-per-node=2", "--preload=starts_a_thread", str(hello))
    assert node.ends() == 0
    warnings = [line for line in node.lines() if "zygote" in line]
    assert len(warnings) == 1
    assert "--preload starts_a_thread: it starts 1 thread(s)" in warnings[0]
    assert node.text().count("hello from") == 2


def test_a_worker_is_found_by_the_name_of_its_script(stage: Stage) -> None:
    sleeper = script(stage.directory / "my training.py", SLEEP)
    node = stage.run("a", str(sleeper), "--lr", "0.1")
    name = f"{sleeper} --lr 0.1".encode()

    def found() -> list[int]:
        return [pid for pid in marked(stage.mark) if b"-u " + name in cmdline(pid).replace(b"\0", b" ")]

    [pid] = stage.until(found, "the worker runs")
    os.kill(pid, signal.SIGKILL)
    assert node.ends() == 128 + signal.SIGKILL
