"""What a namespace must write down to outlive its daemon, and how one is made again from that.

    k/<key>               a value
    q/<number>/<queue>    an item of a queue; the numbers order them
    o/<number>            what calls with an op id did and returned, as a list of objects in JSON

Their version is that of the job's record (core/records.py). Names and fields that are not known are left as they are.

A call and what is remembered of it are one entry, and are written together: a retry that finds the one finds the other.
"""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

VALUES, ITEMS, OPS = "k/", "q/", "o/"
NUMBER_DIGITS = 16  # hexadecimal; sorted by name is sorted by number


@dataclass(frozen=True, slots=True)
class Done:
    """What a call with an op id did."""

    what: str
    key: str
    result: int | bytes | None


@dataclass(slots=True)
class _Entry:
    """One change: a record's new contents, None to remove it; and the call with an op id that made it."""

    name: str
    data: bytes | None
    op: tuple[str, str] | None = None  # its id, and what it did, in JSON


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes to be written at once: by name of the record, None to remove it."""

    records: Mapping[str, bytes | None]
    end: int  # everything up to this number of the journal's is in it, or was before
    changes: int  # how many are in it


class Journal:
    """The changes of one namespace that are not written down yet, in order."""

    def __init__(self, records: Iterable[str] = ()) -> None:
        """`records` names what is written down already."""
        self.number = 0  # of changes so far
        self._taken = 0
        self._entries: deque[_Entry] = deque()
        self._batch = max((number(name) for name in records if name.startswith(OPS)), default=0)
        self._batch_of: dict[str, int] = {}  # by op id: the record that remembers it
        self._left: dict[int, int] = {}  # by that: how many op ids in it are still remembered

    def value(self, key: str, value: bytes | None) -> None:
        """The key has this value from now on; None: none."""
        self._note(VALUES + key, value)

    def item(self, at: int, queue: str, value: bytes | None) -> None:
        """The queue has this item from now on; None: it was taken."""
        self._note(item_name(at, queue), value)

    def op(self, op_id: str, done: Done) -> None:
        """The last change was made by this call."""
        result = done.result
        fact: dict[str, Any] = {"id": op_id, "what": done.what, "key": done.key}
        if isinstance(result, bytes):
            fact["bytes"] = base64.b64encode(result).decode()
        elif result is not None:
            fact["number"] = result
        self._entries[-1].op = (op_id, json.dumps(fact, separators=(",", ":")))

    def remembered(self, op_id: str, batch: int) -> None:
        """This op id was found in a record."""
        self._batch_of[op_id] = batch
        self._left[batch] = self._left.get(batch, 0) + 1

    def forgotten(self, op_id: str) -> None:
        """Nobody will ask for this op id any more."""
        batch = self._batch_of.pop(op_id, None)
        if batch is None:
            return
        self._left[batch] -= 1
        if not self._left[batch]:
            del self._left[batch]
            self._note(_op_name(batch), None)

    def take(self, *, records_max: int, bytes_max: int) -> Batch:
        """Return the first changes, as many as fit; at least one, if there is any."""
        records: dict[str, bytes | None] = {}
        ops: list[tuple[str, str]] = []
        size, taken = 0, self._taken
        while self._entries:
            entry = self._entries[0]
            more = len(entry.name) + len(entry.data or b"") + (len(entry.op[1]) if entry.op else 0)
            if records and (size + more > bytes_max or len(records) + 1 >= records_max):
                break
            self._entries.popleft()
            self._taken += 1
            size += more
            records[entry.name] = entry.data
            if entry.op is not None:
                ops.append(entry.op)
        if ops:
            self._batch += 1
            records[_op_name(self._batch)] = f"[{','.join(text for _, text in ops)}]".encode()
            for op_id, _ in ops:
                self.remembered(op_id, self._batch)
        return Batch(records, self._taken, self._taken - taken)

    def _note(self, name: str, data: bytes | None) -> None:
        self.number += 1
        self._entries.append(_Entry(name, data))


def item_name(at: int, queue: str) -> str:
    """Return the name of a queue's item."""
    return f"{ITEMS}{at:0{NUMBER_DIGITS}x}/{queue}"


def number(name: str) -> int:
    """Return the number in the name of an item, or of a record of calls. Raises ValueError."""
    return int(name[2 : 2 + NUMBER_DIGITS], 16)


def queue_of(name: str) -> str:
    """Return the queue in the name of an item."""
    return name[len(ITEMS) + NUMBER_DIGITS + 1 :]


def ops_in(data: bytes) -> list[tuple[str, Done]]:
    """Return the calls that a record remembers, by op id. Raises ValueError."""
    found = []
    for fact in json.loads(data):
        if not isinstance(fact, dict) or not all(isinstance(fact.get(name), str) for name in ("id", "what", "key")):
            raise ValueError(f"a call is remembered as {str(fact)[:80]}: expected an object with id, what and key")
        result = base64.b64decode(fact["bytes"]) if "bytes" in fact else fact.get("number")
        found.append((fact["id"], Done(fact["what"], fact["key"], result)))
    return found


def _op_name(batch: int) -> str:
    return f"{OPS}{batch:0{NUMBER_DIGITS}x}"
