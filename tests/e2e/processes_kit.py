"""What the process tests share: a supervisor to talk to, a mark to find processes by, and conditions to wait for."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from rdzv.processes.facts import ProcessFact, WorkerCommand
from rdzv.processes.supervisor import Supervisor

F = TypeVar("F", bound=ProcessFact)

# Long enough for the most loaded machine; nothing waits for it unless something is wrong.
LIMIT_S = 120.0


class Node:
    """A supervisor, its facts, and a mark in the environment of all that it starts, whatever becomes of it."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.facts: asyncio.Queue[ProcessFact] = asyncio.Queue()
        self.supervisor: Supervisor

    def env(self, **more: str) -> dict[str, str]:
        return {**os.environ, "RDZV_TEST_MARK": self.mark, **more}

    def worker(self, local_rank: int, *argv: str | Path, **env: str) -> WorkerCommand:
        return WorkerCommand(local_rank=local_rank, argv=tuple(map(str, argv)), env=self.env(**env))

    def python(self, local_rank: int, code: str) -> WorkerCommand:
        return self.worker(local_rank, sys.executable, "-c", code)

    async def fact(self, kind: type[F]) -> F:
        """The next fact, which must be of this kind."""
        fact = await asyncio.wait_for(self.facts.get(), LIMIT_S)
        assert isinstance(fact, kind), fact
        return fact


@asynccontextmanager
async def node(*, fenced: bool = False) -> AsyncIterator[Node]:
    """Whatever it started is gone afterwards."""
    self = Node()
    self.supervisor = await Supervisor.start(self.facts.put_nowait, fenced=fenced)
    try:
        yield self
    finally:
        await self.supervisor.close()
    await until(lambda: not marked(self.mark), "everything is gone after close")


def marked(mark: str) -> list[int]:
    """The living processes with this mark. (A zombie has no environment left.)"""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            environ = Path("/proc", name, "environ").read_bytes()
        except OSError:
            continue
        if f"RDZV_TEST_MARK={mark}".encode() in environ.split(b"\0"):
            found.append(int(name))
    return found


def state(pid: int) -> str:
    """The letter of the process's state: T is stopped; empty: there is no such process."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return ""
    return stat[stat.rindex(")") + 2]


def comm(pid: int) -> str:
    """As the kernel shows it; empty: there is no such process."""
    try:
        return Path("/proc", str(pid), "comm").read_text().rstrip("\n")
    except OSError:
        return ""


def cmdline(pid: int) -> bytes:
    """Empty: there is no such process."""
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return b""


def fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def until(condition: Callable[[], object], what: str) -> None:
    """Returns once the condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:.0f} s: {what}"
        await asyncio.sleep(0.01)


async def zygote_among(pids: Callable[[], Iterable[int]]) -> int:
    """Returns its pid. A worker that was forked a moment ago still has the zygote's command line."""

    def zygotes() -> list[int]:
        return [pid for pid in pids() if b"zygote.py" in cmdline(pid)]

    await until(lambda: len(zygotes()) == 1, "one process is the zygote")
    return zygotes()[0]


def script(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path
