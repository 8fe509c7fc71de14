"""One namespace. What torch's own stores answer is in tests/wire/test_store_torch.py, against torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rendezvousd.core.errors import BadRequest, LimitExceeded, WrongKind
from rendezvousd.core.kv import ITEM_BYTES, NUMBER_MAX, NUMBER_MIN, KvLimits, Namespace


def small(**limits: int) -> Namespace:
    return Namespace(KvLimits(**limits))


# -------------------------------------------------------------------------------------------------------- examples


def test_add_counts_from_nothing_and_is_kept_as_a_decimal() -> None:
    kv = Namespace()
    assert kv.add("n", 5) == 5
    assert kv.add("n", -7) == -2
    assert kv.get("n") == b"-2"


@pytest.mark.parametrize("value", [b"abc", b"", b"12x", b"1.5", b"1_000", b"9" * 20, b"\xd9\xa1"])
def test_what_is_no_number_is_not_added_to(value: bytes) -> None:
    kv = Namespace()
    kv.set("n", value)
    with pytest.raises(WrongKind, match="'n' cannot be added to"):
        kv.add("n", 1)
    assert kv.get("n") == value


@pytest.mark.parametrize("value", [b"+12", b" 12\n", b"0012"])
def test_a_number_may_have_a_sign_blanks_and_zeros(value: bytes) -> None:
    kv = Namespace()
    kv.set("n", value)
    assert kv.add("n", 1) == 13


@pytest.mark.parametrize(("start", "amount"), [(NUMBER_MAX, 1), (NUMBER_MIN, -1)])
def test_a_sum_beyond_64_bits_is_refused(start: int, amount: int) -> None:
    kv = Namespace()
    kv.add("n", start)
    with pytest.raises(LimitExceeded, match="64 bits"):
        kv.add("n", amount)
    assert kv.add("n", 0) == start


def test_compare_set() -> None:
    kv = Namespace()
    assert kv.compare_set("absent", b"old", b"new") == b"old"
    assert not kv.present("absent")
    assert kv.compare_set("k", b"", b"one") == b"one"
    assert kv.compare_set("k", b"", b"two") == b"one"
    assert kv.compare_set("k", b"one", b"two") == b"two"
    assert kv.get("k") == b"two"


def test_a_queue_is_not_a_key() -> None:
    kv = Namespace()
    kv.set("k", b"value")
    kv.queue_push("k", b"item")
    assert (kv.num_keys(), kv.queue_len("k"), kv.get("k")) == (1, 1, b"value")
    assert kv.delete("k")
    assert kv.present("k")
    assert not kv.delete("k")
    assert kv.queue_pop("k") == b"item"
    assert not kv.present("k")
    assert kv.queue_pop("k") is None


def test_versions_never_return() -> None:
    kv = Namespace()
    seen = {kv.version("k")}
    for _ in range(3):
        kv.set("k", b"same")
        assert kv.version("k") not in seen
        seen.add(kv.version("k"))
        kv.delete("k")
        assert kv.version("k") == 0


def test_multi_set_is_all_or_nothing() -> None:
    kv = small(value_bytes=4)
    with pytest.raises(LimitExceeded):
        kv.multi_set(["a", "b"], [b"good", b"too long"])
    with pytest.raises(BadRequest, match="2 keys with 1 values"):
        kv.multi_set(["a", "b"], [b"1"])
    assert kv.num_keys() == 0
    kv.multi_set(["a", "a"], [b"1", b"2"])
    assert kv.multi_get(["a", "a"]) == [b"2", b"2"]


# -------------------------------------------------------------------------------------------------------- limits


def test_keys_and_values_have_a_greatest_size() -> None:
    kv = small(key_bytes=4, value_bytes=4)
    kv.set("kéy", b"1234")  # 4 bytes of UTF-8
    with pytest.raises(LimitExceeded, match="max-store-key-bytes"):
        kv.set("kéyy", b"")
    with pytest.raises(LimitExceeded, match="max-store-value-bytes"):
        kv.append("kéy", b"5")
    with pytest.raises(LimitExceeded, match="max-store-value-bytes"):
        kv.queue_push("q", b"12345")
    assert kv.get("kéy") == b"1234"


def test_a_long_key_is_cut_in_the_error() -> None:
    with pytest.raises(LimitExceeded) as refused:
        Namespace().set("k" * 100_000, b"")
    assert len(str(refused.value)) < 300


def test_the_number_of_keys_is_bounded_queues_included() -> None:
    kv = small(keys=2)
    kv.set("a", b"")
    kv.queue_push("b", b"")
    kv.set("a", b"again")
    kv.queue_push("b", b"again")
    calls: list[Callable[[], object]] = [
        lambda: kv.set("c", b""),
        lambda: kv.queue_push("c", b""),
        lambda: kv.add("c", 1),
    ]
    for refused in calls:
        with pytest.raises(LimitExceeded, match="max-store-keys"):
            refused()
    kv.delete("a")
    kv.set("c", b"")


def test_the_bytes_of_all_together_are_bounded() -> None:
    kv = small(total_bytes=2 * (ITEM_BYTES + 1) + 10)
    kv.set("a", b"12345")
    kv.queue_push("b", b"12345")
    calls: list[Callable[[], object]] = [
        lambda: kv.set("a", b"123456"),
        lambda: kv.queue_push("b", b""),
        lambda: kv.append("a", b"6"),
    ]
    for refused in calls:
        with pytest.raises(LimitExceeded, match="max-store-bytes"):
            refused()
    kv.set("a", b"")
    kv.queue_pop("b")
    assert kv.bytes_held == ITEM_BYTES + 1
    kv.delete("a")
    assert kv.bytes_held == 0


def test_queues_and_answers_are_bounded() -> None:
    kv = small(queue_items=2, reply_bytes=10)
    kv.queue_push("q", b"1")
    kv.queue_push("q", b"2")
    with pytest.raises(LimitExceeded, match="has 2 items"):
        kv.queue_push("q", b"3")
    kv.set("k", b"123456")
    with pytest.raises(LimitExceeded, match="ask for fewer"):
        kv.multi_get(["k", "k"])


# -------------------------------------------------------------------------------------------------------- retries


def test_a_retry_is_not_done_twice() -> None:
    kv = Namespace()
    assert [kv.add("n", 1, "op-1"), kv.add("n", 1, "op-2"), kv.add("n", 1, "op-1")] == [1, 2, 1]
    for _ in range(2):
        kv.append("a", b"x", "op-3")
        kv.queue_push("q", b"1", "op-4")
    kv.queue_push("q", b"2", "op-5")
    assert (kv.get("n"), kv.get("a"), kv.queue_len("q")) == (b"2", b"x", 2)
    assert [kv.queue_pop("q", "op-6"), kv.queue_pop("q", "op-6"), kv.queue_pop("q", "op-7")] == [b"1", b"1", b"2"]
    assert kv.queue_pop("q", "op-8") is None
    kv.queue_push("q", b"3")
    assert kv.queue_pop("q", "op-8") == b"3"


def test_a_refused_call_may_be_made_again() -> None:
    kv = small(keys=1)
    kv.set("full", b"")
    with pytest.raises(LimitExceeded):
        kv.add("n", 1, "op")
    kv.delete("full")
    assert kv.add("n", 1, "op") == 1


def test_an_op_id_belongs_to_one_call() -> None:
    kv = Namespace()
    kv.add("n", 1, "op")
    with pytest.raises(BadRequest, match="needs one of its own"):
        kv.append("n", b"x", "op")
    with pytest.raises(BadRequest, match="needs one of its own"):
        kv.add("m", 1, "op")
    with pytest.raises(BadRequest, match="at most 64"):
        kv.add("n", 1, "x" * 65)


def test_only_the_newest_calls_are_remembered() -> None:
    kv = small(ops=2)
    for op_id in ("a", "b", "c"):
        kv.add("n", 1, op_id)
    assert kv.add("n", 1, "c") == 3
    assert kv.add("n", 1, "a") == 4, "a was forgotten"


def test_big_results_are_not_remembered_without_bound() -> None:
    kv = small(ops_bytes=3000)
    for n in range(10):
        kv.queue_push("q", b"x" * 1000)
        kv.queue_pop("q", f"op-{n}")
    assert kv._ops_bytes <= 3000
    assert len(kv._ops) == 2


# -------------------------------------------------------------------------------------------------------- the model

KEYS = st.sampled_from(["a", "b", "c", ""])
VALUES = st.one_of(st.sampled_from([b"", b"1", b"-3", b"text"]), st.binary(max_size=6))


class AsADict(RuleBasedStateMachine):
    """Any calls in any order, next to a dict and a dict of deques."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = Namespace()
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.ops = 0

    def twice(self, call: Any, *args: Any) -> Any:
        """Make a call, and its retry."""
        self.ops += 1
        result = call(*args, f"op-{self.ops}")
        assert call(*args, f"op-{self.ops}") == result
        return result

    @rule(key=KEYS, value=VALUES)
    def set(self, key: str, value: bytes) -> None:
        self.kv.set(key, value)
        self.values[key] = value

    @rule(values=st.dictionaries(KEYS, VALUES))
    def multi_set(self, values: dict[str, bytes]) -> None:
        self.kv.multi_set(list(values), list(values.values()))
        self.values |= values

    @rule(key=KEYS, amount=st.integers(-5, 5))
    def add(self, key: str, amount: int) -> None:
        try:
            total = int(self.values.get(key, b"0").replace(b"_", b"no digit")) + amount
        except ValueError:
            with pytest.raises(WrongKind):
                self.kv.add(key, amount)
            return
        assert self.twice(self.kv.add, key, amount) == total
        self.values[key] = str(total).encode()

    @rule(key=KEYS, value=VALUES)
    def append(self, key: str, value: bytes) -> None:
        self.twice(self.kv.append, key, value)
        self.values[key] = self.values.get(key, b"") + value

    @rule(key=KEYS, expected=VALUES, desired=VALUES)
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> None:
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        assert self.kv.compare_set(key, expected, desired) == self.values.get(key, expected)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        assert self.kv.delete(key) == (self.values.pop(key, None) is not None)

    @rule(key=KEYS, value=VALUES)
    def push(self, key: str, value: bytes) -> None:
        self.twice(self.kv.queue_push, key, value)
        self.queues.setdefault(key, deque()).append(value)

    @rule(key=KEYS)
    def pop(self, key: str) -> None:
        queue = self.queues.get(key)
        assert self.twice(self.kv.queue_pop, key) == (queue.popleft() if queue else None)

    @invariant()
    def holds_the_same(self) -> None:
        assert self.kv.num_keys() == len(self.values)
        for key in ("a", "b", "c", ""):
            queue = self.queues.get(key, deque())
            assert self.kv.get(key) == self.values.get(key)
            assert self.kv.queue_len(key) == len(queue)
            assert self.kv.present(key) == (key in self.values or bool(queue))
        held = [(key, value) for key, value in self.values.items()]
        held += [(key, item) for key, queue in self.queues.items() for item in queue]
        assert self.kv.bytes_held == sum(ITEM_BYTES + len(key) + len(value) for key, value in held)


TestAsADict = AsADict.TestCase
TestAsADict.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(KEYS, VALUES), max_size=30))
@settings(deadline=None)
def test_no_limit_is_ever_passed(pairs: list[tuple[str, bytes]]) -> None:
    kv = small(keys=2, total_bytes=2 * ITEM_BYTES + 8, value_bytes=6)
    for key, value in pairs:
        before = (kv.get(key), kv.version(key), kv.bytes_held)
        try:
            kv.append(key, value)
        except LimitExceeded:
            assert (kv.get(key), kv.version(key), kv.bytes_held) == before
        assert kv.num_keys() <= 2
        assert kv.bytes_held <= 2 * ITEM_BYTES + 8
        assert len(kv.get(key) or b"") <= 6
