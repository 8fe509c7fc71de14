"""The node's bootstrap stores: sockets bound by the launcher, served by the store holder, used by torch elsewhere."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from rdzv.processes import stores, tree
from rdzv.processes.facts import HelperEnded
from rdzv.processes.spawner_process import SpawnError
from rdzv.processes.stores import NoPort, StoreHolder, StoresUnavailable
from tests.e2e.kit import Stage
from tests.e2e.processes_kit import LIMIT_S, Node, cmdline, fds, marked, node, script, until
from tests.ports import own_ports

CLIENT = Path(__file__).with_name("store_client.py")
# What a store may leave behind in the holder's memory; less would be the allocator's noise.
STORE_KIB = 16


@asynccontextmanager
async def holder_node() -> AsyncIterator[tuple[Node, StoreHolder]]:
    async with node() as n:
        holder = StoreHolder()
        await holder.start(n.supervisor)
        try:
            yield n, holder
        finally:
            await holder.close()


class Client:
    """A process with torch that uses stores as a worker would."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def count(self, port: int) -> int:
        """Connects to the store, adds 1 to a key, and returns the sum: 1 in a fresh store."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"%d\n" % port)
        return int(await asyncio.wait_for(self._process.stdout.readline(), LIMIT_S))


@asynccontextmanager
async def client() -> AsyncIterator[Client]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, str(CLIENT), stdin=pipe, stdout=pipe)
    try:
        yield Client(process)
    finally:
        process.kill()
        await process.wait()


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # it was let go between our connection and its being accepted
        return False
    return False


def has_ipv6() -> bool:
    """Whether the loopback has an IPv6 address."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@contextmanager
def free_range(size: int) -> Iterator[tuple[int, int]]:
    """A range of ports that nobody uses now."""
    own = own_ports()
    first = next(port for port in own[: -size + 1 : size] if all(refused(port + step) for step in range(size)))
    yield first, first + size - 1


def test_an_address_may_be_used_before_torch_is_imported() -> None:
    """And each offer's store is fresh, and gone when dropped."""

    async def story() -> None:
        async with client() as user, holder_node() as (_, holder):
            early = socket.create_connection(("127.0.0.1", await holder.open("a")))
            early.close()
            port = await holder.open("b")
            with pytest.raises(ValueError, match="offer b"):
                await holder.open("b")
            assert [await user.count(port), await user.count(port)] == [1, 2]
            other = await holder.open("c")
            assert other != port
            assert await user.count(other) == 1
            await holder.drop("b")
            await holder.drop("b")
            await until(lambda: refused(port), "the dropped store's port is free")
            assert await user.count(other) == 2, "other stores are not touched"

    asyncio.run(story())


def _has_whole_torch(pid: int) -> bool:
    return b"libtorch_global_deps" in Path(f"/proc/{pid}/maps").read_bytes()  # the first thing that is loaded then


# Put before a script: torch's store alone cannot be had, in one way or another.
PARTS_MISSING = {
    "a version that was not tried": "bare_torch.TRIED = (0, 1), (0, 2)",
    "torch._C cannot be imported alone": "sys.meta_path.insert(0, Refuses())",
}
REFUSES = """
import sys
sys.path.insert(0, {folder!r})
import bare_torch
sys.path.remove({folder!r})

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._C" and not hasattr(sys.modules["torch"], "__file__"):
            raise ImportError("not alone")
"""


def test_a_store_is_made_of_a_small_part_of_torch() -> None:
    async def story() -> None:
        async with holder_node() as (_, holder), client() as user:
            assert await user.count(await holder.open("a")) == 1
            [pid] = _holders(os.getpid())
            assert not _has_whole_torch(pid)

    asyncio.run(story())


@pytest.mark.parametrize("missing", PARTS_MISSING)
def test_where_the_part_cannot_be_had_the_whole_of_torch_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    setting = REFUSES.format(folder=str(Path(stores.__file__).parent)) + PARTS_MISSING[missing]
    script(tmp_path / "sitecustomize.py", [setting])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def story() -> None:
        async with holder_node() as (_, holder), client() as user:
            assert await user.count(await holder.open("a")) == 1
            [pid] = _holders(os.getpid())
            assert _has_whole_torch(pid)

    asyncio.run(story())


def test_stores_listen_on_every_family_there_is() -> None:
    async def story() -> None:
        async with holder_node() as (_, holder):
            port = await holder.open("a")
            socket.create_connection(("127.0.0.1", port)).close()
            if has_ipv6():
                socket.create_connection(("::1", port)).close()

    asyncio.run(story())


@contextmanager
def deaf_name_server(folder: Path) -> Iterator[tuple[list[bytes], list[str]]]:
    """What it was asked, and what a command begins with that is to know no other, and no name by itself."""
    address = f"127.53.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"  # tests side by side have one each
    files = {"resolv.conf": f"nameserver {address}", "nsswitch.conf": "hosts: files dns", "hosts": ""}
    asked: list[bytes] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        threading.Thread(target=lambda: asked.extend(iter(lambda: server.recv(512), b"")), daemon=True).start()
        places = [f"mount --bind {script(folder / name, [text])} /etc/{name}" for name, text in files.items()]
        try:
            yield asked, ["unshare", "--mount", "sh", "-c", " && ".join([*places, 'exec "$@"']), "sh"]
        finally:
            server.sendto(b"", server.getsockname())  # the end of the thread


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may let a process see another /etc/resolv.conf")
@pytest.mark.parametrize("start", ["exec", "zygote"])
def test_no_name_server_is_asked_who_connects_to_a_store(stage: Stage, start: str) -> None:
    """torch would ask, and serve nobody else until there is an answer or none for long enough."""
    with deaf_name_server(stage.directory) as (asked, beginning):
        stage.daemon()
        stage.launch("a", options=[f"--start-method={start}"], before=beginning)
        stage.world(1)
        [event] = stage.progress(event="start")

        async def story() -> None:
            async with client() as user:
                assert await user.count(int(event["env"]["MASTER_PORT"])) == 1

        asyncio.run(story())
        assert asked == []


def test_fifty_stores_leave_nothing_behind() -> None:
    async def story() -> None:
        async with client() as user, holder_node() as (n, holder):
            await until(lambda: _holders(os.getpid()), "the holder has started")
            [pid] = _holders(os.getpid())

            async def one(offer: str) -> None:
                port = await holder.open(offer)
                assert await user.count(port) == 1
                await holder.drop(offer)
                await until(lambda: refused(port), "the port is free")

            for number in range(5):
                await one(f"first-{number}")
            before = fds(os.getpid()), fds(pid), fds(n.supervisor.spawner_pid)
            threads, kib = _threads_and_kib(pid)
            for number in range(50):
                await one(str(number))
            assert (fds(os.getpid()), fds(pid), fds(n.supervisor.spawner_pid)) == before
            threads_after, kib_after = _threads_and_kib(pid)
            assert threads_after == threads
            assert kib_after - kib <= 50 * STORE_KIB

    asyncio.run(story())


def _holders(below: int) -> list[int]:
    """The store holders that descend from a process."""
    return [pid for pid in tree.descendants(below) if b"store_holder.py" in cmdline(pid)]


def _threads_and_kib(pid: int) -> tuple[int, int]:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"Threads:\s+(\d+)", status)[0]), int(re.findall(r"VmRSS:\s+(\d+)", status)[0])


def test_ports_come_from_the_range_once_each_and_its_end_is_explained() -> None:
    async def story() -> None:
        with free_range(4) as (first, last), socket.socket() as stranger:
            stranger.bind(("127.0.0.1", first))
            stranger.listen()
            async with holder_node() as (_, holder):
                ports = set()
                for offer in ("a", "b", "c"):
                    ports.add(await holder.open(offer, (first, last)))
                    await holder.drop(offer)
                assert ports == set(range(first + 1, last + 1)), "not the stranger's, and none twice, though dropped"
                with pytest.raises(NoPort, match=rf"no free port in {first}-{last}: 1 in use, 3 used within the last"):
                    await holder.open("d", (first, last))
                await holder.open("d")

    asyncio.run(story())


def test_a_port_that_may_not_be_used_is_named() -> None:
    async def story() -> None:
        async with holder_node() as (_, holder):
            try:
                await holder.open("a", (1, 1))
            except NoPort as problem:
                assert "port 1" in str(problem)  # noqa: PT017  root may listen there

    asyncio.run(story())


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """In this scope this process can open so many more, and no others."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    plugs: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with suppress(OSError):
            while True:
                plugs.append(os.dup(0))
        for _ in range(count):
            os.close(plugs.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for plug in plugs:
            os.close(plug)


def test_without_descriptors_there_is_no_store_and_later_there_is_one() -> None:
    async def play() -> None:
        async with holder_node() as (n, holder), client() as peer:
            for left in (0, 1):  # none to listen with; none for the holder's copy
                with descriptors_left(left), pytest.raises(NoPort, match="Too many open files"):
                    await holder.open(f"offer-{left}")
            assert await peer.count(await holder.open("offer-1")) == 1
            await holder.close()
            await n.supervisor.stop_helper(StoreHolder.NAME)
            for left in (1, 2):  # no wire; nothing to be the holder's stdio
                with descriptors_left(left), pytest.raises(SpawnError, match="Too many open files"):
                    await holder.start(n.supervisor)
            await holder.start(n.supervisor)
            assert await peer.count(await holder.open("offer-2")) == 1

    asyncio.run(play())


def test_a_dead_holder_is_a_fact_and_a_new_one_serves() -> None:
    async def story() -> None:
        async with client() as user, holder_node() as (n, holder):
            port = await holder.open("a")
            assert await user.count(port) == 1
            [pid] = _holders(os.getpid())
            os.kill(pid, signal.SIGKILL)
            end = await n.fact(HelperEnded)
            assert end == HelperEnded(name=StoreHolder.NAME, exit_code=0, signal=signal.SIGKILL)
            assert refused(port)
            await until(lambda: not holder.running, "the wire's end is noticed")
            with pytest.raises(StoresUnavailable):
                await holder.open("b")
            await holder.start(n.supervisor)
            again = await holder.open("a")
            assert again != port
            assert await user.count(again) == 1
            [pid] = _holders(os.getpid())
            assert _has_whole_torch(pid), "in case it was the small part of torch that the first one died of"

    asyncio.run(story())


def test_a_holder_without_torch_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = script(tmp_path / "python", ["#!/bin/sh", f'exec {sys.executable} -S "$@"'])
    bare.chmod(0o755)
    monkeypatch.setenv("PYTHON_EXEC", str(bare))

    async def story() -> None:
        async with node() as n:
            holder = StoreHolder()
            await holder.start(n.supervisor)
            assert (await n.fact(HelperEnded)).exit_code == 1
            await until(lambda: not holder.running, "the wire's end is noticed")
            with pytest.raises(StoresUnavailable, match="No module named 'torch'"):
                await holder.open("a")

    asyncio.run(story())


def test_the_holder_ends_with_its_wire() -> None:
    async def story() -> None:
        async with node() as n:
            holder = StoreHolder()
            await holder.start(n.supervisor)
            await holder.close()
            assert (await n.fact(HelperEnded)).exit_code == 0
            assert marked(n.mark) == []

    asyncio.run(story())
