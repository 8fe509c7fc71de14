"""One namespace of keys: what a torch.distributed.Store does with them, and no more than fits.

It follows torch's TCPStore, also where that surprises: `compare_set` of an absent key answers with what was expected,
and queues are a space of their own that `num_keys` and `delete` do not see. It differs where TCPStore overflows or
loses its server: `add` refuses a text, and a sum beyond 64 bits.

Nothing waits here and nothing is woken; who does so compares `version`.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rendezvousd.core import kv_journal
from rendezvousd.core.errors import BadRequest, LimitExceeded, WrongKind
from rendezvousd.core.kv_journal import ITEMS, OPS, VALUES, Done, Journal

# What torch's int64 holds.
NUMBER_MIN, NUMBER_MAX = -(1 << 63), (1 << 63) - 1
_NUMBER = re.compile(rb"\s*[+-]?[0-9]{1,19}\s*")
# Counted for each key and queue item on top of its text: what Python needs for it, so that a million empty values are
# not free.
ITEM_BYTES = 128
# An op id is a random uid in text: 32 or 36 characters.
OP_ID_BYTES_MAX = 64
# Of a key so much is shown in an error: it travels in HTTP/2 headers, and people read it.
_SHOWN_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLimits:
    """What one namespace may hold. Sizes are bytes."""

    # Longest key, in UTF-8. torch's own are some 100 bytes: prefixes of process groups and a rank.
    key_bytes: int = 1024
    # Largest value: half of a message, so that a value and what surrounds it always fit into one.
    value_bytes: int = 1 << 19
    # A process group sets one key per rank and a few more.
    keys: int = 65536
    # Keys, values and queue items together, ITEM_BYTES for each included.
    total_bytes: int = 64 << 20
    # Items of one queue: one for each worker of the largest job, 10,000 nodes of 8, rounded up.
    queue_items: int = 1 << 17
    # Values returned by one call: everybody's address in that job.
    reply_bytes: int = 16 << 20
    # A retry comes some seconds after its first try, or never. So many calls with an op id, of all clients, are 5 s of
    # the fastest that one daemon can serve.
    ops: int = 16384
    # What they returned, together: pops return values.
    ops_bytes: int = 8 << 20


DEFAULT_LIMITS = KvLimits()


@dataclass(frozen=True, slots=True)
class _Entry:
    value: bytes
    version: int


class Namespace:
    """Keys with values, and queues by key. Every method that changes something may raise LimitExceeded, and has then
    changed nothing.

    `op_id`, where a method takes it: a call that was done is not done again under the same id, but returns the same.
    Empty: each call counts. Raises BadRequest if the id was another call's.
    """

    def __init__(self, limits: KvLimits = DEFAULT_LIMITS, records: Mapping[str, bytes] | None = None) -> None:
        """`records` are what the namespace's journal wrote down (core/kv_journal.py), none yet if it is empty; None: it
        need not outlive the daemon, and has no journal. Raises ValueError if they cannot be read."""
        self._limits = limits
        self._entries: dict[str, _Entry] = {}
        self._queues: dict[str, deque[tuple[int, bytes]]] = {}
        self._items = 0  # pushed so far
        self._ops: OrderedDict[str, Done] = OrderedDict()
        self._ops_bytes = 0
        self._changes = 0
        self.bytes_held = 0
        self.journal: Journal | None = None
        if records is not None:
            self.journal = Journal(records)
            self._read(records)

    # ---------------------------------------------------------------------------------------------------- looking

    def get(self, key: str) -> bytes | None:
        """Return the value, None if there is none."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def version(self, key: str) -> int:
        """Return a number that differs after every change of the key's value; 0 if there is none."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.version

    def present(self, key: str) -> bool:
        """Return whether the key has a value, or a queue with something in it."""
        return key in self._entries or key in self._queues

    def num_keys(self) -> int:
        """Return how many keys have a value. Queues do not count."""
        return len(self._entries)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are all there. Raises KeyError if one is not, and LimitExceeded."""
        values = [self._entries[key].value for key in keys]
        size = sum(map(len, values))
        if size > self._limits.reply_bytes:
            raise LimitExceeded(
                f"the values of these {len(keys)} keys are {size} bytes, at most {self._limits.reply_bytes} fit into "
                "one answer; ask for fewer at a time"
            )
        return values

    def queue_len(self, key: str) -> int:
        """Return how many items the queue has; 0 if there is no such queue."""
        queue = self._queues.get(key)
        return 0 if queue is None else len(queue)

    # ---------------------------------------------------------------------------------------------------- values

    def set(self, key: str, value: bytes) -> None:
        self._check(key, value)
        self._replace({key: value})

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Set all, or none and raise LimitExceeded, or BadRequest if the two differ in length. Of a key given twice the
        last value holds."""
        if len(keys) != len(values):
            raise BadRequest(f"{len(keys)} keys with {len(values)} values; expected as many of each")
        for key, value in zip(keys, values, strict=True):
            self._check(key, value)
        self._replace(dict(zip(keys, values, strict=True)))

    def add(self, key: str, amount: int, op_id: str = "") -> int:
        """Add to a decimal number, 0 if absent, and return the sum. Raises WrongKind if the value is none."""
        done = self._done(op_id, "add", key)
        if done is not None:
            assert isinstance(done.result, int)
            return done.result
        value = self.get(key)
        total = amount + (0 if value is None else _number(key, value))
        if not NUMBER_MIN <= total <= NUMBER_MAX:
            raise LimitExceeded(f"adding {amount} to {shown(key)} gives {total}, which does not fit in 64 bits")
        self.set(key, str(total).encode())
        self._remember(op_id, Done("add", key, total))
        return total

    def append(self, key: str, value: bytes, op_id: str = "") -> None:
        """Put `value` behind the present one, or set it."""
        if self._done(op_id, "append", key) is None:
            self.set(key, (self.get(key) or b"") + value)
            self._remember(op_id, Done("append", key, None))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set `desired` if the value is `expected`, or if there is none and `expected` is empty. Return the value that
        holds then; `expected` if there is none."""
        value = self.get(key)
        if value != expected and not (value is None and not expected):
            return expected if value is None else value
        self.set(key, desired)
        return desired

    def delete(self, key: str) -> bool:
        """Take the key's value away; return whether it had one. Queues stay."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self.bytes_held -= _cost(key, entry.value)
        if self.journal is not None:
            self.journal.value(key, None)
        return True

    # ---------------------------------------------------------------------------------------------------- queues

    def queue_push(self, key: str, value: bytes, op_id: str = "") -> None:
        """Put an item at the queue's end."""
        if self._done(op_id, "queue_push", key) is not None:
            return
        self._check(key, value)
        length = self.queue_len(key)
        if length >= self._limits.queue_items:
            raise LimitExceeded(f"the queue {shown(key)} has {length} items, and no queue may have more")
        if key not in self._queues:
            self._check_keys(1)
        self._check_bytes(_cost(key, value))
        self._items += 1
        self._queues.setdefault(key, deque()).append((self._items, value))
        self.bytes_held += _cost(key, value)
        if self.journal is not None:
            self.journal.item(self._items, key, value)
        self._remember(op_id, Done("queue_push", key, None))

    def queue_pop(self, key: str, op_id: str = "") -> bytes | None:
        """Take the queue's first item and return it; None if the queue is empty, which is never remembered."""
        done = self._done(op_id, "queue_pop", key)
        if done is not None:
            assert isinstance(done.result, bytes)
            return done.result
        queue = self._queues.get(key)
        if queue is None:
            return None
        at, value = queue.popleft()
        if not queue:  # an empty queue is no queue, or every name ever used would be kept
            del self._queues[key]
        self.bytes_held -= _cost(key, value)
        if self.journal is not None:
            self.journal.item(at, key, None)
        self._remember(op_id, Done("queue_pop", key, value))
        return value

    # ---------------------------------------------------------------------------------------------------- limits

    def _replace(self, values: dict[str, bytes]) -> None:
        before = {key: self._entries.get(key) for key in values}
        self._check_keys(sum(entry is None for entry in before.values()))
        grown = sum(_cost(key, value) for key, value in values.items())
        grown -= sum(_cost(key, entry.value) for key, entry in before.items() if entry is not None)
        self._check_bytes(grown)
        for key, value in values.items():
            self._changes += 1
            self._entries[key] = _Entry(value, self._changes)
            if self.journal is not None:
                self.journal.value(key, value)
        self.bytes_held += grown

    def _check(self, key: str, value: bytes) -> None:
        limits = self._limits
        size = len(key.encode())
        if size > limits.key_bytes:
            raise LimitExceeded(
                f"the key {shown(key)} is {size} bytes long: at most {limits.key_bytes} (--max-store-key-bytes)"
            )
        if len(value) > limits.value_bytes:
            raise LimitExceeded(
                f"the value of {shown(key)} would be {len(value)} bytes: at most {limits.value_bytes} "
                "(--max-store-value-bytes)"
            )

    def _check_keys(self, more: int) -> None:
        held = len(self._entries) + len(self._queues)
        if more and held + more > self._limits.keys:
            raise LimitExceeded(
                f"this store has {held} keys, {more} more are too many: at most {self._limits.keys} (--max-store-keys)"
            )

    def _check_bytes(self, more: int) -> None:
        if more > 0 and self.bytes_held + more > self._limits.total_bytes:
            raise LimitExceeded(
                f"this store holds {self.bytes_held} bytes, {more} more are too many: at most "
                f"{self._limits.total_bytes} (--max-store-bytes)"
            )

    # ---------------------------------------------------------------------------------------------------- retries

    def _done(self, op_id: str, what: str, key: str) -> Done | None:
        if not op_id:
            return None
        if len(op_id) > OP_ID_BYTES_MAX:
            raise BadRequest(f"an op_id of {len(op_id)} characters: at most {OP_ID_BYTES_MAX}")
        done = self._ops.get(op_id)
        if done is not None and (done.what, done.key) != (what, key):
            raise BadRequest(
                f"the op_id of this {what} of {shown(key)} was that of a {done.what} of {shown(done.key)}; each call "
                "needs one of its own"
            )
        return done

    def _remember(self, op_id: str, done: Done) -> None:
        if not op_id:
            return
        if self.journal is not None:
            self.journal.op(op_id, done)
        self._keep(op_id, done)

    def _keep(self, op_id: str, done: Done) -> None:
        self._ops[op_id] = done
        self._ops_bytes += _bytes_held(done)
        while len(self._ops) > self._limits.ops or self._ops_bytes > self._limits.ops_bytes:
            oldest, forgotten = self._ops.popitem(last=False)
            self._ops_bytes -= _bytes_held(forgotten)
            if self.journal is not None:
                self.journal.forgotten(oldest)

    # ---------------------------------------------------------------------------------------------------- its return

    def _read(self, records: Mapping[str, bytes]) -> None:
        assert self.journal is not None
        for name in sorted(records):
            data = records[name]
            if name.startswith(VALUES):
                key = name[len(VALUES) :]
                self._changes += 1
                self._entries[key] = _Entry(data, self._changes)
                self.bytes_held += _cost(key, data)
            elif name.startswith(ITEMS):
                key, self._items = kv_journal.queue_of(name), kv_journal.number(name)
                self._queues.setdefault(key, deque()).append((self._items, data))
                self.bytes_held += _cost(key, data)
            elif name.startswith(OPS):
                for op_id, done in kv_journal.ops_in(data):
                    self.journal.remembered(op_id, kv_journal.number(name))
                    self._keep(op_id, done)


def shown(key: str) -> str:
    """Return a key as an error shows it: quoted, and cut if it is long."""
    return repr(key) if len(key) <= _SHOWN_MAX else f"{key[:_SHOWN_MAX]!r}..."


def _cost(key: str, value: bytes) -> int:
    return ITEM_BYTES + len(key.encode()) + len(value)


def _bytes_held(done: Done) -> int:
    return ITEM_BYTES + len(done.key) + (len(done.result) if isinstance(done.result, bytes) else 0)


def _number(key: str, value: bytes) -> int:
    if not _NUMBER.fullmatch(value):
        raise WrongKind(f"{shown(key)} cannot be added to: its value, of {len(value)} bytes, is no decimal number")
    return int(value)
