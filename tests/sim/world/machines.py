"""Simulated time, and processes in it: each has an event loop and a clock of its own, and the world runs them in turn.

A process that is killed is never run again, one that is paused is not run until it goes on and finds then that its
timers are late: as SIGKILL and SIGSTOP do. A clock may be off, and fast or slow. Nothing waits for real time.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from asyncio import events
from collections.abc import Callable, Coroutine
from typing import Any

# A timer is due when it is so much away: seconds are turned from one clock into another, and back, with such errors.
RESOLUTION_S = 1e-6
# Turns that a process gets to let go of what it holds, after the end of a run.
DISPOSAL_TURNS = 400
# Turns in one instant; a cluster that sets to work takes some hundred.
SPINS_MAX = 5000
# After so many a moment passes, as it does for a real process: who waits for an instant of a clock that turns seconds
# into those of another may look at it too early, by less than can be told.
SPINS_A_MOMENT = 1000


class Task(asyncio.Task[Any]):
    """Its hash is its number, so that a set of tasks has the same order in every run."""

    def __init__(self, number: int, *args: Any, **more: Any) -> None:
        self.number = number
        super().__init__(*args, **more)

    def __hash__(self) -> int:
        return self.number


class _NoSelector:
    def select(self, timeout: float | None) -> list[Any]:
        return []


class Loop(asyncio.BaseEventLoop):
    """The event loop of one process. Its `time` is the process's clock."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process
        self._selector = _NoSelector()
        self._clock_resolution = RESOLUTION_S
        self._tasks_made = 0
        self.signals: dict[int, Callable[[], object]] = {}
        self.set_task_factory(self._make)

    def _make(self, _: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> asyncio.Future[Any]:
        self._tasks_made += 1
        return Task(self._tasks_made, coro, loop=self, **more)

    def _process_events(self, _: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def time(self) -> float:
        return self._process.clock()

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:  # type: ignore[override]
        self.signals[sig] = lambda: callback(*args)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._process.world.fail("bug", f"{self._process.name}: {context['message']}: {error!r}")

    def due(self) -> float | None:
        """Return when, by its own clock, it has something to do. None: only others can wake it."""
        if self._ready:  # type: ignore[attr-defined]
            return -1.0
        scheduled = self._scheduled  # type: ignore[attr-defined]
        return scheduled[0]._when if scheduled else None

    def turn(self) -> None:
        self._run_once()  # type: ignore[attr-defined]


class Process:
    """One process on one machine."""

    def __init__(self, world: World, name: str, machine: str, *, ahead_s: float = 0.0, rate: float = 1.0) -> None:
        self.world = world
        self.name = name
        self.machine = machine
        self.chance = world.random(f"process {name}")
        self.dead = False
        self.paused = False
        self.pauses = 0
        self.turn_s = 0.0  # that each turn of its loop takes: a host that is busy with something else
        self.due_at = float("inf")  # of the world's clock
        self.on_exit: Callable[[], None] = lambda: None
        self._ahead_s, self._rate = ahead_s, rate
        self._free_at = 0.0
        self._old_news = 0  # what was ready when it was paused
        self._wakes = False
        self.loop = Loop(self)
        self.main: asyncio.Task[Any] | None = None
        self.began_at = world.now
        self.owner: Any = None  # the machine it runs on, as its author knows it
        world.add(self)

    def clock(self) -> float:
        """Return seconds of this machine's clock, which is nobody else's."""
        return self._ahead_s + self.world.now * self._rate

    def when(self, reading: float) -> float:
        """Return when, by the world's clock, its own shows this."""
        return (reading - self._ahead_s) / self._rate

    def start(self, main: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run `main`; the process ends with it."""

        def begin() -> None:
            self.main = self.loop.create_task(main())
            self.main.add_done_callback(self._finished)

        self.post(begin)

    def post(self, act: Callable[..., object], *args: Any) -> None:
        """Let something happen to this process from without: now, or when it goes on."""
        if not self.dead:
            self.loop.call_soon(act, *args)
            self._arm()

    def kill(self) -> None:
        """End it, as by SIGKILL."""
        self.dead = True
        self.world.remove(self)

    def pause(self) -> None:
        if not self.paused:
            self.pauses += 1
            self._old_news = len(self.loop._ready)  # type: ignore[attr-defined]
        self.paused = True
        self._arm()

    def go_on(self) -> None:
        self._wakes = self._wakes or self.paused
        self.paused = False
        self._arm()

    def turn(self) -> None:
        """Run what is ready, once round."""
        world = self.world
        self._free_at = world.now + self.turn_s
        world.current = self
        events._set_running_loop(self.loop)
        try:
            if self._wakes:
                self._wake()
            self.loop.turn()
        finally:
            events._set_running_loop(None)
            world.current = None
        self._arm()

    def _wake(self) -> None:
        """Some loops look at their timers first when they wake, others at what has arrived meanwhile."""
        self._wakes = False
        if self.chance.random() < 0.5:
            ready = self.loop._ready  # type: ignore[attr-defined]
            arrived = [ready.pop() for _ in range(len(ready) - self._old_news)]
            for _ in range(3):
                self.loop.turn()
            ready.extend(reversed(arrived))

    def _arm(self) -> None:
        due = None if self.dead or self.paused else self.loop.due()
        if due is None:
            self.due_at = float("inf")
        else:
            self.due_at = max(self.when(due), self._free_at, self.world.now)

    def _finished(self, main: asyncio.Task[Any]) -> None:
        if not main.cancelled() and (error := main.exception()) is not None:
            self.world.fail("bug", f"{self.name} ended with {error!r}")
        if not self.dead and not self.world.over:
            self.on_exit()
        self.dead = True
        self.world.remove(self)

    def dispose(self) -> None:
        """Let its tasks end; nothing of that is part of the run."""
        self.dead = self.paused = False
        loop = self.loop
        loop.set_exception_handler(lambda _, context: None)
        events._set_running_loop(loop)
        try:
            for _ in range(DISPOSAL_TURNS):
                tasks = asyncio.all_tasks(loop)
                if not tasks:
                    break
                for task in tasks:
                    task.cancel()
                loop.turn()
                self._ahead_s += 1.0
            for task in asyncio.all_tasks(loop):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
        finally:
            events._set_running_loop(None)
        loop.close()
        self.dead = True


class World:
    """The one true time, and everything that happens in it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.over = False
        self.current: Process | None = None
        self.processes: list[Process] = []  # those that live
        self.changed = False  # somebody may have been the last one
        self._all: list[Process] = []
        self.failure = ""  # the first promise that was broken
        self.history: list[str] = []
        self._agenda: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = 0

    def random(self, name: str) -> random.Random:
        """Return chance for one purpose: what others draw makes no difference to it."""
        return random.Random(f"{self.seed} {name}")

    def add(self, process: Process) -> None:
        self.processes.append(process)
        self._all.append(process)

    def remove(self, process: Process) -> None:
        if process in self.processes:
            self.processes.remove(process)
        self.changed = True

    def at(self, when: float, act: Callable[..., object], *args: Any) -> None:
        self._numbers += 1
        heapq.heappush(self._agenda, (max(when, self.now), self._numbers, act, args))

    def after(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        self.at(self.now + seconds, act, *args)

    def say(self, text: str) -> None:
        """Write history."""
        if not self.over:
            self.history.append(f"{self.now:10.4f} {text}")

    def fail(self, rule: str, text: str) -> None:
        if not self.failure and not self.over:
            self.failure = f"{rule}: {text}"
            self.say(f"FAILED {self.failure}")

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Let things happen until `done`, a failure, or this time."""
        agenda, never, spins = self._agenda, float("inf"), 0
        while not self.failure:
            at, process = agenda[0][0] if agenda else never, None
            for other in self.processes:
                if other.due_at < at:
                    at, process = other.due_at, other
            if at > until:
                self.now = until
                return
            spins = spins + 1 if at <= self.now else 0
            self.now = max(at, self.now) + (0.0 if (spins + 1) % SPINS_A_MOMENT else RESOLUTION_S)
            if spins > SPINS_MAX:
                self.fail("bug", f"time stands still: {process.name if process is not None else 'the world'} spins")
            elif process is not None:
                process.turn()
            else:
                _, _, act, args = heapq.heappop(agenda)
                act(*args)
            if self.changed:
                self.changed = False
                if done():
                    return

    def end(self) -> None:
        """Let go of everything."""
        self.over = True
        self._agenda.clear()
        for process in self._all:
            process.dispose()
