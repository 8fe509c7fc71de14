"""One node: the agent's orders carried out, and what comes of them told to it. It decides nothing itself.

    signals, clock, supervisor, stores, session ──facts──→ agent ──orders──→ supervisor, stores, session, console

Every order is either done at once or becomes a task, so that a fact is never told while another is being obeyed. Orders
to processes are carried out one after the other, and so are those to stores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, assert_never

from rdzv import agent as agents
from rdzv import model, wording
from rdzv.aside import aside
from rdzv.boottime import boottime
from rdzv.chaos import strike
from rdzv.console import Console
from rdzv.endpoints import Endpoint
from rdzv.options import Options
from rdzv.processes import facts
from rdzv.processes import supervisor as processes
from rdzv.processes.spawner_process import SpawnError
from rdzv.processes.stores import NoPort, StoreHolder, StoresUnavailable
from rdzv.reach import reach
from rdzv.scratch import Scratch, remove_stale
from rdzv.standalone import NotServing, OwnDaemon
from rdzv.worker_env import zygote_plan

if TYPE_CHECKING:
    from rdzv.session import Session
    from rdzv.workers import Workers

JOIN_TIMEOUT_S = 600.0
TIDY_S = 2.0  # for a temporary directory to be made or removed; its file system may hang
DAEMON_AGAIN_S = 1.0  # between two attempts to bring the launcher's own daemon back
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # if named: schedulers warn the script with them, and mean nobody's end


class _Finished(Exception):
    """Ends the scope of a node, and every task in it."""


class Launcher:
    """One node's part in one job. `run` is its whole life."""

    def __init__(self, options: Options, environ: Mapping[str, str], console: Console, began_at: float) -> None:
        self._options = options
        self._environ = dict(environ)  # what workers get; nothing that this process does to its own shows there
        self._console = console
        self._began_at = began_at
        self._loop = asyncio.get_running_loop()
        self._node_uid = uuid.uuid4().hex
        self._exit: asyncio.Future[model.Exit] = self._loop.create_future()
        self._tasks = asyncio.TaskGroup()
        self._stores = StoreHolder(fork=options.start_method == "zygote")
        self._storing, self._processing = asyncio.Lock(), asyncio.Lock()
        self._own_daemon = OwnDaemon(leases=options.on_daemon_loss == "stop") if options.standalone else None
        self._endpoints: tuple[Endpoint, ...] = options.endpoints
        self._session: Session | None = None
        self._early: list[model.LeaveAsked] | None = []  # signals that came before there was anything to stop
        self._reading: set[asyncio.Task[None]] = set()  # error files; as many as workers ended
        self._hurried = False
        self._timer: asyncio.TimerHandle | None = None
        self._scratch: Scratch | None = None
        self._log_dir_said = ""
        self._workers: Workers | None = None

    async def run(self) -> int:
        """Return the exit code."""
        self._handle_signals()
        self._loop.set_exception_handler(self._failed_callback)
        # The spawner comes first, before anything has threads that a child process could inherit a lock from, and with
        # it the zygote: its imports take longer than all else.
        self._supervisor = await processes.Supervisor.start(
            self._process_fact,
            zygote=zygote_plan(self._options, self._environ),
            isolate=self._options.isolate == "pid",
            fenced=self._options.on_daemon_loss == "stop",
        )
        try:
            async with self._tasks:
                await self._attend()
                raise _Finished  # noqa: TRY301  # it is how a task group's tasks are all cancelled
        except* _Finished:
            end = self._exit.result()
        except* (NotServing, SpawnError) as group:
            raise group.exceptions[0] from None
        finally:
            if self._timer is not None:
                self._timer.cancel()
            await self._stores.close()
            await self._supervisor.close()
            if self._workers is not None:
                await self._workers.close()
            await self._tidy()
        self._console.finish(end)
        return end.code

    async def _attend(self) -> None:
        await self._start()
        end = await self._exit
        assert self._session is not None
        await self._session.flush(end.flush_s)

    async def _start(self) -> None:
        """Everything that takes time is begun before the one thing that holds up the loop: importing grpc."""
        options = self._options
        self._scratch = await aside(Scratch, within_s=TIDY_S)
        await self._stores.start(self._supervisor)
        own = None
        if self._own_daemon is not None:
            own = self._tasks.create_task(self._own_daemon.start(self._supervisor))
            await asyncio.sleep(0)
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # or it tells users of every connection that a peer closes
        from rdzv.convert import identity
        from rdzv.session import Session
        from rdzv.workers import Workers

        self._workers = Workers(
            options, self._environ, self._console.outlet, lambda text: self._say(model.Topic.WARN, text)
        )
        if own is not None:
            self._endpoints = (await own,)
        config = agents.Config(
            node_uid=self._node_uid,
            endpoints=", ".join(map(str, self._endpoints)),
            stop_grace_s=options.shutdown_timeout_s,
            join_timeout_s=options.rdzv_conf.join_s or JOIN_TIMEOUT_S,
            fenced=options.on_daemon_loss == "stop",
            daemon_loss_timeout_s=options.rdzv_conf.daemon_loss_timeout_s,
        )
        self._agent, orders = agents.begin(config, self._loop.time())
        self._session = Session(
            self._endpoints,
            identity(options, self._node_uid),
            agents.standing(self._agent),
            began_at=self._began_at,
            on_place=lambda place: self._tell(model.PlaceHeard(place=place)),
            on_away=lambda text: self._tell(model.DaemonAway(text=text)),
            on_refused=lambda text: self._tell(model.DaemonRefused(text=text)),
            local_addr=options.local_addr,
            retry_max_s=options.rdzv_conf.retry_max_s,
        )
        for order in orders:
            self._obey(order)
        self._tasks.create_task(self._session.run())
        self._tasks.create_task(self._clear_up())
        if options.chaos is not None:
            blows = strike(options.chaos, self._supervisor, lambda text: self._say(model.Topic.WARN, text))
            self._tasks.create_task(blows)
        early, self._early = self._early or [], None
        for fact in early:
            self._tell(fact)
        self._arm()

    def _failed_callback(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A fact that cannot be handled is a bug; going on without it would be a wrong node that looks right."""
        loop.default_exception_handler(context)
        if "handle" in context and not self._exit.done():
            self._exit.set_exception(context["exception"])

    async def _clear_up(self) -> None:
        """Remove what launchers that were killed left behind; there is no hurry."""
        with contextlib.suppress(TimeoutError):
            await aside(remove_stale, within_s=TIDY_S)

    async def _tidy(self) -> None:
        if self._scratch is not None:
            try:
                await aside(self._scratch.remove, within_s=TIDY_S)
            except TimeoutError:
                self._say(model.Topic.WARN, f"cannot remove {self._scratch.path}")

    # -------------------------------------------------------------------------------------------- facts

    def _tell(self, fact: model.Fact) -> None:
        """The end of a lease comes before all that was seen later, also by a launcher that was stopped itself."""
        ends_at = agents.lease_ends_at(self._agent)
        if ends_at is not None and (now := boottime()) >= ends_at:
            self._lease_ends(now)
        self._step(fact)

    def _lease_ends(self, now: float) -> None:
        """`now` is by CLOCK_BOOTTIME."""
        fence = self._agent.fence
        assert fence is not None
        late_s = now - fence.term_at(self._options.shutdown_timeout_s)
        self._step(model.LeaseEnds(round_uid=fence.round_uid, late_s=late_s, left_s=max(0.0, fence.kill_at() - now)))

    def _step(self, fact: model.Fact) -> None:
        self._agent, orders = agents.step(self._agent, fact, self._loop.time())
        for order in orders:
            self._obey(order)
        self._arm()

    def _arm(self) -> None:
        """Wake when the agent, or the console, wants to."""
        if self._timer is not None:
            self._timer.cancel()
        instants = [at for at in (agents.wakes_at(self._agent), self._console.wakes_at()) if at is not None]
        if (ends_at := agents.lease_ends_at(self._agent)) is not None:
            instants.append(self._loop.time() + ends_at - boottime())
        if self._agent.config.fenced:
            self._supervisor.fence(self._agent.fence.until if self._agent.fence is not None else None)
        self._timer = self._loop.call_at(min(instants), self._time_passed) if instants else None

    def _time_passed(self) -> None:
        self._console.tick(self._loop.time())
        self._tell(model.TimePassed())

    def _handle_signals(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored or blocked, the end of a child would not be noticed
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._ignored = frozenset(n for n in SIGNALS if signal.getsignal(n) is signal.SIG_IGN)
        named = {signal.Signals[name] for name in self._options.signals_to_handle}
        for number in {*SIGNALS, *named}:
            if number in PASSED_ON:
                self._loop.add_signal_handler(number, self._pass_on, number)
            elif number != signal.SIGHUP or number not in self._ignored:  # nohup means what it says
                self._loop.add_signal_handler(number, self._signalled, number)

    def _pass_on(self, number: signal.Signals) -> None:
        self._supervisor.signal(number)
        self._say(model.Topic.NEWS, f"got {number.name}: passed on to {self._supervisor.alive()} workers")

    def _signalled(self, number: signal.Signals) -> None:
        fact = model.LeaveAsked(signal=int(number), reason=f"got {number.name}")
        if self._early is not None:
            self._early.append(fact)
        else:
            self._tell(fact)

    def _process_fact(self, fact: facts.ProcessFact) -> None:
        if self._exit.done():
            return  # the scope is being left
        match fact:
            case facts.WorkerEnded():
                reading = self._tasks.create_task(self._worker_ended(fact))
                self._reading.add(reading)
                reading.add_done_callback(self._reading.discard)
            case facts.HelperEnded():
                if self._early is None:  # or nothing is open yet; the first to be opened will find no holder
                    self._helper_ended(fact.name)
            case facts.ZygoteEnded():
                if not fact.missing:
                    self._say(model.Topic.WARN, f"the zygote ended ({fact.text}); workers are started by exec")
            case facts.HeirEnded():
                self._say(model.Topic.WARN, f"not imported in advance: {fact.text}")
            case facts.LeftBehind():
                self._say(model.Topic.NEWS, wording.left_behind(fact.names, fact.kill_s))
            case facts.SpawnerEnded():
                fenced = self._agent.fence is not None and boottime() >= self._agent.fence.until
                text = f"{fact.text}; all processes of this node ended with it"
                self._say(model.Topic.WARN, wording.lease_ended() if fenced else text)
            case _:
                assert_never(fact)

    def _helper_ended(self, name: str) -> None:
        if name == StoreHolder.NAME:
            self._tell(model.StoreLost(offer_id="", text=self._stores.problem or "its process died"))
        elif name == OwnDaemon.NAME:
            self._tasks.create_task(self._daemon_again())

    async def _worker_ended(self, fact: facts.WorkerEnded) -> None:
        assert self._workers is not None
        self._tell(await self._workers.ended(fact))

    # -------------------------------------------------------------------------------------------- orders

    def _obey(self, order: model.Order) -> None:
        match order:
            case model.Tell():
                if self._session is not None:
                    self._session.tell(order.standing, at_once=order.at_once)
            case model.Say():
                self._console.say(order, self._loop.time())
            case model.Hurry():
                self._hurried = True
                self._supervisor.hurry()
            case model.CutShort():
                self._supervisor.hurry()
            case model.Exit():
                self._exit.set_result(order)
            case model.OpenStore() | model.DropStore() | model.ReachMaster() | model.Spawn() | model.Stop():
                self._tasks.create_task(self._work(order))
            case _:
                assert_never(order)

    def _work(
        self, order: model.OpenStore | model.DropStore | model.ReachMaster | model.Spawn | model.Stop
    ) -> Coroutine[None, None, None]:
        match order:
            case model.OpenStore():
                return self._open_store(order.offer_id)
            case model.DropStore():
                return self._drop_store(order.offer_id)
            case model.ReachMaster():
                return self._reach(order)
            case model.Spawn():
                return self._spawn(order.assignment)
            case model.Stop():
                return self._stop(order)
            case _:
                assert_never(order)

    def _say(self, topic: model.Topic, text: str) -> None:
        self._console.say(model.Say(topic, text), self._loop.time())

    async def _open_store(self, offer_id: str) -> None:
        async with self._storing:
            try:
                port = await self._opened(offer_id)
            except (NoPort, SpawnError, StoresUnavailable) as error:
                self._tell(model.StoreFailed(offer_id=offer_id, text=str(error)))
            else:
                self._tell(model.StoreOpened(offer_id=offer_id, port=port))

    async def _opened(self, offer_id: str) -> int:
        ports = self._options.rdzv_conf.master_port_range
        try:
            return await self._stores.open(offer_id, ports)
        except StoresUnavailable:
            await self._supervisor.stop_helper(StoreHolder.NAME)  # it closed its wire, and may not have ended yet
            await self._stores.start(self._supervisor)
            return await self._stores.open(offer_id, ports)

    async def _drop_store(self, offer_id: str) -> None:
        async with self._storing:
            await self._stores.drop(offer_id)

    async def _reach(self, order: model.ReachMaster) -> None:
        if problem := await reach(Endpoint(order.addr, order.port)):
            self._tell(model.MasterUnreachable(round_uid=order.round_uid, text=problem))
        else:
            self._tell(model.MasterReached(round_uid=order.round_uid))

    async def _spawn(self, seat: model.Assignment) -> None:
        assert self._workers is not None
        assert self._scratch is not None
        async with self._processing:
            try:
                commands = await self._workers.commands(
                    seat,
                    endpoint=",".join(map(str, self._endpoints)),
                    job_uid=self._agent.known.job_uid,
                    scratch=self._scratch.path,
                    address=self._session.address if self._session is not None else "",
                )
                self._say_log_dir(self._workers.log_dir)
                if not self._may_spawn():
                    return  # it is being told
                await self._supervisor.spawn(seat.round_uid, commands)
            except facts.SpawnFailed as failed:
                fact = model.SpawnFailed(round_uid=seat.round_uid, local_rank=failed.local_rank, text=failed.text)
                self._tell(fact)
            except (OSError, ValueError) as error:
                text = f"cannot prepare the workers: {str(error) or type(error).__name__}"
                self._tell(model.SpawnFailed(round_uid=seat.round_uid, local_rank=0, text=text))
            else:
                self._tell(model.WorkersStarted(round_uid=seat.round_uid))
            finally:
                self._workers.started()

    def _may_spawn(self) -> bool:
        """Nothing is spawned in the last moments of a lease, or after it."""
        ends_at = agents.lease_ends_at(self._agent)
        return ends_at is None or boottime() < ends_at

    def _say_log_dir(self, path: str) -> None:
        if path and path != self._log_dir_said:
            self._log_dir_said = path
            self._say(model.Topic.NEWS, f"log files: {path}")

    async def _stop(self, order: model.Stop) -> None:
        assert self._workers is not None
        self._supervisor.withdraw()
        async with self._processing:
            grace_s = 0.0 if self._hurried else order.grace_s
            # Workers inherit what this process was started with ignored, as a script's background jobs are with SIGINT.
            number = signal.SIGTERM if order.signal in self._ignored else order.signal
            await self._supervisor.stop(signal=number, grace_s=grace_s, next_round=order.next_round)
            if self._reading:
                await asyncio.wait(self._reading)  # how they ended is told before that they are gone
            await self._workers.gone()
            self._tell(model.WorkersGone(round_uid=order.round_uid))

    async def _daemon_again(self) -> None:
        """Bring the launcher's own daemon back; the agent hears of it as of any daemon that was away."""
        assert self._own_daemon is not None
        while True:
            try:
                await self._own_daemon.start(self._supervisor)
            except (NotServing, SpawnError):
                await asyncio.sleep(DAEMON_AGAIN_S)
            else:
                return
