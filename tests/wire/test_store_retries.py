"""The store over a poor wire: answers that are lost, daemons that go, come back, or do not lead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from rdzv.store import Store, StoreLostError
from rendezvousd.v1 import store_pb2 as pb
from tests.ports import free_port
from tests.wire.store_daemon import (
    PATIENCE_S,
    Cable,
    Daemon,
    Rounds,
    failed,
    raw,
    serving,
    until,
    waiting,
)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with serving() as it:
        yield it


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


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
        waiting(daemon, 3)
        daemon.store().queue_push("q", "1")
        assert (first.result().value, again.result().value) == (b"1", b"1")
        assert pop(request, timeout=PATIENCE_S).value == b"1"
        daemon.store().queue_push("q", "2")
        assert other.result().value == b"2"


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
        follower.rounds.leads = False
        ports = (free_port(), follower.port, daemon.port)
        store = daemon.store(endpoint=",".join(f"127.0.0.1:{port}" for port in ports))
        store.set("k", "v")
        assert daemon.store().get("k") == b"v"


def test_a_proxy_for_the_web_is_not_asked(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    daemon.store(endpoint=f"localhost:{daemon.port}", timeout=timedelta(seconds=PATIENCE_S + 1)).set("k", "v")
    assert daemon.store().get("k") == b"v"
