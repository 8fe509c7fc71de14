"""A node: the real launcher, agent and session of `rdzvrun`, on processes and stores that are simulated."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from rdzv import model
from rdzv.console import Console
from rdzv.convert import seat_out
from rdzv.launcher import Launcher
from rdzv.options import Options, parse
from rdzv.processes import facts
from rdzv.processes import supervisor as processes
from rdzv.processes.stores import StoresUnavailable
from rdzv.worker_env import worker_environment
from tests.sim.world.machines import Process, World
from tests.sim.world.network import Network
from tests.sim.world.training import Training, Worker

T = TypeVar("T")

SPAWN_S = (0.02, 0.3)
KEEPER_S = (0.02, 0.1)  # how soon the workers of a killed launcher are gone
OPEN_STORE_S = (0.001, 0.02)
SCRIPT = str(Path(__file__))  # any Python file: nothing is run


class Outlet:
    """Where a console writes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def put(self, data: bytes, *, own: bool = False) -> None:
        self.lines += data.decode().splitlines()

    def close(self) -> None:
        pass


@lru_cache(maxsize=4096)
def options(*argv: str) -> Options:
    return parse([*argv, SCRIPT], {})


class Node:
    """A machine on which launchers are started, one after the other."""

    def __init__(
        self,
        world: World,
        net: Network,
        training: Training,
        judge: Any,
        name: str,
        argv: Callable[[], Sequence[str]],
        **clock: float,
    ) -> None:
        """`argv`: with which options the next launcher is started."""
        self.world, self.net, self.training, self.judge = world, net, training, judge
        self.name = name
        self.kind = "same"  # or by what it differs from the others
        self._argv = argv
        self.process: Process | None = None
        self.uid = ""
        self.incarnation = 0
        self.workers: list[Worker] = []
        self.stores: dict[int, str] = {}  # offer by port
        self.supervisor: Supervisor | None = None
        self.chance = world.random(f"node {name}")
        self.clock = clock
        self.exits: list[tuple[int, str]] = []
        self.cleared_at = 0.0  # when a killed launcher's workers are gone
        self._port = 20000

    @property
    def up(self) -> bool:
        return self.process is not None and not self.process.dead

    def boot(self) -> None:
        """Start a launcher. It takes longer to come up than what the one before left needs to end."""
        if self.up or self.world.over:
            return
        if self.world.now < self.cleared_at:
            self.world.after(KEEPER_S[1], self.boot)
            return
        self.net.power_on(self.name)
        self.options = options(*self._argv())
        self.incarnation += 1
        self.uid = f"{self.name}.{self.incarnation}"
        process = self.process = Process(self.world, self.uid, self.name, **self.clock)
        process.owner = self
        process.on_exit = lambda: self._gone(process)
        self.world.say(f"{self.uid} is started")
        process.start(self._run)

    async def _run(self) -> None:
        outlet = Outlet()
        console = Console(self.name, outlet)  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        code = await Launcher(self.options, {}, console, loop.time()).run()
        text = next((line for line in reversed(outlet.lines) if not line.startswith(f"[{self.name}]   ")), "")
        self.exits.append((code, text))
        self.judge.exited(self, code, text)

    def _gone(self, process: Process) -> None:
        self.net.died(process)
        self.stores.clear()
        self._end_workers()

    # ------------------------------------------------------------------------------------------ what befalls it

    def kill(self) -> None:
        """SIGKILL of the launcher: its keeper ends the workers."""
        if self.process is not None and self.up:
            self.world.say(f"{self.uid} is killed")
            self.judge.node_died(self)
            self.process.kill()
            self.net.died(self.process)
            self.stores.clear()
            clears_s = self.chance.uniform(*KEEPER_S)
            self.cleared_at = self.world.now + clears_s
            self.world.after(clears_s, self._end_workers)

    def lose_power(self) -> None:
        if self.process is not None and self.up:
            self.world.say(f"{self.uid} loses its power")
            self.judge.node_died(self)
            self.process.kill()
            self.net.power_off(self.name)
            self.stores.clear()
            self._end_workers()

    def _end_workers(self) -> None:
        for worker in self.workers:
            self.training.end(worker, number=int(signal.SIGKILL), hint=True)

    def signal(self, number: int) -> None:
        if self.process is not None and self.up and number in self.process.loop.signals:
            self.world.say(f"{self.uid} gets signal {number}")
            self.process.post(self.process.loop.signals[number])

    def lose_stores(self) -> None:
        """Its store holder dies."""
        if self.process is not None and self.up and self.supervisor is not None:
            self.world.say(f"the stores of {self.uid} are lost")
            self.stores.clear()
            self.supervisor.helper = False
            fact = facts.HelperEnded(name=Stores.NAME, exit_code=1, signal=0)
            self.process.post(self.supervisor.on_fact, fact)

    # -------------------------------------------------------------------------------------------------- its truth

    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.alive]

    def open_store(self, offer_id: str) -> int:
        self._port += 1
        self.stores[self._port] = offer_id
        return self._port


def _node() -> Node:
    owner = _world().current.owner
    assert isinstance(owner, Node)
    return owner


class Supervisor:
    """As processes.Supervisor: what the launcher asks of its processes."""

    def __init__(self, node: Node, on_fact: Callable[[facts.ProcessFact], None]) -> None:
        self._node, self.on_fact = node, on_fact
        self.helper = False
        self._withdrawn = False
        self._closed = False
        self._hurried = asyncio.Event()
        node.supervisor = self
        self._until: float | None = None  # the end of the lease under which workers live

    @classmethod
    async def start(cls, on_fact: Callable[[facts.ProcessFact], None], **_: Any) -> Supervisor:
        return cls(_node(), on_fact)

    async def spawn(self, round_uid: str, commands: Sequence[facts.WorkerCommand]) -> None:
        self._withdrawn = False
        node = self._node
        await asyncio.sleep(node.chance.uniform(*SPAWN_S))
        if self._withdrawn:
            raise facts.SpawnFailed(0, "withdrawn")
        workers = []
        for command in commands:
            env = command.env
            workers.append(
                Worker(
                    node=node,
                    round_uid=env["RENDEZVOUSD_ROUND_UID"],
                    local_rank=command.local_rank,
                    rank=int(env["RANK"]),
                    world_size=int(env["WORLD_SIZE"]),
                    master=(env["MASTER_ADDR"], int(env["MASTER_PORT"])),
                    restart_count=int(env["TORCHELASTIC_RESTART_COUNT"]),
                    on_end=self._ended,
                    env=env,
                )
            )
        node.workers = [w for w in node.workers if w.alive] + workers
        for worker in workers:
            node.training.start(worker)

    def _ended(self, worker: Worker) -> None:
        process = self._node.process
        if process is not None and not process.dead:
            process.post(self._tell_ended, worker)

    def _tell_ended(self, worker: Worker) -> None:
        if self._closed:
            return
        now = asyncio.get_running_loop().time()
        fact = facts.WorkerEnded(
            round_uid=worker.round_uid,
            local_rank=worker.local_rank,
            exit_code=worker.exit_code,
            signal=worker.signal,
            at=now,
        )
        self.on_fact(fact)

    async def stop(self, *, signal: int, grace_s: float, next_round: bool) -> int:
        node = self._node
        for worker in node.living():
            node.training.stop(worker, signal, grace_s)
        while node.living():
            if self._hurried.is_set():
                node._end_workers()
            await asyncio.sleep(0.05)
        await asyncio.sleep(0)  # how they ended is told first
        return 0

    def hurry(self) -> None:
        self._hurried.set()

    def withdraw(self) -> None:
        self._withdrawn = True

    def signal(self, number: int) -> None:
        pass

    def fence(self, until: float | None) -> None:
        """As the keeper: it ends everything at that instant, whatever has become of the launcher."""
        if until == self._until:
            return
        self._until = until
        process = self._node.process
        if until is not None and process is not None:
            self._node.world.at(process.when(until), self._lease_ended, until)

    def _lease_ended(self, until: float) -> None:
        node = self._node
        if until != self._until or node.supervisor is not self or not node.up or node.process is None:
            return
        node.world.say(f"the lease of {node.uid} has ended")
        node._end_workers()
        node.stores.clear()
        self.helper = False
        node.process.post(self.on_fact, facts.SpawnerEnded(text="its lease ended"))
        node.process.post(self.on_fact, facts.HelperEnded(name=Stores.NAME, exit_code=0, signal=int(signal.SIGKILL)))

    def alive(self) -> int:
        return len(self._node.living())

    async def stop_helper(self, name: str) -> None:
        self.helper = False

    async def close(self) -> None:
        self._closed = True
        if not self._node.world.over:
            self._node._end_workers()


class Stores:
    """As stores.StoreHolder."""

    NAME = "store-holder"

    def __init__(self, *, fork: bool = False) -> None:
        self._node = _node()
        self.problem = ""

    async def start(self, supervisor: Supervisor) -> None:
        supervisor.helper = True

    async def open(self, offer_id: str, ports: object) -> int:
        await asyncio.sleep(self._node.chance.uniform(*OPEN_STORE_S))
        if self._node.supervisor is None or not self._node.supervisor.helper:
            raise StoresUnavailable("it died")
        return self._node.open_store(offer_id)

    async def drop(self, offer_id: str) -> None:
        for port in [port for port, known in self._node.stores.items() if known == offer_id]:
            del self._node.stores[port]

    async def close(self) -> None:
        if not self._node.world.over:
            self._node.stores.clear()


class Workers:
    """As workers.Workers: commands with the environment that real workers get."""

    log_dir = ""

    def __init__(self, options: Options, *_: Any) -> None:
        self._options = options
        self._node = _node()

    async def commands(
        self, seat: model.Assignment, *, endpoint: str, job_uid: str, **_: object
    ) -> list[facts.WorkerCommand]:
        environments = [
            worker_environment(
                {},
                seat_out(seat),
                local_rank,
                run_id=self._options.run_id,
                role=self._options.role,
                error_file="",
                endpoint=endpoint,
                job_uid=job_uid,
                signals_to_handle=(),
            )
            for local_rank in range(seat.slots)
        ]
        return [facts.WorkerCommand(local_rank=i, argv=(), env=env) for i, env in enumerate(environments)]

    def started(self) -> None:
        pass

    async def ended(self, fact: facts.WorkerEnded) -> model.WorkerEnded:
        found = [w for w in self._node.workers if (w.round_uid, w.local_rank) == (fact.round_uid, fact.local_rank)]
        hint = bool(found) and found[0].hint
        return model.WorkerEnded(
            round_uid=fact.round_uid,
            local_rank=fact.local_rank,
            exit_code=fact.exit_code,
            signal=fact.signal,
            at=fact.at,
            victim=hint,
        )

    async def gone(self) -> None:
        pass

    async def close(self) -> None:
        pass


class Scratch:
    path = "/nowhere"

    def remove(self) -> None:
        pass


class _NoAnswer(Exception):
    pass


async def aside(call: Callable[[], T], *, within_s: float) -> T:
    """As aside.aside, without a thread."""
    try:
        return call()
    except _NoAnswer:
        await asyncio.sleep(within_s)
        raise TimeoutError from None


def connect(where: Any) -> None:
    """As reach._connect: whether somebody listens there."""
    node = _node()
    judge = node.judge
    target = judge.cluster.machine(where.host)
    net = node.net
    if (
        target is None
        or where.host in net.off
        or net.is_cut(node.name, where.host)
        or net.is_cut(where.host, node.name)
    ):
        raise _NoAnswer
    if where.port not in target.stores:
        raise ConnectionRefusedError(111, "Connection refused")


_worlds: list[World] = []  # the one that is being run


def _world() -> Any:
    return _worlds[-1]


def patches() -> list[tuple[Any, str, Any]]:
    """Return what stands where the launcher would touch the machine: (where, name, what)."""
    from rdzv import brains, channels, launcher, reach, session, workers

    return [
        (processes, "Supervisor", Supervisor),
        (launcher, "StoreHolder", Stores),
        (launcher, "Scratch", Scratch),
        (launcher, "remove_stale", lambda: 0),
        (launcher, "aside", aside),
        (launcher, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=_node().uid))),
        (workers, "Workers", Workers),
        (reach, "aside", aside),
        (session, "aside", aside),
        (brains, "aside", aside),
        (brains, "addresses", lambda endpoint: (endpoint,)),
        (channels, "addresses", lambda endpoint: (endpoint,)),
        (reach, "_connect", connect),
        (launcher, "boottime", lambda: _world().current.clock()),
        (session, "boottime", lambda: _world().current.clock()),
        (session, "time", SimpleNamespace(monotonic=lambda: _world().current.clock())),
        (session, "random", SimpleNamespace(uniform=lambda a, b: _world().current.chance.uniform(a, b))),
    ]
