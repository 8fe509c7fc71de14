"""For tests of the store: a daemon's service in a thread, and a cable to it that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import grpc

from rdzv.store import Store
from rendezvousd.core.errors import NoSuchJob, NotLeader, RoundOver, StoreLost
from rendezvousd.core.kv import DEFAULT_LIMITS, KvLimits
from rendezvousd.core.settings import Limits
from rendezvousd.rpc.server import server_options
from rendezvousd.rpc.store import StoreCounts, StoreService
from rendezvousd.v1 import store_pb2 as pb

T = TypeVar("T")
PATIENCE_S = 60.0  # for what takes milliseconds on an idle machine


class Rounds:
    """The engine's part: what is there."""

    def __init__(self) -> None:
        self.job_uid, self.round_uid, self.generation = "job", uuid.uuid4().hex, "1"
        self.leads = True

    def check(self, run_id: str, job_uid: str, round_uid: str, generation: str) -> None:
        if not self.leads:
            raise NotLeader("another daemon leads")
        if (run_id, job_uid) != ("run", self.job_uid):
            raise NoSuchJob(f"there is no job {run_id!r}")
        if generation != self.generation:
            raise StoreLost("the daemon was restarted")
        if round_uid and round_uid != self.round_uid:
            raise RoundOver("the round is over")


class Daemon:
    """The store service on a loopback port, in a thread of its own."""

    def __init__(self, rounds: Rounds, limits: KvLimits = DEFAULT_LIMITS, port: int = 0) -> None:
        self.rounds = rounds
        rounds.leads = True
        self.service = StoreService(self, limits)
        self._away = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.port = self._run(self._start(port))

    async def _start(self, port: int) -> int:
        self._server = grpc.aio.server(options=server_options(Limits()))
        self._server.add_generic_rpc_handlers((self.service.handler(),))
        bound: int = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return bound

    def check(self, run_id: str, job_uid: str, round_uid: str, generation: str) -> None:
        if self._away:
            raise NotLeader(self._away)
        self.rounds.check(run_id, job_uid, round_uid, generation)

    def check_lead(self) -> None:
        if self._away:
            raise NotLeader(self._away)

    def leave(self, why: str) -> None:
        """Attend no job any more, and say so to whoever asks."""
        self._away = why
        self.tell(lambda: self.service.close(NotLeader(why)))

    def _run(self, task: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(task, self._loop).result(PATIENCE_S)

    def tell(self, call: Callable[[], T]) -> T:
        """Call something in the daemon's thread."""

        async def told() -> T:
            return call()

        result: T = self._run(told())
        return result

    def counts(self) -> StoreCounts:
        return self.tell(self.service.counts)

    def next_round(self) -> None:
        over, self.rounds.round_uid = self.rounds.round_uid, uuid.uuid4().hex
        self.tell(lambda: self.service.round_over(over))

    def stop(self) -> None:
        if self._loop.is_closed():
            return
        self.rounds.leads = False
        self.tell(lambda: self.service.close(NotLeader("the daemon is shutting down")))
        self._run(self._server.stop(1))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def store(self, **options: Any) -> Store:
        it = self.rounds
        named = {"run_id": "run", "job_uid": it.job_uid, "round_uid": it.round_uid, "generation": it.generation}
        timeout = timedelta(seconds=PATIENCE_S)
        return Store(**{"endpoint": f"127.0.0.1:{self.port}", "timeout": timeout, **named, **options})

    def scope(self) -> pb.Scope:
        it = self.rounds
        return pb.Scope(run_id="run", job_uid=it.job_uid, round_uid=it.round_uid, generation=it.generation)


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[Daemon]:
    it = Daemon(options.pop("rounds", None) or Rounds(), **options)
    try:
        yield it
    finally:
        it.stop()


@contextlib.contextmanager
def raw(daemon: Daemon) -> Iterator[Callable[..., Any]]:
    """Calls as any client makes them."""
    with grpc.insecure_channel(f"127.0.0.1:{daemon.port}") as channel:

        def call(method: str, request: Any, reply: Any) -> Any:
            make = channel.unary_stream if method == "Watch" else channel.unary_unary
            return make(f"/rendezvousd.v1.Store/{method}", request.SerializeToString, reply.FromString)

        yield call


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def waiting(daemon: Daemon, count: int) -> None:
    until(lambda: daemon.counts().waiters == count)


def failed(future: Future[Any]) -> BaseException:
    error = future.exception(PATIENCE_S)
    assert error is not None
    return error


class Cable:
    """Carries bytes between clients and a daemon, and can be cut."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.mute = threading.Event()  # answers are lost
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [near, far]
                for source, sink, is_answer in ((near, far, False), (far, near, True)):
                    thread = threading.Thread(target=self._carry, args=(source, sink, is_answer))
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not (is_answer and self.mute.is_set()):
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.cut()
        for thread in self._threads[1:]:
            thread.join()
