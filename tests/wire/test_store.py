"""The store over a real wire: a daemon's service in a thread, real clients, and torch itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
import torch.distributed as dist

from rdzv.store import RoundOverError, Store, StoreError, StoreLostError
from rdzv.worker import NotAWorkerError
from rendezvousd.core.errors import NoSuchJob, NotLeader, RoundOver, StoreLost
from rendezvousd.core.kv import DEFAULT_LIMITS, KvLimits
from rendezvousd.rpc import waiters
from rendezvousd.rpc.store import StoreCounts, StoreService
from rendezvousd.v1 import store_pb2 as pb

T = TypeVar("T")
PATIENCE_S = 60.0  # for what takes milliseconds on an idle machine


class Rounds:
    """The engine's part: what is there."""

    def __init__(self) -> None:
        self.job_uid, self.round_uid, self.generation = "job", uuid.uuid4().hex, "1"

    def check(self, run_id: str, job_uid: str, round_uid: str, generation: str) -> None:
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
        self.service = StoreService(rounds, limits)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.port = self._run(self._start(port))

    async def _start(self, port: int) -> int:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self.service.handler(),))
        bound: int = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return bound

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


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with serving() as it:
        yield it


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


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


# -------------------------------------------------------------------------------------------------------- as torch does

SHORT = timedelta(milliseconds=50)
SCRIPTS: dict[str, Callable[[Any], object]] = {
    "set and get": lambda s: (
        s.set("k", "v"),
        s.get("k"),
        s.set("k", b"\x00\xff"),
        s.get("k"),
        s.set("k", ""),
        s.get("k"),
    ),
    "text": lambda s: (s.set("ключ", "é\0x"), s.get("ключ")),
    "no name": lambda s: (s.set("", "v"), s.get(""), s.num_keys()),
    "add": lambda s: (s.add("n", 5), s.get("n"), s.add("n", -7), s.get("n"), s.set("n", "+12"), s.add("n", 1)),
    "compare_set": lambda s: (
        s.compare_set("absent", "old", "new"),
        s.check(["absent"]),
        s.compare_set("k", "", "one"),
        s.compare_set("k", "", "two"),
        s.compare_set("k", "one", "two"),
        s.get("k"),
        s.compare_set("empty", "", ""),
        s.check(["empty"]),
    ),
    "append": lambda s: (s.append("a", "1"), s.append("a", "2"), s.get("a"), s.add("a", 1), s.get("a")),
    "delete": lambda s: (s.set("k", "v"), s.delete_key("k"), s.delete_key("k"), s.check(["k"]), s.num_keys()),
    "many": lambda s: (
        s.multi_set(["a", "b", "a"], ["1", b"2", "3"]),
        s.multi_get(["b", "a", "b"]),
        s.multi_get([]),
        s.multi_set([], []),
        s.num_keys(),
    ),
    "nothing": lambda s: (s.wait([]), s.check([])),
    "wait": lambda s: (s.set("a", "1"), s.set("b", ""), s.wait(["a", "b"]), s.wait(["a"], SHORT), s.check(["a", "b"])),
    "get too late": lambda s: s.get("absent"),
    "wait too late": lambda s: (s.set("a", ""), s.wait(["a", "absent"], SHORT)),
    "no wait": lambda s: s.wait(["absent"], timedelta(0)),
    "many too late": lambda s: s.multi_get(["absent"]),
    "keys with too few values": lambda s: s.multi_set(["a", "b"], ["1"]),
    "a text for a list": lambda s: s.check("k"),
    "a number for a value": lambda s: s.set("k", 1),
    "queue": lambda s: (
        s.queue_push("q", "1"),
        s.queue_push("q", b"2"),
        s.queue_len("q"),
        s.check(["q"]),
        s.wait(["q"]),
        s.num_keys(),
        s.delete_key("q"),
        s.queue_pop("q"),
        s.queue_pop("q", False),
        s.queue_len("q"),
        s.check(["q"]),
    ),
    "queue beside a value": lambda s: (
        s.set("k", "v"),
        s.queue_push("k", "i"),
        s.get("k"),
        s.queue_pop("k"),
        s.get("k"),
    ),
    "no queue": lambda s: s.queue_len("q"),
    "empty queue": lambda s: s.queue_pop("q", block=False),
    "empty queue too late": lambda s: s.queue_pop("q"),
    "barrier": lambda s: s.barrier("b", 1),
    "extended": lambda s: s.has_extended_api(),
}


def outcome(script: Callable[[Any], object], store: Any) -> object:
    """What a script returns, or which of torch's errors it raises."""
    store.set_timeout(SHORT)
    try:
        return script(store)
    except dist.QueueEmptyError:
        return "queue empty"
    except dist.DistStoreError:
        return "store error"
    except TypeError:
        return "type error"


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_answers_as_torchs_own_store(daemon: Daemon, name: str) -> None:
    theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert outcome(SCRIPTS[name], daemon.store()) == outcome(SCRIPTS[name], theirs)


def test_cpp_reaches_it_through_a_prefix(daemon: Daemon) -> None:
    store = daemon.store()
    prefixed = dist.PrefixStore("p", store)
    prefixed.set("k", "v")
    assert (store.get("p/k"), prefixed.get("k"), prefixed.num_keys()) == (b"v", b"v", 1)
    assert (prefixed.add("n", 2), prefixed.compare_set("k", "v", "w")) == (2, b"w")
    prefixed.append("k", "x")
    prefixed.multi_set(["a", "b"], ["1", "2"])
    assert (prefixed.multi_get(["a", "b", "k"]), prefixed.check(["a", "c"])) == ([b"1", b"2", b"wx"], False)
    prefixed.wait(["a"])
    prefixed.barrier("b", 1)
    assert (prefixed.delete_key("k"), prefixed.clone().get("a")) == (True, b"1")


def test_a_store_made_in_passing_is_kept_for_cpp(daemon: Daemon) -> None:
    prefixed = dist.PrefixStore("p", daemon.store())
    prefixed.set("k", "v")
    assert daemon.store() is daemon.store()
    assert daemon.store().get("p/k") == b"v"


def test_a_prefix_of_its_own(daemon: Daemon) -> None:
    mine = daemon.store(prefix="mine")
    mine.set("k", "v")
    mine.queue_push("q", "i")
    assert (mine.get("k"), mine.queue_pop("q"), daemon.store().get("mine/k")) == (b"v", b"i", b"v")
    mine.multi_set(["a"], ["1"])
    mine.wait(["a"])
    assert daemon.store().multi_get(["mine/a"]) == [b"1"]


# -------------------------------------------------------------------------------------------------------- waiting


def test_a_waiter_is_woken_by_its_key_and_no_other(daemon: Daemon, threads: ThreadPoolExecutor) -> None:
    store = daemon.store()
    one, both = threads.submit(store.get, "a"), threads.submit(store.multi_get, ["a", "b"])
    waited = threads.submit(store.wait, ["b", "a"])
    waiting(daemon, 3)
    store.set("other", "")
    assert daemon.counts().waiters == 3
    store.add("a", 1)
    assert one.result(PATIENCE_S) == b"1"
    assert not both.done()
    assert not waited.done()
    store.append("b", "2")
    assert both.result(PATIENCE_S) == [b"1", b"2"]
    assert waited.result(PATIENCE_S) is None
    waiting(daemon, 0)


def test_all_keys_are_there_at_the_same_time(daemon: Daemon, threads: ThreadPoolExecutor) -> None:
    store = daemon.store()
    both = threads.submit(store.multi_get, ["a", "b"])
    waiting(daemon, 1)
    store.set("a", "old")
    store.delete_key("a")
    store.set("b", "2")
    waiting(daemon, 1)
    store.set("a", "new")
    assert both.result(PATIENCE_S) == [b"new", b"2"]


def test_poppers_are_served_in_order_each_item_once(daemon: Daemon, threads: ThreadPoolExecutor) -> None:
    store = daemon.store()
    poppers = []
    for count in range(1, 6):
        poppers.append(threads.submit(store.queue_pop, "q"))
        waiting(daemon, count)
    for item in range(5):
        store.queue_push("q", str(item))
    assert [popper.result(PATIENCE_S) for popper in poppers] == [b"0", b"1", b"2", b"3", b"4"]
    assert store.queue_len("q") == 0
    waiting(daemon, 0)


def test_out_of_time_says_which_key_how_long_and_where(daemon: Daemon) -> None:
    store = daemon.store(timeout=timedelta(seconds=0.1))
    store.set("there", "")
    with pytest.raises(dist.DistStoreError) as late:
        store.wait(["there", "absent"])
    assert not isinstance(late.value, StoreError)
    text = str(late.value)
    assert "'absent'" in text
    assert "'there'" not in text
    assert "waited 0.1 s" in text
    assert f"the store of the round of run 'run' at 127.0.0.1:{daemon.port}" in text
    assert daemon.counts().waiters == 0


def test_a_client_that_hangs_up_leaves_no_waiter(daemon: Daemon) -> None:
    with raw(daemon) as call:
        get = call("Get", pb.GetRequest, pb.GetReply).future(
            pb.GetRequest(scope=daemon.scope(), key="never", timeout_ms=10**6), timeout=PATIENCE_S
        )
        pop = call("QueuePop", pb.QueuePopRequest, pb.QueuePopReply).future(
            pb.QueuePopRequest(scope=daemon.scope(), key="never", block=True, timeout_ms=10**6), timeout=PATIENCE_S
        )
        waiting(daemon, 2)
        get.cancel()
        pop.cancel()
        waiting(daemon, 0)
    daemon.store().queue_push("never", "still there")
    assert daemon.store().queue_pop("never") == b"still there"


def test_waiters_are_bounded(daemon: Daemon, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiters, "WAITERS_MAX", 2)
    store = daemon.store()
    first = [threads.submit(store.get, "k") for _ in range(2)]
    waiting(daemon, 2)
    with pytest.raises(StoreError, match="2 calls wait in this store"):
        store.get("k")
    store.set("k", "v")
    assert [future.result(PATIENCE_S) for future in first] == [b"v", b"v"]


def test_watch_tells_now_and_every_last_state(daemon: Daemon) -> None:
    store = daemon.store()
    with raw(daemon) as call:
        watch = call("Watch", pb.WatchRequest, pb.WatchReply)(
            pb.WatchRequest(scope=daemon.scope(), key="k"), timeout=PATIENCE_S
        )
        waiting(daemon, 1)
        store.set("k", "1")
        assert next(watch) == pb.WatchReply(present=True, value=b"1")
        waiting(daemon, 1)
        store.set("other", "")
        store.delete_key("k")
        assert next(watch) == pb.WatchReply()
        for n in range(20):
            store.set("k", str(n))
        told = next(watch)
        while told.value != b"19":
            told = next(watch)
        late = call("Watch", pb.WatchRequest, pb.WatchReply)(
            pb.WatchRequest(scope=daemon.scope(), key="k"), timeout=PATIENCE_S
        )
        assert next(late).value == b"19"
        waiting(daemon, 2)
        daemon.next_round()
        with pytest.raises(grpc.RpcError) as over:
            next(watch)
        assert over.value.code() is grpc.StatusCode.ABORTED


# -------------------------------------------------------------------------------------------------------- scopes


def test_who_waits_when_the_round_ends_is_told(daemon: Daemon, threads: ThreadPoolExecutor) -> None:
    store, job = daemon.store(), daemon.store(scope="job")
    job.set("step", "7")
    store.set("k", "v")
    ended = [
        threads.submit(store.get, "never"),
        threads.submit(store.wait, ["k", "never"]),
        threads.submit(store.multi_get, ["never", "k"]),
        threads.submit(store.queue_pop, "never"),
    ]
    outlives = threads.submit(job.get, "next")
    waiting(daemon, 5)
    daemon.next_round()
    for future in ended:
        error = failed(future)
        assert isinstance(error, RoundOverError)
        assert "round is over" in str(error)
    assert daemon.counts()[:2] == (1, 1)
    job.set("next", "8")
    assert outlives.result(PATIENCE_S) == b"8"


def test_a_late_call_brings_no_round_back(daemon: Daemon) -> None:
    late = daemon.store()
    late.set("k", "v")
    daemon.next_round()
    calls: list[Callable[[], object]] = [
        lambda: late.set("k", "v"),
        lambda: late.get("k"),
        lambda: late.add("n", 1),
        lambda: late.check(["k"]),
        lambda: late.num_keys(),
        lambda: late.queue_push("q", "v"),
    ]
    for call in calls:
        with pytest.raises(RoundOverError):
            call()
    assert daemon.counts() == (0, 0, 0, 0)
    assert daemon.store().num_keys() == 0


def test_a_job_that_is_gone_leaves_nothing(daemon: Daemon, threads: ThreadPoolExecutor) -> None:
    store, job = daemon.store(), daemon.store(scope="job")
    ended = [threads.submit(store.get, "never"), threads.submit(job.get, "never")]
    waiting(daemon, 2)
    daemon.rounds.job_uid = "another"
    daemon.tell(lambda: daemon.service.job_gone("job"))
    assert all(isinstance(failed(future), RoundOverError) for future in ended)
    assert daemon.counts() == (0, 0, 0, 0)
    with pytest.raises(StoreError, match="there is no job"):
        job.get("never")


def test_of_another_generation_nothing_is_answered(daemon: Daemon) -> None:
    store = daemon.store()
    store.add("n", 3)
    daemon.rounds.generation = "2"
    with pytest.raises(StoreLostError, match="the daemon was restarted"):
        store.add("n", 1)


def test_limits_are_told(threads: ThreadPoolExecutor) -> None:
    with serving(limits=KvLimits(keys=1, value_bytes=10)) as daemon:
        store = daemon.store()
        with pytest.raises(StoreError, match="at most 10"):
            store.set("k", "x" * 11)
        store.set("k", "text")
        with pytest.raises(StoreError, match="at most 1 "):
            store.add("n", 1)
        with pytest.raises(StoreError, match="no decimal number"):
            store.add("k", 1)
        with pytest.raises(StoreError, match="2 keys with 1 values"):
            store.multi_set(["k", "k"], ["1"])


def test_more_keys_than_fit_into_one_message(daemon: Daemon) -> None:
    store = daemon.store()
    keys = [f"{'long' * 100}/{n}" for n in range(500)]
    for start in range(0, len(keys), 100):
        store.multi_set(keys[start : start + 100], [str(n) for n in range(start, start + 100)])
    store.wait(keys)
    assert store.check(keys)
    assert store.multi_get(keys) == [str(n).encode() for n in range(500)]
    assert not store.check([*keys, "absent"])


# -------------------------------------------------------------------------------------------------------- a poor wire


@contextlib.contextmanager
def raw(daemon: Daemon) -> Iterator[Callable[..., Any]]:
    """Calls as any client makes them."""
    with grpc.insecure_channel(f"127.0.0.1:{daemon.port}") as channel:

        def call(method: str, request: Any, reply: Any) -> Any:
            make = channel.unary_stream if method == "Watch" else channel.unary_unary
            return make(f"/rendezvousd.v1.Store/{method}", request.SerializeToString, reply.FromString)

        yield call


def test_a_retried_pop_takes_its_turn_and_returns_the_same(daemon: Daemon) -> None:
    with raw(daemon) as call:
        pop = call("QueuePop", pb.QueuePopRequest, pb.QueuePopReply)
        request = pb.QueuePopRequest(scope=daemon.scope(), key="q", block=True, timeout_ms=10**6, op_id="one")
        first = pop.future(request, timeout=PATIENCE_S)
        waiting(daemon, 1)
        other = pop.future(
            pb.QueuePopRequest(scope=daemon.scope(), key="q", block=True, timeout_ms=10**6, op_id="two"),
            timeout=PATIENCE_S,
        )
        waiting(daemon, 2)
        again = pop.future(request, timeout=PATIENCE_S)
        with pytest.raises(grpc.RpcError, match="made again"):
            first.result()
        waiting(daemon, 2)
        daemon.store().queue_push("q", "1")
        assert again.result().value == b"1"
        assert pop(request, timeout=PATIENCE_S).value == b"1"
        daemon.store().queue_push("q", "2")
        assert other.result().value == b"2"


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


@pytest.fixture
def cable(daemon: Daemon) -> Iterator[Cable]:
    it = Cable(daemon.port)
    yield it
    it.close()


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (lambda store: store.add("k", 1), 1),
        (lambda store: (store.append("k", "x"), store.get("k"))[-1], b"x"),
        (lambda store: (store.queue_push("k", "x"), store.queue_len("k"))[-1], 1),
    ],
)
def test_what_was_done_is_not_done_again(
    daemon: Daemon, cable: Cable, threads: ThreadPoolExecutor, call: Callable[[Store], object], result: object
) -> None:
    store = daemon.store(endpoint=f"127.0.0.1:{cable.port}")
    store.set("connected", "")
    cable.mute.set()
    held = daemon.counts().bytes_held
    answer = threads.submit(call, store)
    until(lambda: daemon.counts().bytes_held > held)  # done, and the answer is lost
    cable.cut()
    cable.mute.clear()
    assert answer.result(PATIENCE_S) == result


def test_a_popped_item_whose_answer_was_lost(daemon: Daemon, cable: Cable, threads: ThreadPoolExecutor) -> None:
    store, direct = daemon.store(endpoint=f"127.0.0.1:{cable.port}"), daemon.store()
    direct.queue_push("q", "1")
    direct.queue_push("q", "2")
    assert store.queue_len("q") == 2
    cable.mute.set()
    answer = threads.submit(store.queue_pop, "q")
    until(lambda: direct.queue_len("q") == 1)
    cable.cut()
    cable.mute.clear()
    assert answer.result(PATIENCE_S) == b"1"
    assert direct.queue_pop("q") == b"2"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_calls_outlive_a_daemon_that_comes_back(threads: ThreadPoolExecutor) -> None:
    rounds, port = Rounds(), free_port()
    with serving(rounds=rounds, port=port) as daemon:
        store = daemon.store()
        store.set("k", "v")
        waits = threads.submit(store.get, "later")
        waiting(daemon, 1)
    adds = threads.submit(store.add, "n", 1)  # while there is none
    with serving(rounds=rounds, port=port) as daemon:
        assert adds.result(PATIENCE_S) == 1
        waiting(daemon, 1)
        store.set("later", "after all")
        assert waits.result(PATIENCE_S) == b"after all"


def test_a_daemon_that_comes_back_empty_says_so(threads: ThreadPoolExecutor) -> None:
    port = free_port()
    with serving(port=port) as daemon:
        rounds, store = daemon.rounds, daemon.store()
        store.add("n", 3)
        waits = threads.submit(store.get, "later")
        waiting(daemon, 1)
    rounds.generation = "2"
    with serving(rounds=rounds, port=port):
        assert isinstance(failed(waits), StoreLostError)
        with pytest.raises(StoreLostError):
            store.add("n", 1)


def test_no_daemon_at_all(daemon: Daemon) -> None:
    port = free_port()
    store = daemon.store(endpoint=f"127.0.0.1:{port}", timeout=timedelta(seconds=0.3))
    with pytest.raises(dist.DistStoreError, match=rf"no answer to Set of 'k' for .* s from .* at 127.0.0.1:{port}: "):
        store.set("k", "v")


def test_of_several_daemons_the_one_that_leads_is_found(daemon: Daemon) -> None:
    with serving() as follower:
        follower.tell(lambda: follower.service.close(NotLeader("another daemon leads")))
        ports = (free_port(), follower.port, daemon.port)
        store = daemon.store(endpoint=",".join(f"127.0.0.1:{port}" for port in ports))
        store.set("k", "v")
        assert daemon.store().get("k") == b"v"


def test_a_proxy_for_the_web_is_not_asked(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    daemon.store(endpoint=f"localhost:{daemon.port}", timeout=timedelta(seconds=PATIENCE_S + 1)).set("k", "v")
    assert daemon.store().get("k") == b"v"


# -------------------------------------------------------------------------------------------------------- workers


def start(daemon: Daemon, what: str, rank: int, world_size: int) -> subprocess.Popen[str]:
    it = daemon.rounds
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "RENDEZVOUSD_ENDPOINT": f"127.0.0.1:{daemon.port}",
        "RENDEZVOUSD_RUN_ID": "run",
        "RENDEZVOUSD_JOB_UID": it.job_uid,
        "RENDEZVOUSD_ROUND": "1",
        "RENDEZVOUSD_ROUND_UID": it.round_uid,
        "RENDEZVOUSD_STORE_GENERATION": it.generation,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(Path(__file__).with_name("store_worker.py")), what]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_workers(daemon: Daemon, what: str, world_size: int) -> None:
    workers = [start(daemon, what, rank, world_size) for rank in range(world_size)]
    try:
        said = [worker.communicate(timeout=4 * PATIENCE_S) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for worker, (out, err) in zip(workers, said, strict=True):
        assert (worker.returncode, out) == (0, "all went well 1\n"), err


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("what", ["group-by-store", "group-by-url"])
def test_a_process_group(daemon: Daemon, what: str, world_size: int) -> None:
    run_workers(daemon, what, world_size)


def test_forked_children(daemon: Daemon) -> None:
    run_workers(daemon, "fork", 1)


def test_outside_of_rdzvrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RENDEZVOUSD_ENDPOINT", raising=False)
    with pytest.raises(NotAWorkerError, match=r"start this with rdzvrun, or pass endpoint="):
        Store()
    with pytest.raises(ValueError, match="expected 'round' or 'job'"):
        Store(scope="world")


def test_importing_rdzv_costs_nothing() -> None:
    code = "import sys, rdzv; print([m for m in ('torch', 'grpc', 'google.protobuf') if m in sys.modules])"
    env = {**os.environ, "RENDEZVOUSD_ROUND": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "[]\n"
