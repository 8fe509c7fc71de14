"""The store over a real wire: who waits, who is woken, and what ends with a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import grpc
import pytest
import torch.distributed as dist

from rdzv.store import RoundOverError, StoreError, StoreLostError
from rendezvousd.core.kv import KvLimits
from rendezvousd.rpc import waiters
from rendezvousd.v1 import store_pb2 as pb
from tests.wire.store_daemon import PATIENCE_S, Daemon, failed, raw, serving, waiting


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with serving() as it:
        yield it


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


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
    ended: list[Future[Any]] = [
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
