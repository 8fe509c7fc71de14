"""A namespace that outlives its daemon: its journal makes it again, and calls that are tried again count once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rendezvousd.core.kv import KvLimits, Namespace
from rendezvousd.core.kv_journal import OPS, Batch

KEYS = ("a", "b/c", "ключ", "")
ROOMY = {"records_max": 100, "bytes_max": 1 << 20}


def written(kv: Namespace, disk: dict[str, bytes], **limits: int) -> Batch:
    """Write the next batch down."""
    assert kv.journal is not None
    batch = kv.journal.take(**(limits or ROOMY))
    for name, data in batch.records.items():
        if data is None:
            disk.pop(name, None)
        else:
            disk[name] = data
    return batch


def drained(kv: Namespace, disk: dict[str, bytes], **limits: int) -> None:
    assert kv.journal is not None
    while written(kv, disk, **limits).end < kv.journal.number:
        pass


def contents(kv: Namespace) -> Any:
    """All that callers can see. Takes everything out of the queues."""
    queues = {key: [kv.queue_pop(key) for _ in range(kv.queue_len(key))] for key in KEYS}
    return {key: kv.get(key) for key in KEYS}, queues, kv.num_keys(), kv.bytes_held


calls = st.one_of(
    st.tuples(st.just("set"), st.sampled_from(KEYS), st.binary(max_size=8)),
    st.tuples(st.just("append"), st.sampled_from(KEYS), st.binary(max_size=8)),
    st.tuples(st.just("delete"), st.sampled_from(KEYS)),
    st.tuples(st.just("queue_push"), st.sampled_from(KEYS), st.binary(max_size=8)),
    st.tuples(st.just("queue_pop"), st.sampled_from(KEYS)),
)


@given(st.lists(calls, max_size=40), st.integers(2, 5), st.integers(1, 200))
def test_what_is_written_down_makes_the_namespace_again(
    made: list[tuple[Any, ...]], records_max: int, bytes_max: int
) -> None:
    kv, disk = Namespace(records={}), dict[str, bytes]()
    for number, (what, *arguments) in enumerate(made):
        with_op = what in ("append", "queue_push", "queue_pop") and number % 2
        getattr(kv, what)(*arguments, *([f"op{number}"] if with_op else []))
        if number % 3 == 0:
            written(kv, disk, records_max=records_max, bytes_max=bytes_max)
    drained(kv, disk, records_max=records_max, bytes_max=bytes_max)
    assert contents(Namespace(records=disk)) == contents(kv)


@dataclass
class Caller:
    """Makes one call after the other; what was not answered is tried again."""

    number: int
    calls: int = 0
    waits_for: int | None = None  # answered when so much of the journal is written; None: it waits for nothing

    @property
    def op_id(self) -> str:
        return f"{self.number}.{self.calls}"


class Story:
    """Six callers of a daemon that is killed now and then: two count, two push items, two pop them."""

    def __init__(self) -> None:
        self.disk: dict[str, bytes] = {}
        self.kv = Namespace(records={})
        self.written = 0
        self.callers = [Caller(number) for number in range(6)]
        self.counted = 0
        self.pushed, self.popped = Counter[bytes](), Counter[bytes]()

    def call(self, which: int) -> None:
        caller = self.callers[which]
        if caller.waits_for is None:
            caller.calls += 1
            self._carry_out(caller)

    def write(self, amount: int) -> None:
        """Some answers get through and some do not."""
        self.written = written(self.kv, self.disk, records_max=2 + amount, bytes_max=1 << 20).end
        if amount % 2:
            self._answer()

    def crash(self, first: int) -> None:
        self.kv, self.written = Namespace(records=self.disk), 0
        for caller in self.callers[first:] + self.callers[:first]:
            if caller.waits_for is not None:
                self._carry_out(caller)

    def end(self) -> None:
        drained(self.kv, self.disk)
        assert self.kv.journal is not None
        self.written = self.kv.journal.number
        self._answer()

    def _carry_out(self, caller: Caller) -> None:
        assert self.kv.journal is not None
        if caller.number < 2:
            self.kv.add("n", 1, caller.op_id)
        elif caller.number < 4:
            self.kv.queue_push("q", caller.op_id.encode(), caller.op_id)
        elif self.kv.queue_pop("q", caller.op_id) is None:
            caller.waits_for = None
            return
        caller.waits_for = self.kv.journal.number

    def _answer(self) -> None:
        for caller in self.callers:
            if caller.waits_for is None or caller.waits_for > self.written:
                continue
            if caller.number < 2:
                self.counted += 1
            elif caller.number < 4:
                self.pushed[caller.op_id.encode()] += 1
            else:
                self.popped[self.kv.queue_pop("q", caller.op_id) or b""] += 1
            caller.waits_for = None


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["call", "write", "crash"]), st.integers(0, 5)), max_size=80))
def test_whatever_is_lost_with_a_daemon_each_call_counts_once(steps: list[tuple[str, int]]) -> None:
    story = Story()
    for what, number in [*steps, ("crash", 0)]:
        getattr(story, what)(number)
    story.end()
    assert int(story.kv.get("n") or 0) == story.counted
    left = Counter(story.kv.queue_pop("q") or b"" for _ in range(story.kv.queue_len("q")))
    assert story.popped + left == story.pushed


def test_calls_that_nobody_asks_for_any_more_are_removed() -> None:
    kv, disk = Namespace(KvLimits(ops=3), records={}), dict[str, bytes]()
    for number in range(10):
        kv.add("n", 1, f"op{number}")
        written(kv, disk)
    drained(kv, disk)
    assert len([name for name in disk if name.startswith(OPS)]) == 3
    again = Namespace(KvLimits(ops=3), records=disk)
    assert again.add("n", 1, "op9") == 10
    for number in range(10, 13):
        again.add("n", 1, f"op{number}")
    drained(again, disk)
    assert len([name for name in disk if name.startswith(OPS)]) == 1  # written in one batch
    assert Namespace(records=disk).get("n") == b"13"


def test_a_change_greater_than_a_batch_is_a_batch_of_its_own() -> None:
    kv, disk = Namespace(records={}), dict[str, bytes]()
    kv.multi_set([f"k{number}" for number in range(250)], [b"x" * 10] * 250)
    kv.queue_push("q", b"y" * 5000, "op")
    drained(kv, disk, records_max=100, bytes_max=1000)
    again = Namespace(records=disk)
    assert again.num_keys() == 250
    assert again.queue_pop("q") == b"y" * 5000


def test_what_a_newer_daemon_wrote_beside_is_left_alone_and_a_damaged_record_is_named() -> None:
    calls = b'[{"id":"op","what":"add","key":"n","number":3,"new":1}]'
    kv = Namespace(records={"k/n": b"3", "o/0000000000000001": calls, "new/1": b"?"})
    assert kv.num_keys() == 1
    assert kv.add("n", 3, "op") == 3
    for damage in (b"?", b'[["op","add","n",3]]', b'[{"id":"op"}]'):
        with pytest.raises(ValueError, match=r"."):
            Namespace(records={"o/0000000000000001": damage})
