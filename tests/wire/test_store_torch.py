"""The store as torch uses it, and next to torch's own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rdzv.store import Store
from rdzv.worker import NotAWorkerError
from tests.wire.store_daemon import PATIENCE_S, Daemon, serving


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with serving() as it:
        yield it


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

# What torch's own store has learnt since 2.4.
LATER = {"queue": "queue_push", "barrier": "barrier", "clone": "clone", "too few": "clone"}
QUEUE_EMPTY: Any = getattr(dist, "QueueEmptyError", ())


def _known(name: str) -> bool:
    return all(hasattr(dist.TCPStore, method) for word, method in LATER.items() if word in name)


def outcome(script: Callable[[Any], object], store: Any) -> object:
    """What a script returns, or which of torch's errors it raises."""
    store.set_timeout(SHORT)
    try:
        return script(store)
    except QUEUE_EMPTY:
        return "queue empty"
    except dist.DistStoreError:
        return "store error"
    except TypeError:
        return "type error"


@pytest.mark.parametrize("name", [name for name in SCRIPTS if _known(name)])
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
    if _known("barrier"):
        prefixed.barrier("b", 1)
    assert prefixed.delete_key("k")
    if _known("clone"):
        assert prefixed.clone().get("a") == b"1"


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
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(start(daemon, what, rank, world_size)) for rank in range(world_size)]
        for worker in workers:
            stack.callback(worker.kill)
        said = [worker.communicate(timeout=4 * PATIENCE_S) for worker in workers]
    for worker, (out, err) in zip(workers, said, strict=True):
        own = [line for line in out.splitlines() if not line.startswith("[Gloo]")]  # which some say on stdout
        assert (worker.returncode, own) == (0, ["all went well 1"]), err


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
