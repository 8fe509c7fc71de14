"""`rdzv.Store`: a torch.distributed.Store that the daemon holds, for init_process_group and for a script's own use.

torch.distributed.init_process_group("gloo", store=rdzv.Store(), rank=rank, world_size=world_size)

import rdzv.store  # makes torch know rdzv://
torch.distributed.init_process_group("gloo", init_method="rdzv://")

job = rdzv.Store(scope="job")  # outlives the round: where did my data loader stop?
"""

from __future__ import annotations

import itertools
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, TypeVar
from urllib.parse import parse_qs, urlsplit

import grpc
import torch.distributed
from torch.distributed.rendezvous import register_rendezvous_handler

from rdzv import worker
from rdzv.endpoints import Endpoint, parse_endpoints
from rdzv.store_calls import Declined, NoAnswer, caller
from rendezvousd.v1 import store_pb2 as pb

Reply = TypeVar("Reply")

DEFAULT_TIMEOUT = timedelta(seconds=300)  # torch's own, for every store
# Keys of one call together: a message that any daemon takes.
BATCH_BYTES = 32 << 10
_SHOWN_MAX = 100  # characters of a key in an error

# not in every torch this works with
_QueueEmptyError = getattr(torch.distributed, "QueueEmptyError", torch.distributed.DistStoreError)


class StoreError(torch.distributed.DistStoreError):  # type: ignore[misc]  # torch is not typed here
    """The daemon declined a call. Trying again does not help."""


class RoundOverError(StoreError):
    """The round of this worker is over, and its store with it. The launcher is about to stop this process."""


class StoreLostError(StoreError):
    """The daemon lost what this store held. Nothing is answered, so that no counter starts from 0 again."""


@dataclass(frozen=True, slots=True)
class _Address:
    """Which namespace of which daemon."""

    endpoints: tuple[Endpoint, ...]
    run_id: str
    job_uid: str
    round_uid: str  # empty: the job's namespace
    generation: str


def _address(
    scope: str,
    endpoint: str | None,
    run_id: str | None,
    job_uid: str | None,
    round_uid: str | None,
    generation: str | None,
) -> _Address:
    """Take from the environment what is not given. Raises NotAWorkerError if it is not there either, and ValueError."""
    if scope not in ("round", "job"):
        raise ValueError(f"scope={scope!r}: expected 'round' or 'job'")

    def found(value: str | None, variable: str, option: str) -> str:
        return worker.required(os.environ, variable, option) if value is None else value

    return _Address(
        endpoints=parse_endpoints(found(endpoint, worker.ENDPOINT, "endpoint")),
        run_id=found(run_id, worker.RUN_ID, "run_id"),
        job_uid=found(job_uid, worker.JOB_UID, "job_uid"),
        round_uid=found(round_uid, worker.ROUND_UID, "round_uid") if scope == "round" else "",
        generation=os.environ.get(worker.STORE_GENERATION, "") if generation is None else generation,
    )


class _OneOfEach(type(torch.distributed.Store)):  # type: ignore[misc]  # torch is not typed here
    """Gives the same object for equal arguments, and keeps it.

    C++ holds on to its half of a Store for as long as a process group lives, and cannot hold the Python half, which it
    calls: without this, `init_process_group(store=rdzv.Store())` would lose it at once.
    """

    _made: ClassVar[dict[object, Any]] = {}

    def __call__(cls, **options: Any) -> Any:
        where = _address(options.get("scope", "round"), *map(options.get, _PLACES))
        key = (cls, where, options.get("prefix", ""), options.get("timeout", DEFAULT_TIMEOUT))
        if key not in cls._made:
            cls._made.setdefault(key, super().__call__(**options))
        return cls._made[key]


_PLACES = ("endpoint", "run_id", "job_uid", "round_uid", "generation")


class Store(torch.distributed.Store, metaclass=_OneOfEach):  # type: ignore[misc]  # torch is not typed here
    """A namespace of keys at the daemon, shared by all workers of a round (or, with scope="job", of a job).

    Options: `scope` "round" or "job"; `prefix`, put before each key with a slash; `timeout` of each call. What else it
    needs comes from the environment rdzvrun gives to workers, or from `endpoint` ("host:port", several separated by
    commas), `run_id`, `job_uid`, `round_uid` and `generation`.

    Equal options give the same object, so `set_timeout` holds for all who made it so. A few fixed prefixes are meant;
    for more there is torch.distributed.PrefixStore. Safe for threads. A forked child opens connections of its own; it
    should not use a store that another thread of its parent was waiting in while it was forked (a limit of gRPC's).

    Every call raises torch.distributed.DistStoreError when it is out of time, also when that is for lack of a daemon:
    until then it goes on trying. It raises RoundOverError, StoreLostError, or StoreError for whatever else the daemon
    declines. Keys and values are limited, by default to 1 KiB and 512 KiB.
    """

    def __init__(
        self,
        *,
        scope: str = "round",
        prefix: str = "",
        timeout: timedelta = DEFAULT_TIMEOUT,
        endpoint: str | None = None,
        run_id: str | None = None,
        job_uid: str | None = None,
        round_uid: str | None = None,
        generation: str | None = None,
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._address = it = _address(scope, endpoint, run_id, job_uid, round_uid, generation)
        self._prefix = f"{prefix}/" if prefix else ""
        self._caller = caller(it.endpoints)
        self._scope = pb.Scope(run_id=it.run_id, job_uid=it.job_uid, round_uid=it.round_uid, generation=it.generation)

    def __repr__(self) -> str:
        return f"rdzv.Store({self._name()} at {self._caller})"

    # ---------------------------------------------------------------- values; C++ passes bytes, Python may pass str

    def set(self, key: str, value: str | bytes) -> None:
        self._call("Set", pb.SetRequest(scope=self._scope, key=self._key(key), value=_bytes(value)), pb.SetReply)

    def get(self, key: str) -> bytes:
        """Return the value, waiting until there is one."""
        return self._call("Get", pb.GetRequest(scope=self._scope, key=self._key(key)), pb.GetReply).value

    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number that is the value, 0 if absent; return the sum. Done once, also if the connection
        breaks in between."""
        request = pb.AddRequest(scope=self._scope, key=self._key(key), amount=amount, op_id=_op_id())
        return self._call("Add", request, pb.AddReply).sum

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `desired` if the value is `expected`, or if there is none and `expected` is empty. Return the value that
        holds then; `expected` if there is none."""
        request = pb.CompareSetRequest(
            scope=self._scope, key=self._key(key), expected=_bytes(expected), desired=_bytes(desired)
        )
        return self._call("CompareSet", request, pb.CompareSetReply).value

    def append(self, key: str, value: str | bytes) -> None:
        """Put `value` behind the present one, or set it. Done once, as `add`."""
        request = pb.AppendRequest(scope=self._scope, key=self._key(key), value=_bytes(value), op_id=_op_id())
        self._call("Append", request, pb.AppendReply)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set all of them, or none."""
        named, contents = self._keys(keys), [_bytes(value) for value in values]
        self._call("MultiSet", pb.MultiSetRequest(scope=self._scope, keys=named, values=contents), pb.MultiSetReply)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values, waiting until each key has one."""
        values: list[bytes] = []
        for batch, left in self._batches(keys, self.timeout):
            request = pb.MultiGetRequest(scope=self._scope, keys=batch)
            values.extend(self._call("MultiGet", request, pb.MultiGetReply, left).values)
        return values

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there."""
        for batch, left in self._batches(keys, self.timeout if timeout is None else timeout):
            self._call("Wait", pb.WaitRequest(scope=self._scope, keys=batch), pb.WaitReply, left)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there, without waiting."""
        return all(
            self._call("Check", pb.CheckRequest(scope=self._scope, keys=batch), pb.CheckReply, left).all_present
            for batch, left in self._batches(keys, self.timeout)
        )

    def delete_key(self, key: str) -> bool:
        """Return whether the key was there. (After a broken connection this may say no of a key that it deleted.)"""
        request = pb.DeleteRequest(scope=self._scope, key=self._key(key))
        return self._call("Delete", request, pb.DeleteReply).deleted

    def num_keys(self) -> int:
        """Return the number of keys in the namespace, whatever their prefix."""
        return self._call("NumKeys", pb.NumKeysRequest(scope=self._scope), pb.NumKeysReply).keys

    # ---------------------------------------------------------------- queues; C++ has no way to call these

    def queue_push(self, key: str, value: str | bytes) -> None:
        request = pb.QueuePushRequest(scope=self._scope, key=self._key(key), value=_bytes(value), op_id=_op_id())
        self._call("QueuePush", request, pb.QueuePushReply)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the queue's first item and return it. If there is none, wait, or raise torch's QueueEmptyError."""
        request = pb.QueuePopRequest(scope=self._scope, key=self._key(key), block=block, op_id=_op_id())
        return self._call("QueuePop", request, pb.QueuePopReply).value

    def queue_len(self, key: str) -> int:
        request = pb.QueueLenRequest(scope=self._scope, key=self._key(key))
        return self._call("QueueLen", request, pb.QueueLenReply).length

    # ---------------------------------------------------------------- what C++ looks up under other names

    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """Say that append, multi_get and multi_set may be used."""
        return True

    def clone(self) -> Store:
        """Return a store that may be used at the same time as this one: itself."""
        return self

    # ---------------------------------------------------------------- the calls

    def _call(self, method: str, request: Any, reply: type[Reply], timeout: timedelta | None = None) -> Reply:
        limit: timedelta = self.timeout if timeout is None else timeout
        began = time.monotonic()
        try:
            return self._caller.call(method, request, reply, limit.total_seconds())
        except Declined as why:
            raise _declined(why, self._name()) from None
        except NoAnswer as why:
            waited_s = time.monotonic() - began
            text = self._out_of_time(method, request, why, waited_s)
            raise torch.distributed.DistStoreError(text) from None

    def _out_of_time(self, method: str, request: Any, why: NoAnswer, waited_s: float) -> str:
        where = f"{self._name()} at {self._caller}"
        if why.refusal:
            return f"{why.text}; waited {waited_s:.1f} s in {where}"
        return f"no answer to {method}{_of(request)} for {waited_s:.1f} s from {where}: {why.text}"

    def _name(self) -> str:
        address = self._address
        return f"the store of {'the round of ' if address.round_uid else ''}run {address.run_id!r}"

    def _key(self, key: str) -> str:
        return self._prefix + key

    def _keys(self, keys: Sequence[str]) -> list[str]:
        if isinstance(keys, str):
            raise TypeError(f"keys={keys!r}: expected a list of keys")
        return [self._prefix + key for key in keys]

    def _batches(self, keys: Sequence[str], timeout: timedelta) -> Iterator[tuple[list[str], timedelta]]:
        """The keys, as many as one message takes, with what is left of the time for them; at least one batch."""
        deadline = time.monotonic() + timeout.total_seconds()
        batch: list[str] = []
        size = 0
        for key in self._keys(keys):
            size += len(key.encode())
            if batch and size > BATCH_BYTES:
                yield batch, timedelta(seconds=max(0.0, deadline - time.monotonic()))
                batch, size = [], len(key.encode())
            batch.append(key)
        yield batch, timedelta(seconds=max(0.0, deadline - time.monotonic()))


def _declined(why: Declined, name: str) -> Exception:
    """What a refusal of the daemon is for a script."""
    text = f"{why.text} ({name})"
    if why.refusal == "QueueEmpty":
        error: Exception = _QueueEmptyError(text)
    elif why.code is grpc.StatusCode.ABORTED:
        error = RoundOverError(text)
    elif why.refusal == "StoreLost":
        error = StoreLostError(text)
    else:
        error = StoreError(text)
    return error


def _bytes(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"a value of type {type(value).__name__}: expected str or bytes")


def _op_id() -> str:
    return uuid.uuid4().hex


def _of(request: Any) -> str:
    """The key or keys of a request, for an error."""
    key = getattr(request, "key", "") or ", ".join(getattr(request, "keys", ())[:3])
    return f" of {key[:_SHOWN_MAX]!r}" if key else ""


# Process groups made by rdzv:// in this process. All workers make the same ones in the same order, and one that is made
# after another was destroyed must not meet its keys.
_groups = itertools.count(1)


def _rendezvous(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: object) -> Iterator[tuple[Any, int, int]]:
    """torch's handler of rdzv://: yields a store of the round, the rank and the world size, once."""
    query = parse_qs(urlsplit(url).query)

    def number(name: str) -> int:
        said = query.get(name, ["-1"])[0]  # a size or rank of -1 is torch's way to say nothing
        return int(worker.required(os.environ, name.upper(), name) if said == "-1" else said)

    store = torch.distributed.PrefixStore(f"init_process_group/{next(_groups)}", Store(timeout=timeout))
    yield store, number("rank"), number("world_size")
    raise RuntimeError("a worker meets its peers once; rdzvrun starts a new one for the next round")


register_rendezvous_handler("rdzv", _rendezvous)
