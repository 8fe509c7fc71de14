"""A daemon: the real terms of service, election, engine and streams, on a network and an etcd that are simulated."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

from rendezvousd import attendance  # noqa: F401  # named, so that a mutation finds it
from rendezvousd.backends.memory import MemoryBackend
from rendezvousd.config import Config
from rendezvousd.core.errors import Refusal
from rendezvousd.core.model import Job
from rendezvousd.desk import Desk
from rendezvousd.options import EtcdOptions
from rendezvousd.rpc.about import About
from rendezvousd.rpc.admin import Admin
from rendezvousd.rpc.rendezvous import RendezvousStreams
from rendezvousd.rpc.store import StoreService
from rendezvousd.terms import Office, serve_terms
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.sim.world.machines import Process, World
from tests.sim.world.network import Network, Server

PORT = 29400
JOIN = "/rendezvousd.v1.Rendezvous/Join"
GET_DAEMON = "/rendezvousd.v1.Rendezvous/GetDaemon"
RUN_ID = "job"


class _Health:
    async def set(self, *, serving: bool) -> None:
        pass


class _Operator:
    """Whoever calls an operator's method, and takes a refusal for an answer."""

    def peer(self) -> str:
        return "operator"

    async def abort(self, code: object, text: str, *_: object) -> None:
        raise Refusal(text)


class Daemon:
    """A machine on which a daemon is started, again and again."""

    def __init__(
        self, world: World, net: Network, judge: Any, name: str, etcd: tuple[str, ...], **clock: float
    ) -> None:
        self.world, self.net, self.judge = world, net, judge
        self.name = name
        self.process: Process | None = None
        self.incarnation = 0
        self.address = f"{name}:{PORT}"
        self.clock = clock
        self.config = Config(
            backend="etcd" if etcd else "memory", etcd=EtcdOptions(endpoints=tuple(f"{e}:2379" for e in etcd))
        )

    @property
    def up(self) -> bool:
        return self.process is not None and not self.process.dead

    def boot(self) -> None:
        if self.up or self.world.over:
            return
        self.net.power_on(self.name)
        self.incarnation += 1
        process = self.process = Process(self.world, f"{self.name}.{self.incarnation}", self.name, **self.clock)
        process.owner = self
        process.on_exit = lambda: self._gone(process)
        self.world.say(f"{process.name} is started")
        process.start(self._run)

    async def _run(self) -> None:
        process = self.process
        assert process is not None
        desk = Desk()
        streams = RendezvousStreams(desk)
        office = Office(desk, streams, StoreService(desk), _Health())  # type: ignore[arg-type]
        self.admin = Admin(desk)
        about = About(desk, self.config.backend)

        async def get_daemon(_: object, context: Any) -> None:
            await context.read()
            view = await about.get_daemon(pb.GetDaemonRequest(), context)
            with contextlib.suppress(asyncio.InvalidStateError):  # as where gRPC itself answers a call that has ended
                await context.write(view.SerializeToString())

        self.net.listeners[self.address] = Server(self.net, process, {JOIN: streams.join, GET_DAEMON: get_daemon})
        await serve_terms(self.config, office, self.address)

    def _gone(self, process: Process) -> None:
        self.net.listeners.pop(self.address, None)
        self.net.died(process)

    def kill(self) -> None:
        if self.process is not None and self.up:
            self.world.say(f"{self.process.name} is killed")
            self.process.kill()
            self._gone(self.process)

    def lose_power(self) -> None:
        if self.process is not None and self.up:
            self.world.say(f"{self.process.name} loses its power")
            self.process.kill()
            self.net.listeners.pop(self.address, None)
            self.net.power_off(self.name)

    def terminate(self) -> None:
        """As by SIGTERM."""
        if self.process is not None and self.up and self.process.main is not None:
            self.world.say(f"{self.process.name} is asked to end")
            self.process.post(self.process.main.cancel)

    def operate(self, what: str, node: str = "") -> None:
        """Let an operator ask for something."""
        if self.process is not None and self.up and not self.process.paused and hasattr(self, "admin"):
            self.process.post(lambda: asyncio.ensure_future(self._operate(what, node)))

    async def _operate(self, what: str, node: str) -> None:
        context: Any = _Operator()
        try:
            match what:
                case "restart":
                    await self.admin.restart(pb.RestartRequest(run_id=RUN_ID), context)
                case "remove":
                    await self.admin.leave(pb.LeaveRequest(run_id=RUN_ID, node_name=node), context)
                case _:
                    await self.admin.close(pb.CloseRequest(run_id=RUN_ID), context)
        except Refusal:
            return
        self.world.say(f"operator: {what} {node} at {self.name}")
        self.judge.operated(what, node)


class _Memory(MemoryBackend):
    """Says what it keeps."""

    async def write(self, job: Job, *, expected: int) -> int:
        stored = await super().write(job, expected=expected)
        daemon = _world().current.owner
        sealed = job.round is not None and job.round.uid == job.known.round_uid
        roster = [str(seat.uid) for seat in job.round.seats] if sealed and job.round is not None else []
        daemon.judge.stored(daemon.process, job.known.round_uid, roster)
        return stored


def _world() -> Any:
    from tests.sim.world.nodes import _worlds

    return _worlds[-1]


def patches() -> list[tuple[Any, str, Any]]:
    """Return what stands where the daemon would touch the machine: (where, name, what)."""
    from rendezvousd import election, engine, terms
    from rendezvousd.backends import etcd, etcd_client

    def token_hex(size: int) -> str:
        return f"{_world().current.chance.getrandbits(8 * size):0{2 * size}x}"

    secrets = SimpleNamespace(token_hex=token_hex)
    return [
        (terms, "MemoryBackend", _Memory),
        (engine, "secrets", secrets),
        (etcd, "secrets", secrets),
        (etcd_client, "random", SimpleNamespace(uniform=lambda a, b: _world().current.chance.uniform(a, b))),
        (election, "boottime", lambda: _world().current.clock()),
    ]
