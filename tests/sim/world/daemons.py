"""A daemon: the real terms of service, election, engine and streams, on a network and an etcd that are simulated."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from rendezvousd import attendance  # noqa: F401  # named, so that a mutation finds it
from rendezvousd.backends.memory import MemoryBackend
from rendezvousd.config import Config
from rendezvousd.core.errors import Refusal
from rendezvousd.core.model import Job
from rendezvousd.core.settings import Timing
from rendezvousd.desk import Desk
from rendezvousd.options import EtcdOptions
from rendezvousd.rpc.about import About
from rendezvousd.rpc.admin import Admin
from rendezvousd.rpc.rendezvous import RendezvousStreams
from rendezvousd.rpc.store import StoreService
from rendezvousd.terms import Office, serve_terms
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.sim.world import calls
from tests.sim.world.etcd import SMALL_BYTES_MAX
from tests.sim.world.machines import Process, World
from tests.sim.world.network import JOIN, Handler, Network, Server
from tests.sim.world.plan import Wide

PORT = 29400
GET_DAEMON = "/rendezvousd.v1.Rendezvous/GetDaemon"
AGE = 1024  # how often a node did not reach its peers that has tried for days


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
        self,
        world: World,
        net: Network,
        judge: Any,
        name: str,
        etcd: tuple[str, ...],
        settle_s: float | None = None,
        **clock: float,
    ) -> None:
        self.world, self.net, self.judge = world, net, judge
        self.name = name
        self.process: Process | None = None
        self.incarnation = 0
        self.address = f"{name}:{PORT}"
        self.clock = clock
        self.config = Config(
            backend="etcd" if etcd else "memory",
            etcd=EtcdOptions(endpoints=tuple(f"{e}:2379" for e in etcd)),
            timing=Timing() if settle_s is None else Timing(settle_s=settle_s),
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
        desk = self.desk = Desk()
        streams, store = RendezvousStreams(desk), StoreService(desk)
        office = Office(desk, streams, store, _Health())  # type: ignore[arg-type]
        self.admin = Admin(desk)
        about = About(desk, self.config.backend)

        async def get_daemon(_: object, context: Any) -> None:
            await context.read()
            view = await about.get_daemon(pb.GetDaemonRequest(), context)
            with contextlib.suppress(asyncio.InvalidStateError):  # as where gRPC itself answers a call that has ended
                await context.write(view.SerializeToString())

        handlers: dict[str, Handler] = {JOIN: streams.join, GET_DAEMON: get_daemon, **calls.handlers(store)}
        self.net.listeners[self.address] = Server(self.net, process, handlers)
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

    def operate(self, what: str, run_id: str, node: str = "") -> None:
        """Let an operator ask for something."""
        if self.process is not None and self.up and not self.process.paused and hasattr(self, "admin"):
            self.process.post(lambda: asyncio.ensure_future(self._operate(what, run_id, node)))

    async def _operate(self, what: str, run_id: str, node: str) -> None:
        context: Any = _Operator()
        try:
            match what:
                case "restart":
                    await self.admin.restart(pb.RestartRequest(run_id=run_id), context)
                case "remove":
                    await self.admin.leave(pb.LeaveRequest(run_id=run_id, node_name=node), context)
                case _:
                    await self.admin.close(pb.CloseRequest(run_id=run_id), context)
        except Refusal:
            return
        self.world.say(f"operator: {what} {node} at {self.name}")
        self.judge.operated(what, run_id, node)

    def age(self, run_id: str, node: str) -> None:
        """Let a node be one that has not reached its peers for days."""
        if self.process is None or not self.up or not self.desk.attends:
            return
        room = self.desk.engine.rooms.get(run_id)
        if room is None:
            return
        for uid, found in room.job.nodes.items():
            if found.name == node and found.unreachables < AGE:
                room.job = replace(room.job, nodes=room.job.nodes.set(uid, replace(found, unreachables=AGE)))


class _Memory(MemoryBackend):
    """Says what it keeps."""

    async def write(self, job: Job, *, expected: int) -> int:
        stored = await super().write(job, expected=expected)
        daemon = _world().current.owner
        daemon.judge.stored(daemon.process, job)
        return stored


def _small_requests(operations_max: int) -> list[tuple[Any, str, Any]]:
    """Return what the backend must know of an etcd that takes no larger transactions."""
    from rendezvousd.backends import etcd, etcd_store

    half = SMALL_BYTES_MAX // 2
    return [
        (etcd, "OPERATIONS_MAX", operations_max),
        (etcd, "BYTES_MAX", half),
        (etcd, "PAGE", 2),
        (etcd_store, "PAGE_MIN", 2),
        (etcd_store, "PAGE_MAX", 2),
        (etcd_store.EtcdStores, "records_max", operations_max),
        (etcd_store.EtcdStores, "bytes_max", half),
    ]


def _world() -> Any:
    from tests.sim.world.nodes import _worlds

    return _worlds[-1]


def patches(wide: Wide) -> list[tuple[Any, str, Any]]:
    """Return what stands where the daemon would touch the machine, and for constants: (where, name, what)."""
    from rendezvousd import delivery, election, engine, terms
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
        *([(delivery, "SMALL_MAX", wide.small_max)] if wide.small_max else []),
        *(_small_requests(wide.operations_max) if wide.operations_max else []),
    ]
