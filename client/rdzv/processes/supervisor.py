"""The node's processes, as the launcher sees them: started, watched and stopped through the spawner.

The launcher asks with coroutines and is told with facts. A process that has a Supervisor starts its children through it
alone: when the spawner dies, everything below this process that was not there before is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal as signals
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rdzv.errors import describe_exit
from rdzv.processes.facts import (
    HeirEnded,
    Helper,
    HelperEnded,
    LeftBehind,
    ProcessFact,
    SpawnerEnded,
    SpawnFailed,
    WorkerCommand,
    WorkerEnded,
    ZygoteEnded,
    ZygotePlan,
)
from rdzv.processes.spawner_process import SpawnerProcess, SpawnError, become_subreaper
from rdzv.processes.wire import to_text

if TYPE_CHECKING:
    from rdzv.processes.wire import Body

log = logging.getLogger(__name__)

# A spawner that has not stopped everybody so long after the grace is stuck, or was itself stopped: it is killed, and
# the workers with it. (It sweeps for SWEEP_S, 5 s, at most.)
STUCK_S = 10.0


class _NotStarted(Exception):
    """Why a process never ran."""


@dataclass(slots=True)
class _Batch:
    """The workers of one `spawn`. While it is in progress their ends are held back: if it fails, they never were."""

    held: list[ProcessFact] | None = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class _Child:
    """A process from the order to start it until its end is known."""

    started: asyncio.Future[int]  # its pid, or _NotStarted
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    pid: int = 0
    ordered: bool = False  # its end is no news


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker(_Child):
    round_uid: str
    local_rank: int
    batch: _Batch


@dataclass(slots=True, kw_only=True, eq=False)
class _Helper(_Child):
    name: str
    awaited: bool  # somebody is told if it cannot be started


class Supervisor:
    """The processes of one node. Made by `start`; belongs to the loop and the thread it was started in."""

    def __init__(
        self, on_fact: Callable[[ProcessFact], None], zygote: ZygotePlan | None, isolate: bool, fenced: bool
    ) -> None:
        self._zygote_plan = zygote
        self._isolate = isolate
        self._fenced = fenced
        self._fence: float | None = None
        self._loop = asyncio.get_running_loop()
        self._on_fact = on_fact
        self._spawner: SpawnerProcess | None = None
        self._starting = asyncio.Lock()  # one spawner at a time
        self._clearing: asyncio.Task[int] | None = None  # after a spawner's death
        self._children: dict[int, _Worker | _Helper] = {}  # by the number the wire knows them by
        self._number = 0
        self._stopping: asyncio.Future[int] | None = None
        self._closed = False
        self._was_subreaper = become_subreaper(True)

    @classmethod
    async def start(
        cls,
        on_fact: Callable[[ProcessFact], None],
        *,
        zygote: ZygotePlan | None = None,
        isolate: bool = False,
        fenced: bool = False,
    ) -> Supervisor:
        """With its spawner running, and its zygote begun. `on_fact` is called in this thread, from the loop.
        `isolate`: all processes are in a PID namespace, and the pids that are told are of that. `fenced`: `fence` will
        be used. Raises SpawnError."""
        self = cls(on_fact, zygote, isolate, fenced)
        try:
            await self._need_spawner()
        except BaseException:
            await self.close()
            raise
        return self

    # ------------------------------------------------------------------------------------------------ workers

    async def spawn(self, round_uid: str, commands: Sequence[WorkerCommand]) -> None:
        """Returns when all have been started: each runs its program. Their facts come after that. Raises SpawnFailed
        when one could not be; then none is left, nor is any process of another round."""
        if self._stopping is not None:
            raise RuntimeError("workers are being stopped")
        batch = _Batch()
        workers = []
        try:
            spawner = await self._need_spawner()
        except SpawnError as dead:
            raise SpawnFailed(commands[0].local_rank if commands else 0, str(dead)) from dead
        if self._fenced:
            spawner.fence(self._fence)  # it may be a new one
        for command in commands:
            worker = _Worker(
                started=self._loop.create_future(),
                round_uid=round_uid,
                local_rank=command.local_rank,
                batch=batch,
            )
            workers.append(worker)
            stdio = (command.stdin, command.stdout, command.stderr)
            self._order(spawner, worker, command.argv, command.env, stdio, fork=command.fork)
        try:
            results = await asyncio.gather(*(worker.started for worker in workers), return_exceptions=True)
        except asyncio.CancelledError:
            self._release(batch)
            raise
        for worker, result in zip(workers, results, strict=True):
            if isinstance(result, BaseException):
                batch.held = None
                for other in workers:
                    other.ordered = True
                await self.stop(signal=signals.SIGKILL, grace_s=0.0)
                raise SpawnFailed(worker.local_rank, str(result))
        self._release(batch)

    async def stop(self, *, signal: int = signals.SIGTERM, grace_s: float, next_round: bool = False) -> int:
        """Send `signal` to every worker, TERM to what each leaves behind when it has ended, and KILL to whatever is not
        a helper when the grace is over. `next_round`: it is waited for, so what is left of workers that ended by
        themselves has less time. Returns when no process of any round is left: 0, or how many could not be killed
        (uninterruptible sleep). Asked again while in progress, it signals again, and the shorter grace counts."""
        if self._clearing is not None:
            return await asyncio.shield(self._clearing)
        if self._spawner is None:
            return 0
        if self._stopping is None:
            self._stopping = self._loop.create_future()
        self._spawner.link.post({"do": "stop", "signal": int(signal), "grace_s": grace_s, "next_round": next_round})
        stuck = self._loop.call_later(grace_s + STUCK_S, self._spawner.kill)
        try:
            return await asyncio.shield(self._stopping)
        finally:
            stuck.cancel()

    def fence(self, until: float | None) -> None:
        """At this instant of CLOCK_BOOTTIME all is killed, workers and helpers, whatever has become of this process.
        None: at no time. A spawner that is started after the last call hears of it with the next `spawn`."""
        if until != self._fence:
            self._fence = until
            if self._spawner is not None:
                self._spawner.fence(until)

    def hurry(self) -> None:
        """The stop in progress, if any, has no grace left."""
        if self._spawner is not None:
            self._spawner.link.post({"do": "hurry"})

    def signal(self, number: int, local_rank: int | None = None) -> None:
        """Send a signal to each worker that runs its program, or to that of one local rank; not to what it has
        started."""
        for ident, child in self._children.items():
            if self._spawner is not None and isinstance(child, _Worker) and local_rank in (None, child.local_rank):
                self._spawner.link.post({"do": "signal", "signal": int(number), "id": ident})

    def withdraw(self) -> None:
        """Workers that still wait for the zygote to be ready are not to be started: their `spawn` fails."""
        if self._spawner is not None:
            self._spawner.link.post({"do": "withdraw"})

    def alive(self) -> int:
        """How many workers have been ordered and not ended."""
        return sum(isinstance(child, _Worker) for child in self._children.values())

    def pids(self) -> dict[int, int]:
        """local rank → pid, of the workers that run."""
        return {w.local_rank: w.pid for w in self._children.values() if isinstance(w, _Worker) and w.pid}

    # ------------------------------------------------------------------------------------------------ helpers

    async def start_helper(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> Helper:
        """A process that outlives rounds and survives `stop`. It finds `pass_fds` as its descriptors 3, 4, ... in that
        order, and its stdio is /dev/null: one that held the launcher's output would keep a pipeline from ending.
        Raises SpawnError, and ValueError for a name in use."""
        helper = await self._order_helper(name, argv, env, pass_fds, fork=False, awaited=True)
        try:
            return Helper(name=name, pid=await helper.started)
        except _NotStarted as why:
            raise SpawnError(f"helper {name!r}: {why}") from why

    async def begin_helper(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int] = (), *, fork: bool
    ) -> None:
        """As `start_helper`, and does not wait until it runs, which may take until the zygote is ready. If it never
        comes to run that is a fact."""
        await self._order_helper(name, argv, env, pass_fds, fork=fork, awaited=False)

    async def _order_helper(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        *,
        fork: bool,
        awaited: bool,
    ) -> _Helper:
        if self._helper(name) is not None:
            raise ValueError(f"there is a helper {name!r}")
        spawner = await self._need_spawner()
        helper = _Helper(started=self._loop.create_future(), name=name, awaited=awaited)
        try:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        except OSError as refused:
            raise SpawnError(f"helper {name!r}: {refused}") from refused
        try:
            self._order(spawner, helper, argv, env, (null, null, null, *pass_fds), fork=fork)
        finally:
            os.close(null)
        return helper

    async def stop_helper(self, name: str) -> None:
        """Returns when it is gone, also when it was so before. There will be no fact of it."""
        for number, child in self._children.items():
            if isinstance(child, _Helper) and child.name == name:
                child.ordered = True
                if self._spawner is not None:
                    self._spawner.link.post({"do": "end", "id": number})
                await child.gone.wait()
                return

    def _helper(self, name: str) -> _Helper | None:
        return next((h for h in self._children.values() if isinstance(h, _Helper) and h.name == name), None)

    # ------------------------------------------------------------------------------------------------ the spawner

    @property
    def spawner_pid(self) -> int:
        """0: none is running."""
        return 0 if self._spawner is None else self._spawner.pid

    @property
    def keeper_pid(self) -> int:
        """0: none is running."""
        return 0 if self._spawner is None else self._spawner.keeper_pid

    async def close(self) -> None:
        """Kill everything, helpers and spawner too. No fact comes after this is called. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._spawner is not None:
            await self._spawner.close()
        if self._clearing is not None:
            await self._clearing
        if not self._was_subreaper:
            become_subreaper(False)

    async def _need_spawner(self) -> SpawnerProcess:
        """The running one, or a new one when the last one's remains are cleared away. Raises SpawnError."""
        async with self._starting:
            if self._closed:
                raise SpawnError("the supervisor is closed")
            if self._clearing is not None:
                await asyncio.shield(self._clearing)
            if self._spawner is None:
                self._spawner = SpawnerProcess(
                    self._hear, self._spawner_ended, isolate=self._isolate, fenced=self._fenced
                )
                if self._zygote_plan is not None:
                    self._order_zygote(self._spawner, self._zygote_plan)
            spawner = self._spawner
            await spawner.ready()
            return spawner

    def _spawner_ended(self, text: str) -> None:
        dead, self._spawner = self._spawner, None
        if dead is not None:
            self._tell(SpawnerEnded(text=text))
            self._clearing = self._loop.create_task(self._clear(dead, text))

    async def _clear(self, dead: SpawnerProcess, text: str) -> int:
        """Everything that a dead spawner leaves behind: processes, and those who wait for its answers. Returns how
        many processes could not be killed."""
        left, statuses = await dead.clear()
        if left:
            log.warning("%d processes could not be killed (uninterruptible sleep?)", left)
        for number, child in list(self._children.items()):
            if not child.started.done():
                self._not_started(number, text)
                continue
            status = statuses.get(child.pid, -signals.SIGKILL)
            self._ended(number, exit_code=max(status, 0), signal=max(-status, 0), at=self._loop.time())
        self._clearing = None
        self._stopped(left)
        return left

    # ------------------------------------------------------------------------------------------------ the wire

    def _order(
        self,
        spawner: SpawnerProcess,
        child: _Worker | _Helper,
        argv: Sequence[str],
        env: Mapping[str, str],
        fds: Sequence[int],
        *,
        fork: bool,
    ) -> None:
        self._number += 1
        self._children[self._number] = child
        body = {
            "do": "start",
            "id": self._number,
            "kind": "worker" if isinstance(child, _Worker) else "helper",
            "fork": fork,
            **_command(argv, env),
        }
        try:
            spawner.link.post(body, fds)
        except (OSError, ValueError) as refused:
            self._not_started(self._number, f"cannot hand over its files: {refused}")

    def _order_zygote(self, spawner: SpawnerProcess, plan: ZygotePlan) -> None:
        script = str(Path(__file__).with_name("zygote.py"))
        body = {
            "do": "zygote",
            **_command((plan.worker_argv[0], "-u", script), plan.env),
            "prepare": {"argv": list(plan.worker_argv), "modules": list(plan.modules)},
            "later": list(plan.later),
            "later_s": plan.later_s,
        }
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            spawner.link.post(body, (null, 1, 2))
        except OSError as refused:  # the launcher has no output: everybody is told so who needs it
            self._tell(ZygoteEnded(text=f"cannot hand over the output: {refused.strerror}", missing=False))
        finally:
            os.close(null)

    def _hear(self, body: Body) -> None:
        match body["is"]:
            case "started":
                child = self._children[body["id"]]
                child.pid = body["pid"]
                if not child.started.done():
                    child.started.set_result(child.pid)
            case "failed":
                self._not_started(body["id"], body["text"])
            case "ended":
                # Our loop's clock and the spawner's need not begin at the same instant.
                at = self._loop.time() - (time.monotonic() - body["at"])
                self._ended(body["id"], exit_code=body["exit_code"], signal=body["signal"], at=at)
            case "stopped":
                if body["left"]:
                    log.warning("%d processes could not be killed (uninterruptible sleep?)", body["left"])
                self._stopped(body["left"])
            case "leftovers":
                self._tell(LeftBehind(names=tuple(body["names"]), kill_s=body["kill_s"]))
            case "zygote_ended":
                self._tell(ZygoteEnded(text=_what_ended_it(body), missing=body["missing"]))
            case "heir_ended":
                self._tell(HeirEnded(text=_what_ended_it(body)))
            case unknown:
                raise ValueError(f"the spawner says {unknown!r}")

    def _not_started(self, number: int, text: str) -> None:
        child = self._children.pop(number)
        child.gone.set()
        if isinstance(child, _Helper) and not (child.awaited or child.ordered or self._closed):
            log.warning("helper %r: %s", child.name, text)
            self._tell(HelperEnded(name=child.name, exit_code=127, signal=0))
        if not child.started.done():
            child.started.set_exception(_NotStarted(text))
            child.started.exception()  # whoever asked may have been cancelled

    def _ended(self, number: int, *, exit_code: int, signal: int, at: float) -> None:
        child = self._children.pop(number)
        child.gone.set()
        if child.ordered:
            return
        if isinstance(child, _Helper):
            self._tell(HelperEnded(name=child.name, exit_code=exit_code, signal=signal))
            return
        fact = WorkerEnded(
            round_uid=child.round_uid, local_rank=child.local_rank, exit_code=exit_code, signal=signal, at=at
        )
        if child.batch.held is None:
            self._tell(fact)
        else:
            child.batch.held.append(fact)

    def _stopped(self, left: int) -> None:
        stopping, self._stopping = self._stopping, None
        if stopping is not None and not stopping.done():
            stopping.set_result(left)

    def _release(self, batch: _Batch) -> None:
        held, batch.held = batch.held, None
        for fact in held or ():
            self._tell(fact)

    def _tell(self, fact: ProcessFact) -> None:
        """In a loop step of its own, so that a receiver that raises takes nothing else down."""
        self._loop.call_soon(self._deliver, fact)

    def _deliver(self, fact: ProcessFact) -> None:
        if not self._closed:
            self._on_fact(fact)


def _what_ended_it(body: Body) -> str:
    text: str = body["text"] or describe_exit(body["exit_code"], body["signal"])
    return text


def _command(argv: Sequence[str], env: Mapping[str, str]) -> Body:
    return {
        "argv": [to_text(word) for word in argv],
        "env": {to_text(name): to_text(value) for name, value in env.items()},
    }
