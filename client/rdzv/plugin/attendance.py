"""One node at the daemon: `rdzv.agent` decides, and torch's agent has the workers.

It is told of a round by what `next_seat` returns, and that it must stop its workers by `must_stop`; that it has stopped
them it says by asking for the next seat. Everything here belongs to one event loop; `must_stop` may be read from
anywhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, assert_never

from rdzv import agent as agents
from rdzv import model, rules
from rdzv.aside import aside
from rdzv.endpoints import Endpoint
from rdzv.plugin.bootstrap import Stores
from rdzv.plugin.session_process import SessionProcess
from rdzv.plugin.settings import Settings
from rdzv.processes.stores import NoPort
from rdzv.reach import reach

log = logging.getLogger("rdzv.torchrun")

OPEN_S = 30.0  # for a store to be opened: milliseconds, and more on a busy host


class JobOver(Exception):
    """This node has no part in the job any more. `over` is how the job ended, or that the node was removed; None: it
    goes by itself, because there is no daemon, or none that would have it (`refused`), or because it was told to."""

    def __init__(self, text: str, over: model.Ended | model.Removed | None, *, refused: bool) -> None:
        super().__init__(text)
        self.over, self.refused = over, refused


class Attendance:
    """`run` is its whole life; it lasts until `close`."""

    def __init__(self, settings: Settings) -> None:
        self.must_stop = False  # the workers of the round that was taken last
        self.waits_for = ""  # why there is no seat yet, for people
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._agent, self._orders = agents.begin(_config(settings), self._loop.time())
        self._stores = Stores(settings.conf.master_port_range)
        self._storing = asyncio.Lock()
        self._tasks = asyncio.TaskGroup()
        self._facts: deque[Callable[[float], rules.Step]] = deque()
        self._stepping = False
        self._running = ""  # the round whose workers torch's agent has, or is about to start
        self._finished = False  # they all succeeded; torch's agent will start no others
        self._end: model.Exit | None = None
        self._news = asyncio.Event()
        self._closed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._session = SessionProcess(
            settings.endpoints,
            settings.identity,
            agents.standing(self._agent),
            began_at=time.monotonic(),
            on_place=lambda place: self._tell(model.PlaceHeard(place=place)),
            on_away=lambda text: self._tell(model.DaemonAway(text=text)),
            on_refused=lambda text: self._tell(model.DaemonRefused(text=text)),
            local_addr=settings.local_addr,
            retry_max_s=settings.conf.retry_max_s,
        )

    async def run(self) -> None:
        """Attend the daemon until the node is done with the job, then wait for `close`."""
        self._loop.set_exception_handler(self._failed_callback)
        try:
            async with self._tasks:
                attending = self._tasks.create_task(self._session.run())
                failing = self._tasks.create_task(self._fail())
                orders, self._orders = self._orders, []
                self._obey(orders)
                self._arm()
                await self._until(lambda: self._end is not None)
                assert self._end is not None
                await self._session.flush(self._end.flush_s)
                attending.cancel()
                await self._closed.wait()
                failing.cancel()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._stores.close()

    # -------------------------------------------------------------------------------------------- what is asked

    async def next_seat(self) -> tuple[model.Assignment, model.Cause | None]:
        """Say that no worker of any round lives here, and return the next seat, with the cause of the last break.
        Raises JobOver."""
        self._workers_are_gone()
        await self._until(lambda: self._end is not None or self._dealt() is not None)
        seat = self._dealt()
        if self._end is not None or seat is None:
            raise self._over()
        self._running, self.must_stop = seat.round_uid, False
        place = self._agent.place
        return seat, place.cause if place is not None else None

    @property
    def job_uid(self) -> str:
        """The identity of the job that this node was told of last; empty: none yet."""
        return self._agent.known.job_uid

    async def started(self) -> None:
        """Take in that the workers of the round run."""
        self._tell(model.WorkersStarted(round_uid=self._running))

    async def succeeded(self) -> None:
        """Take in that all workers have ended with success, and that this node will start no others."""
        self._finished = True
        held = self._agent.held
        if held is not None and held.round_uid == self._running:
            for local_rank in range(held.assignment.slots):
                now = self._loop.time()
                ended = model.WorkerEnded(
                    round_uid=held.round_uid, local_rank=local_rank, exit_code=0, signal=0, at=now
                )
                self._tell(ended)
        self._running = ""
        self._workers_are_gone()

    async def others_are_done(self) -> None:
        """Return once nothing of the job depends on this node, whose workers have succeeded."""
        await self._until(lambda: self._end is not None or not self._agent.done)

    async def leave(self, reason: str) -> None:
        """Return when the node has no part in the job any more. No worker lives here."""
        if not isinstance(self._agent.over, model.Ended):
            self._tell(model.LeaveAsked(signal=0, reason=reason))
        self._running = ""
        self._workers_are_gone()
        await self._until(lambda: self._end is not None)

    async def close(self) -> None:
        """End. Whoever still waits is cancelled."""
        self._closed.set()
        if self._end is None:
            self._end = model.Exit(code=1, text="closed")
            self._news.set()

    def _dealt(self) -> model.Assignment | None:
        """Return the seat whose workers are to be started now, if there is one."""
        held = self._agent.held
        if held is None or not held.spawned or held.gone or held.stop_at is not None:
            return None
        return held.assignment

    def _workers_are_gone(self) -> None:
        held = self._agent.held
        if held is None or held.gone:
            return
        if held.stop_at is not None:
            self._tell(model.WorkersGone(round_uid=held.round_uid))
        elif held.phase in (model.Phase.STARTING, model.Phase.RUNNING):
            self._step(lambda now: _stopped_by_itself(self._agent, held, now))

    def _over(self) -> JobOver:
        text = self._end.text if self._end is not None else "closed"
        return JobOver(text, self._agent.over, refused=bool(self._agent.refused))

    # -------------------------------------------------------------------------------------------- facts

    def _tell(self, fact: model.Fact) -> None:
        self._step(lambda now: agents.step(self._agent, fact, now))

    def _step(self, change: Callable[[float], rules.Step]) -> None:
        """Apply a change and obey what comes of it, which may be further changes: one after the other."""
        self._facts.append(change)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._facts:
                self._agent, orders = self._facts.popleft()(self._loop.time())
                self._obey(orders)
                self._go_when_finished()
        finally:
            self._stepping = False
        self._arm()
        self._news.set()

    def _go_when_finished(self) -> None:
        """The others need new workers, and this node has none to give: they must not wait for it."""
        agent = self._agent
        if self._finished and not agent.done and agent.idle and not agent.doomed:
            self._tell(model.LeaveAsked(signal=0, reason="its workers have all succeeded"))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at = agents.wakes_at(self._agent)
        self._timer = None if at is None else self._loop.call_at(at, self._tell, model.TimePassed())

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    def _failed_callback(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A change that cannot be made is a bug; going on without it would be a wrong node that looks right."""
        loop.default_exception_handler(context)
        if "handle" in context and not self._failed.done():
            self._failed.set_exception(context["exception"])

    async def _fail(self) -> None:
        await self._failed

    # -------------------------------------------------------------------------------------------- orders

    def _obey(self, orders: list[model.Order]) -> None:
        for order in orders:
            match order:
                case model.Tell():
                    self._session.tell(order.standing, at_once=order.at_once)
                case model.Say():
                    self._say(order)
                case model.Exit():
                    self._end = order
                case model.Stop():
                    self._stop(order)
                case model.OpenStore():
                    self._tasks.create_task(self._open_store(order.offer_id))
                case model.DropStore():
                    self._tasks.create_task(self._drop_store(order.offer_id))
                case model.ReachMaster():
                    self._tasks.create_task(self._reach(order))
                case model.Spawn() | model.Hurry() | model.CutShort():
                    pass  # `next_seat` returns by itself; torch's agent has a grace of its own
                case _:
                    assert_never(order)

    def _say(self, said: model.Say) -> None:
        match said.topic:
            case model.Topic.WAIT:
                self.waits_for = said.text
                log.debug("rendezvousd: %s", said.text)
            case model.Topic.NEWS:
                log.info("rendezvousd: %s", said.text)
            case model.Topic.CAUSE | model.Topic.WARN:
                log.warning("rendezvousd: %s", said.text)
            case _:
                assert_never(said.topic)

    def _stop(self, order: model.Stop) -> None:
        if self._running == order.round_uid:
            self.must_stop = True
        else:  # torch's agent has not heard of the round, or is done with its workers
            self._tell(model.WorkersGone(round_uid=order.round_uid))

    async def _open_store(self, offer_id: str) -> None:
        async with self._storing:
            try:
                port = await aside(lambda: self._stores.open(offer_id), within_s=OPEN_S)
            except TimeoutError:
                self._tell(model.StoreFailed(offer_id=offer_id, text=f"no store within {OPEN_S:g} s"))
            except (NoPort, RuntimeError) as error:  # torch's own errors are RuntimeErrors
                self._tell(model.StoreFailed(offer_id=offer_id, text=str(error)))
            else:
                self._tell(model.StoreOpened(offer_id=offer_id, port=port))

    async def _drop_store(self, offer_id: str) -> None:
        async with self._storing:
            self._stores.drop(offer_id)

    async def _reach(self, order: model.ReachMaster) -> None:
        problem = await reach(Endpoint(order.addr, order.port))
        if problem:
            self._tell(model.MasterUnreachable(round_uid=order.round_uid, text=problem))
        else:
            self._tell(model.MasterReached(round_uid=order.round_uid))


def _stopped_by_itself(agent: agents.Agent, held: model.Held, now: float) -> rules.Step:
    """torch's agent has stopped its workers and nobody asked it to: one of them failed, which it counts by itself.

    The daemon hears that they are stopped. That breaks the round for all, and uses no restart.
    """
    over = {model.Phase.STARTING: model.Phase.STOPPED, model.Phase.RUNNING: model.Phase.STOPPED}
    held = replace(held.moved(over), gone=True, stop_at=now)
    agent, orders = rules.settle(replace(agent, held=held, idle_at=now), now)
    return agent, [model.Tell(standing=agents.standing(agent), at_once=True), *orders]


def _config(settings: Settings) -> agents.Config:
    return agents.Config(
        node_uid=settings.identity.node_uid,
        endpoints=", ".join(map(str, settings.endpoints)),
        stop_grace_s=settings.stop_grace_s,
        join_timeout_s=settings.join_timeout_s,
    )
