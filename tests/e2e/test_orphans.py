"""Nobody is left behind, whoever of the launcher and its helpers is killed, alone or together, or hangs meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import difficult_worker
from tests.e2e.processes_kit import LIMIT_S, comm, marked, state, until

DRIVER = Path(__file__).with_name("orphan_driver.py")
HELPERS = ("keeper", "spawner", "zygote")
EVERYBODY = ("launcher", *HELPERS)
# Two workers; launcher, keeper, spawner, zygote, and a helper. Less two that replace themselves, and may be missed.
PROCESSES = 2 * difficult_worker.PROCESSES + 5 - 2


@dataclass(frozen=True)
class Launcher:
    mark: str
    pids: dict[str, int]

    def others(self) -> list[int]:
        """Who lives of all but the launcher itself."""
        return [pid for pid in marked(self.mark) if pid != self.pids["launcher"]]

    def workers(self) -> list[int]:
        """Those of the workers and their children that are there to stay."""
        return [pid for pid in self.others() if comm(pid) == difficult_worker.NAME]

    async def kill(self, names: Iterable[str]) -> None:
        """All at once: who is stopped cannot do anything about the death of another."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for name in names:
                with suppress(ProcessLookupError):  # of its death another has heard who clears up already
                    os.kill(self.pids[name], number)
            if number == signal.SIGSTOP:
                await until(lambda: {state(self.pids[name]) for name in names} == {"T"}, "all are stopped")


def _start(argv: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)


@asynccontextmanager
async def launcher(*, isolate: str = "", wrapper: Iterable[str] = ()) -> AsyncIterator[Launcher]:
    """With two workers and all that belongs to them. A worker has died already, and left children."""
    mark = uuid.uuid4().hex
    env = {**os.environ, "RDZV_TEST_MARK": mark, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [*wrapper, sys.executable, str(DRIVER), "textwrap", isolate]
    with _start(argv, env) as process:
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), LIMIT_S)
            assert line, "it does not start"
            self = Launcher(mark, json.loads(line))
            await until(lambda: len(marked(mark)) >= PROCESSES, "all have started")
            yield self
        finally:
            process.kill()
        await until(lambda: not marked(mark), "nobody is left")


@pytest.mark.parametrize("victims", [*itertools.combinations(EVERYBODY, 1), *itertools.combinations(EVERYBODY, 2)])
def test_nobody_outlives(victims: tuple[str, ...]) -> None:
    async def story() -> None:
        async with launcher() as it:
            await it.kill(victims)
            if "launcher" in victims:
                await until(lambda: not marked(it.mark), "all are gone")
            elif victims != ("zygote",):
                await until(lambda: not it.others(), "all but the launcher are gone")

    asyncio.run(story())


@pytest.mark.parametrize("hung", HELPERS)
def test_a_helper_that_hangs_keeps_nobody_alive(hung: str) -> None:
    async def story() -> None:
        async with launcher() as it:
            os.kill(it.pids[hung], signal.SIGSTOP)
            await it.kill(["launcher"])
            await until(lambda: not marked(it.mark), "all are gone")

    asyncio.run(story())


def test_the_death_of_a_zygote_touches_no_worker() -> None:
    async def story() -> None:
        async with launcher() as it:
            await until(lambda: len(it.workers()) == 2 * difficult_worker.STAYING, "they are there")
            before = it.workers()
            await it.kill(["zygote"])
            await until(lambda: it.pids["zygote"] not in it.others(), "the zygote is gone")
            assert it.workers() == before
            assert {it.pids["keeper"], it.pids["spawner"]} <= set(it.others())

    asyncio.run(story())


@pytest.mark.parametrize("wrapper", [(), ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")])
def test_isolated_workers_outlive_not_even_three_deaths(wrapper: tuple[str, ...]) -> None:
    """With root's rights, and by a user namespace."""

    async def story() -> None:
        async with launcher(isolate="isolate", wrapper=wrapper) as it:
            await it.kill(["launcher", "keeper", "spawner"])
            await until(lambda: not marked(it.mark), "all are gone")

    asyncio.run(story())
